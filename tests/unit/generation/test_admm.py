from __future__ import annotations

import pytest
import torch

from gradmm.config.settings import AdmmSettings, ProjectionSettings
from gradmm.generation.admm import admm, best_draws
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.projection import Projector
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.vocabulary import allowed_tokens

SETTINGS = AdmmSettings(iterations=4, inner_steps=6, learning_rate=0.05)


def objective_and_projection(phi: LanguageModel, template: TokenisedTemplate):
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    allowed = allowed_tokens(phi, "english")
    start = allowed.ids[torch.randint(len(allowed.ids), (5, 6), generator=torch.Generator().manual_seed(1))]
    project = Projector(phi, allowed, "they said\n", ProjectionSettings(candidates=30))
    return HeadMatching(phi, template, 1, target), project, start


def test_an_example_does_not_depend_on_its_batch(phi: LanguageModel, template: TokenisedTemplate) -> None:
    objective, project, start = objective_and_projection(phi, template)
    together = admm(objective, project, phi.embed, start, SETTINGS, range(4))
    for i in range(len(start)):
        alone = admm(objective, project, phi.embed, start[i : i + 1], SETTINGS, range(4))
        assert torch.equal(alone.token_ids[0], together.token_ids[i])
        assert torch.allclose(alone.history[:, 0], together.history[:, i], atol=1e-9)


def test_updates_are_those_of_algorithm_1(phi: LanguageModel, template: TokenisedTemplate) -> None:
    """Repeat the run with plain Adam on one example, where no gradient is clipped."""
    objective, project, start = objective_and_projection(phi, template)
    settings = SETTINGS.model_copy(update={"gradient_clip": 1e9, "rho": 0.7})
    x = phi.embed(start[:1])
    dual = torch.zeros_like(x)
    losses = []
    for t in range(4):
        z = phi.embed(project(x + dual / 0.7))
        losses.append(float(objective(z)))
        if t > 0:
            dual = dual + 0.7 * (x - z)
        x = x.detach().clone().requires_grad_(True)
        adam = torch.optim.Adam([x], lr=0.05)
        for _ in range(6):
            adam.zero_grad()
            (objective(x).sum() + 0.35 * (x - z + dual / 0.7).pow(2).sum()).backward()
            adam.step()
        x = x.detach()
    result = admm(objective, project, phi.embed, start[:1], settings, range(4))
    assert torch.allclose(result.history[:4, 0], torch.tensor(losses, dtype=torch.float64), atol=1e-9)


def test_best_is_the_lowest_loss_of_all_iterates_and_last_is_the_last(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    objective, project, start = objective_and_projection(phi, template)
    best = admm(objective, project, phi.embed, start, SETTINGS, range(4))
    assert torch.allclose(best.losses, best.history.min(dim=0).values)
    assert torch.allclose(best.losses, objective(phi.embed(best.token_ids)))
    last = admm(objective, project, phi.embed, start, SETTINGS.model_copy(update={"keep": "last"}), range(4))
    assert torch.allclose(last.losses, last.history[-1])
    assert torch.allclose(last.losses, objective(phi.embed(last.token_ids)))


def test_descent_before_the_first_projection_lowers_the_loss(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    objective, _, start = objective_and_projection(phi, template)
    seen = []

    def record(x: torch.Tensor) -> torch.Tensor:
        seen.append(objective(x).mean())
        return start

    admm(objective, record, phi.embed, start, SETTINGS.model_copy(update={"initial_steps": 20}), range(1))
    assert seen[0] < objective(phi.embed(start)).mean() - 0.005


#: A rho so large that a token that has stopped does not change again.
STIFF = SETTINGS.model_copy(update={"rho": 1e4, "iterations": 9, "patience": 2})


def test_a_text_with_unchanged_tokens_is_done_after_its_patience(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    objective, project, start = objective_and_projection(phi, template)
    projected = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        projected.append(len(x))
        return project(x)

    result = admm(objective, counted, phi.embed, start, STIFF, range(9))
    *rounds, last = projected
    assert last == len(start)
    assert rounds == sorted(rounds, reverse=True)
    assert sum(rounds) < 9 * len(start)
    whole = admm(objective, project, phi.embed, start, STIFF.model_copy(update={"patience": None}), range(9))
    assert result.history.shape == whole.history.shape == (10, len(start))
    assert torch.allclose(result.history[:9], whole.history[:9], atol=1e-9)


@pytest.mark.parametrize("rho", [0.01, 10.0])
def test_finished_texts_do_not_affect_the_others(
    phi: LanguageModel, template: TokenisedTemplate, rho: float
) -> None:
    """Texts leave the batch one after another; each ends as it would alone."""
    objective, project, start = objective_and_projection(phi, template)
    settings = STIFF.model_copy(update={"rho": rho, "patience": 1, "keep": "last"})
    together = admm(objective, project, phi.embed, start, settings, range(9))
    for i in range(len(start)):
        alone = admm(objective, project, phi.embed, start[i : i + 1], settings, range(9))
        assert torch.equal(alone.token_ids[0], together.token_ids[i])
        assert torch.allclose(alone.history[:, 0], together.history[:, i], atol=1e-9)


def test_a_text_whose_tokens_change_again_restarts_its_patience(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    """The tokens of one text are prescribed: unchanged, changed, unchanged, unchanged; then it is done."""
    objective, _, start = objective_and_projection(phi, template)
    first, other = start[:1], start[1:2]
    dictated = iter([first, other, other, other, first])
    rounds = []

    def project(x: torch.Tensor) -> torch.Tensor:
        rounds.append(x)
        return next(dictated)

    result = admm(objective, project, phi.embed, first, STIFF.model_copy(update={"keep": "last"}), range(9))
    assert len(rounds) == 4 + 1  # the last one is the final projection of x
    assert torch.equal(result.token_ids, first)


def test_best_draw_has_the_lowest_loss(phi: LanguageModel, template: TokenisedTemplate) -> None:
    objective, _, start = objective_and_projection(phi, template)
    draws = start.view(1, 5, 6)
    losses = objective(phi.embed(start))
    assert torch.equal(best_draws(objective, phi.embed, draws)[0], start[losses.argmin()])
