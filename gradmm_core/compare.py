"""What each arm of a comparison is worth, beside the product's: as rows, and as tables in Markdown.

Everything is paired over seeds: with a seed, every arm is fine-tuned in the same order of batches and measured on
the same rows. Intervals are Student's over seeds, at 95%. A seed stands for another generation of all texts, or
another draw of random rows, and for fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from gradmm_core.arms import PRODUCT
from gradmm_core.finetune_eval import accuracies_by_seed, chosen_learning_rate
from gradmm_core.intervals import CONFIDENCE, LEAST_SEEDS, SeedMean, mean_over_seeds, paired_difference

#: Columns of `arm_measures`, their headings, and digits.
MEASURES = {
    "log_perplexity": ("log-perplexity", 2),
    "distinct_2": ("distinct-2", 3),
    "self_bleu": ("self-BLEU", 3),
    "frechet_distance": ("Fréchet distance", 1),
    "squared_mmd": ("squared MMD", 4),
    "nearest_distance": ("nearest real text", 2),
}


HONEST = (
    "Of the checkpoint chosen on validation; in brackets that of the checkpoint best on test, which looks at what "
    f"it is measured on. Means over seeds, and {CONFIDENCE:.0%} intervals (Student) from {LEAST_SEEDS} seeds on."
)


def compare_arms(evaluations: pd.DataFrame, measures: pd.DataFrame | None) -> pd.DataFrame:
    """One row per arm and size, in the order of `evaluations`, with the columns of the stage `compare`.

    `difference` is the product's accuracy minus the arm's, both of the checkpoint chosen on validation. Where the
    product has not the arm's size (before fine-tuning, real-1k), its largest one stands against it.

    Args:
        evaluations: rows of `arm_eval`, of all arms, sizes and seeds.
        measures: rows of `arm_measures`; None leaves their columns out.
    """
    by_seed = {
        (str(arm), int(str(size))): accuracies_by_seed(rows)
        for (arm, size), rows in evaluations.groupby(["arm", "size"], sort=False)  # pyright: ignore
    }
    sizes = [size for arm, size in by_seed if arm == PRODUCT]
    return pd.DataFrame(
        [
            _row(evaluations, measures, by_seed, arm, size, size if size in sizes else max(sizes))
            for arm, size in by_seed
        ]
    )


def _row(
    evaluations: pd.DataFrame,
    measures: pd.DataFrame | None,
    by_seed: Mapping[tuple[str, int], pd.DataFrame],
    arm: str,
    size: int,
    against: int,
) -> dict[str, object]:
    own = evaluations.loc[(evaluations["arm"] == arm) & (evaluations["size"] == size)]
    values, product = by_seed[arm, size], by_seed[PRODUCT, against].set_index("seed")["accuracy"]
    others = values.set_index("seed")["accuracy"]
    if size == 0:  # before fine-tuning, which no seed changes
        others = pd.Series(others.tolist()[0], index=product.index)
    ahead = paired_difference(product.tolist(), others.loc[product.index].tolist())
    accuracy = mean_over_seeds(values["accuracy"].tolist())
    best = mean_over_seeds(values["best_on_test"].tolist())
    same = arm == PRODUCT
    return {
        "arm": arm,
        "size": size,
        "texts": own.drop_duplicates("seed")["texts"].mean(),
        "seeds": len(values),
        "learning_rate": chosen_learning_rate(own),
        "accuracy": accuracy.mean,
        "accuracy_half_width": accuracy.half_width,
        "best_on_test": best.mean,
        "best_on_test_half_width": best.half_width,
        **({} if measures is None else _reading(measures, arm, size)),
        "against_size": against,
        "difference": None if same else ahead.mean,
        "difference_half_width": None if same else ahead.half_width,
        "verdict": None if same else ahead.verdict,
    }


def _reading(measures: pd.DataFrame, arm: str, size: int) -> dict[str, float]:
    own = measures.loc[(measures["arm"] == arm) & (measures["size"] == size)]
    return {measure: own[measure].mean() for measure in MEASURES}


def comparison_markdown(table: pd.DataFrame, by: str = "texts") -> str:
    """Tables of accuracy, of the product's lead, and of how the texts read; every figure from the rows.

    Args:
        table: rows of the stage `compare`.
        by: what a size counts.
    """
    sizes = sorted(table.loc[table["arm"] == PRODUCT, "size"])
    at_sizes = table[table["size"].isin(sizes)]
    alone = [row for _, row in table[~table["size"].isin(sizes)].iterrows()]
    parts = [
        f"## Accuracy on the test split, by the number of {by}",
        HONEST,
        "\n".join(f"- {_name(row)}: {_accuracy(row)}" for row in alone),
        _grid(at_sizes, sizes, _accuracy),
        *_leads(table.dropna(subset=["verdict"]), alone, sizes, by),
        *_how_it_reads(at_sizes[at_sizes["size"] == max(sizes)]),
    ]
    return "\n\n".join(filter(None, parts))


def _how_it_reads(largest: pd.DataFrame) -> list[str]:
    if not set(MEASURES) <= set(largest):
        return []
    return [
        f"## How {largest['size'].max()} texts read",
        "Log-perplexity under the model; word pairs that are different; BLEU of each text against the others; and "
        "three distances of the model's hidden states from those of as many test rows of each class. More "
        "log-perplexity is less likely text; less of the distances is nearer to real text.",
        markdown_table(
            ["arm", *(heading for heading, _ in MEASURES.values())],
            (
                [row["arm"], *(f"{row[m]:,.{digits}f}" for m, (_, digits) in MEASURES.items())]
                for _, row in largest.iterrows()
            ),
        ),
    ]


def arms_markdown(table: pd.DataFrame, columns: Mapping[str, tuple[str, int]]) -> str:
    """One line per row: accuracy, the product's lead, and other figures of the row.

    Args:
        table: rows like those of the stage `compare`.
        columns: of the other figures, with their headings and digits.
    """
    head = ["arm", "accuracy (best on test)", f"{PRODUCT} ahead by", *(heading for heading, _ in columns.values())]
    lines = [
        [
            str(row["arm"]),
            _accuracy(row),
            "" if pd.isna(row["verdict"]) else _lead(row),
            *("" if pd.isna(row[c]) else f"{row[c]:,.{digits}f}" for c, (_, digits) in columns.items()),
        ]
        for _, row in table.iterrows()
    ]
    return markdown_table(head, lines)


def _leads(compared: pd.DataFrame, alone: Sequence[pd.Series], sizes: Sequence[int], by: str) -> list[str]:
    """Nothing where the product is by itself."""
    if compared.empty:
        return []
    within = int((compared["verdict"] == "within noise").sum())
    by_chance = len(compared) * (1 - CONFIDENCE)
    return [
        f"## How far {PRODUCT} is ahead",
        "Its accuracy minus the arm's, paired by seed, of the checkpoints chosen on validation.",
        "\n".join(f"- {_name(row)}: {_lead(row)} ({row['against_size']} {by} of {PRODUCT})" for row in alone),
        _grid(compared[compared["size"].isin(sizes)], sizes, _lead),
        f"{within} of {len(compared)} differences are within noise. Each is judged by itself: if no arm differed, "
        f"about {by_chance:.1f} of them would still be called a difference.",
    ]


def _name(row: pd.Series) -> str:
    return "before fine-tuning" if row["size"] == 0 else str(row["arm"])


def _accuracy(row: pd.Series) -> str:
    honest = _interval(row, "accuracy").text(3)
    if row["size"] == 0:
        return honest
    short = f", {row['texts']:,.0f} texts" if row["texts"] < row["size"] else ""
    return f"{honest} ({_interval(row, 'best_on_test').text(3)}){short}"


def _lead(row: pd.Series) -> str:
    return _interval(row, "difference").lead(3)


def _interval(row: pd.Series, figure: str) -> SeedMean:
    half_width = row[f"{figure}_half_width"]
    return SeedMean(row[figure], None if pd.isna(half_width) else half_width, row["seeds"])


def _grid(table: pd.DataFrame, sizes: Sequence[int], cell: Callable[[pd.Series], str]) -> str:
    """A line for each arm, a column for each size."""
    if table.empty:
        return ""
    ordered = table.sort_values("size", kind="stable").groupby("arm", sort=False)
    lines = ([str(arm), *(cell(row) for _, row in rows.iterrows())] for arm, rows in ordered)
    return markdown_table(["arm", *map(str, sizes)], lines)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
