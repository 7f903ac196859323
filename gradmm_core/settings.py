"""The settings of every stage, as validated models: the vocabulary of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every library's generator takes
MatchingLoss = Literal["cosine", "distance"]


class Settings(BaseModel):
    """One block of a recipe. Unknown keys are errors; values are never changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    #: Fields that decide how the work is done but not what comes out; they stay out of cache keys.
    runtime_fields: ClassVar[frozenset[str]] = frozenset()

    @field_validator("*")
    @classmethod
    def _has_no_nul(cls, value: Any) -> Any:
        """The operating system takes a NUL in no path, and no person means one."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError("a NUL character cannot be part of a setting")
        return value

    def key_fields(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values: what a cache key is made of."""
        return self.model_dump(mode="json", exclude=set(self.runtime_fields))


class DataSettings(Settings):
    """Where the labelled texts come from: a hub data set, or local Parquet, CSV or JSONL files."""

    hub: str | None = Field(default=None, description="Hub data set id; used when no path is set.")
    hub_config: str | None = None
    revision: str | None = Field(default=None, description="Branch, tag or commit of the hub data set.")
    path: str | None = Field(
        default=None,
        description="A folder of <split>.parquet, .csv or .jsonl files (or folders <split>/ of them).",
    )
    text_column: str | None = Field(
        default=None, description="Default: the one of 'text' and 'sentence' that is there."
    )
    label_column: str = "label"
    train_split: str = "train"
    validation_split: str | None = Field(default=None, description="Default: held off the train split.")
    test_split: str = "test"
    validation_rows: Count = Field(
        default=1000, description="Rows held off train when there is no validation split."
    )
    drop_other_labels: bool = Field(
        default=False, description="Drop rows whose label no class has, rather than stop."
    )
    min_words: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Train rows with fewer words are dropped."
    )
    max_per_class: Count | None = Field(default=None, description="Use this many random train rows of each class.")


class ClassSettings(Settings):
    """One class: its label in the data, and how it is put in words."""

    label: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(min_length=1)]
    verbaliser: Annotated[str, Field(min_length=1, description="With its leading space.")]
    instruction: Annotated[str, Field(min_length=1, description="Public, hand-written: what to write.")]


class TemplateSettings(Settings):
    """How a text is turned into an example: text + suffix + verbaliser."""

    suffix: str = Field(default=" It was", description="With its leading space.")
    max_text_tokens: Count = Field(default=128, description="Longer texts are cut at the end.")


class ModelSettings(Settings):
    """The causal language model: a local folder or a hub id."""

    name: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:0, ...")
    trust_remote_code: bool = Field(default=False, description="Run the Python that comes with the model.")


class PrivacySettings(Settings):
    """The guarantee asked for. `epsilon: null` means none."""

    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Default: declared_records ** -1.1, which is below one in the number of records.",
    )
    declared_records: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="The data set's size, as publicly declared."
    )
    clipping_norm: Positive = 1.0
    adjacency: Literal["add-or-remove", "replace"] = "add-or-remove"
    calibration: Literal["analytic", "paper"] = "analytic"
    sampler: Literal["floating-point", "discrete"] = Field(
        default="floating-point",
        description="'discrete' is proof against attacks on the noise's last bits, for some 10% more noise.",
    )
    budget_epsilon: Positive | None = Field(
        default=None,
        description="All releases from this data together may spend so much. Default: epsilon, for one release.",
    )
    ledger: str | None = Field(
        default=None,
        description="The name that releases from the data are counted under. Default: their source.",
    )
    unsafe_noise_seed: int | None = Field(default=None, description="For tests only: voids the guarantee.")


class TargetGradientSettings(Settings):
    """The gradient that the synthetic texts are to match."""

    runtime_fields = frozenset({"batch_size"})

    batch_size: Count = 64
    matching: Literal["head", "full-gradient"] = Field(
        default="head",
        description="Gradient of the output head (closed form), or of all parameters (slow ablation).",
    )
    space: Literal["full", "label-rows", "public-subspace"] = Field(
        default="public-subspace",
        description="The whole head (the paper), its rows of the response tokens, or these rows on the leading "
        "directions of the hidden states of public text.",
    )
    subspace_dimensions: Count = Field(default=16, description="k: directions kept by 'public-subspace'.")
    centred: bool = Field(
        default=True,
        description="Release what the data add to the gradient that the model's own, public text has.",
    )
    probe_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.5,
        description="The part of the squared clipping norm that a linear probe of the hidden states has. Released "
        "with the gradient, it tells which texts teach their class. 0: no probe, as in the paper.",
    )
    probe_dimensions: Count | Literal["auto"] = Field(
        default="auto",
        description="Directions of public texts' hidden states that the probe works with. 'auto': as many as the "
        "noise leaves room for, by privacy.declared_records; no probe where these are too few.",
    )
    public_texts: Count = Field(default=1000, description="Texts of each class that the model writes itself.")
    public_text_tokens: Count = 25

    @property
    def directions(self) -> int | None:
        """Of the probe; None without one. 'auto' has been settled before (`release_norms.settled`)."""
        if self.probe_share == 0:
            return None
        assert self.probe_dimensions != "auto"
        return self.probe_dimensions

    @property
    def uses_public_text(self) -> bool:
        """Whether the target's space or centre, or the probe's, comes from text that the model writes."""
        return self.centred or self.space == "public-subspace" or self.probe_share > 0


class AdmmSettings(Settings):
    """Algorithm 1 of the paper, with its defaults."""

    rho: Positive = Field(
        default=0.01, description="A step from Z is as long as the loss's gradient / rho: too large moves nothing."
    )
    iterations: Count = 30
    inner_steps: Count = 50
    learning_rate: Positive = 0.008
    gradient_clip: Positive = Field(
        default=1.0, description="Largest norm of one example's gradient with respect to X."
    )
    initial_draws: Count = Field(default=5, description="Random token sequences to choose each start from.")
    initial_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Descent on the matching loss alone."
    )
    patience: Count | None = Field(
        default=10,
        description="A text that has kept all of its tokens for so many iterations is done; null: it goes on.",
    )
    keep: Literal["best", "last"] = Field(default="best", description="'last' is the paper's choice.")


class SearchSettings(Settings):
    """Discrete search: texts that the model writes from the instruction, edited where that matches better.

    `rounds=0` is reranking (the best of `draws` texts); with `draws=1` it is what the model writes as it comes.
    """

    draws: Count = Field(default=40, description="Texts written for each example; the best one is the start.")
    top_k: Count = Field(default=200, description="Each token is drawn from so many likeliest ones.")
    rounds: Annotated[int, Field(ge=0)] = Field(
        default=5, description="Each takes the best of its edits, if better."
    )
    edits: Count = Field(
        default=32, description="Texts tried in a round, with one word changed, chosen by the loss's gradient."
    )
    whole_sentences: bool = Field(
        default=True,
        description="End texts where a sentence ends. text_tokens is the most that a text has, and at least half "
        "of that is left; a text without such an end is the last choice.",
    )
    fluency: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1,
        description="Price of log-perplexity above the draws' mean, in standard deviations of the draws.",
    )


class ProjectionSettings(Settings):
    """From embeddings back to readable tokens."""

    rule: Literal["nearest-of-likely", "likeliest-of-near", "nearest"] = Field(
        default="likeliest-of-near",
        description="The paper's, its published code's (which reads better), and an ablation.",
    )
    candidates: Count = Field(default=200, description="k: how many tokens the rule chooses from.")
    language: Literal["english", "any"] = Field(default="english", description="Which tokens count as words.")


class GenerationSettings(Settings):
    """How many texts, how long, and by which method."""

    # How many texts and how long reach each shard as numbers of its own.
    runtime_fields = frozenset({"batch_size", "shard_size", "per_class", "text_tokens"})

    method: Literal["search", "admm"] = Field(
        default="search", description="Search among texts that the model writes, or Algorithm 1 of the paper."
    )
    matches: Literal["mean", "difference"] = Field(
        default="mean",
        description="If the target is centred: texts match the mean gradient that follows, or the target itself.",
    )
    loss: MatchingLoss = Field(
        default="distance",
        description="Match the direction of the gradient (the paper), or its length too. The latter needs "
        "target_gradient.centred and matches=mean, from which a mean gradient follows.",
    )
    probe_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Price of a nat of the probe's loss, in units of the matching loss. For method=search, where "
        "target_gradient.probe_share is above 0. 0: it has no say, not even in the label filter.",
    )
    per_class: Count = 50
    text_tokens: Count | Literal["auto"] = Field(
        default=20, description="'auto': the class's mean; not in private runs. Whole sentences end sooner."
    )
    admm: AdmmSettings = AdmmSettings()
    search: SearchSettings = SearchSettings()
    projection: ProjectionSettings = ProjectionSettings()
    shard_size: Count = Field(default=25, description="Examples per shard: what a crash can lose.")
    batch_size: Count = Field(default=100, description="Examples optimised side by side.")


class Exemplar(Settings):
    """A hand-written, public example for few-shot classification."""

    text: Annotated[str, Field(min_length=1)]
    label: int


class LabelFilterSettings(Settings):
    """Few-shot classification of the generated texts; a released probe has a say too."""

    runtime_fields = frozenset({"batch_size"})

    enabled: bool = True
    calibrated: bool = Field(
        default=True,
        description="Take off the model's preference for a class over all texts. Without it, as in the paper, a "
        "weak model drops most texts of the class that it does not prefer.",
    )
    exemplars: tuple[Exemplar, ...] = ()
    batch_size: Count = 32


class LossSelectionSettings(Settings):
    """Keeps the texts whose gradients match best."""

    per_class: Count = 50
    by: Literal["text", "set"] = Field(
        default="text",
        description="The texts that match best each by itself, or the set that matches best as a whole.",
    )
    near_duplicate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Drop a text that has more than this part of its word trigrams in common with a better one.",
    )


class CategoryBalanceSettings(Settings):
    """Evens out the mean matching loss of the classes."""

    enabled: bool = True
    floor: Count = Field(default=10, description="Never leave a class with fewer texts than this.")


class FinetuneEvalSettings(Settings):
    """Fine-tuning on the synthetic texts, and on as many real ones."""

    runtime_fields = frozenset({"eval_batch_size"})

    steps: Count = 200
    batch_size: Count = 16
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1e-5, 3e-5, 1e-4)
    evaluate_every: Count = 50
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0, 1, 2)
    max_validation_rows: Count | None = 500
    max_test_rows: Count | None = None
    eval_batch_size: Count = 64

    @field_validator("learning_rates", "seeds")
    @classmethod
    def _are_different(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is run twice would count twice in a mean, and make its interval too narrow."""
        again = [value for number, value in enumerate(values) if value in values[:number]]
        if again:
            raise ValueError(f"{again[0]} is there more than once")
        return values


class MechanismAuditSettings(Settings):
    """Canaries through the noise mechanism of a private run, before anything private is read."""

    draws: Annotated[int, Field(ge=10)] = Field(
        default=100_000, description="Releases with a canary, and as many without it."
    )
    canaries: Count = 500
    guesses: Count = 100
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = Field(
        default=0.999, description="A run whose mechanism fails at this confidence is stopped."
    )

    def draws_of(self, sampler: str) -> int:
        """Exact noise is some fifty times slower to draw."""
        return max(10, self.draws // 50) if sampler == "discrete" else self.draws


class MiaAuditSettings(Settings):
    """The loss-threshold membership-inference attack of the paper."""

    runs: Count = 10
    threshold_records: Count = Field(
        default=100, description="Members, and as many non-members, to set the threshold."
    )
    test_records: Count = Field(default=100, description="Members, and as many non-members, to attack.")


class ExecutionSettings(Settings):
    """Where generation's shards and all fine-tunings run. Neither results nor releases know."""

    runtime_fields = frozenset({"runner", "workers", "address", "threads"})

    runner: Literal["in-process", "processes", "ray", "dask"] = Field(
        default="in-process",
        description="One after another in the run's process; in one process per GPU; on Ray or Dask (extras).",
    )
    workers: Count | None = Field(
        default=None, description="Shards at once. Default: as many as there are GPUs, or the cluster has workers."
    )
    address: str | None = Field(
        default=None, description="Of a Ray or Dask cluster. Default: one on this machine, for this run."
    )
    threads: Count | None = Field(
        default=None,
        description="torch's, of each worker. Another number may change a text's last bits. Default: torch's own.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ExecutionSettings:
        if self.address and self.runner not in ("ray", "dask"):
            raise ValueError(f"address: runner={self.runner} has no cluster")
        if self.address and self.workers:
            raise ValueError("workers: the cluster at the address has its own")
        if self.workers and self.runner == "in-process":
            raise ValueError("workers: runner=in-process has none")
        return self
