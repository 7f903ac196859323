"""The page of a study in Markdown, and its pictures: how it was made, and the rows of its own stage as tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from gradmm.evaluation.arm import ALL_ROWS
from gradmm.evaluation.tfidf_classifier import INVERSE_PENALTIES
from gradmm.metrics.intervals import CONFIDENCE, MIN_SEEDS, SeedMean
from gradmm.outputs.markdown import markdown_table
from gradmm.studies.arms import CLASSIFIER, PRODUCT, RIVALS, PrivateEvolution
from gradmm.studies.compare import MEASURES
from gradmm.studies.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A row of a study's table.
Row = dict[str, Any]

INTERVALS = f"Means over seeds; {CONFIDENCE:.0%} Student intervals from {MIN_SEEDS} seeds on."

CHECKPOINTS = (
    "Test accuracy of the checkpoint chosen on validation and, in brackets, of the checkpoint that is best on "
    f"test, which is selected on the rows that it is measured on. {INTERVALS}"
)

OVER_ROWS = (
    f"In brackets, the {CONFIDENCE:.0%} bootstrap interval over test rows, which are the same for every arm."
)

_SEEDS = (
    "Each has its own generation, draw of random rows and order of fine-tuning. The target and the rows of "
    "herding and k-center are the same for all."
)

#: What a seed varies, by study; `_SEEDS` for all others.
_STUDY_SEEDS = {
    "scarce": "Each has its own draw of real rows, generation from them, and order of fine-tuning.",
    "distribution": "Each has its own generation, draw of random rows, and draw of test rows.",
}

#: Further columns, with headings and digits.
_TEXTS = {"texts": ("texts", 0)}
_GENERATED = {"matching_loss": ("matching loss", 4), "token_passes": ("passes per text", 0)}
_READING = {name: MEASURES[name] for name in ("log_perplexity", "distinct_2")}

#: Quantities of the theory, with headings.
_QUANTITIES = {
    "start_gap": "e_0",
    "drift": "D_t",
    "real_smoothness": "b of real",
    "arm_smoothness": "b of arm",
    "gap_smoothness": "b of difference",
}


def study_page(record: StudyRecord) -> str:
    """Write the notes and tables of a study."""
    parts = [
        f"# {record.recipe.name}: {record.study}",
        _bullets(notes(record)),
        *_TABLES[record.study](record.table.read()),
        *(_generation_times(record) if record.study == "scale" else []),
        *(_making_times(record) if record.study == "compare" else []),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def study_pictures(record: StudyRecord) -> Mapping[str, Figure]:
    """Draw the pictures of a study, by file name without suffix."""
    from gradmm.studies import plots  # imports matplotlib

    rows = record.table.read()
    if record.study == "scarce":
        return {"accuracy": plots.accuracy_by_size(rows, "real rows")}
    if record.study == "compare" and len(record.sizes) > 1:
        return {"accuracy": plots.accuracy_by_size(rows)}
    if record.study == "scale":
        named = rows.assign(arm=rows["method"].fillna(rows["arm"]))
        return {"accuracy": plots.accuracy_by_number(named)}
    if record.study == "epsilon":
        return {"accuracy": plots.accuracy_by_epsilon(rows)}
    if record.study == "distribution":
        return {"frechet_distance": plots.figure_by_arm(rows, "frechet_distance", "Fréchet distance")}
    if record.study == "gradients":
        return {"gradient_error": plots.gradient_errors(rows)}
    if record.study == "bounds":
        return {"bounds": plots.bounds_and_observations(rows)}
    if record.study == "transfer":
        rows = rows.assign(arm=rows["model"] + ": " + rows["arm"])
    return {"accuracy": plots.figure_by_arm(rows, "accuracy", "test accuracy")}


def notes(record: StudyRecord) -> list[str]:
    """Describe how the tables were made: guarantees, model, protocol, seeds, command, commit and machine."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    command = f"`{shlex.join(record.command)}`" if record.command else "called from Python"
    return [
        "Not for publication: the figures are measured on private data, and herding, k-center and random are "
        "rows of it.",
        f"{PRODUCT}, by {record.recipe.generation.method}: {record.guarantee.sentence}",
        *(f"{arm}: {guarantee.sentence}" for arm, guarantee in record.guarantees.items()),
        f"Model {record.recipe.model.name}, {record.model['digest'][:12]}. {_protocol(record)}",
        f"Seeds {', '.join(map(str, record.seeds))}. {_varied_by_seeds(record)}",
        f"{record.started:%Y-%m-%d}, {command}, commit {record.commit or 'unknown'}, on {record.machine}. "
        f"{versions}.",
    ]


def _varied_by_seeds(record: StudyRecord) -> str:
    """Say what the intervals include."""
    parts = [_STUDY_SEEDS.get(record.study, _SEEDS)]
    if any(isinstance(RIVALS.get(arm.partition(",")[0]), PrivateEvolution) for arm in record.arms):
        parts.append("The texts of Private Evolution are its release, and the same for all.")
    if any(guarantee.epsilon is not None for guarantee in (record.guarantee, *record.guarantees.values())):
        parts.append("The intervals do not include the draw of the noise.")
    return " ".join(parts)


def _protocol(record: StudyRecord) -> str:
    settings, test_rows = record.recipe.finetune_eval, record.data["test"]["rows"]
    if record.study == "distribution":
        return f"No fine-tuning. {test_rows:,} test rows."
    training = f"Fine-tuning with batches of {settings.batch_size}"
    if record.study in ("gradients", "bounds"):
        figures = record.stage("gradient_path").figures
        return (
            f"{training}: {figures['steps']:,} steps, learning rate {figures['learning_rate']:g} for every arm. "
            f"{figures['real_rows']:,} "
            "random train rows represent the real data, as evenly over the classes as possible, the same for all "
            "arms and seeds; the intervals do not include their draw."
        )
    rates = ", ".join(f"{rate:g}" for rate in settings.learning_rates)
    steps = ", ".join(f"{steps:,}" for steps in settings.steps)
    rows = min(test_rows, settings.max_test_rows or math.inf)
    return (
        f"{training}. For each arm and size, the first seed chooses the learning rate (from {rates}) and the "
        f"number of steps (from {steps}) on validation; the other seeds use its choice. {rows:,} test rows, "
        "the same for every arm; what follows ± does not include their draw, which moves every accuracy with a "
        f"standard error of up to {0.5 / math.sqrt(rows):.3f}."
    )


# --------------------------------------------------------------------------------------------------- Accuracies


def comparison_tables(table: pd.DataFrame, by: str = "texts") -> list[str]:
    """Tables of accuracy, of the gap recovered, of the product's lead, and of the quality of the texts.

    Args:
        table: rows of the stage `compare`, or of `scarce`, which lack `gap_recovered`.
        by: the unit of `size`.
    """
    sizes = table.loc[table["arm"] == PRODUCT, "size"]
    at_sizes, alone = table[table["size"].isin(sizes)], table[~table["size"].isin(sizes)]
    return [
        f"## Test accuracy by the number of {by}",
        CHECKPOINTS,
        _bullets(f"{_name(row)}: {_accuracy(row)}" for row in _rows(alone)),
        _grid(at_sizes, "size", _accuracy),
        "Learning rate and number of steps, as chosen by the first seed:",
        _bullets(f"{_name(row)}: {_schedule(row)}" for row in _rows(alone[alone["steps"] > 0])),
        _grid(at_sizes, "size", _schedule),
        *_gap_tables(at_sizes, alone),
        *_lead_tables(at_sizes.dropna(subset=["verdict"]), alone, by),
        *_quality(at_sizes[at_sizes["size"] == sizes.max()]),
    ]


def _gap_tables(at_sizes: pd.DataFrame, alone: pd.DataFrame) -> list[str]:
    table = pd.concat([at_sizes, alone])
    if "gap_recovered" not in table or ALL_ROWS not in set(table["arm"]) or "before" not in set(table["arm"]):
        return []
    heading = "## Gap recovered"
    if table["gap_recovered"].isna().all():
        return [heading, f"None: fine-tuning on {ALL_ROWS} does not exceed the model before fine-tuning."]
    return [
        heading,
        "(accuracy - accuracy before fine-tuning) / (accuracy of all train rows - accuracy before fine-tuning), "
        "from the mean accuracies of the checkpoints chosen on validation.",
        _bullets(f"{_name(row)}: {_recovered(row)}" for row in _rows(alone)),
        _grid(at_sizes, "size", _recovered),
    ]


def _recovered(row: Row) -> str:
    share = row["gap_recovered"]
    return "" if pd.isna(share) else f"{round(share, 2) + 0:.0%}"  # + 0 turns -0.0 into 0.0


def _lead_tables(at_sizes: pd.DataFrame, alone: pd.DataFrame, by: str) -> list[str]:
    compared = pd.concat([at_sizes, alone])
    if compared.empty:
        return []
    rivals = (compared["against"] != PRODUCT).any()
    against_rivals = f"A rival is compared with {PRODUCT} under the same epsilon. " if rivals else ""
    return [
        f"## Lead of {PRODUCT}",
        f"Its accuracy minus the arm's, paired by seed, at the checkpoints chosen on validation. {against_rivals}"
        f"{OVER_ROWS}",
        _bullets(
            f"{_name(row)}: {_lead(row)} (against {row['against_size']} {by} of {row['against']})"
            for row in _rows(alone)
        ),
        _grid(at_sizes, "size", _lead),
        _within_noise(compared) + _by_chance(compared),
    ]


def _quality(largest: pd.DataFrame) -> list[str]:
    if not set(MEASURES) <= set(largest):
        return []
    return [
        f"## Quality of {largest['size'].max()} texts",
        "Log-perplexity under the model; share of distinct word bigrams; BLEU of each text against the others; "
        "and three distances of the model's hidden states from those of test rows, the same for all arms: of each "
        "class as many as texts were asked for, or all if there are fewer. A higher "
        "log-perplexity means less likely text, a smaller distance means closer to real text.",
        _table({"arm": row["arm"]} | _cells(row, MEASURES) for row in _rows(largest)),
    ]


def _scarce(table: pd.DataFrame) -> list[str]:
    texts = table[table["arm"] == PRODUCT].sort_values("size")["texts"]
    return [
        f"`real rows` are the few rows themselves, the baseline to beat. {PRODUCT} and zero-shot (text written "
        "without data) have as many texts as the recipe's filters pass. By the number of real rows, "
        f"{PRODUCT} has {', '.join(f'{count:,.0f}' for count in texts)} texts, a mean over seeds.",
        *comparison_tables(table, "real rows"),
    ]


def _transfer(table: pd.DataFrame) -> list[str]:
    penalties = ", ".join(f"{c:g}" for c in INVERSE_PENALTIES)
    parts = [
        "## Accuracy of other models, trained on texts made for the recipe's model",
        CHECKPOINTS,
        f"The {CLASSIFIER} is not a language model: it is scikit-learn's TF-IDF of words and word pairs, with "
        "logistic regression on the class probabilities of the texts. Each seed chooses C on validation (from "
        f"{penalties}). There are no other checkpoints.",
    ]
    for model, rows in table.groupby("model", sort=False):
        parts += [f"### {model}", _arms(rows, _TEXTS)]
    return parts


def _ablate(table: pd.DataFrame) -> list[str]:
    return [
        "## Contribution of each part",
        f"{CHECKPOINTS} {PRODUCT} is the recipe itself. Matching losses of different targets cannot be compared.",
        _arms(table, _TEXTS | _GENERATED | _READING),
    ]


def _scale(table: pd.DataFrame) -> list[str]:
    return [
        "## Accuracy by the number of texts",
        f"{CHECKPOINTS} random is as many random train rows.",
        _table(
            {
                "method": row["arm"] if pd.isna(row["method"]) else row["method"],
                "texts": f"{row['size']:,}",
                "accuracy (best on test)": _accuracy(row),
                "learning rate, steps": _schedule(row) if row["steps"] else "",
            }
            | _cells(row, {"token_passes": ("passes per text", 0)})
            for row in _rows(table)
        ),
    ]


def _generation_times(record: StudyRecord) -> list[str]:
    """Return the time of each method's first generation. One that was cached has none."""
    texts = max(record.sizes)
    methods = record.table.read().drop_duplicates("arm").set_index("arm")["method"].to_dict()
    return [
        _bullets(
            f"{methods[arm]}: {texts:,} texts in {seconds:,.0f} s, {seconds / texts:.3f} s each."
            for arm, stages in record.making_seconds.items()
            if (seconds := stages.get("generation")) is not None
        )
    ]


def _making_times(record: StudyRecord) -> list[str]:
    """Return the time that each arm's first texts took. Stages that were cached have none."""
    if not record.making_seconds:
        return []
    return [
        "## Time",
        "Of the stages that this run computed for the first seed's texts. Those found in the cache are left out, "
        "and so are those that an arm shares with an earlier one.",
        _bullets(
            f"{arm}: {sum(stages.values()):,.0f} s "
            f"({', '.join(f'{stage} {seconds:,.1f}' for stage, seconds in stages.items())})"
            for arm, stages in record.making_seconds.items()
        ),
    ]


def _epsilon(table: pd.DataFrame) -> list[str]:
    return [
        "## Cost of the noise",
        f"{CHECKPOINTS} The cosine is that of the targets with and without noise, over all classes; of a centred "
        "target, that of the difference between the data and public text. It is measured on the private target, "
        "outside of the guarantee.",
        _arms(table, {"target_cosine": ("cosine of the target", 3)} | _READING),
    ]


def _arms(table: pd.DataFrame, columns: Mapping[str, tuple[str, int]]) -> str:
    """One line per arm: accuracy, the product's lead, the chosen schedule, and further columns."""
    return _table(
        {
            "arm": row["arm"],
            "accuracy (best on test)": _accuracy(row),
            f"lead of {PRODUCT} (over test rows)": "" if pd.isna(row["verdict"]) else _lead(row),
            "learning rate, steps": _schedule(row) if row["steps"] else "",
        }
        | _cells(row, columns)
        for row in _rows(table)
    )


def _name(row: Row) -> str:
    return "before fine-tuning" if row["arm"] == "before" else row["arm"]


def _accuracy(row: Row) -> str:
    if row["size"] == 0:  # a single checkpoint
        return _mean(row, "accuracy")
    short = f", {row['texts']:,.0f} texts" if row["texts"] < row["size"] else ""
    return f"{_mean(row, 'accuracy')} ({_mean(row, 'best_on_test')}){short}"


def _schedule(row: Row) -> str:
    return f"{row['learning_rate']:g}, {row['steps']:,}"


# ------------------------------------------------------------------------------------- Distances and gradients


def _distribution(table: pd.DataFrame) -> list[str]:
    distances = ("frechet_distance", "squared_mmd", "nearest_distance")
    reading = {name: column for name, column in MEASURES.items() if name not in distances}

    def cells(row: Row) -> dict[str, str]:
        found = {"arm": row["arm"]} | _cells(row, _TEXTS)
        for name in distances:
            heading, digits = MEASURES[name]
            mean, low, high = (f"{row[name + end]:,.{digits}f}" for end in ("", "_low", "_high"))
            found[heading] = f"{mean} ({low} to {high})"
        return found | _cells(row, reading)

    return [
        "## Distance from real text",
        "Distances of the model's hidden states from those of as many test rows, which each seed draws anew: "
        "means over seeds. In brackets, 95% of the distances between random halves of the first seed's texts and "
        "as many rows. The Fréchet distance grows when there are fewer rows, so that the mean may lie outside. "
        "`random` are train rows: the distance of real text from itself.",
        _table(map(cells, _rows(table))),
    ]


def gradients_tables(table: pd.DataFrame) -> list[str]:
    """Tables of the gradient errors and cosines of both parts, and of the losses.

    Args:
        table: rows of the stage `gradients`.
    """
    table = table.assign(arm=[f"{row['arm']}, {row['texts']:,.0f} texts" for row in _rows(table)])
    parts = []
    for part, name in (("all", "all parameters"), ("head", "the output head")):
        rows = table[table["part"] == part]
        compared = rows.dropna(subset=["verdict"])
        parts += [
            f"## Gradient error of {name}",
            "||g_arm - g_real|| / ||g_real|| and, in brackets, the cosine of the mean gradients at the same "
            f"parameters, by the number of steps taken on the arm's texts. {INTERVALS}",
            _grid(rows, "step", lambda row: f"{_mean(row, 'error')} ({_mean(row, 'cosine')})"),
        ]
        if not compared.empty:
            parts += [
                f"{PRODUCT}'s error minus the arm's, paired by seed:",
                _grid(rows[rows["arm"].isin(compared["arm"])], "step", _gradient_lead),
                _within_noise(compared),
            ]
    losses = table[table["part"] == "all"]
    return [
        *parts,
        "## Losses",
        "Mean response loss (nats) of the real rows and, in brackets, of the arm's texts.",
        _grid(losses, "step", lambda row: f"{_mean(row, 'real_loss')} ({_mean(row, 'arm_loss')})"),
    ]


def _gradient_lead(row: Row) -> str:
    """A lower error is nearer to the real gradient."""
    if pd.isna(row["verdict"]):
        return "diverged"
    return _lead(row).replace("lower", "nearer").replace("higher", "farther")


def bounds_tables(table: pd.DataFrame) -> list[str]:
    """Tables of the theory's quantities, and of both bounds beside the observed gaps.

    Args:
        table: rows of the stage `bounds`.
    """

    def of_step(row: Row, figures: Mapping[str, str]) -> dict[str, str]:
        cells = {heading: _mean(row, figure) for figure, heading in figures.items()}
        return {"arm": row["arm"], "step": str(row["step"])} | cells

    parts = [
        "## Quantities of the theory",
        "Over all parameters: the gap of the gradients at the start, the drift, and the smoothness of the real "
        "loss, of the arm's loss, and of their difference. Smoothness is estimated from below, by secants between "
        f"measured points other than the step's own. {INTERVALS}",
        _table(of_step(row, _QUANTITIES) for row in _rows(table)),
    ]
    theorem = "Theorem: the changes of both losses differ by at most e_0 D_t + b D_t^2 / 2"
    for name, bound, figures in (
        ("Lemma: e_t <= e_0 + b D_t", "gap", {"gap": "gap e_t"}),
        (theorem, "loss", {"loss_difference": "loss difference"}),
    ):
        figures |= {f"{bound}_bound": "bound", f"sharp_{bound}_bound": "sharper bound"}
        held = {f"{bound}_held": "held", f"sharp_{bound}_held": "sharper held"}
        total = " and ".join(f"{table[column].sum()} of {table['runs'].sum()}" for column in held)
        parts += [
            f"## {name}",
            "With b the sum of both losses' smoothness; sharper with the smoothness of their difference.",
            _table(
                of_step(row, figures) | {heading: f"{row[c]} of {row['runs']}" for c, heading in held.items()}
                for row in _rows(table)
            ),
            f"They held in {total} cases. With the true constants both always hold; with estimates they can fail.",
        ]
    return parts


_TABLES: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "compare": comparison_tables,
    "scarce": _scarce,
    "transfer": _transfer,
    "ablate": _ablate,
    "scale": _scale,
    "epsilon": _epsilon,
    "distribution": _distribution,
    "gradients": gradients_tables,
    "bounds": bounds_tables,
}

# --------------------------------------------------------------------------------------------- Cells and tables


def _rows(table: pd.DataFrame) -> list[Row]:
    return table.to_dict("records")  # pyright: ignore[reportReturnType]


def _seed_mean(row: Row, figure: str) -> SeedMean:
    half_width = row[f"{figure}_half_width"]
    return SeedMean(row[figure], None if pd.isna(half_width) else half_width, row.get("seeds", row.get("runs", 0)))


def _mean(row: Row, figure: str) -> str:
    return "diverged" if pd.isna(row[figure]) else _seed_mean(row, figure).text(3)


def _lead(row: Row) -> str:
    if pd.isna(row["difference"]):
        return "diverged"
    over_seeds = _seed_mean(row, "difference").lead(3)
    if "difference_rows_low" not in row or pd.isna(row["difference_rows_low"]):
        return over_seeds
    return f"{over_seeds} ({row['difference_rows_low']:+.3f} to {row['difference_rows_high']:+.3f})"


def _within_noise(compared: pd.DataFrame) -> str:
    judged = _judged(compared)
    if judged.empty:
        return f"Too few seeds to tell differences from noise: that takes {MIN_SEEDS}."
    return f"{(judged['verdict'] == 'within noise').sum()} of {len(judged)} differences are within noise."


def _by_chance(compared: pd.DataFrame) -> str:
    judged = _judged(compared)
    if judged.empty:
        return ""
    return (
        " There is no correction for multiple comparisons: without any true difference, "
        f"about {len(judged) * (1 - CONFIDENCE):.1f} of them would still be called one."
    )


def _judged(compared: pd.DataFrame) -> pd.DataFrame:
    """Leave out rows with too few seeds for a verdict."""
    return compared[compared["verdict"] != "too few seeds"]


def _cells(row: Row, columns: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Cells by heading; empty for a null."""
    return {
        heading: "" if pd.isna(row[name]) else f"{row[name]:,.{digits}f}"
        for name, (heading, digits) in columns.items()
    }


def _grid(table: pd.DataFrame, by: str, cell: Callable[[Row], str]) -> str:
    """A line for each arm, a column for each size or step in ascending order."""
    columns = {str(value): "" for value in sorted(table[by].unique())}
    arms = table.groupby("arm", sort=False)
    return _table(
        {"arm": str(arm)} | columns | {str(row[by]): cell(row) for row in _rows(rows)} for arm, rows in arms
    )


def _table(lines: Iterable[Mapping[str, str]]) -> str:
    """A line for each mapping from heading to cell."""
    lines = list(lines)
    if not lines:
        return ""
    headings = list(dict.fromkeys(heading for line in lines for heading in line))
    return markdown_table(headings, ([line.get(heading, "") for heading in headings] for line in lines))


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
