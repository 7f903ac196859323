"""Tests that the README, docs/ and other pages are true: names, commands, links, sources of figures."""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

import gradmm
from benchmarks.evidence import planned
from benchmarks.results_page import measured, rivals_table, table, with_table
from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.deployments.cli.main import app
from gradmm.deployments.recipe_files import find_recipe
from gradmm.outputs.descriptions import STAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

#: A file below tests/, or a test: of the file before the `::`, or of the last file named.
TEST_NAME = re.compile(r"`(?:tests/)?((?:\w+/)+test_\w+\.py)?(?:::)?(test_\w+\*?)?`")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


def named_tests(text: str) -> Iterator[tuple[str, str]]:
    """Yield files and the test patterns in them; a file alone has the pattern `*`."""
    file = ""
    for place, name in TEST_NAME.findall(text):
        file = place or file
        if place or name:
            yield file, name or "*"


def functions_of(file: str) -> list[str]:
    path = ROOT / "tests" / file
    if not path.is_file():
        return []
    return [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize(("folder", "at_least"), [("operations", 40), ("privacy", 25)])
def test_every_test_that_a_document_names_exists(folder: str, at_least: int) -> None:
    named = [each for page in sorted((DOCS / folder).glob("*.md")) for each in named_tests(page.read_text())]
    assert len(named) >= at_least
    missing = [
        (file, name) for file, name in named if not any(fnmatchcase(test, name) for test in functions_of(file))
    ]
    assert missing == []


def test_names_are_found_in_each_way_of_writing_them() -> None:
    text = "`unit/a/test_a.py`, `tests/flows/test_b.py::test_c`, `::test_d`; `test_e_*`, not `test_f()` or `a.py`"
    assert list(named_tests(text)) == [
        ("unit/a/test_a.py", "*"),
        ("flows/test_b.py", "test_c"),
        ("flows/test_b.py", "test_d"),
        ("flows/test_b.py", "test_e_*"),
    ]


def figures_of(text: str) -> set[str]:
    """Return the figures with an interval, without their sign, however lines are broken."""
    return {" ± ".join(found) for found in re.findall(r"(\d+\.\d+)\s±\s(\d+\.\d+)", text)}


def measured_figures() -> set[str]:
    """Return every figure with an interval in the data of the results."""
    figures = set()
    for file in (RESULTS / "data").glob("*.csv"):
        for row in csv.DictReader(file.read_text().splitlines()):
            figures |= {f"{row[name[:-5]].lstrip('+-')} ± {row[name]}" for name in row if name.endswith("_ci95")}
    return figures


@pytest.mark.parametrize(
    "page",
    [README, DOCS / "guide" / "artifacts.md", *sorted(RESULTS.glob("*.md"))],
    ids=page_name,
)
def test_every_interval_in_the_results_is_in_their_data(page: Path) -> None:
    assert figures_of(page.read_text()) - measured_figures() == set()


def test_the_index_of_results_has_its_figures() -> None:
    assert len(figures_of((RESULTS / "README.md").read_text())) >= 30


@pytest.mark.parametrize("name", ["README.md", "rivals.md"])
def test_the_tables_are_written_from_the_data(name: str) -> None:
    page = (RESULTS / name).read_text()
    written = table(measured()) if name == "README.md" else rivals_table()
    assert with_table(page, written) == page


def test_figures_are_found_across_lines_and_whatever_their_sign() -> None:
    assert figures_of("by +0.021 ± 0.012 (-0.5\n± 0.25), 3 ± 1, 0.7") == {"0.021 ± 0.012", "0.5 ± 0.25"}


def test_every_run_of_the_results_has_its_command_commit_and_date() -> None:
    runs = json.loads((RESULTS / "data" / "runs.json").read_text())
    assert all(run["command"] and run["commit"] and run["date"] for run in runs.values())
    for file in [RESULTS / "accuracy.csv", *(RESULTS / "data").glob("*.csv")]:
        rows = csv.DictReader(file.read_text().splitlines())
        assert {row["run"] for row in rows if "run" in row} <= set(runs), file.name


def test_the_picture_shows_the_measured_accuracies() -> None:
    def accuracies(file: Path) -> set[tuple[str, ...]]:
        rows = csv.DictReader(file.read_text().splitlines())
        return {tuple(row[name] for name in ("run", "arm", "accuracy", "accuracy_ci95")) for row in rows}

    assert accuracies(RESULTS / "accuracy.csv") <= accuracies(RESULTS / "data" / "compare.csv")


def test_the_readme_has_at_most_900_words_and_its_sections_in_order() -> None:
    text = README.read_text()
    assert len(text.split()) <= 900
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Install and demo",
        "Results",
        "How it works",
        "Your data",
        "The guarantee",
        "Serve",
        "Limits",
        "Develop, cite, licence",
    ]


def test_the_index_of_results_has_one_table_one_picture_and_at_most_800_words() -> None:
    first_screen, _, rest = (RESULTS / "README.md").read_text().partition("\n## ")
    assert len(re.findall("[A-Za-z]+", first_screen)) <= 250
    assert len(re.findall(r"^\|[-| ]+\|$", first_screen, re.MULTILINE)) == 1
    assert len(re.findall(r"!\[", first_screen)) == 1
    assert len(rest.split()) <= 800


def test_the_readme_describes_each_stage_as_the_terminal_does() -> None:
    told = re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)$", README.read_text(), re.MULTILINE)
    assert len(told) == 12
    assert {stage: " ".join(words.split()) for stage, words in told} == {stage: STAGES[stage] for stage, _ in told}


def test_the_sample_sentences_are_of_the_release_that_the_readme_names() -> None:
    samples = re.findall(r"^- (.*) \*\((\w+)\)\*$", README.read_text(), re.MULTILINE)
    rows = csv.DictReader((RESULTS / "data" / "demo-epsilon-1.csv").read_text().splitlines())
    released = {(row["text"], ("negative", "positive")[int(row["label"])]) for row in rows}
    assert len(samples) == 6
    assert set(samples) <= released


@pytest.mark.parametrize("page", [README, DOCS / "guide" / "recipes.md"], ids=lambda page: page.name)
def test_calls_of_distil_have_its_parameters(page: Path) -> None:
    calls = [
        node
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "gradmm.distil"
    ]
    assert calls
    for call in calls:
        inspect.signature(gradmm.distil).bind(
            *call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords}
        )


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [citation[name] for name in ("title", "version", "license")] == [
        project[name] for name in ("name", "version", "license")
    ]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of every link of a page that stays in the repository."""
    for target in re.findall(r"\]\(([^)]*)\)", without_code(page.read_text())):
        if "://" not in target:
            place, _, anchor = target.partition("#")
            yield (page.parent / place).resolve() if place else page, anchor


@every_page
def test_links_resolve(page: Path) -> None:
    broken = [(file.name, anchor) for file, anchor in links(page) if not file.exists()]
    broken += [(file.name, anchor) for file, anchor in links(page) if anchor and anchor not in anchors(file)]
    assert broken == []


def test_every_file_of_docs_is_linked_from_its_index() -> None:
    reached, new = set(), [README, DOCS / "README.md"]
    while new:
        page = new.pop()
        reached.add(page)
        new += [file for file, _ in links(page) if file.suffix == ".md" and file not in reached]
    linked = {file for page in reached for file, _ in links(page)}
    folders = {file for file in linked if file.is_dir()}
    files = {file for file in DOCS.rglob("*") if file.is_file() and file.name != "README.md"}
    assert {file.name for file in files - linked if file.parent not in folders} == set()


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the console blocks of a page."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            yield shlex.split(line.removeprefix("$ "), comments=True)


@every_page
def test_commands_parse(page: Path) -> None:
    for words in command_lines(page):
        if "gradmm" in (program := words[0].removeprefix(".venv/bin/")):
            assert program == "gradmm"
            app.parse_args(words[1:], print_error=False, exit_on_error=False)
    commands = {name for name in app if not name.startswith("-")}
    assert set(re.findall(r"`gradmm ([a-z]\w*)", page.read_text())) <= commands


def test_planned_studies_have_names_of_their_own_and_commands_and_settings_that_exist() -> None:
    studies = planned()
    assert len({study.name for study in studies}) == len(studies)
    for study in studies:
        app.parse_args(study.words, print_error=False, exit_on_error=False)
        changes = [value for option, value in pairwise(study.words) if option == "--set"]
        load_recipe(find_recipe(study.words[1]), changes)


@every_page
def test_scripts_benchmarks_and_modules_exist_or_the_page_says_that_they_were_removed(page: Path) -> None:
    text = page.read_text()
    for script in re.findall(r"\bscripts/([\w.]*\w)", text):
        assert (ROOT / "scripts" / script).is_file(), script
    for name in re.findall(r"\bbenchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{name}.py").is_file() or "removed since" in text.lower(), name
    for name in re.findall(r"`(gradmm(?:\.\w+)+)`", text):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            package, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(package), attribute), name


def setting_exists(name: str) -> bool:
    model: type[BaseModel] | None = Recipe
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return False
        annotation = model.model_fields[part].annotation
        types = (annotation, *get_args(annotation))  # a block, or one that may be left out
        model = next((each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), None)
    return True


@every_page
def test_settings_exist(page: Path) -> None:
    blocks = "|".join(Recipe.model_fields)
    named = re.findall(rf"(?:`|--set '?)((?:{blocks})\.[a-z_.]+[a-z_])", page.read_text())
    endings = (".csv", ".json", ".md", ".py")
    assert [name for name in named if not name.endswith(endings) and not setting_exists(name)] == []


def test_the_page_of_settings_is_up_to_date_and_explains_each() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))["page"]()
    assert (DOCS / "guide" / "settings.md").read_text() == written
    rows = re.findall(r"^\| `(.*?)` \| (.*) \| (.*) \| (.*) \|$", written, re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows) > 100
    assert all(all(cells) for cells in rows)


def test_the_recipe_in_the_guide_is_a_recipe(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "guide" / "recipes.md").read_text(), re.DOTALL)
    (tmp_path / "reviews.yaml").write_text(block)
    assert load_recipe(tmp_path / "reviews.yaml").name == "reviews"
