"""A recipe: everything one distillation needs to know, validated, from a YAML file."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Hashable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gradmm_core.errors import InputError
from gradmm_core.settings import (
    CategoryBalanceSettings,
    ClassSettings,
    DataSettings,
    ExecutionSettings,
    FinetuneEvalSettings,
    GenerationSettings,
    LabelFilterSettings,
    LossSelectionSettings,
    MechanismAuditSettings,
    MiaAuditSettings,
    ModelSettings,
    PrivacySettings,
    Seed,
    Settings,
    TargetGradientSettings,
    TemplateSettings,
)

T = TypeVar("T")
#: Bytes. A recipe takes a few thousand, and parsing takes a second for each million.
LARGEST_FILE = 2**20


class Recipe(Settings):
    """One data set's distillation, stage by stage. Its field names are the names that `--set` takes."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)]
    description: str = ""
    data: DataSettings
    classes: Annotated[tuple[ClassSettings, ...], Field(min_length=2)]
    template: TemplateSettings = TemplateSettings()
    model: ModelSettings
    privacy: PrivacySettings = PrivacySettings()
    target_gradient: TargetGradientSettings = TargetGradientSettings()
    generation: GenerationSettings = GenerationSettings()
    label_filter: LabelFilterSettings = LabelFilterSettings()
    loss_selection: LossSelectionSettings = LossSelectionSettings()
    category_balance: CategoryBalanceSettings = CategoryBalanceSettings()
    finetune_eval: FinetuneEvalSettings = FinetuneEvalSettings()
    mechanism_audit: MechanismAuditSettings = MechanismAuditSettings()
    mia_audit: MiaAuditSettings = MiaAuditSettings()
    seed: Seed = 0
    execution: ExecutionSettings = ExecutionSettings()

    @property
    def class_names(self) -> dict[int, str]:
        """By label."""
        return {c.label: c.name for c in self.classes}

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        labels = [c.label for c in self.classes]
        if len(set(labels)) < len(labels):
            raise ValueError(f"classes: two classes share a label in {labels}")
        if len({c.name for c in self.classes}) < len(labels):
            raise ValueError("classes: two classes share a name")
        if len({c.verbaliser for c in self.classes}) < len(labels):
            raise ValueError("classes: two classes share a verbaliser")
        strangers = {e.label for e in self.label_filter.exemplars} - set(labels)
        if strangers:
            raise ValueError(f"label_filter.exemplars: no class has the label {min(strangers)}")
        if self.label_filter.enabled and not self.label_filter.exemplars:
            raise ValueError("label_filter.exemplars: none given, and label_filter.enabled is true")
        if self.mechanism_audit.guesses > self.mechanism_audit.canaries:
            raise ValueError("mechanism_audit.guesses: more than mechanism_audit.canaries")
        if self.loss_selection.per_class > self.generation.per_class:
            raise ValueError("loss_selection.per_class: more than generation.per_class")
        tokens, longest = self.generation.text_tokens, self.template.max_text_tokens
        if tokens != "auto" and tokens > longest:
            raise ValueError(f"generation.text_tokens: {tokens}, and template.max_text_tokens cuts at {longest}")
        search = self.generation.search
        if search.rounds and search.draws < 2:
            raise ValueError("generation.search.draws: fluency is measured by at least 2")
        if self.data.path is None and self.data.hub is None:
            raise ValueError("data: neither data.path nor data.hub is set")
        if self.data.train_split in (self.data.validation_split, self.data.test_split):
            raise ValueError("data.train_split: also named as the validation or test split")
        if self.target_gradient.matching == "full-gradient":
            self._check_full_gradient()
        by_mean = self.target_gradient.centred and self.generation.matches == "mean"
        if self.generation.loss == "distance" and not by_mean:
            raise ValueError(
                "generation.loss: only a mean gradient has a length, and without target_gradient.centred and "
                "generation.matches=mean none is known; set cosine"
            )
        if self.privacy.epsilon is not None:
            self._check_private()
        return self

    def _check_full_gradient(self) -> None:
        if self.target_gradient.centred or self.target_gradient.space != "full":
            raise ValueError("target_gradient.space: the full gradient needs space=full and centred=false")
        if self.target_gradient.probe_share > 0:
            raise ValueError("target_gradient.probe_share: no probe is released with the full gradient; set 0")
        if self.generation.method != "admm":
            raise ValueError("generation.method: the full gradient has no closed form to search by; set admm")
        if self.loss_selection.by != "text":
            raise ValueError("loss_selection.by: the full gradient has no closed form for sets; set text")

    def _check_private(self) -> None:
        if self.privacy.delta is None and self.privacy.declared_records is None:
            raise ValueError("privacy: an epsilon needs privacy.delta or privacy.declared_records")
        if self.generation.text_tokens == "auto":
            raise ValueError("generation.text_tokens: 'auto' reads the private texts; give a number")
        if self.data.max_per_class is not None:
            raise ValueError("data.max_per_class: one more record would push another out; use all")
        if self.target_gradient.matching == "full-gradient":
            raise ValueError("target_gradient.matching: the full gradient is an ablation without privacy")
        by_size = self.target_gradient.centred and self.generation.matches == "mean"
        if by_size and self.privacy.declared_records is None:
            raise ValueError("privacy.declared_records: none, and generation.matches='mean' needs the data's size")
        by_room = self.target_gradient.probe_share > 0 and self.target_gradient.probe_dimensions == "auto"
        if by_room and self.privacy.declared_records is None:
            raise ValueError(
                "privacy.declared_records: none, and target_gradient.probe_dimensions='auto' needs it"
            )
        if self.privacy.sampler == "discrete":
            self._check_discrete()

    def _check_discrete(self) -> None:
        if self.target_gradient.space == "full":
            raise ValueError("privacy.sampler: 'discrete' is for small target spaces; set target_gradient.space")
        if self.privacy.unsafe_noise_seed is not None:
            raise ValueError("privacy.sampler: the discrete sampler takes no seed")
        if find_spec("opendp") is None:
            raise ValueError("privacy.sampler: 'discrete' needs OpenDP; run `pip install opendp`")
        if self.privacy.calibration == "paper":
            raise ValueError("privacy.sampler: the paper's formula is not for the discrete sampler")

    @property
    def ledger(self) -> str:
        """The name under which releases from the data are counted: where they come from, or as set."""
        if self.privacy.ledger:
            return self.privacy.ledger
        if self.data.path is None:
            return "/".join(filter(None, [self.data.hub, self.data.hub_config]))
        path = Path(os.path.expanduser(self.data.path))  # pathlib's own refuses users that there are not
        return str(path.resolve() if os.path.exists(path) else path)


def load_recipe(path: Path, overrides: Iterable[str] = (), preset: Path | None = None) -> Recipe:
    """Reads a recipe; puts a preset's settings over it, then overrides like `a.b=value` (the value in YAML).

    Args:
        preset: a YAML file of some settings. Blocks are merged; other values, lists too, replace the recipe's.

    Raises:
        InputError: for an unreadable file, an unknown key (with the nearest known one) or a bad value.
    """
    values = read_yaml(path, dict)
    if preset is not None:
        chosen = read_yaml(preset, dict)
        _check_preset(chosen, where=str(preset))
        values = merged_settings(values, chosen)
    for override in overrides:
        _apply_override(values, override)
    return validate_recipe(values, where=str(path))


def read_yaml(path: Path, kind: type[T]) -> T:
    """A YAML file that holds a mapping (`dict`) or a list of settings.

    Raises:
        InputError: for a file that cannot be read, or that holds something else.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError("is larger than 1 MiB", str(path), "give a YAML file of settings")
        values = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"cannot be read ({problem})", str(path), "give a YAML file of settings") from error
    if not isinstance(values, kind):
        form = "mapping" if kind is dict else "list"
        raise InputError(f"is not a {form} of settings", str(path), "give a YAML file of settings")
    return values


def _check_preset(values: dict[Any, Any], where: str) -> None:
    """Refuses what would be wrong in any recipe, so that the preset is named, not the recipe that it goes over."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        problems = [p for p in _problems(error) if p["type"] != "missing"]  # the recipe has what is not here
        if problems:
            raise _input_error(problems, where) from error


def merged_settings(values: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """`over` put over `values`, block by block. A list is one value: its entries have no names to merge by."""
    merged = values | over
    for key in values.keys() & over.keys():
        if isinstance(values[key], dict) and isinstance(over[key], dict):
            merged[key] = merged_settings(values[key], over[key])
    return merged


def _parsed(text: str) -> Any:
    """The values of a YAML text.

    Raises:
        yaml.YAMLError: for every text that is none.
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # of PyYAML's own constructors: a 99th of a month, an `!!int` that is none, ...
        raise yaml.YAMLError(f"a value that cannot be, or too many levels: {type(error).__name__}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML without repeated keys: a second `privacy:` block would otherwise silently undo the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "found a key that is no word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key.value!r} twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def validate_recipe(values: Mapping[Any, Any], where: str) -> Recipe:
    """A `Recipe` from plain values; every validation problem becomes one `InputError` line."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _input_error(_problems(error), where) from error


def _problems(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False)


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise InputError(f"{override!r} is not of the form a.b=value", "--set", "for example --set seed=1")
    try:
        value = _parsed(text)
    except yaml.YAMLError as error:
        raise InputError(f"{text!r} is not a YAML value", f"--set {name}", "quote it") from error
    node: Any = values
    for key in keys[:-1]:
        node = _descend(node, key, name)
    if isinstance(node, list):
        node[_index(node, keys[-1], name)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise InputError("is not a block of settings", f"--set {name}", "see `gradmm recipes --show NAME`")


def _descend(node: Any, key: str, name: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, name)]
    if not isinstance(node, dict):
        raise InputError("is not a block of settings", f"--set {name}", "see `gradmm recipes --show NAME`")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, name: str) -> int:
    if key.isdigit() and int(key) < len(node):
        return int(key)
    raise InputError(f"there is no entry {key!r} in a list of {len(node)}", f"--set {name}", "count from 0")


def _input_error(problems: list[ErrorDetails], where: str) -> InputError:
    # Unknown names first: a misspelt block also counts as a missing one.
    problems = sorted(problems, key=lambda p: p["type"] != "extra_forbidden")
    first, more = problems[0], f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = _nearest_setting(name)
        fix = f"did you mean {near!r}?" if near else "see `gradmm recipes --show NAME` for the names"
        return InputError(f"unknown setting {name!r}{more}", where, fix)
    if not name:
        name, _, problem = first["msg"].removeprefix("Value error, ").partition(": ")
        return InputError(f"{name}: {problem}{more}", where, "change the recipe or use --set")
    # Where a setting has alternatives, pydantic adds the one it tried: `text_tokens.constrained-int`.
    name = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
    given = "" if first["type"] == "missing" else f", not {reprlib.repr(first['input'])}"
    problem = first["msg"][0].lower() + first["msg"][1:]
    return InputError(f"{name}: {problem}{given}{more}", where, "correct it")


def _nearest_setting(name: str) -> str | None:
    """The known name most like an unknown one, in the same block or else in another."""
    block, _, key = name.rpartition(".")
    general_block = re.sub(r"\b\d+\b", "N", block)
    siblings, everywhere = {}, {}
    for known in setting_names():
        known_block, _, known_key = known.rpartition(".")
        everywhere.setdefault(known_key, known)
        if known_block == general_block:
            siblings[known_key] = f"{block}.{known_key}" if block else known_key
    for names in (siblings, everywhere):
        for near in difflib.get_close_matches(key, names, n=1):
            return names[near]
    return None


def setting_names(model: type[Settings] = Recipe, prefix: str = "") -> list[str]:
    """Dotted names of all settings: `generation.admm.rho`, `classes.N.label`, ..."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        is_list = get_args(field.annotation)[1:] == (...,)
        inner = get_args(field.annotation)[0] if is_list else field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            names.extend(setting_names(inner, f"{prefix}{name}.{'N.' if is_list else ''}"))
    return names
