"""Synthetic texts of one class whose gradients match the class's target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from gradmm_core.admm import GenerationResult, Objective, admm, best_draws
from gradmm_core.full_gradient import FullGradientMatching
from gradmm_core.language_model import LanguageModel
from gradmm_core.matching import HeadMatching
from gradmm_core.opening import Opening
from gradmm_core.perplexity import log_perplexities
from gradmm_core.projection import Projector
from gradmm_core.rerank import rerank
from gradmm_core.settings import GenerationSettings, TargetGradientSettings
from gradmm_core.target_space import TargetSpace
from gradmm_core.template import TokenisedTemplate, tokenise_texts
from gradmm_core.vocabulary import AllowedTokens, allowed_tokens


@dataclass(frozen=True)
class Shard:
    """Examples `start` to `start + count - 1` of one class; `index` numbers the class's shards."""

    label: int
    index: int
    start: int
    count: int


def plan_shards(labels: list[int], per_class: int, shard_size: int) -> list[Shard]:
    """Cuts `per_class` examples of every class into shards of at most `shard_size`."""
    return [
        Shard(label, index, start, min(shard_size, per_class - start))
        for label in labels
        for index, start in enumerate(range(0, per_class, shard_size))
    ]


def generate(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    target: Tensor,
    space: TargetSpace,
    instruction: str,
    label_name: str,
    shard: Shard,
    text_tokens: int,
    matching: TargetGradientSettings,
    settings: GenerationSettings,
    seed: int,
) -> pd.DataFrame:
    """The texts of one shard, with the columns of the stage `generation`.

    An example's random draws depend on (seed, label, its number in the class) alone, and no example affects
    another, so neither shards nor batches change what comes out.

    Args:
        target: of this class, as `target_gradients` returns it; `space` is where it lives.
        text_tokens: n, the number of tokens that are optimised. Released texts are tokenised afresh, and their
            matching loss is that of the text as released.
    """
    if matching.matching == "head":
        objective = HeadMatching(language_model, template, shard.label, target, space)
    else:
        objective = FullGradientMatching(language_model, template, shard.label, target)
    allowed = allowed_tokens(language_model, settings.projection.language)
    numbers = range(shard.start, shard.start + shard.count)
    title = f"generation, {label_name} {numbers[0]}-{numbers[-1]}"
    if settings.method == "rerank":
        opening = Opening(language_model, instruction)
        results = [
            rerank(
                language_model, objective, allowed, opening, text_tokens, settings.rerank, _seed(seed, shard, n)
            )
            for n in tqdm(numbers, desc=title, unit="text", disable=None, leave=False)
        ]
        return _frame(language_model, template, objective, results, numbers, shard, label_name, settings)
    project = Projector(language_model, allowed, instruction, settings.projection)
    results = []
    for begin in range(0, shard.count, settings.batch_size):
        batch = numbers[begin : begin + settings.batch_size]
        draws = _random_texts(allowed, seed, shard.label, batch, settings.admm.initial_draws, text_tokens)
        results.append(_solve(language_model, objective, project, draws, settings, title))
    return _frame(language_model, template, objective, results, numbers, shard, label_name, settings)


def _solve(
    language_model: LanguageModel,
    objective: Objective,
    project: Projector,
    draws: Int[Tensor, "batch draws tokens"],
    settings: GenerationSettings,
    title: str,
) -> GenerationResult:
    def embed(ids: Tensor) -> Float[Tensor, "*shape hidden"]:
        return language_model.embed(ids).to(language_model.head_dtype)

    start = best_draws(objective, embed, draws)
    with tqdm(range(settings.admm.iterations), desc=title, unit="iteration", disable=None, leave=False) as bar:
        return admm(objective, project, embed, start, settings.admm, bar)


def _seed(seed: int, shard: Shard, number: int) -> int:
    return int(np.random.SeedSequence([seed, shard.label, number]).generate_state(1)[0])


def _random_texts(
    allowed: AllowedTokens, seed: int, label: int, numbers: range, draws: int, tokens: int
) -> Int[Tensor, "batch draws tokens"]:
    """Uniformly random allowed tokens, the first one among those that may start a text."""
    texts = []
    for number in numbers:
        random = np.random.default_rng([seed, label, number])
        first = random.integers(len(allowed.starting_ids), size=(draws, 1))
        rest = random.integers(len(allowed.ids), size=(draws, tokens - 1))
        columns = [allowed.starting_ids.cpu()[first], allowed.ids.cpu()[rest]]
        texts.append(torch.cat(columns, dim=1))
    return torch.stack(texts).to(allowed.ids.device)


def _frame(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    objective: Objective,
    results: list[GenerationResult],
    numbers: range,
    shard: Shard,
    label_name: str,
    settings: GenerationSettings,
) -> pd.DataFrame:
    token_ids = torch.cat([r.token_ids for r in results]).tolist()
    texts = [language_model.decode(ids).strip() for ids in token_ids]
    released = tokenise_texts(language_model.tokenizer, texts, template.max_text_tokens, "generation")
    return pd.DataFrame(
        {
            "id": [f"{shard.label}-{number:05d}" for number in numbers],
            "label": shard.label,
            "label_name": label_name,
            "text": texts,
            "token_ids": released,
            "matching_loss": _released_losses(language_model, objective, released),
            "log_perplexity": log_perplexities(language_model, released),
            "shard": shard.index,
            "steps": _steps(settings),
            "loss_history": torch.cat([r.history for r in results], dim=1).T.tolist(),
        }
    )


def _steps(settings: GenerationSettings) -> int:
    """Gradient steps per example."""
    if settings.method == "rerank":
        return 0
    return settings.admm.iterations * settings.admm.inner_steps + settings.admm.initial_steps


@torch.no_grad()
def _released_losses(language_model: LanguageModel, objective: Objective, texts: list[list[int]]) -> list[float]:
    """Matching losses of the texts as they will be read. One by one: retokenised texts differ in length."""
    ids = [torch.tensor([text], device=language_model.device) for text in texts]
    return [float(objective(language_model.embed(row))) for row in ids]
