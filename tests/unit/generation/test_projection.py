"""Compare the cached projection with one that reads the whole text again for every token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradmm.config.settings import ProjectionSettings
from gradmm.generation.projection import Projector
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens
from tests.conftest import tiny_language_model

INSTRUCTION = "a quiet room :\n"


def with_blank_twins(model: LanguageModel, allowed: AllowedTokens, log_probabilities: Tensor) -> Tensor:
    """Compute log(p(word) + p( word)) for every token that may start a text."""
    added = log_probabilities.clone()
    for token in allowed.starting_ids.tolist():
        (twin,) = model.encode(" " + model.decode([token]))
        added[token] = (log_probabilities[token].exp() + log_probabilities[twin].exp()).log()
    return added


def slow_projection(
    model: LanguageModel, allowed: AllowedTokens, row_of_x: Tensor, rule: str, k: int
) -> list[int]:
    """Project one example without a cache, by full sorts over the whole vocabulary."""
    chosen: list[int] = []
    for j, row in enumerate(row_of_x):
        usable = allowed.starting_ids if j == 0 else allowed.ids
        ids = torch.tensor([[*model.prefix_ids, *model.encode(INSTRUCTION), *chosen]])
        log_probabilities = model.model(input_ids=ids).logits[0, -1].log_softmax(dim=0)
        if j == 0:  # a word may follow the instruction as either of its two tokens
            log_probabilities = with_blank_twins(model, allowed, log_probabilities)
        distances = (model.embeddings - row).norm(dim=1)
        if rule == "nearest-of-likely":
            likely = sorted(usable.tolist(), key=lambda i: -float(log_probabilities[i]))[:k]
            chosen.append(min(likely, key=lambda i: float(distances[i])))
        elif rule == "likeliest-of-near":
            near = sorted(usable.tolist(), key=lambda i: float(distances[i]))[:k]
            chosen.append(max(near, key=lambda i: float(log_probabilities[i])))
        else:
            chosen.append(min(usable.tolist(), key=lambda i: float(distances[i])))
    return chosen


@pytest.mark.parametrize("family", ["phi", "gpt2", "llama", "opt"])
@pytest.mark.parametrize("rule", ["nearest-of-likely", "likeliest-of-near", "nearest"])
def test_projection_equals_the_uncached_one(tokenizer, family: str, rule: str) -> None:
    model = tiny_language_model(tokenizer, family)
    allowed = allowed_tokens(model, "english")
    torch.manual_seed(0)
    x = model.embeddings[torch.randint(len(tokenizer), (4, 6))] + 0.1 * torch.randn(
        4, 6, model.embeddings.shape[1]
    )
    project = Projector(
        model, allowed, INSTRUCTION, ProjectionSettings.model_validate({"rule": rule, "candidates": 9})
    )
    expected = [slow_projection(model, allowed, rows, rule, 9) for rows in x]
    assert project(x).tolist() == expected


def test_each_row_is_projected_as_if_alone(phi: LanguageModel) -> None:
    project = Projector(phi, allowed_tokens(phi, "english"), INSTRUCTION, ProjectionSettings(candidates=20))
    x = 0.3 * torch.randn(5, 7, phi.embeddings.shape[1], generator=torch.Generator().manual_seed(3)).double()
    together = project(x)
    alone = torch.cat([project(row[None]) for row in x])
    assert torch.equal(together, alone)


def test_embeddings_of_tokens_project_to_themselves_when_every_token_is_likely(phi: LanguageModel) -> None:
    allowed = allowed_tokens(phi, "english")
    project = Projector(phi, allowed, INSTRUCTION, ProjectionSettings(rule="nearest-of-likely", candidates=10_000))
    ids = torch.stack([allowed.starting_ids[:5], allowed.ids[5:10], allowed.ids[-5:]], dim=1)
    assert torch.equal(project(phi.embed(ids)), ids)
