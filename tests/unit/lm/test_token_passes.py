"""Counted passes, compared with a formula for each method."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from gradmm.config.settings import AdmmSettings, ProjectionSettings, SearchSettings
from gradmm.generation.admm import admm, best_draws
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.projection import Projector
from gradmm.generation.sampler import ModelSampler
from gradmm.generation.search import Search
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens

INSTRUCTION = "they said\n"
BATCH, TOKENS = 3, 5


@pytest.fixture(scope="module")
def allowed(phi: LanguageModel) -> AllowedTokens:
    return allowed_tokens(phi, "english")


@pytest.fixture(scope="module")
def instruction(phi: LanguageModel) -> int:
    return len(phi.prefix_ids) + len(phi.encode(INSTRUCTION))


@pytest.fixture(scope="module")
def whole(template: TokenisedTemplate) -> int:
    """Tokens read to score a text."""
    return len(template.prefix) + TOKENS + len(template.tail(1))


def matching(phi: LanguageModel, template: TokenisedTemplate) -> HeadMatching:
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return HeadMatching(phi, template, 1, target)


def counts(meter: ComputeMeter) -> tuple[int, int]:
    return meter.forward_tokens, meter.backward_tokens


def test_every_token_of_a_batch_counts_for_every_caller(phi: LanguageModel) -> None:
    ids = torch.arange(1, 13).view(3, 4)
    with ComputeMeter(phi) as meter:
        phi.hidden_states(input_ids=ids)
        assert counts(meter) == (12, 0)
        phi.hidden_states(inputs_embeds=phi.embed(ids[:1]))
        assert counts(meter) == (16, 0)
        phi.model(input_ids=ids[:, :1])
        assert counts(meter) == (19, 0)
    assert meter.token_passes == 19


def test_meters_count_only_while_open_and_can_be_nested(phi: LanguageModel) -> None:
    ids = torch.arange(1, 7)[None]
    read = partial(phi.hidden_states, input_ids=ids)
    outer = ComputeMeter(phi)
    read()
    with outer:
        read()
        with ComputeMeter(phi) as inner:
            read()
        read()
    read()
    assert counts(outer) == (18, 0)
    assert counts(inner) == (6, 0)
    with pytest.raises(ValueError, match="broken"), outer:
        raise ValueError("broken")
    read()
    assert counts(outer) == (18, 0)


def test_a_backward_pass_counts_twice_and_only_where_a_gradient_came_through(
    phi: LanguageModel, template: TokenisedTemplate, whole: int
) -> None:
    objective = matching(phi, template)
    ids = torch.arange(1, 1 + 2 * TOKENS).view(2, TOKENS)
    x = phi.embed(ids).requires_grad_(True)
    objective(x)  # the first call checks once whether the last MLP can be cut
    with ComputeMeter(phi) as meter:
        loss = objective(x).sum()
        assert counts(meter) == (2 * whole, 0)  # no backward pass yet
        torch.autograd.grad(loss, [x])
        assert counts(meter) == (2 * whole, 2 * whole)
        with torch.no_grad():
            objective(x)
        objective(x.detach())
        (objective(x).detach() + x.sum()).sum().backward()  # reaches x without passing through the model
        assert counts(meter) == (8 * whole, 2 * whole)
    assert meter.token_passes == 12 * whole


def test_a_backward_pass_after_the_meter_has_closed_does_not_count(
    phi: LanguageModel, template: TokenisedTemplate, whole: int
) -> None:
    x = phi.embed(torch.arange(1, 1 + TOKENS)[None]).requires_grad_(True)
    objective = matching(phi, template)
    objective(x)
    with ComputeMeter(phi) as meter:
        loss = objective(x).sum()
    torch.autograd.grad(loss, [x])
    assert counts(meter) == (whole, 0)


def test_an_instruction_is_read_once_and_then_only_new_tokens(phi: LanguageModel, instruction: int) -> None:
    prompt_cache = PromptCache(phi, INSTRUCTION)
    with ComputeMeter(phi) as meter:
        cache, _ = prompt_cache.begin(4)
        assert counts(meter) == (instruction, 0)
        prompt_cache.append(cache, torch.ones(4, 3, dtype=torch.long))
        assert counts(meter) == (instruction + 12, 0)
        prompt_cache.append(cache, torch.ones(4, 1, dtype=torch.long))
        prompt_cache.begin(2)
        assert counts(meter) == (instruction + 16, 0)


def test_sampling_costs_a_pass_for_each_token_except_the_last(
    phi: LanguageModel, allowed: AllowedTokens, instruction: int
) -> None:
    uniforms = np.random.default_rng(0).random((7, TOKENS))
    prompt_cache = PromptCache(phi, INSTRUCTION)
    with ComputeMeter(phi) as meter:
        write_texts(phi, allowed, prompt_cache, uniforms, batch_size=3)
        assert counts(meter) == (instruction + 7 * (TOKENS - 1), 0)
        write_texts(phi, allowed, prompt_cache, uniforms[:, :2])
    assert counts(meter) == (instruction + 7 * (TOKENS - 1) + 7, 0)


@pytest.mark.parametrize(("rule", "reads"), [("likeliest-of-near", True), ("nearest", False)])
def test_admm_costs_its_iterations(
    phi: LanguageModel,
    template: TokenisedTemplate,
    allowed: AllowedTokens,
    instruction: int,
    whole: int,
    rule: str,
    reads: bool,
) -> None:
    objective = matching(phi, template)
    project = Projector(
        phi, allowed, INSTRUCTION, ProjectionSettings.model_validate({"rule": rule, "candidates": 9})
    )
    settings = AdmmSettings(iterations=2, inner_steps=4, initial_steps=3)
    draws = allowed.starting_ids[torch.arange(BATCH * 2 * TOKENS) % 7].view(BATCH, 2, TOKENS)
    with ComputeMeter(phi) as meter:
        admm(objective, project, phi.embed, best_draws(objective, phi.embed, draws), settings, range(2))
    scored = BATCH * whole
    descents = (3 + 2 * 4) * scored
    projections = instruction + 3 * BATCH * (TOKENS - 1) if reads else 0
    assert counts(meter) == (2 * scored + descents + projections + 3 * scored, descents)


def test_search_costs_a_pass_per_trial_and_a_backward_pass_per_round(
    phi: LanguageModel, template: TokenisedTemplate, allowed: AllowedTokens, instruction: int, whole: int
) -> None:
    settings = SearchSettings(draws=6, rounds=1, edits=8)
    readable = TextConstraints(phi, template)
    search = Search(phi, matching(phi, template), allowed, readable, settings)
    sampler = ModelSampler(phi, allowed, INSTRUCTION, settings.top_k)
    generators = [np.random.default_rng(number) for number in range(BATCH)]
    with ComputeMeter(phi) as meter:
        search(sampler(generators, TOKENS, 6).unflatten(0, (BATCH, 6)), range(1))
    draws = 6 * (TOKENS - 1 + whole)
    a_round = whole + 8 * whole
    assert counts(meter) == (instruction + BATCH * (draws + a_round), BATCH * whole)
