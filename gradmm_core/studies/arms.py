"""The arms of a comparison: the product's texts, and the baselines that they are compared with.

An arm of n texts is the first n of its texts, as evenly over the classes as possible, so that one generation
serves all sizes. The order of the texts is

    gradmm, rerank       by matching loss, after all filters
    zero-shot, few-shot  as written; only the label filter selects (of two near duplicates, the better match stays)
    soft zero-shot       as zero-shot, labelled by the calibrated model: as much as can be had without the data
    calibrated model     no text, and no training
    herding, k-center    as selected
    private-evolution    by noisy votes, under a guarantee; with hard labels, or soft ones of the calibrated model
    epsvec, dp-few-shot,
    dp-adapters          as written; the same guarantee and labels
    random, real-100,
    real-1k              a random draw for each seed
    all rows             all train rows, the ceiling
"""

from __future__ import annotations

from typing import NamedTuple

from gradmm.evaluation.arm import ALL_ROWS, CALIBRATED, Arm

#: Default sizes of `compare`: texts in all classes together, as in the paper.
SIZES = (5, 10, 20, 50, 100)

#: Default numbers of real rows of `scarce`, in all classes together, as in the paper.
ROWS = (5, 10, 20, 50)

#: Default numbers of texts of `scale`, in all classes together.
SCALES = (100, 300, 1000, 3000, 10_000)

#: Default guarantees of `epsilon`.
EPSILONS = (0.01, 0.05, 0.2, 1.0)

#: Default baselines. The distances of `random` are those between two samples of real text.
BASELINES = {
    "transfer": ("before", "zero-shot", "random", "real-1k"),
    "distribution": ("zero-shot", "rerank", "random"),
    "gradients": ("zero-shot", "random"),
    "bounds": ("zero-shot", "random"),
}

#: The product's arm.
PRODUCT = "gradmm"

#: The arm of texts and labels that the model makes without the data.
SOFT_ZERO_SHOT = "soft zero-shot"

#: The model of `transfer` that is not a language model.
CLASSIFIER = "TF-IDF classifier"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("before", "nothing"),
        Arm(CALIBRATED, "nothing"),
        Arm("zero-shot", "written"),
        Arm("few-shot", "written"),
        Arm(SOFT_ZERO_SHOT, "written"),
        Arm("rerank", "synthetic"),
        Arm("herding", "coreset"),
        Arm("k-center", "coreset"),
        Arm("random", "train"),
        Arm("real-100", "train"),
        Arm("real-1k", "train"),
        Arm(ALL_ROWS, "train"),
        Arm(PRODUCT, "synthetic"),
    )
}


class PrivateEvolution(NamedTuple):
    """Settings of an arm of Private Evolution: T iterations, L variations of each text."""

    iterations: int
    variations: int


class Epsvec(NamedTuple):
    """Settings of an arm of EPSVec: by how many times the released vector the texts are steered."""

    strength: float


class FewShot(NamedTuple):
    """Settings of an arm of DP few-shot: the number of released examples of each class."""

    examples: int


class Adapters(NamedTuple):
    """Settings of an arm of DP adapters: their rank, and how they are trained (`rivals.dp_adapters`)."""

    rank: int
    passes: int
    steps_per_pass: int
    learning_rate: float


#: Arms of other methods that release texts under a guarantee. Those of EPSVec share one release.
RIVALS = {
    "private-evolution": PrivateEvolution(1, 7),
    "private-evolution-10": PrivateEvolution(10, 3),
    "epsvec": Epsvec(1.0),
    "epsvec-2": Epsvec(2.0),
    "dp-few-shot": FewShot(4),
    "dp-adapters": Adapters(rank=1, passes=2, steps_per_pass=4, learning_rate=3e-2),
}

#: The few real rows of `scarce` themselves.
REAL_ROWS = Arm("real rows", "train")


def private_arm(epsilon: float, name: str = PRODUCT) -> Arm:
    """Name the arm of the product, or of a rival, under a guarantee that the recipe itself does not have."""
    return Arm(f"{name}, epsilon {epsilon:g}", "synthetic")


def counterpart(arm: str) -> str:
    """Return the product's arm that an arm is compared with: for a rival, the one under the same guarantee."""
    name, separator, epsilon = arm.rpartition(", epsilon ")
    return f"{PRODUCT}, epsilon {epsilon}" if separator and name != PRODUCT else PRODUCT
