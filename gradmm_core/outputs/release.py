"""The release folder, which may be published: synthetic texts, their guarantee and a description of their making.

It is a Hugging Face data set, and depends on the noisy target and on public settings only. The figures of a run's
stages (accuracy, audits, record counts) are measured on private data and are not read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from markupsafe import Markup

from gradmm.config.recipe import Recipe
from gradmm.config.settings import TargetGradientSettings
from gradmm.generation.per_class import tilts_words
from gradmm.labelling.hard_rows import COPIES, label_counts
from gradmm.labelling.labelling import probability_matrix
from gradmm.outputs.markdown import escape_markdown
from gradmm.outputs.record import RunRecord
from gradmm.privacy.guarantee import RECORD, Guarantee, rounded_up
from gradmm.storage.artifacts import publish
from gradmm.storage.atomic import temporary_folder
from gradmm.storage.location import Location, create

TRAIN_FILE = "data/train-00000-of-00001.parquet"
HARD_FILE = "hard/train-00000-of-00001.parquet"

#: The exact content of a release folder.
RELEASE_FILES = frozenset({"README.md", TRAIN_FILE, HARD_FILE, "privacy.json", "recipe.yaml"})

#: Example texts per class on the card.
SHOWN_PER_CLASS = 3

#: Numbers of records of one person, and deltas, whose epsilons are stated.
GROUPS = (1, 2, 5, 10)
DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8)

#: The hub's size categories: upper bound and name.
SIZE_CATEGORIES = [(10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M")]


def write_release(folder: Location, run: RunRecord, texts: pd.DataFrame) -> Location:
    """Write the release folder atomically. The same run and texts give the same bytes.

    For an object store the folder is made and checked locally, then copied object by object.

    Args:
        texts: the labelled texts. Probabilities and scores are computed from the noisy target, so they are
            post-processing. With method=written there is no matching loss, and the release has no such column.

    Returns:
        `folder`.

    Raises:
        OSError: if `folder` exists and is not empty: a release is never overwritten.
        ValueError: if the folder would contain anything but `RELEASE_FILES`.
        KeyError: for a label that no class has.
    """
    tables = {TRAIN_FILE: _train_parquet(run.recipe, texts), HARD_FILE: _hard_parquet(run.recipe, texts)}
    contents = {
        "README.md": _card(run, texts, tables).encode(),
        **tables,
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
    """Write the files of a release to an empty folder and check it."""
    for name, content in contents.items():
        publish(folder / name, content)
    check_release(folder)


def check_release(folder: Location) -> None:
    """Check that a folder contains exactly `RELEASE_FILES`.

    Raises:
        ValueError: names the extra and the missing files.
    """
    found = folder.rglob("*")
    entries = {entry.relative_to(folder).as_posix(): entry for entry in found}  # pyright: ignore[reportArgumentType]
    files = {name for name, entry in entries.items() if not entry.is_dir()}
    links = {name for name, entry in entries.items() if entry.is_symlink()}
    extra = (files - RELEASE_FILES) | links
    missing = RELEASE_FILES - files
    if extra or missing:
        raise ValueError(
            f"{folder} is not a release folder: not allowed: {sorted(extra)}, missing: {sorted(missing)}"
        )


def class_label_names(recipe: Recipe) -> dict[int, str]:
    """Return class names by label, in the order of the `ClassLabel` feature.

    Labels 0 to K-1 are kept. For other labels, the ClassLabel value is the class's position in the recipe.
    """
    names = recipe.class_names
    return dict(sorted(names.items())) if set(names) == set(range(len(names))) else names


def guarantee_table(run: RunRecord) -> list[tuple[str, str]]:
    """Return the guarantee and its assumptions as terms and values."""
    guarantee = run.guarantee
    return [
        ("unit of privacy", guarantee.unit),
        ("adjacency", guarantee.adjacency),
        ("epsilon", _number(guarantee.epsilon, "g")),
        ("delta", _bound(guarantee.delta, 4)),
        *_delta_by_records(run),
        ("noise standard deviation sigma, per coordinate", _number(guarantee.sigma, ".6g")),
        ("clipping norm C", _number(guarantee.clipping_norm, "g")),
        ("sensitivity", _number(guarantee.sensitivity, "g")),
        ("mu of Gaussian differential privacy, all releases", _bound(guarantee.mu, 4)),
        ("rho of zero-concentrated differential privacy, all releases", _bound(guarantee.rho, 4)),
        ("target space", _target_space(run.plan.target)),
        ("noise sampler", guarantee.sampler or "none"),
        ("releases under the same root, from these data or others", str(guarantee.releases)),
        ("composed epsilon of all releases", _bound(guarantee.composed_epsilon, 4)),
        ("accountant", guarantee.accountant if guarantee.calibration != "paper" else "none"),
        ("noise calibration", _calibration(guarantee)),
        ("assumed public", _assumed_public(run.recipe)),
    ]


def how_texts_were_made(run: RunRecord) -> str:
    """Describe the generation method in one or two sentences."""
    settings, after = run.recipe.generation, "after a public instruction"
    search, endpoint = settings.search, settings.endpoint
    model = "the model" if endpoint is None else f"the served model {last_part(endpoint.model)}"
    if settings.method == "admm":
        words = "words" if settings.projection.rule == "nearest" else f"words that the model finds likely {after}"
        return (
            f"Texts were optimised to match their class's target, by {settings.admm.iterations} iterations of "
            f"ADMM over embeddings, projected onto {words}."
        )
    tilted = tilts_words(run.recipe, run.plan.target)
    unused = "the target gradient was not used" if tilted else "the target was not used"
    words = " Their words were tilted towards the released token rates." if tilted else ""
    if settings.method == "written" or (search.draws == 1 and not search.rounds):
        return f"Texts are {model}'s samples {after}; {unused}.{words}"
    edits = f", improved by single-word edits in {search.rounds} rounds" if search.rounds else ""
    uses_probe = run.plan.target.probe_chooses_texts and settings.probe_weight > 0
    probe = ", and by the loss of a linear probe of the model's hidden states" if uses_probe else ""
    return (
        f"Each text is the best of {search.draws} samples of {model} {after}{edits}. Texts are ranked by how "
        f"well their gradient matches their class's target{probe}.{words}"
    )


def how_texts_were_labelled(run: RunRecord) -> str:
    """Describe the labels in one or two sentences."""
    if run.recipe.labelling.labels == "hard":
        return "Each text has the class that it was written for, with probability 1."
    model = "the model's answer to the text in the template, calibrated by public text"
    target = run.plan.target
    classifiers = {
        "the linear probe": target.probe_share > 0,
        "the naive Bayes classifier of tokens": target.token_share > 0,
    }
    used = [name for name, released in classifiers.items() if released and run.recipe.labelling.release]
    if not used:
        return f"The probabilities are {model}."
    return (
        f"The probabilities combine {model}, with {' and '.join(used)} that the released statistics define, and "
        "the released numbers of records."
    )


def how_texts_were_filtered(run: RunRecord) -> str:
    """List the filters in one sentence."""
    recipe = run.recipe
    probe = " and the probe" if run.plan.target.probe_chooses_texts and recipe.generation.probe_weight > 0 else ""
    labels = f"classification by the model{probe}{'' if recipe.label_filter.enabled else ' (disabled)'}"
    if recipe.generation.method == "written":
        return f"{labels}, and removal of near duplicates."
    balance = "" if recipe.category_balance.enabled else " (disabled)"
    return f"{labels}, selection by matching loss, and balancing of the classes{balance}."


def public_model_name(run: RunRecord) -> str:
    """Return the model's hub id, or the last component of its folder without the path."""
    if run.model["revision"] is not None:
        return run.recipe.model.name
    return last_part(run.recipe.model.name)


def last_part(name: str) -> str:
    """Return the last component of a path, or a name as it is."""
    return PureWindowsPath(name).name or name  # splits at / and at \


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _bound(value: float | None, digits: int) -> str:
    return "none" if value is None else rounded_up(value, digits)


def _delta_by_records(run: RunRecord) -> list[tuple[str, str]]:
    """Return delta times the declared number of units: as many may be unprotected under such a delta."""
    delta, declared = run.guarantee.delta, run.recipe.privacy.declared_records
    if delta is None or declared is None:
        return []
    return [("delta times the declared number of units, to be well below 1", f"{delta * declared:.2g}")]


def _calibration(guarantee: Guarantee) -> str:
    if guarantee.calibration == "paper":
        return "paper: sqrt(2 log(1.25 / delta)) / epsilon, proved for epsilon up to 1 only"
    return guarantee.calibration or "none"


def _target_space(settings: TargetGradientSettings) -> str:
    size = f" of {settings.subspace_dimensions} dimensions" if settings.space == "public-subspace" else ""
    centred = ", centred on the gradient of public text" if settings.centred else ""
    what = "the class sums of a probe" if settings.releases_class_sums_alone else "a probe"
    probe = f"; {settings.probe_share:.0%} of C squared for {what}" if settings.probe_share > 0 else ""
    tokens = f"; {settings.token_share:.0%} for token rates" if settings.token_share > 0 else ""
    return f"{settings.space}{size}{centred}{probe}{tokens}"


def _assumed_public(recipe: Recipe) -> str:
    declared = recipe.privacy.declared_records
    kind = "records" if recipe.privacy.unit_column is None else "units"
    size = f"the declared number of {kind} ({declared})" if declared else f"no number of {kind}"
    return (
        "the model and its training data, the classes and their verbalisers, the template, the instructions, "
        f"the exemplars, every other setting in recipe.yaml, {size}"
    )


def _card(run: RunRecord, texts: pd.DataFrame, tables: Mapping[str, bytes]) -> str:
    recipe = run.recipe
    names = class_label_names(recipe)
    counts = Counter(texts["label"].tolist())
    shown = texts.groupby("label").head(SHOWN_PER_CLASS)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradmm.outputs"),
        finalize=_escape_unless_marked_safe,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("card.md.jinja").render(
        front_matter=_front_matter(recipe, run.guarantee, len(texts), tables),
        recipe=recipe,
        target=run.plan.target,
        guarantee=run.guarantee,
        guarantee_table=guarantee_table(run),
        groups=groups_table(run.guarantee),
        epsilons=epsilon_table(run.guarantee),
        of_records=run.guarantee.unit == RECORD,
        model=public_model_name(run),
        model_commit=run.model["revision"],
        version=run.versions["gradmm"],
        rows=len(texts),
        how_made=how_texts_were_made(run),
        how_labelled=how_texts_were_labelled(run),
        copies=COPIES,
        how_filtered=how_texts_were_filtered(run),
        has_losses=recipe.generation.method != "written",
        classes=[(i, label, name, counts[label]) for i, (label, name) in enumerate(names.items())],
        labels_are_kept=list(names) == list(range(len(names))),
        shown=[(names[label], text) for label, text in zip(shown["label"], shown["text"], strict=True)],
    )


def _escape_unless_marked_safe(value: Any) -> Any:
    return value if isinstance(value, Markup) else escape_markdown(str(value))


def _front_matter(recipe: Recipe, guarantee: Guarantee, rows: int, tables: Mapping[str, bytes]) -> str:
    """Describe the release to `datasets`.

    The library keeps what it has loaded under the folder's name and these fields, not under its path. All releases
    are called `release`, so without a digest in the fields it would return another one's texts.
    """
    fields: dict[str, Any] = {"pretty_name": f"{recipe.name} (synthetic)"}
    if recipe.generation.projection.language == "english":
        fields["language"] = ["en"]
    fields |= {
        "task_categories": ["text-classification"],
        "size_categories": [next((name for bound, name in SIZE_CATEGORIES if rows < bound), "n>1M")],
        "tags": ["synthetic", *(["differential-privacy"] if guarantee.safe else [])],
        "configs": [
            {
                "config_name": name,
                "description": f"SHA-256 {hashlib.sha256(tables[file]).hexdigest()}",
                "data_files": [{"split": "train", "path": f"{PurePosixPath(file).parent}/train-*.parquet"}],
            }
            for name, file in (("default", TRAIN_FILE), ("hard", HARD_FILE))
        ],
    }
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).rstrip()


def _train_parquet(recipe: Recipe, texts: pd.DataFrame) -> bytes:
    names = class_label_names(recipe)
    index = {label: position for position, label in enumerate(names)}
    probabilities = dict(zip(recipe.class_names, probability_matrix(texts).T, strict=True))
    scores = ["log_perplexity"] if recipe.generation.method == "written" else ["matching_loss", "log_perplexity"]
    return _parquet(
        recipe,
        {
            "text": texts["text"].tolist(),
            "label": [index[label] for label in texts["label"].tolist()],
            **{f"p_{name}": probabilities[label].tolist() for label, name in names.items()},
            **{score: texts[score].tolist() for score in scores},
        },
    )


def _hard_parquet(recipe: Recipe, texts: pd.DataFrame) -> bytes:
    """Write each text `COPIES` times, with labels in proportion to its probabilities."""
    index = {label: position for position, label in enumerate(class_label_names(recipe))}
    counts = label_counts(probability_matrix(texts))
    rows, columns = np.nonzero(counts)
    times = counts[rows, columns]
    labels = np.array([index[label] for label in recipe.class_names])
    return _parquet(
        recipe,
        {
            "text": np.repeat(texts["text"].to_numpy()[rows], times).tolist(),
            "label": np.repeat(labels[columns], times).tolist(),
        },
    )


def _parquet(recipe: Recipe, columns: Mapping[str, list[Any]]) -> bytes:
    """Write columns as Parquet with the features of `datasets`: text, the label's names, and numbers."""
    from datasets import ClassLabel, Features, Value  # late: the import takes a second

    known = {"text": Value("string"), "label": ClassLabel(names=list(class_label_names(recipe).values()))}
    features = Features({name: known.get(name, Value("float64")) for name in columns})
    buffer = io.BytesIO()
    pq.write_table(pa.table(dict(columns), schema=features.arrow_schema), buffer)
    return buffer.getvalue()


def groups_table(guarantee: Guarantee) -> list[tuple[int, str]]:
    """Return the epsilon of a person with several records, at the release's delta.

    Empty without a guarantee, or where a person's records are clipped together.
    """
    if guarantee.unit != RECORD or not guarantee.safe or guarantee.delta is None or guarantee.mu is None:
        return []
    return [(count, _bound(guarantee.epsilon_at(guarantee.delta, count), 3)) for count in GROUPS]


def epsilon_table(guarantee: Guarantee) -> list[tuple[str, str]]:
    """Return pairs of delta and epsilon of all releases together; empty without a guarantee."""
    if not guarantee.safe or guarantee.mu is None:
        return []
    return [(f"{delta:g}", _bound(guarantee.epsilon_at(delta), 3)) for delta in DELTAS]


def _privacy_json(guarantee: Guarantee) -> str:
    values = guarantee.model_dump(mode="json") | {"sentence": guarantee.sentence, "rho": guarantee.rho}
    if guarantee.safe and guarantee.delta is not None:
        values["in_words"] = guarantee.in_words
        values["correct_guesses_at_most"] = guarantee.correct_guesses
        values["epsilon_at_delta"] = {f"{delta:g}": guarantee.epsilon_at(delta) for delta in DELTAS}
        if guarantee.unit == RECORD:
            values["epsilon_of_records"] = {
                str(count): guarantee.epsilon_at(guarantee.delta, count) for count in GROUPS
            }
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _recipe_yaml(run: RunRecord) -> str:
    """Return the recipe without the locations of the data, the model's folder, the workers and the server."""
    values = run.recipe.model_dump(mode="json", exclude={"execution"})
    values["generation"]["endpoint"] = None
    values["data"] |= {"path": None, "hub": None, "hub_config": None, "revision": None}
    values["model"]["name"] = public_model_name(run)
    header = "# The recipe of this run without the data's location: set data.path or data.hub to run it again.\n"
    return header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
