"""Train a TF-IDF classifier on the texts of one arm with one seed, and evaluate it on held-out rows."""

from __future__ import annotations

from gradmm.data.examples import sample_rows
from gradmm.evaluation.arm import Arm
from gradmm.evaluation.tfidf_classifier import evaluate_classifier, one_hot
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.arm_texts import ArmTexts
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


@stage_task("tfidf_eval")
def tfidf_eval(
    context: RunContext,
    arm: Arm,
    made: StageArtifact | None,
    counts: dict[int, int],
    labels: list[int],
    train: SplitReference,
    validation: SplitReference,
    test: SplitReference,
    max_validation_rows: int | None,
    max_test_rows: int | None,
    seed: int,
    held_out_seed: int,
) -> Outcome:
    """Return one row per split, of the classifier with the best accuracy on validation.

    Args:
        made: the source of the arm's texts; see `ArmTexts`.
        counts: number of texts of each label.
        labels: of all classes, in the recipe's order.
        held_out_seed: draws the validation and test rows where their number is limited, the same as in `arm_eval`.
    """
    source = ArmTexts(context, arm, made, train)
    texts, probabilities = source.of(counts, seed), source.probabilities(counts)
    held_out = {}
    for split, max_rows in ((validation, max_validation_rows), (test, max_test_rows)):
        rows = read_split(context, split)
        held_out[split.split] = rows.take(sample_rows(len(rows), max_rows, held_out_seed))
    frame, chosen = evaluate_classifier(
        arm.name,
        texts.texts,
        one_hot(texts.labels, labels) if probabilities is None else probabilities,
        labels,
        held_out,
        seed,
    )
    return frame.assign(size=sum(counts.values()), texts=len(texts)), {"C": chosen, "texts": len(texts)}
