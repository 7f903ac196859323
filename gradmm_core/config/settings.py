"""Validated settings of every stage: the vocabulary of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # valid for the random generators of all libraries used
MatchingLoss = Literal["cosine", "distance"]


def _as_list(value: Any) -> Any:
    """Make a list of a single number."""
    return [value] if isinstance(value, (int, float, str)) else value


#: One number or a list; a tuple after validation.
Counts = Annotated[
    tuple[Count, ...],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=Count | Annotated[list[Count], Field(min_length=1)]),
]


class Settings(BaseModel):
    """One block of a recipe. Unknown keys are errors; values are immutable after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    #: Fields that affect execution but not the result. Cache keys exclude them.
    runtime_fields: ClassVar[frozenset[str]] = frozenset()

    @field_validator("*", mode="before")
    @classmethod
    def _reject_boolean_number(cls, value: Any, info: Any) -> Any:
        """Refuse true and false, and so YAML's yes and on, where pydantic would take them for 1 and 0.

        Args:
            info: a pydantic `ValidationInfo`, a protocol that cannot be checked at run time.
        """
        if isinstance(value, bool):
            kinds = set(re.findall(r"\w+", str(cls.model_fields[info.field_name].annotation)))
            if kinds & {"int", "float"} and "bool" not in kinds:
                raise ValueError("expected a number, not true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _check_characters(cls, value: Any) -> Any:
        """Join pairs of surrogates, which YAML makes of JSON's escapes of an emoji; refuse lone ones and NUL.

        A lone surrogate cannot be written to a file, and NUL cannot be part of a path.
        """
        if not isinstance(value, str):
            return value
        if "\0" in value:
            raise ValueError("a NUL character cannot be part of a setting")
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise ValueError("half of a character (a lone surrogate) cannot be part of a setting") from None

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore a pickle. Fields that are newer than the pickle get their defaults."""
        fields = type(self).model_fields.items()
        newer = {name: field.get_default(call_default_factory=True, validated_data={}) for name, field in fields}
        super().__setstate__(state | {"__dict__": newer | state["__dict__"]})

    def key_fields(self) -> dict[str, Any]:
        """Return the settings that determine the result, as JSON values for a cache key."""
        return self.model_dump(mode="json", exclude=set(self.runtime_fields))


class DataSettings(Settings):
    """Source of the labelled texts: a hub data set, or local Parquet, CSV, TSV or JSON files."""

    hub: str | None = Field(default=None, description="Hub data set id; used if path is unset.")
    hub_config: str | None = Field(default=None, description="Configuration of the hub data set.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the hub data set.")
    path: str | None = Field(
        default=None,
        description="A Parquet, CSV, TSV or JSON file; a folder of files <split>.parquet, .csv, ..., or of "
        "folders <split>/ with such files; or a folder saved by `datasets`.",
    )
    text_column: str | None = Field(default=None, description="Default: 'text' or 'sentence', whichever exists.")
    label_column: str = Field(default="label", description="Column of whole numbers from 0 on, or of label_names.")
    label_names: Annotated[tuple[str, ...], Field(min_length=2)] | None = Field(
        default=None,
        description="Values of the label column in the order of the labels 0, 1, ... Default: it holds labels.",
    )
    train_split: str = Field(default="train", description="Split with the private records.")
    validation_split: str | None = Field(default=None, description="Default: held out from the train split.")
    test_split: str | None = Field(default="test", description="null: held out from the train split.")
    validation_rows: Count = Field(
        default=1000, description="Rows held out from train if validation_split is unset."
    )
    test_rows: Count = Field(default=1000, description="Rows held out from train if test_split is null.")
    drop_other_labels: bool = Field(
        default=False, description="Drop rows whose label is of no class. Default: raise an error."
    )
    min_words: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Drop rows of train and validation with fewer words."
    )
    max_per_class: Count | None = Field(
        default=None, description="Random train rows used per class. Default: all."
    )

    @field_validator("label_names")
    @classmethod
    def _reject_equal_names(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names and len(set(names)) < len(names):
            raise ValueError("a name is repeated")
        return names


class ClassSettings(Settings):
    """One class: its label in the data, name, verbaliser and instruction."""

    label: Annotated[int, Field(ge=0, description="Its number in the data, or its place in data.label_names.")]
    name: Annotated[str, Field(min_length=1, description="Stands in the release and in reports. Public.")]
    verbaliser: Annotated[str, Field(min_length=1, description="Includes the leading space.")]
    instruction: Annotated[
        str, Field(min_length=1, description="Public, hand-written prompt for texts of the class.")
    ]


class TemplateSettings(Settings):
    """Template of an example: text + suffix + verbaliser."""

    suffix: str = Field(default=" It was", description="Includes the leading space.")
    max_text_tokens: Count = Field(default=128, description="Longer texts are truncated.")


#: Values of `model.device` that spread a model over several devices, by accelerate's names.
DEVICE_MAPS = ("balanced", "balanced_low_0", "sequential")


class ModelSettings(Settings):
    """The causal language model: a local folder or a hub id."""

    name: Annotated[str, Field(min_length=1, description="Folder, or id on the hub.")]
    revision: str | None = Field(default=None, description="Branch, tag or commit of the hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="'auto': bfloat16 for weights that are stored in half precision (bfloat16 or float16), else "
        "float32. Fine-tuning of all parameters is in float32 always.",
    )
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, cuda:0, ...; or how to spread the layers over all GPUs and, when these are "
        "full, over memory and disk: balanced, balanced_low_0 or sequential, as accelerate's device maps.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code from the model's repository.")


class PrivacySettings(Settings):
    """Requested privacy guarantee. `epsilon: null` means none."""

    epsilon: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="Epsilon of the target's release. null: no noise and no guarantee."
    )
    delta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Default: declared_records ** -1.1, which is below 1 / declared_records.",
    )
    declared_records: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Declared number of records to train on. Public; need not be exact."
    )
    clipping_norm: Positive = Field(
        default=1.0, description="C: largest L2 norm of the whole vector of a record, or of a unit's records."
    )
    adjacency: Literal["add-or-remove", "replace"] = Field(
        default="add-or-remove",
        description="Neighbouring data sets differ in one record (or unit) that is added, or replaced by another, "
        "which takes twice the noise.",
    )
    calibration: Literal["analytic", "paper"] = Field(
        default="analytic",
        description="Standard deviation of the noise by Balle and Wang (2018), or sqrt(2 log(1.25 / delta)) / "
        "epsilon as in the paper, which holds up to epsilon 1.",
    )
    sampler: Literal["floating-point", "discrete"] = Field(
        default="floating-point",
        description="'discrete' resists attacks on the low-order bits of the noise, at about 10% more noise.",
    )
    unit_column: str | None = Field(
        default=None,
        description="Column that names the person (or other unit) of each row of train. The guarantee is then per "
        "unit, and declared_records, data.validation_rows and data.test_rows count units. Default: each row is a "
        "unit.",
    )
    rows_per_unit: Count = Field(
        default=10, description="Largest number of a unit's rows that are used: the first ones."
    )
    budget_epsilon: Positive | None = Field(
        default=None,
        description="Total epsilon of all releases from this data, unless the ledger has a budget already. "
        "Default: epsilon, enough for one release.",
    )
    ledger: str | None = Field(
        default=None,
        description="Name of the ledger that counts releases from this data. Default: the data's source.",
    )
    redraw: bool = Field(
        default=False,
        description="Draw and charge a new target in every run. If false, a run on unchanged data uses the target "
        "again, so that a new release reveals that the data changed.",
    )
    unsafe_noise_seed: int | None = Field(default=None, description="For tests only: voids the guarantee.")

    @property
    def max_rows_per_unit(self) -> int | None:
        """Return `rows_per_unit`; None if each row is a unit."""
        return None if self.unit_column is None else self.rows_per_unit

    @property
    def resolved_delta(self) -> float | None:
        """Return delta, or N ** -1.1 for the declared number of records N; None if neither is set."""
        if self.delta is not None or self.declared_records is None:
            return self.delta
        return self.declared_records**-1.1


class TargetGradientSettings(Settings):
    """Target gradient for the synthetic texts to match."""

    runtime_fields = frozenset({"batch_size"})

    batch_size: Count = Field(default=64, description="Records processed together.")
    matching: Literal["head", "full-gradient"] = Field(
        default="head",
        description="Gradient of the output head (closed form) or of all parameters (slow ablation).",
    )
    space: Literal["full", "label-rows", "public-subspace"] = Field(
        default="public-subspace",
        description="The whole head (the paper), its rows for the response tokens, or these rows on the leading "
        "directions of the hidden states of public text.",
    )
    subspace_dimensions: Count = Field(default=16, description="k: number of directions in 'public-subspace'.")
    centred: bool = Field(
        default=True,
        description="Release the private gradient minus the gradient of public text from the model.",
    )
    probe_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.1,
        description="Share of the squared clipping norm for a linear probe of the hidden states. Released with "
        "the gradient, it scores how well a text represents its class. 0: no probe, as in the paper.",
    )
    token_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.85,
        description="Share of the squared clipping norm for each class's token rates: how often its texts contain "
        "each token of the vocabulary. They label texts, and tilt the words that are written. 0: none, as in the "
        "paper.",
    )
    probe_dimensions: Count | Literal["auto"] = Field(
        default="auto",
        description="Leading directions of public hidden states used by the probe. 'auto': as many as the noise "
        "allows, given privacy.declared_records; see probe_covariance for what happens if these are too few.",
    )
    probe_covariance: Literal["auto", "records", "public"] = Field(
        default="auto",
        description="Covariance of the hidden states that the probe assumes. 'records': that of the records, for "
        "which their second moment is released with most of the probe's share. 'public': that of public text; "
        "the classes' sums have the whole share, in 16 directions if their number is 'auto', and the probe labels "
        "texts but chooses none. 'auto': 'records' if the noise allows it, else 'public'. No probe if it allows "
        "neither.",
    )
    public_texts: Count = Field(default=1000, description="Public texts sampled from the model per class.")
    public_text_tokens: Count = Field(default=25, description="Length of a public text in tokens.")

    @model_validator(mode="after")
    def _shares_leave_room(self) -> TargetGradientSettings:
        if self.probe_share + self.token_share >= 1:
            raise ValueError("token_share: with probe_share it leaves nothing for the gradient; reduce one")
        return self

    def key_fields(self) -> dict[str, Any]:
        """Return the settings that determine the result. A target without newer parts keeps its earlier key."""
        fields = super().key_fields()
        if self.token_share == 0:
            del fields["token_share"]
        else:
            fields["token_weights"] = "document frequencies"  # equal for all tokens until 2026-11-26
        if not self.releases_class_sums_alone:
            del fields["probe_covariance"]
        return fields

    @property
    def directions(self) -> int | None:
        """Return the dimensions of the probe, or None without one. 'auto' must be resolved first."""
        if self.probe_share == 0:
            return None
        assert self.probe_dimensions != "auto"
        return self.probe_dimensions

    @property
    def releases_class_sums_alone(self) -> bool:
        """Return whether a probe is released without the second moment of the records' features."""
        return self.probe_share > 0 and self.probe_covariance == "public"

    @property
    def probe_chooses_texts(self) -> bool:
        """Return whether texts are chosen by the probe: a search would exploit the errors of class sums alone."""
        return self.probe_share > 0 and not self.releases_class_sums_alone

    @property
    def uses_public_text(self) -> bool:
        """Return whether space, centre, probe or token rates need text sampled from the model."""
        return self.centred or self.space == "public-subspace" or self.probe_share > 0 or self.token_share > 0


class WordTiltSettings(Settings):
    """How much likelier words are sampled, so that texts have the words of the class's records.

    Used by the generation methods search and written if target_gradient.token_share > 0.
    """

    strength: Annotated[float, Field(ge=0, le=2)] = Field(
        default=1.0,
        description="0: sample as the model does. 1: write words as often as the class's records contain them. "
        "Values between: rates in between; above 1: beyond those of the records.",
    )
    emphasis: Annotated[float, Field(ge=0, le=2)] = Field(
        default=0.5,
        description="In texts of every class, write words that distinguish some class "
        "exp(strength x emphasis x evidence) times as often as without emphasis. The evidence of a word, in nats, "
        "is capped at 2.",
    )
    iterations: Annotated[int, Field(ge=0)] = Field(
        default=4,
        description="Times that texts are written, their words counted and the tilt corrected. 0: tilt by the "
        "ratio of the released rates to the model's own.",
    )
    texts: Count = Field(default=400, description="Texts written per class and iteration.")


class AdmmSettings(Settings):
    """Algorithm 1 of the paper, with its defaults."""

    rho: Positive = Field(
        default=0.01,
        description="Penalty weight. X moves from Z by about gradient / rho: a large rho leaves texts unchanged.",
    )
    iterations: Count = Field(default=30, description="Updates of X, Z and the dual variable.")
    inner_steps: Count = Field(default=50, description="Adam steps on X in each iteration.")
    learning_rate: Positive = Field(default=0.008, description="Learning rate of Adam on X.")
    gradient_clip: Positive = Field(
        default=1.0, description="Maximum norm of each example's gradient with respect to X."
    )
    initial_draws: Count = Field(default=5, description="Random token sequences to choose each initial text from.")
    initial_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Initial gradient steps on the matching loss alone."
    )
    patience: Count | None = Field(
        default=10,
        description="Stop a text after this many iterations without a token change; null: never stop early.",
    )
    keep: Literal["best", "last"] = Field(default="best", description="'last' is the paper's choice.")


class SearchSettings(Settings):
    """Discrete search: sample texts from the instruction, then edit words to match better.

    `rounds=0` reranks `draws` samples. With `draws=1` too, the sample is used unchanged.
    """

    draws: Count = Field(default=40, description="Texts sampled per example; the best one is edited.")
    top_k: Count = Field(default=200, description="Number of most likely tokens to sample from.")
    rounds: Annotated[int, Field(ge=0)] = Field(
        default=5, description="Rounds of edits. Each keeps its best edit if it is an improvement."
    )
    edits: Count = Field(
        default=32, description="One-word edits tried per round, proposed by the gradient of the loss."
    )
    fluency: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1,
        description="Weight of the log-perplexity above the draws' mean, in standard deviations of the draws.",
    )


class WrittenSettings(Settings):
    """Texts as the model writes them from the instruction, their words tilted by the released rates."""

    top_k: Count = Field(default=200, description="Number of most likely tokens to sample from.")
    draws: Count = Field(
        default=8,
        description="Maximum number of samples per example. The first that contains no class's answer, and ends "
        "with a sentence if it has to, is kept, or else the last one.",
    )


class ProjectionSettings(Settings):
    """Projection of embeddings onto readable tokens."""

    rule: Literal["nearest-of-likely", "likeliest-of-near", "nearest"] = Field(
        default="likeliest-of-near",
        description="The paper's rule, its published code's (more fluent), and an ablation.",
    )
    candidates: Count = Field(default=200, description="k: number of candidate tokens.")
    language: Literal["english", "any"] = Field(default="english", description="Tokens that count as words.")


class EndpointSettings(Settings):
    """A served model that writes the texts, by the completions of the OpenAI protocol (vLLM, llama.cpp, ...).

    It gets the public instructions only. Its key, if it asks for one, is in the environment (OPENAI_API_KEY).
    """

    runtime_fields = frozenset({"requests_at_once"})

    url: Annotated[str, Field(pattern=r"^https?://[^@\s?#]+$")] = Field(
        description="Base URL with the version, such as http://127.0.0.1:8000/v1, without a password."
    )
    model: Annotated[str, Field(min_length=1)] = Field(description="Name that the server has for it.")
    temperature: Positive = Field(default=1.0, description="Temperature of the sampling.")
    requests_at_once: Count = Field(default=16, description="Texts that the server writes at a time.")


class GenerationSettings(Settings):
    """Number, length and generation method of the texts."""

    # per_class and text_tokens reach each shard as separate inputs.
    runtime_fields = frozenset({"batch_size", "shard_size", "per_class", "text_tokens", "compile_layers"})

    method: Literal["written", "search", "admm"] = Field(
        default="written",
        description="Texts as the model writes them, a search among such texts for those that match the target, "
        "or Algorithm 1 of the paper.",
    )
    matches: Literal["mean", "difference"] = Field(
        default="mean",
        description="For a centred target: match the mean gradient derived from it, or the target itself.",
    )
    loss: MatchingLoss = Field(
        default="distance",
        description="Match the direction of the gradient (the paper), or its length too. 'distance' requires "
        "target_gradient.centred and matches=mean.",
    )
    probe_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Weight of a nat of the probe's loss, in units of the matching loss. Used by method=search if "
        "a probe with a second moment is released. 0: ignore the probe, in the label filter too.",
    )
    endpoint: EndpointSettings | None = Field(
        default=None,
        description="A served model that writes the texts of methods written and search, without a tilt of words. "
        "The recipe's model does all else: target, scores, edits, labels. Default: it writes too.",
    )
    per_class: Count = Field(default=1000, description="Texts to generate for each class.")
    text_tokens: Count | Literal["auto"] = Field(
        default=20,
        description="Length of a text in tokens. 'auto': the mean of the class's records; not in private runs.",
    )
    whole_sentences: bool = Field(
        default=True,
        description="End texts at a sentence boundary, by methods written and search. text_tokens is then the "
        "maximum, and at least half of it is kept. In a search, texts without a boundary rank last.",
    )
    admm: AdmmSettings = AdmmSettings()
    search: SearchSettings = SearchSettings()
    written: WrittenSettings = WrittenSettings()
    projection: ProjectionSettings = ProjectionSettings()
    shard_size: Count | Literal["auto"] = Field(
        default="auto",
        description="Examples per shard. A crash loses unfinished shards. 'auto': 25, or 1000 for method=written.",
    )
    batch_size: Count = Field(default=100, description="Examples generated together.")
    compile_layers: bool = Field(
        default=False,
        description="Compile the model's layers by torch.compile for methods search and admm. Takes seconds, and "
        "saves time on a GPU with large batches.",
    )

    def key_fields(self) -> dict[str, Any]:
        """Return the settings that determine the result. Texts of the recipe's model keep their earlier keys."""
        fields = super().key_fields()
        if self.endpoint is None:
            del fields["endpoint"]
        else:
            fields["endpoint"] = self.endpoint.key_fields()
        return fields

    @property
    def examples_per_shard(self) -> int:
        """Return the shard size, with 'auto' resolved: a shard takes seconds to minutes with a small model."""
        if self.shard_size != "auto":
            return self.shard_size
        return 1000 if self.method == "written" else 25


class Exemplar(Settings):
    """A hand-written, public example for few-shot classification."""

    text: Annotated[str, Field(min_length=1, description="Written by hand, never a row of the data.")]
    label: int = Field(description="Label of its class.")


class LabelFilterSettings(Settings):
    """Few-shot classification of the generated texts by the model, and by the probe if it has a second moment.

    For texts with hard labels. Soft labels say how far a text is of another class.
    """

    runtime_fields = frozenset({"batch_size"})

    enabled: bool = Field(default=False, description="Drop texts that are classified as another class.")
    calibrated: bool = Field(
        default=True,
        description="Batch calibration: remove the model's bias towards a class over all texts. Without it, as in "
        "the paper, a weak model drops most texts of the other classes.",
    )
    exemplars: tuple[Exemplar, ...] = Field(default=(), description="One of each class or more.")
    batch_size: Count = Field(default=32, description="Texts classified together.")


class LossSelectionSettings(Settings):
    """Selection of the texts whose gradients match best."""

    per_class: Count | None = Field(default=None, description="Texts to keep. null: all but near duplicates.")
    by: Literal["text", "set"] = Field(
        default="text",
        description="Select texts that match best individually, or the set that matches best as a whole.",
    )
    near_duplicate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Drop a text if the Jaccard similarity of its word trigrams to a better one's exceeds this.",
    )


class CategoryBalanceSettings(Settings):
    """Balancing of the mean matching loss across classes."""

    enabled: bool = Field(
        default=True, description="Trim classes whose texts match worse, if texts have a matching loss."
    )
    floor: Count = Field(default=10, description="Minimum number of texts per class.")


class LabellingSettings(Settings):
    """Class probabilities of the texts that passed the filters."""

    runtime_fields = frozenset({"batch_size"})

    labels: Literal["soft", "hard"] = Field(
        default="soft",
        description="'soft': probabilities of the classes, by the calibrated model and what was released. "
        "'hard': the class that each text was written for, as in the paper.",
    )
    release: bool = Field(
        default=True,
        description="Use the released probe, token rates and numbers of records. false: the calibrated model "
        "alone, which uses no private data.",
    )
    batch_size: Count = Field(default=64, description="Texts labelled together.")


class FinetuneEvalSettings(Settings):
    """Fine-tuning on the synthetic texts, and on the same number of real ones."""

    runtime_fields = frozenset({"eval_batch_size"})

    steps: Counts = Field(
        default=(300,),
        description="One number or a list. For each arm, the first seed trains with every pair of learning rate "
        "and number of steps, and the best checkpoint on validation decides both for all seeds.",
    )
    batch_size: Count = Field(default=16, description="Examples in a step.")
    lora_rank: Count | None = Field(
        default=None,
        description="Train LoRA adapters of this rank, 64 for instance, instead of all parameters: for models too "
        "large for that. They need larger learning rates and more steps. Needs gradmm[lora].",
    )
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        default=(3e-5, 1e-4, 3e-4),
        description="Learning rates of Adam to choose from, see steps. They decay linearly to zero, and those of "
        "adapters rise over the first tenth of the steps.",
    )
    evaluate_every: Count = Field(default=50, description="Steps between checkpoints. The last step is one too.")
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = Field(
        default=(0, 1, 2), description="One fine-tuning each. Intervals are over these."
    )
    max_validation_rows: Count | None = Field(default=500, description="Random rows to choose checkpoints by.")
    max_test_rows: Count | None = Field(default=None, description="Random rows that accuracy is measured on.")
    eval_batch_size: Count = Field(default=64, description="Rows evaluated together.")

    @field_validator("steps", "learning_rates", "seeds")
    @classmethod
    def _reject_duplicates(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse repeated values, which would count twice in a mean and narrow its interval."""
        repeated = [value for number, value in enumerate(values) if value in values[:number]]
        if repeated:
            raise ValueError(f"{repeated[0]} is repeated")
        return values


class MechanismAuditSettings(Settings):
    """Canary audit of the noise mechanism, run before any private data are read."""

    draws: Annotated[int, Field(ge=10)] = Field(
        default=100_000, description="Canaries that are released, and as many that are left out."
    )
    canaries: Count = Field(default=500, description="Canaries in one release, each put in or left out at random.")
    guesses: Count = Field(default=100, description="Guesses: the highest and lowest scores.")
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = Field(
        default=0.999, description="Stop the run if an attack finds more than the claim at this confidence."
    )

    def draws_of(self, sampler: str) -> int:
        """Return the number of draws. The discrete sampler is about 50 times slower and gets 1/50."""
        return max(10, self.draws // 50) if sampler == "discrete" else self.draws


class MiaAuditSettings(Settings):
    """Loss-threshold membership-inference attack of the paper."""

    runs: Count = Field(default=10, description="Attacks on random members and non-members.")
    threshold_records: Count = Field(
        default=100, description="Members, and as many non-members, used to set the threshold."
    )
    test_records: Count = Field(default=100, description="Members, and as many non-members, under attack.")


class ExecutionSettings(Settings):
    """Execution of generation shards and fine-tuning. Excluded from results and releases."""

    runtime_fields = frozenset({"runner", "workers", "address", "threads"})

    runner: Literal["in-process", "processes", "ray", "dask"] = Field(
        default="in-process",
        description="Sequential in the run's process, one process per GPU, or Ray or Dask (optional extras).",
    )
    workers: Count | None = Field(
        default=None, description="Parallel shards. Default: number of GPUs or of cluster workers."
    )
    address: str | None = Field(
        default=None, description="Address of a Ray or Dask cluster. Default: a temporary one on this machine."
    )
    threads: Count | None = Field(
        default=None,
        description="torch threads per worker. May change the last bits of a result. Default: torch's own.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ExecutionSettings:
        if self.address and self.runner not in ("ray", "dask"):
            raise ValueError(f"address: runner={self.runner} uses no cluster")
        if self.address and self.workers:
            raise ValueError("workers: determined by the cluster at the address")
        if self.workers and self.runner == "in-process":
            raise ValueError("workers: runner=in-process uses none")
        return self
