"""The folder that may leave the house: synthetic sentences, their guarantee and how they were made.

It is a Hugging Face data set. Everything in it follows from the noisy target and from public settings. The
figures of a run's stages (accuracy, audit, counts of real records) are those of private data: none is read.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import jinja2
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from markupsafe import Markup

from gradmm_core.artifacts import publish
from gradmm_core.location import Location, create
from gradmm_core.preflight import released_target
from gradmm_core.privacy import Guarantee
from gradmm_core.recipe import Recipe
from gradmm_core.run_record import RunRecord
from gradmm_core.temporary import temporary_folder

TRAIN_FILE = "data/train-00000-of-00001.parquet"

#: All that a release may hold, and must.
RELEASE_FILES = frozenset({"README.md", TRAIN_FILE, "privacy.json", "recipe.yaml"})

#: Sentences of each class that the card shows.
SHOWN_PER_CLASS = 3

#: Upper bounds of the hub's size categories, with their names.
SIZE_CATEGORIES = [(10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M")]

#: What Markdown (CommonMark, and the tables, links, formulas and emojis that GitHub and the hub add) gives a
#: meaning to: some characters at the start of a paragraph, others anywhere.
_MARKDOWN_SYNTAX = re.compile(r"^[#+=-]|[\\`*_\[\]<>|~&$@]|:(?=[\w/+-])|(?<=www)\.", re.IGNORECASE)


def write_release(folder: Location, run: RunRecord, texts: pd.DataFrame) -> Location:
    """Writes the release folder, whole or not at all. The same run and texts give the same bytes.

    In an object store it is there object by object, once it has been made and checked here.

    Args:
        texts: the rows that the last filter kept, with the columns `label`, `text`, `matching_loss` and
            `log_perplexity`. The scores are taken against the noisy target, so they are post-processing.

    Returns:
        `folder`.

    Raises:
        OSError: if `folder` exists and is not empty: a release is never overwritten.
        ValueError: if the folder would hold anything but `RELEASE_FILES`.
        KeyError: for a label that no class has.
    """
    contents = {
        "README.md": _card(run, texts).encode(),
        TRAIN_FILE: _train_parquet(run.recipe, texts),
        "privacy.json": _privacy_json(run.guarantee).encode(),
        "recipe.yaml": _recipe_yaml(run).encode(),
    }
    if isinstance(folder, Path):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary_folder(folder) as made:
            _fill(made, contents)
            os.replace(made, folder)
    else:
        with tempfile.TemporaryDirectory() as made:
            _fill(Path(made), contents)
            for name in contents:
                create(folder / name, (Path(made) / name).read_bytes())
    return folder


def _fill(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes the files of a release into an empty folder, and checks that it is one."""
    for name, content in contents.items():
        publish(folder / name, content)
    check_release(folder)


def check_release(folder: Location) -> None:
    """Proves that a folder holds the files of a release and nothing else.

    Raises:
        ValueError: naming what is too much and what is missing.
    """
    found = folder.rglob("*")
    entries = {entry.relative_to(folder).as_posix(): entry for entry in found}  # pyright: ignore[reportArgumentType]
    files = {name for name, entry in entries.items() if not entry.is_dir()}
    links = {name for name, entry in entries.items() if entry.is_symlink()}
    strangers = (files - RELEASE_FILES) | links
    missing = RELEASE_FILES - files
    if strangers or missing:
        raise ValueError(
            f"{folder} is no release: not allowed there: {sorted(strangers)}, missing: {sorted(missing)}"
        )


def class_label_names(recipe: Recipe) -> dict[int, str]:
    """Names of the classes by label, in the order of the `ClassLabel` feature.

    Labels 0 to K-1 are kept. Other labels have no place in a ClassLabel, whose values are 0 to K-1: a class
    is then numbered by its position in the recipe.
    """
    names = recipe.class_names
    return dict(sorted(names.items())) if set(names) == set(range(len(names))) else names


def guarantee_table(recipe: Recipe, guarantee: Guarantee) -> list[tuple[str, str]]:
    """The guarantee, term by term, with what it takes for granted."""
    return [
        ("unit of privacy", guarantee.unit),
        ("adjacency", guarantee.adjacency),
        ("epsilon", _number(guarantee.epsilon, "g")),
        ("delta", _number(guarantee.delta, ".4g")),
        ("sigma of the noise, per coordinate", _number(guarantee.sigma, ".6g")),
        ("C, the clipping norm", _number(guarantee.clipping_norm, "g")),
        ("sensitivity", _number(guarantee.sensitivity, "g")),
        ("target space", _target_space(recipe)),
        ("sampler of the noise", guarantee.sampler or "none"),
        ("number of releases from these data", str(guarantee.releases)),
        ("epsilon of all releases together", _number(guarantee.composed_epsilon, ".4g")),
        ("accountant", guarantee.accountant if guarantee.calibration != "paper" else "none"),
        ("calibration of sigma", _calibration(guarantee)),
        ("assumed public", _assumed_public(recipe)),
    ]


def how_texts_were_made(recipe: Recipe) -> str:
    """The method of generation, in a sentence."""
    settings, surest = recipe.generation, ""
    search, after = settings.search, "after a public instruction"
    if settings.method == "admm":
        words = "words" if settings.projection.rule == "nearest" else f"words that the model finds likely {after}"
        way = f"by ADMM over embeddings, in {settings.admm.iterations} iterations, held to {words}"
    elif search.draws == 1 and not search.rounds:
        return f"Sentences were taken as the model wrote them {after}; the target had no say in them."
    else:
        way = f"for each the best of {search.draws} that the model wrote {after}"
        if search.rounds:
            way += f", with words changed over {search.rounds} rounds where that made it better"
    if settings.method == "search" and released_target(recipe).probe_share > 0 and settings.probe_weight > 0:
        surest = ", and that a linear probe of the model's hidden states takes for the class"
    return f"Sentences were sought whose gradients point the way of their class's target{surest}: {way}."


def public_model_name(run: RunRecord) -> str:
    """The model's hub id, or the last component of its folder: not where that folder lies."""
    if run.model["revision"] is not None:
        return run.recipe.model.name
    return PureWindowsPath(run.recipe.model.name).name  # splits at / and at \


def escape_markdown(text: str) -> str:
    """The text as one line of Markdown that shows it character by character, in table cells too."""
    return _MARKDOWN_SYNTAX.sub(r"\\\g<0>", " ".join(text.split()))


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _calibration(guarantee: Guarantee) -> str:
    if guarantee.calibration == "paper":
        return "paper: sqrt(2 log(1.25 / delta)) / epsilon, which is proved for epsilon up to 1 only"
    return guarantee.calibration or "none"


def _target_space(recipe: Recipe) -> str:
    settings = released_target(recipe)
    size = f" of {settings.subspace_dimensions} dimensions" if settings.space == "public-subspace" else ""
    centred = ", centred on the gradient of public text" if settings.centred else ""
    probe = f"; a probe has {settings.probe_share:.0%} of C squared" if settings.probe_share > 0 else ""
    return f"{settings.space}{size}{centred}{probe}"


def _assumed_public(recipe: Recipe) -> str:
    declared = recipe.privacy.declared_records
    size = f"the declared number of records ({declared})" if declared else "no number of records"
    return (
        "the model and all that it was trained on, the classes and their verbalisers, the template, the "
        f"instructions, the exemplars, every other setting in recipe.yaml, {size}"
    )


def _card(run: RunRecord, texts: pd.DataFrame) -> str:
    recipe = run.recipe
    names = class_label_names(recipe)
    counts = Counter(texts["label"].tolist())
    shown = texts.groupby("label").head(SHOWN_PER_CLASS)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradmm_core"),
        finalize=_escape_unless_marked_safe,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("card.md.jinja").render(
        front_matter=_front_matter(recipe, run.guarantee, len(texts)),
        recipe=recipe,
        guarantee=run.guarantee,
        guarantee_table=guarantee_table(recipe, run.guarantee),
        model=public_model_name(run),
        model_commit=run.model["revision"],
        version=run.versions["gradmm"],
        rows=len(texts),
        how_made=how_texts_were_made(recipe),
        classes=[(i, label, name, counts[label]) for i, (label, name) in enumerate(names.items())],
        labels_are_kept=list(names) == list(range(len(names))),
        shown=[(names[label], text) for label, text in zip(shown["label"], shown["text"], strict=True)],
    )


def _escape_unless_marked_safe(value: Any) -> Any:
    return value if isinstance(value, Markup) else escape_markdown(str(value))


def _front_matter(recipe: Recipe, guarantee: Guarantee, rows: int) -> str:
    fields: dict[str, Any] = {"pretty_name": f"{recipe.name} (synthetic)"}
    if recipe.generation.projection.language == "english":
        fields["language"] = ["en"]
    fields |= {
        "task_categories": ["text-classification"],
        "size_categories": [next((name for bound, name in SIZE_CATEGORIES if rows < bound), "n>1M")],
        "tags": ["synthetic", *(["differential-privacy"] if guarantee.safe else [])],
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}
        ],
    }
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).rstrip()


def _train_parquet(recipe: Recipe, texts: pd.DataFrame) -> bytes:
    from datasets import ClassLabel, Features, Value  # late: it takes a second

    names = class_label_names(recipe)
    index = {label: position for position, label in enumerate(names)}
    features = Features(
        {
            "text": Value("string"),
            "label": ClassLabel(names=list(names.values())),
            "matching_loss": Value("float64"),
            "log_perplexity": Value("float64"),
        }
    )
    columns = {name: texts[name].tolist() for name in features}
    columns["label"] = [index[label] for label in columns["label"]]
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=features.arrow_schema), buffer)
    return buffer.getvalue()


def _privacy_json(guarantee: Guarantee) -> str:
    values = guarantee.model_dump(mode="json") | {"sentence": guarantee.sentence}
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _recipe_yaml(run: RunRecord) -> str:
    """The recipe as run, but for where the data, the model's folder and the workers lie."""
    values = run.recipe.model_dump(mode="json", exclude={"execution"})
    values["data"] |= {"path": None, "hub": None, "hub_config": None, "revision": None}
    values["model"]["name"] = public_model_name(run)
    header = "# The recipe as run, but for where the data lies: set data.path or data.hub to run it again.\n"
    return header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
