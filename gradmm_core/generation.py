"""Synthetic texts of one class whose gradients match the class's target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from gradmm_core.admm import GenerationResult, Objective, admm, best_draws
from gradmm_core.compute_meter import ComputeMeter
from gradmm_core.errors import InputError
from gradmm_core.filters import text_figures
from gradmm_core.full_gradient import FullGradientMatching
from gradmm_core.language_model import LanguageModel
from gradmm_core.matching import HeadMatching
from gradmm_core.memory import in_parts_that_fit
from gradmm_core.opening import Opening
from gradmm_core.perplexity import log_perplexities
from gradmm_core.probe import Probe
from gradmm_core.projection import Projector
from gradmm_core.readable import Readable
from gradmm_core.search import Search
from gradmm_core.sentence_ends import PAD
from gradmm_core.settings import GenerationSettings, TargetGradientSettings
from gradmm_core.shards import Shard
from gradmm_core.target_space import TargetSpace
from gradmm_core.template import TokenisedTemplate, tokenise_texts
from gradmm_core.vocabulary import AllowedTokens, allowed_tokens


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
    probe: Probe | None = None,
) -> pd.DataFrame:
    """The texts of one shard, with the columns of the stage `generation`.

    An example's random draws depend on (seed, label, its number in the class) alone, and no example affects
    another, so neither shards nor batches change what comes out.

    Args:
        target: of this class, as `target_gradients` returns it; `space` is where it lives.
        probe: judges texts by their hidden states; None if none was released.
        text_tokens: n, the number of tokens that are optimised, or written before a text is cut. Released texts
            are tokenised afresh, and their matching loss is that of the text as released.

    Raises:
        InputError: if instruction and text are too long for the model, or its numbers are not finite.
    """
    Opening(language_model, instruction).check_room(text_tokens, "generation.text_tokens")
    numbers = range(shard.start, shard.start + shard.count)
    title = f"generation, {label_name} {numbers[0]}-{numbers[-1]}"
    objective: Objective
    if matching.matching == "head":
        objective = HeadMatching(
            language_model, template, shard.label, target, space, settings.loss, probe, settings.probe_weight
        )
    else:
        objective = FullGradientMatching(language_model, template, shard.label, target)
    batches = [
        numbers[begin : begin + settings.batch_size] for begin in range(0, len(numbers), settings.batch_size)
    ]
    task = _Task(language_model, template, objective, instruction, shard.label, text_tokens, settings, seed, title)
    with ComputeMeter(language_model) as meter:
        solve = _search(task) if settings.method == "search" else _admm(task)
        results = [result for batch in batches for result in in_parts_that_fit(solve, batch)]
    frame = _frame(language_model, template, objective, results, numbers, shard, label_name, meter)
    if probe is None:
        return frame.assign(probe_loss=np.nan)
    judged = probe.judge(language_model, template, frame["token_ids"].tolist())
    return frame.assign(probe_loss=-judged[:, probe.labels.index(shard.label)].double().numpy())


def generation_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """How well texts match and read, and what they cost: passes of one token through the model's body."""
    return text_figures(texts) | {"token_passes_per_text": float(texts["token_passes"].mean())}


@dataclass(frozen=True)
class _Task:
    """What every method of generation is given."""

    language_model: LanguageModel
    template: TokenisedTemplate
    objective: Objective
    instruction: str
    label: int
    tokens: int
    settings: GenerationSettings
    seed: int
    title: str

    def random(self, number: int) -> np.random.Generator:
        """Example `number`'s own: its text depends on nothing else that is random."""
        return np.random.default_rng([self.seed, self.label, number])

    def progress(self, steps: int) -> tqdm:
        return tqdm(range(steps), desc=self.title, disable=None, leave=False)


#: Makes the texts of some numbers of the class, side by side.
_Solver = Callable[[range], GenerationResult]


def _search(task: _Task) -> _Solver:
    assert isinstance(task.objective, HeadMatching)  # the recipe's validation asks for it
    settings = task.settings.search
    allowed = allowed_tokens(task.language_model, task.settings.projection.language)
    readable = Readable(task.language_model, task.template)
    search = Search(task.language_model, task.objective, allowed, readable, task.instruction, settings)

    def solve(numbers: range) -> GenerationResult:
        uniforms = np.stack([task.random(number).random((settings.draws, task.tokens)) for number in numbers])
        with task.progress(settings.rounds) as rounds:
            return search(uniforms, rounds)

    return solve


def _admm(task: _Task) -> _Solver:
    settings, embed = task.settings.admm, task.language_model.embed_freely
    allowed = allowed_tokens(task.language_model, task.settings.projection.language)
    project = Projector(task.language_model, allowed, task.instruction, task.settings.projection)

    def solve(numbers: range) -> GenerationResult:
        texts = [_random_texts(allowed, task.random(n), settings.initial_draws, task.tokens) for n in numbers]
        start = best_draws(task.objective, embed, torch.stack(texts).to(allowed.ids.device))
        with task.progress(settings.iterations) as iterations:
            return admm(task.objective, project, embed, start, settings, iterations)

    return solve


def _random_texts(
    allowed: AllowedTokens, random: np.random.Generator, draws: int, tokens: int
) -> Int[Tensor, "draws tokens"]:
    """Uniformly random allowed tokens, the first one among those that may start a text."""
    first = random.integers(len(allowed.starting_ids), size=(draws, 1))
    rest = random.integers(len(allowed.ids), size=(draws, tokens - 1))
    return torch.cat([allowed.starting_ids.cpu()[first], allowed.ids.cpu()[rest]], dim=1)


def _frame(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    objective: Objective,
    results: list[GenerationResult],
    numbers: range,
    shard: Shard,
    label_name: str,
    meter: ComputeMeter,
) -> pd.DataFrame:
    token_ids = torch.cat([r.token_ids for r in results]).tolist()
    texts = [language_model.decode([i for i in ids if i != PAD]).strip() for ids in token_ids]
    released = tokenise_texts(language_model.tokenizer, texts, template.max_text_tokens, "generation")
    frame = pd.DataFrame(
        {
            "id": [f"{shard.label}-{number:05d}" for number in numbers],
            "label": shard.label,
            "label_name": label_name,
            "text": texts,
            "token_ids": released,
            "matching_loss": _released_losses(language_model, objective, released),
            "log_perplexity": log_perplexities(language_model, released),
            "shard": shard.index,
            "token_passes": meter.token_passes / shard.count,
            "loss_history": torch.cat([r.history for r in results], dim=1).T.tolist(),
        }
    )
    _check_finite(frame, language_model)
    return frame


def _check_finite(frame: pd.DataFrame, language_model: LanguageModel) -> None:
    if not np.isfinite(frame["matching_loss"]).all():
        fix = "set model.dtype=float32, or use another model"
        raise InputError("the model gives texts a matching loss that is not finite", "generation", fix)
    if not np.isfinite(frame["log_perplexity"]).all():
        problem = "a text of one token has no perplexity without a beginning-of-sequence token"
        if language_model.tokenizer.bos_token_id is not None:
            problem = "the model gives texts a log-perplexity that is not finite"
        raise InputError(problem, "generation.text_tokens", "write longer texts, or use another model")


@torch.no_grad()
def _released_losses(language_model: LanguageModel, objective: Objective, texts: list[list[int]]) -> list[float]:
    """Matching losses of the texts as they will be read. One by one: retokenised texts differ in length."""
    ids = [torch.tensor([text], device=language_model.device) for text in texts]
    return [float(objective(language_model.embed(row))) for row in ids]
