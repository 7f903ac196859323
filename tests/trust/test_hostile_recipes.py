"""Recipes from strangers: whatever is in the file or behind `--set`, a recipe or one line, and nothing is run."""

from __future__ import annotations

import copy
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradmm.config.loading import load_recipe, setting_names, validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from tests.conftest import examples
from tests.trust.told import told

MINIMAL = {
    "name": "tiny",
    "data": {"path": "."},
    "classes": [
        {"label": 0, "name": "bad", "verbaliser": " bad", "instruction": "a bad day:"},
        {"label": 1, "name": "good", "verbaliser": " good", "instruction": "a good day:"},
    ],
    "model": {"name": "."},
    "label_filter": {"enabled": False},
}

pytestmark = pytest.mark.timeout(200)  # none may hang


def cases(count: int) -> settings:
    """Hypothesis settings for many short examples."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return examples(count, derandomize=True, suppress_health_check=checks)


any_text = st.text(st.characters(), max_size=20)  # every plane, surrogates and controls
scalars = st.one_of(
    any_text,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from(["\0", "../../x", "~nobody", "/dev/zero", "[/red]", "{{7*7}}", "\x1b[2J", "1e999", 10**400]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(any_text, st.integers(), st.none()), inner, max_size=3),
    ),
    max_leaves=6,
)
names = st.one_of(st.sampled_from(sorted(setting_names())), any_text)

#: What YAML's own constructors trip over, and what strangers try.
TRICKY_YAML = [
    "2001-99-99",
    "!!timestamp x",
    "!!int ''",
    "!!float abc",
    "!!bool maybe",
    "!!binary '='",
    "{[a]: 1}",
    "? [a]\n: 1",
    "{{a: 1}: 2}",
    "!!set {a, a}",
    "!!omap [a]",
    "!!pairs [[a]]",
    "<<: 1",
    "{<<: [1]}",
    "&a [*a]",
    "&a {<<: *a}",
    "*nowhere",
    "9" * 5000,
    "1:" * 50 + "1",
    ".nan",
    "- " * 400,
    "[" * 1000,
    "{a: " * 1000,
    '"\\ud800"',
    '"\\0"',
    "!!python/object/apply:os.system ['touch executed']",
    "!!python/name:os.system",
    "!!python/object/new:os.system ['touch executed']",
    "%YAML 9.9\n---\na",
    "a\n---\nb",
    "\ufeffa: b",
    "\t",
    "",
]


def of_recipe(recipe: Any) -> None:
    """What is done with a recipe before anything is run: its ledger's name, and its whole in YAML."""
    if isinstance(recipe, Recipe):
        assert recipe.ledger
        shown = yaml.safe_dump(recipe.model_dump(mode="json"), allow_unicode=True)
        assert validate_recipe(yaml.safe_load(shown), "again") == recipe


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code in a recipe would leave a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


def changed(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """With a value in another's place, or in a place of its own."""
    values = copy.deepcopy(values)
    node: Any = values
    *blocks, key = name.replace(".N", ".0").split(".")
    for block in blocks:
        node = node[int(block)] if isinstance(node, list) else node.setdefault(block, {})
        if not isinstance(node, dict | list):
            return values
    if isinstance(node, dict):
        node[key] = value
    return values


@cases(2500)
@given(st.lists(st.tuples(names, values), min_size=1, max_size=3))
@example([("data", {1: 2})])
@example([("classes", [None])])
@example([("data.path", "a\0b")])
@example([("seed", 2**80)])
@example([("name", "a" * 5000)])
def test_a_recipe_with_any_values_is_one_or_is_refused_in_a_line(changes: list[tuple[str, Any]]) -> None:
    recipe = MINIMAL
    for name, value in changes:
        recipe = changed(recipe, name, value)
    of_recipe(told(lambda: validate_recipe(recipe, "a file")))


yaml_text = st.one_of(
    st.sampled_from(TRICKY_YAML),
    st.text(string.ascii_lowercase + "0123456789:-?[]{}&*!|>'\"%@`#,. \n\t~<=", max_size=40),
    values.map(lambda value: yaml.dump(value, allow_unicode=False) if not _has_surrogates(value) else "a"),
)


def _has_surrogates(value: Any) -> bool:
    return any(0xD800 <= ord(character) < 0xE000 for character in str(value)) or "\\ud" in repr(value)


@cases(800)
@given(names, yaml_text)
@example("data.path", "2001-99-99")
@example("privacy.ledger", '"\\x9b[2J"')
def test_any_override_is_taken_or_refused_in_a_line(recipe_file: Path, name: str, text: str) -> None:
    of_recipe(told(lambda: load_recipe(recipe_file, [f"{name.replace('.N', '.0')}={text}"])))


@cases(2000)
@given(st.lists(yaml_text, max_size=4))
def test_any_file_is_refused_in_a_line(recipe_file: Path, lines: list[str]) -> None:
    other = recipe_file.with_name("other.yaml")
    other.write_text("\n".join(lines), errors="replace")
    assert isinstance(told(lambda: load_recipe(other)), str)


@cases(300)
@given(st.lists(st.one_of(yaml_text, st.tuples(names, yaml_text).map(": ".join)), max_size=3))
def test_any_file_is_a_preset_or_refused_in_a_line(recipe_file: Path, lines: list[str]) -> None:
    other = recipe_file.with_name("other.yaml")
    other.write_text("\n".join(lines), errors="replace")
    of_recipe(told(lambda: load_recipe(recipe_file, preset=other)))


@pytest.mark.parametrize("form", ["{}", "name: {}", "data: {{path: {}}}", "description: {}", "{}: 1"])
def test_every_tricky_yaml_is_refused_in_a_line(recipe_file: Path, form: str) -> None:
    other = recipe_file.with_name("other.yaml")
    for text in TRICKY_YAML:
        other.write_text(form.format(text))
        assert isinstance(told(lambda: load_recipe(other)), str), text


def alias_bomb(levels: int, form: str) -> str:
    """9 to the power of `levels` leaves, if anything walks through them."""
    lines = [form.format(0, ", ".join(["x"] * 9) if form.endswith("]\n") else "k: 1")]
    for level in range(1, levels):
        inner = ", ".join(f"*a{level - 1}" if form.endswith("]\n") else f"k{i}: *a{level - 1}" for i in range(9))
        lines.append(form.format(level, inner))
    return "".join(lines)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("form", ["a{0}: &a{0} [{1}]\n", "a{0}: &a{0} {{{1}}}\n"])
@pytest.mark.parametrize(
    "place", ["classes", "data", "description", "privacy", "finetune_eval: {seeds", "unknown"]
)
def test_an_alias_bomb_is_refused_at_once(recipe_file: Path, form: str, place: str) -> None:
    closing = "}" if "{" in place else ""
    text = alias_bomb(30, form) + f"{place}: *a29{closing}\n"
    bomb = recipe_file.with_name("bomb.yaml")
    bomb.write_text(text)
    assert isinstance(told(lambda: load_recipe(bomb)), str)
    assert isinstance(told(lambda: load_recipe(recipe_file, preset=bomb)), str)


def test_a_file_larger_than_any_recipe_is_not_parsed(recipe_file: Path) -> None:
    large = recipe_file.with_name("large.yaml")
    large.write_text("- a\n" * 2**20)
    with pytest.raises(InputError, match="larger than 1 MiB"):
        load_recipe(large)


@pytest.mark.parametrize("name", ["data.path", "data.train_split", "model.name", "classes.0.name"])
def test_a_nul_is_refused_where_it_stands(name: str) -> None:
    line = told(lambda: validate_recipe(changed(MINIMAL, name, "a\0b"), "a file"))
    assert line.startswith(f"a file: {name}: value error, a NUL character cannot be part of a setting")


@pytest.mark.parametrize("name", ["data.path", "template.suffix", "privacy.ledger", "classes.0.name"])
def test_half_a_character_is_refused_and_two_halves_are_joined(name: str) -> None:
    """YAML reads the escapes that JSON has for an emoji as two surrogates."""
    line = told(lambda: validate_recipe(changed(MINIMAL, name, "a\ud83d"), "a file"))
    assert line.startswith(f"a file: {name}: value error, half of a character")
    recipe = validate_recipe(changed(MINIMAL, name, "a\ud83d\ude00"), "a file")
    assert "a\U0001f600" in recipe.model_dump_json()


def test_a_million_characters_are_not_repeated() -> None:
    for recipe in (
        MINIMAL | {"x" * 10**6: 1},
        MINIMAL | {"seed": "x" * 10**6},
        MINIMAL | {"data": {"y" * 10**6: 1}},
    ):
        assert isinstance(told(lambda recipe=recipe: validate_recipe(recipe, "a file")), str)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    return file
