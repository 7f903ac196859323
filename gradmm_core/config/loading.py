"""Reading of recipes: YAML files, presets, overrides and one-line error messages."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gradmm.config.recipe import Recipe
from gradmm.config.settings import Settings
from gradmm.errors import InputError, InputErrors

T = TypeVar("T")

#: A recipe takes a few thousand bytes. Parsing takes a second per million.
MAX_FILE_BYTES = 2**20


def load_recipe(path: Path | str, overrides: Iterable[str] = (), preset: Path | None = None) -> Recipe:
    """Read a recipe, apply a preset, then apply overrides.

    Args:
        overrides: `a.b=value`, with the value in YAML.
        preset: a YAML file of settings. Its blocks are merged; its other values and lists replace the recipe's.

    Raises:
        InputError: for an unreadable file, an unknown key (with the nearest known one) or an invalid value.
    """
    values = read_yaml(Path(path), dict)
    if preset is not None:
        chosen = read_yaml(preset, dict)
        _check_preset(chosen, where=str(preset))
        values = merged_settings(values, chosen)
    return recipe_of(values, overrides, where=str(path))


def recipe_of(values: dict[str, Any], overrides: Iterable[str], where: str) -> Recipe:
    """Apply overrides to plain values, and validate them.

    Raises:
        InputError: for an unknown key or an invalid value.
    """
    for override in overrides:
        _apply_override(values, override)
    return validate_recipe(values, where)


def read_yaml(path: Path, kind: type[T]) -> T:
    """Read a YAML file of settings whose top level is a `kind`: `dict` or `list`.

    Raises:
        InputError: if the file cannot be read or has another top level.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
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
    """Reject settings that are invalid in every recipe, so that the error names the preset's file."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        problems = [p for p in _problems(error) if p["type"] != "missing"]  # the recipe supplies these
        if problems:
            raise _input_error(problems, where) from error


def merged_settings(values: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `over` into `values`, block by block. Lists are replaced: their entries have no keys."""
    merged = values | over
    for key in values.keys() & over.keys():
        if isinstance(values[key], dict) and isinstance(over[key], dict):
            merged[key] = merged_settings(values[key], over[key])
    return merged


def _parsed(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        yaml.YAMLError: for every invalid text.
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML's constructors raise others for an invalid date, an invalid `!!int`, ...
        raise yaml.YAMLError(f"invalid value or nesting too deep: {type(error).__name__}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """Reject repeated keys: a second `privacy:` block would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "found a compound key", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key.value!r} twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def validate_recipe(values: Mapping[Any, Any], where: str) -> Recipe:
    """Validate plain values as a `Recipe`.

    Raises:
        InputError: with all problems.
    """
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
        raise InputError(f"{override!r} is not of the form a.b=value", "set", "for example seed=1")
    if not text.strip():  # as of a shell's variable that is not set
        raise InputError("has no value", f"set {name}", "write null to unset a setting")
    try:
        value = _parsed(text)
    except yaml.YAMLError as error:
        raise InputError(f"{text!r} is not a YAML value", f"set {name}", "quote it") from error
    node: Any = values
    for key in keys[:-1]:
        node = _descend(node, key, name)
    if isinstance(node, list):
        node[_index(node, keys[-1], name)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise InputError("is not a block of settings", f"set {name}", "see a recipe for the names")


def _descend(node: Any, key: str, name: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, name)]
    if not isinstance(node, dict):
        raise InputError("is not a block of settings", f"set {name}", "see a recipe for the names")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, name: str) -> int:
    if key.isdecimal() and int(key) < len(node):
        return int(key)
    raise InputError(f"there is no entry {key!r} in a list of {len(node)}", f"set {name}", "count from 0")


def _input_error(problems: list[ErrorDetails], where: str) -> InputError:
    """Return one error for each setting that is wrong, without those that follow from another."""
    unknown = {problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"}
    misspelt = {_nearest_setting(_dotted(loc)) for loc in unknown}
    errors: dict[str, InputError] = {}
    for problem in sorted(problems, key=lambda p: p["loc"] not in unknown):
        loc = problem["loc"]
        within = any(other["loc"][: len(loc)] == loc != other["loc"] for other in problems)
        if within or (problem["type"] == "missing" and _dotted(loc) in misspelt):
            continue
        name = _dotted(loc) if loc in unknown else _setting(loc)
        errors.setdefault(name, _in_a_line(problem, name, where))
    return next(iter(errors.values())) if len(errors) == 1 else InputErrors([*errors.values()])


def _in_a_line(problem: ErrorDetails, name: str, where: str) -> InputError:
    if problem["type"] == "extra_forbidden":
        near = _nearest_setting(name)
        fix = f"did you mean {near!r}?" if near else "see a recipe for the names"
        return InputError(f"unknown setting {name!r}", where, fix)
    if not name:
        name, _, what = problem["msg"].removeprefix("Value error, ").partition(": ")
        return InputError(f"{name}: {what}", where, "change the recipe or override it")
    given = "" if problem["type"] == "missing" else f", not {reprlib.repr(problem['input'])}"
    what = problem["msg"][0].lower() + problem["msg"][1:]
    return InputError(f"{name}: {what}{given}", where, "correct it")


def _dotted(loc: Iterable[int | str]) -> str:
    return ".".join(map(str, loc))


def _setting(loc: Iterable[int | str]) -> str:
    """Name a setting. For a union, pydantic appends the alternative it tried: `text_tokens.constrained-int`."""
    return _dotted(part for part in loc if isinstance(part, int) or part.isidentifier())


def _nearest_setting(name: str) -> str | None:
    """Return the most similar known name, from the same block if possible."""
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
    """List the dotted names of all settings: `generation.admm.rho`, `classes.N.label`, ..."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        is_list = get_args(field.annotation)[1:] == (...,)
        inner = get_args(field.annotation)[0] if is_list else field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            names.extend(setting_names(inner, f"{prefix}{name}.{'N.' if is_list else ''}"))
    return names
