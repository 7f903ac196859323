"""Gradients along a path compared with a slow loop, and the theory on quadratic losses with known constants."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.data.examples import Examples
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.schedule import Schedule
from gradmm.gradients.mean_gradient import MeanGradient
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.studies.bounds import HELD, bounds_of_runs
from gradmm.studies.gradient_path import EARLY, gradient_path, path_rows
from tests.conftest import examples
from tests.unit.evaluation.test_finetune_eval import finetuning_of, separable
from tests.unit.gradients.test_mean_gradient import slow_mean_gradient

ARM, REAL = separable(6), separable(9, first=20)
STEPS, SCHEDULE, SEED = (2, 4, 5), Schedule(3e-3, 5), 7


@pytest.fixture(scope="module")
def finetuning(tiny_model: ModelReference, prompt_template: PromptTemplate) -> Finetuning:
    return finetuning_of(tiny_model, prompt_template, batch_size=4, evaluate_every=2)


@pytest.fixture(scope="module")
def path(finetuning: Finetuning) -> pd.DataFrame:
    return gradient_path(finetuning, "random", ARM, REAL, SCHEDULE, SEED)


@pytest.fixture(scope="module")
def slow(finetuning: Finetuning) -> dict[float, dict]:
    """Parameters, losses and gradients in float64, by step; the point on the line is at the step `EARLY`."""

    def measured(language_model: LanguageModel) -> dict:
        model = copy.deepcopy(language_model.model).double()
        found: dict[str, Any] = {"at": torch.cat([p.detach().flatten() for p in model.parameters()])}
        for name, texts in (("real", REAL), ("arm", ARM)):
            loss, gradient = slow_mean_gradient(model, finetuning.template, texts)
            head = [g for (n, _), g in zip(model.named_parameters(), gradient, strict=True) if "lm_head" in n]
            found[name] = {part: torch.cat([g.flatten() for g in gradients]) for part, gradients in
                           (("all", gradient), ("head", head))} | {"loss": loss}  # fmt: skip
        return found

    points: dict[float, dict] = {0: measured(finetuning.fresh_model())}
    for step, model in finetuning.checkpoints(ARM, SCHEDULE, SEED, "slow"):
        points[step] = measured(model)
    model = finetuning.fresh_model()
    at = torch.lerp(points[0]["at"], points[STEPS[-1]]["at"], EARLY).float()
    torch.nn.utils.vector_to_parameters(at, model.model.parameters())
    return points | {EARLY: measured(model)}


def test_figures_equal_those_of_gradients_computed_one_by_one(path: pd.DataFrame, slow: dict[float, dict]) -> None:
    rows = [(step, part) for step in (0, *STEPS) for part in ("head", "all")]
    assert [*zip(path["step"], path["part"], strict=True)] == rows
    run = path[["arm", "seed", "learning_rate", "steps"]].drop_duplicates()
    assert run.to_numpy().tolist() == [["random", SEED, *SCHEDULE]]
    for _, row in path.iterrows():
        point = slow[row["step"]]
        real, arm = point["real"][row["part"]], point["arm"][row["part"]]
        expected = {
            "real_norm": real.norm(),
            "arm_norm": arm.norm(),
            "gap": (arm - real).norm(),
            "error": (arm - real).norm() / real.norm(),
            "cosine": torch.nn.functional.cosine_similarity(real, arm, dim=0),
            "real_loss": point["real"]["loss"],
            "arm_loss": point["arm"]["loss"],
            "drift": (point["at"] - slow[0]["at"]).norm(),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value), rel=2e-3, abs=1e-7), (name, row["step"])


def test_smoothness_is_the_largest_secant_without_the_step(path: pd.DataFrame, slow: dict[float, dict]) -> None:
    line = (0, EARLY, STEPS[-1])
    pairs: list[tuple[float, float]] = [*((0, step) for step in STEPS), *pairwise(STEPS), *pairwise(line)]

    def gradient(at: float, loss: str) -> torch.Tensor:
        real, arm = (slow[at][each]["all"] for each in ("real", "arm"))
        return {"real": real, "arm": arm, "gap": real - arm}[loss]

    def secant(a: float, b: float, loss: str) -> float:
        change = gradient(a, loss) - gradient(b, loss)
        return float(change.norm() / (slow[a]["at"] - slow[b]["at"]).norm())

    for _, row in path.iterrows():
        for loss in ("real", "arm", "gap"):
            secants = [secant(a, b, loss) for a, b in pairs if row["step"] == 0 or row["step"] not in (a, b)]
            assert row[f"{loss}_smoothness"] == pytest.approx(max(secants), rel=1e-2), row["step"]


def test_an_arm_that_is_the_real_texts_has_no_error(finetuning: Finetuning) -> None:
    path = gradient_path(finetuning, "random", REAL, REAL, SCHEDULE, SEED)
    assert (path["error"] == 0).all()
    assert path["cosine"].tolist() == pytest.approx([1.0] * len(path))
    assert (path["real_loss"] == path["arm_loss"]).all()


def test_a_diverging_run_has_rows_for_all_steps(finetuning: Finetuning) -> None:
    path = gradient_path(finetuning, "random", ARM, REAL, Schedule(1e30, 5), SEED)
    assert path["step"].unique().tolist() == [0, *STEPS]
    assert path.loc[path["step"] == 0, "error"].notna().all()
    assert path.loc[path["step"] == STEPS[-1], ["error", "real_smoothness"]].isna().all(axis=None)
    assert not bounds_of_runs(path)[[*HELD]].any(axis=None)


def test_no_texts_are_refused(finetuning: Finetuning) -> None:
    with pytest.raises(InputError, match="no texts"):
        gradient_path(finetuning, "random", Examples([], []), REAL, SCHEDULE, SEED)


# ---------------------------------------------------------------------------------------------------- quadratics


class Point(torch.nn.Module):
    """A model whose last parameter is "the head"."""

    def __init__(self, at: np.ndarray) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.from_numpy(at[:-1].copy()))
        self.head = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.move(at)

    def move(self, at: np.ndarray) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(at.copy()), self.parameters())

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


class Quadratic:
    """(x - c)' A (x - c) / 2 with a symmetric, possibly indefinite A; `smoothness` is the true constant."""

    def __init__(self, width: int, scale: float, generator: np.random.Generator) -> None:
        matrix = scale * generator.normal(size=(width, width))
        self.hessian, self.centre = (matrix + matrix.T) / 2, generator.normal(size=width)
        self.smoothness = float(np.linalg.norm(self.hessian, 2))

    def __call__(self, language_model: LanguageModel) -> MeanGradient:
        at = torch.nn.utils.parameters_to_vector(language_model.model.parameters())
        away = at.detach().numpy() - self.centre
        gradient = torch.from_numpy(self.hessian @ away)
        return MeanGradient(float(away @ self.hessian @ away / 2), [gradient[:-1], gradient[-1:].view(1, 1)])


quadratics = {
    "width": st.integers(2, 5),
    "steps": st.integers(1, 4),
    "scales": st.tuples(st.sampled_from([0.0, 1e-2, 1.0, 30.0]), st.sampled_from([1e-2, 1.0, 30.0])),
    "length": st.sampled_from([0.0, 1e-2, 1.0, 10.0]),
    "seed": st.integers(0, 10_000),
}


def quadratic_path(
    width: int, steps: int, scales: tuple[float, float], length: float, seed: int
) -> tuple[pd.DataFrame, Quadratic, Quadratic]:
    """A path over random points: the bounds hold for any path."""
    generator = np.random.default_rng(seed)
    real, arm = (Quadratic(width, scale, generator) for scale in scales)
    at = generator.normal(size=width)

    def checkpoints() -> Iterator[tuple[int, LanguageModel]]:
        point = Point(at)
        for step in range(1, steps + 1):
            point.move(at + length * generator.normal(size=width))
            yield step, LanguageModel(point, None)

    with np.errstate(invalid="ignore", divide="ignore"):
        frame = path_rows(LanguageModel(Point(at), None), checkpoints(), real, arm)
    return frame.assign(arm="random", seed=seed, learning_rate=1.0, steps=9), real, arm


@examples(60)
@given(**quadratics)
def test_secants_never_exceed_the_true_smoothness(**drawn) -> None:
    path, real, arm = quadratic_path(**drawn)
    assert (path["real_smoothness"] <= real.smoothness * (1 + 1e-6)).all()
    assert (path["arm_smoothness"] <= arm.smoothness * (1 + 1e-6)).all()
    between = np.linalg.norm(real.hessian - arm.hessian, 2)
    assert (path["gap_smoothness"] <= between * (1 + 1e-6)).all()
    assert (path.loc[path["step"] == 0, "arm_smoothness"] >= path["arm_smoothness"].max()).all()
    if drawn["length"]:
        assert (path["arm_smoothness"] > 0).all()


@examples(60)
@given(**quadratics)
def test_with_the_true_smoothness_both_bounds_hold(**drawn) -> None:
    path, real, arm = quadratic_path(**drawn)
    between = np.linalg.norm(real.hessian - arm.hessian, 2)
    true = {"real_smoothness": real.smoothness, "arm_smoothness": arm.smoothness, "gap_smoothness": between}
    bounds = bounds_of_runs(path.assign(**true))
    assert bounds["step"].tolist() == [*range(1, drawn["steps"] + 1)]
    assert bounds[[*HELD]].all(axis=None)
    assert (bounds["sharp_loss_bound"] <= bounds["loss_bound"] * (1 + 1e-9)).all()


def test_a_bound_by_an_estimate_can_fail() -> None:
    """The real gradient is constant except at one checkpoint, which no other pair of points can detect."""

    def real(language_model: LanguageModel) -> MeanGradient:
        (x,) = language_model.model.body.tolist()
        return MeanGradient(0.0, [torch.tensor([101.0 if x == 2 else 1.0]), torch.zeros(1, 1)])

    def arm(language_model: LanguageModel) -> MeanGradient:
        return MeanGradient(0.0, [torch.tensor([0.5]), torch.zeros(1, 1)])

    checkpoints = ((step, LanguageModel(Point(np.array([float(step), 0.0])), None)) for step in (1, 2, 3))
    path = path_rows(LanguageModel(Point(np.zeros(2)), None), checkpoints, real, arm)
    smoothness = path.loc[path["part"] == "all"].set_index("step")["real_smoothness"]
    assert smoothness.to_dict() == {0: 100.0, 1: 100.0, 2: 0.0, 3: 100.0}
    bounds = bounds_of_runs(path.assign(arm="random", seed=0, learning_rate=1.0, steps=9)).set_index("step")
    assert bounds["gap_held"].to_dict() == bounds["sharp_gap_held"].to_dict() == {1: True, 2: False, 3: True}
    assert (bounds["gap"][2], bounds["gap_bound"][2]) == (100.5, 0.5)


def test_bounds_are_tight_for_parabolas_of_opposite_curvature() -> None:
    """In one dimension, L = x^2 and S = -x^2: the gap and the loss difference equal their bounds."""
    path = pd.DataFrame(
        {
            "arm": "random", "seed": 0, "learning_rate": 1.0, "steps": 9, "part": "all", "step": [0, 1],
            "gap": [4.0, 12.0], "drift": [0.0, 2.0],  # from x = 1 to x = 3
            "real_loss": [1.0, 9.0], "arm_loss": [-1.0, -9.0],
            "real_smoothness": 2.0, "arm_smoothness": 2.0, "gap_smoothness": 4.0,
        }
    )  # fmt: skip
    (row,) = bounds_of_runs(path).to_dict("records")
    assert row["gap_bound"] == row["sharp_gap_bound"] == row["gap"] == 12.0
    assert row["loss_bound"] == row["sharp_loss_bound"] == row["loss_difference"] == 16.0
    assert all(row[held] for held in HELD)
    (row,) = bounds_of_runs(path.assign(arm_smoothness=1.9)).to_dict("records")
    assert [row[held] for held in HELD] == [False, True, False, True]
    (row,) = bounds_of_runs(path.assign(gap_smoothness=3.9)).to_dict("records")
    assert [row[held] for held in HELD] == [True, False, True, False]
