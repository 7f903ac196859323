"""Recipe: the validated settings of one distillation, read from a YAML file."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field, model_validator

from gradmm.config.settings import (
    DEVICE_MAPS,
    CategoryBalanceSettings,
    ClassSettings,
    DataSettings,
    ExecutionSettings,
    FinetuneEvalSettings,
    GenerationSettings,
    LabelFilterSettings,
    LabellingSettings,
    LossSelectionSettings,
    MechanismAuditSettings,
    MiaAuditSettings,
    ModelSettings,
    PrivacySettings,
    Seed,
    Settings,
    TargetGradientSettings,
    TemplateSettings,
    WordTiltSettings,
)

#: A larger delta is no protection, however few the records are.
MAX_DELTA = 0.01

#: Texts of a class among which a set can be selected: their Gram matrix takes 200 MB.
MAX_SET_CANDIDATES = 5000


#: Beginning of `data.path` and `model.name` for material that gradmm makes itself.
BUILTIN = "builtin:"


class Recipe(Settings):
    """Settings of one distillation, one block per stage."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100, description="Names the runs, and the release's card."
        ),
    ]
    description: str = Field(default="", description="One-line description of the recipe.")
    data: DataSettings
    classes: Annotated[tuple[ClassSettings, ...], Field(min_length=2)]
    template: TemplateSettings = TemplateSettings()
    model: ModelSettings
    privacy: PrivacySettings = PrivacySettings()
    target_gradient: TargetGradientSettings = TargetGradientSettings()
    word_tilt: WordTiltSettings = WordTiltSettings()
    generation: GenerationSettings = GenerationSettings()
    label_filter: LabelFilterSettings = LabelFilterSettings()
    loss_selection: LossSelectionSettings = LossSelectionSettings()
    category_balance: CategoryBalanceSettings = CategoryBalanceSettings()
    labelling: LabellingSettings = LabellingSettings()
    finetune_eval: FinetuneEvalSettings = FinetuneEvalSettings()
    mechanism_audit: MechanismAuditSettings = MechanismAuditSettings()
    mia_audit: MiaAuditSettings = MiaAuditSettings()
    seed: Seed = Field(default=0, description="Seed of all random numbers except the noise.")
    execution: ExecutionSettings = ExecutionSettings()

    @property
    def class_names(self) -> dict[int, str]:
        """Return the class names, keyed by label."""
        return {c.label: c.name for c in self.classes}

    @property
    def instructions(self) -> dict[int, str]:
        """Return the instruction of each class, keyed by label."""
        return {c.label: c.instruction for c in self.classes}

    @property
    def texts_per_class(self) -> int:
        """Return the largest number of texts of a class that the filters keep."""
        return self.loss_selection.per_class or self.generation.per_class

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        self._check_classes()
        self._check_data()
        if self.target_gradient.matching == "full-gradient":
            self._check_full_gradient()
        if self.model.device in DEVICE_MAPS:
            self._check_spread()
        self._check_texts()
        if self.mechanism_audit.guesses > self.mechanism_audit.canaries:
            raise ValueError("mechanism_audit.guesses: exceeds mechanism_audit.canaries")
        if self.privacy.epsilon is not None:
            self._check_private()
        elif self.privacy.unit_column is not None:
            raise ValueError(
                "privacy.unit_column: without privacy.epsilon there is no guarantee per unit; set null"
            )
        return self

    def _check_classes(self) -> None:
        labels = [c.label for c in self.classes]
        if len(set(labels)) < len(labels):
            raise ValueError(f"classes: two classes share a label in {labels}")
        if len({c.name for c in self.classes}) < len(labels):
            raise ValueError("classes: two classes share a name")
        if len({c.verbaliser for c in self.classes}) < len(labels):
            raise ValueError("classes: two classes share a verbaliser")
        names = self.data.label_names or ()
        if names and max(labels) >= len(names):
            raise ValueError(
                f"classes: label {max(labels)} has no name among the {len(names)} in data.label_names"
            )
        for each in self.classes:
            if each.name in names and names[each.label] != each.name:
                raise ValueError(
                    f"classes: the class of label {each.label} is named {each.name!r}, which is label "
                    f"{names.index(each.name)} in data.label_names"
                )
        unknown = {e.label for e in self.label_filter.exemplars} - set(labels)
        if unknown:
            raise ValueError(f"label_filter.exemplars: no class has the label {min(unknown)}")
        if self.label_filter.enabled and not self.label_filter.exemplars:
            raise ValueError("label_filter.exemplars: required by label_filter.enabled=true")

    def _check_data(self) -> None:
        if self.data.path is None and self.data.hub is None:
            raise ValueError("data: neither data.path nor data.hub is set")
        if self.data.train_split in (self.data.validation_split, self.data.test_split):
            raise ValueError("data.train_split: is also the validation or test split")
        if self.data.validation_split is not None and self.data.validation_split == self.data.test_split:
            raise ValueError(
                "data.validation_split: is also the test split; set null, to hold rows out of train instead"
            )

    def _check_texts(self) -> None:
        """Check that texts can be generated and selected as asked for."""
        generation, selection = self.generation, self.loss_selection
        if self.texts_per_class > generation.per_class:
            raise ValueError("loss_selection.per_class: exceeds generation.per_class")
        if selection.by == "set" and generation.per_class > MAX_SET_CANDIDATES:
            raise ValueError(
                f"loss_selection.by: a set is selected among at most {MAX_SET_CANDIDATES} texts per class, and "
                f"generation.per_class={generation.per_class}; set text"
            )
        if selection.by == "set" and generation.method == "written":
            raise ValueError("loss_selection.by: texts of method=written match no target; set text")
        if generation.endpoint is not None and generation.method == "admm":
            raise ValueError("generation.endpoint: method=admm writes no texts; set written or search")
        tokens, max_tokens = generation.text_tokens, self.template.max_text_tokens
        if tokens != "auto" and tokens > max_tokens:
            raise ValueError(f"generation.text_tokens: {tokens} exceeds template.max_text_tokens={max_tokens}")
        if generation.search.rounds and generation.search.draws < 2:
            raise ValueError("generation.search.draws: the fluency term needs at least 2")
        by_mean = self.target_gradient.centred and generation.matches == "mean"
        if generation.loss == "distance" and not by_mean:
            raise ValueError(
                "generation.loss: distance needs a mean gradient, so target_gradient.centred=true and "
                "generation.matches=mean; or set cosine"
            )

    def _check_full_gradient(self) -> None:
        if self.target_gradient.centred or self.target_gradient.space != "full":
            raise ValueError("target_gradient.space: the full gradient requires space=full and centred=false")
        if self.target_gradient.probe_share > 0:
            raise ValueError("target_gradient.probe_share: the full gradient supports no probe; set 0")
        if self.target_gradient.token_share > 0:
            raise ValueError("target_gradient.token_share: the full gradient supports no token rates; set 0")
        if self.generation.method != "admm":
            raise ValueError("generation.method: the full gradient is matched by admm only; set admm")
        if self.loss_selection.by != "text":
            raise ValueError("loss_selection.by: the full gradient has no closed form for sets; set text")

    def _check_spread(self) -> None:
        device = self.model.device
        if self.execution.runner != "in-process":
            raise ValueError(f"execution.runner: model.device={device} leaves no GPU to workers; set in-process")
        if self.target_gradient.matching == "full-gradient":
            raise ValueError(
                f"target_gradient.matching: the full gradient needs one device, not {device}; set head"
            )
        if self.generation.compile_layers:
            raise ValueError(f"generation.compile_layers: needs one device, not model.device={device}; set false")

    def _check_private(self) -> None:
        if self.privacy.delta is None and self.privacy.declared_records is None:
            raise ValueError("privacy: epsilon requires privacy.delta or privacy.declared_records")
        self._check_delta()
        if self.generation.text_tokens == "auto":
            raise ValueError("generation.text_tokens: 'auto' reads the private texts; set a number")
        if self.data.max_per_class is not None:
            raise ValueError("data.max_per_class: adding a record could displace another; set null")
        if self.target_gradient.matching == "full-gradient":
            raise ValueError("target_gradient.matching: the full-gradient ablation is not private; set head")
        if self.privacy.unit_column is not None and self.target_gradient.space == "full":
            raise ValueError("privacy.unit_column: needs a small target space; set target_gradient.space")
        if self.model.dtype == "float16":
            raise ValueError("model.dtype: float16 overflows, which loses records of a private sum; set bfloat16")
        uses_size = self.target_gradient.centred and self.generation.matches == "mean"
        if uses_size and self.privacy.declared_records is None:
            raise ValueError("privacy.declared_records: required by generation.matches=mean")
        auto_probe = self.target_gradient.probe_share > 0 and self.target_gradient.probe_dimensions == "auto"
        if auto_probe and self.privacy.declared_records is None:
            raise ValueError("privacy.declared_records: required by target_gradient.probe_dimensions=auto")
        if self.target_gradient.token_share > 0 and self.privacy.declared_records is None:
            raise ValueError("privacy.declared_records: required by target_gradient.token_share")
        if self.privacy.sampler == "discrete":
            self._check_discrete()

    def _check_delta(self) -> None:
        """Refuse a delta that a mechanism could meet by publishing records of persons picked at random."""
        delta, records = self.privacy.resolved_delta, self.privacy.declared_records
        assert delta is not None
        if records is not None and delta >= 1 / records:
            raise ValueError(f"privacy.delta: {delta:.3g} is not below 1 / declared_records = {1 / records:.3g}")
        if delta > MAX_DELTA:
            raise ValueError(f"privacy.delta: {delta:.3g} protects too little; set at most {MAX_DELTA:g}")

    def _check_discrete(self) -> None:
        if self.target_gradient.space == "full":
            raise ValueError("privacy.sampler: 'discrete' needs a small target space; set target_gradient.space")
        if self.privacy.unsafe_noise_seed is not None:
            raise ValueError("privacy.sampler: 'discrete' does not accept a seed")
        if self.privacy.calibration == "paper":
            raise ValueError("privacy.sampler: 'discrete' does not support calibration=paper")

    @property
    def ledger(self) -> str:
        """Return the name of the privacy ledger: as set, or else the source of the data."""
        if self.privacy.ledger:
            return self.privacy.ledger
        if self.data.path is None:
            return "/".join(filter(None, [self.data.hub, self.data.hub_config]))
        if self.data.path.startswith(BUILTIN):
            return self.data.path
        return os.path.realpath(os.path.expanduser(self.data.path))  # Path.expanduser raises for unknown users
