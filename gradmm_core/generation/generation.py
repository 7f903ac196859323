"""Generate synthetic texts of one class whose gradients match the class's target."""

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

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
from gradmm.errors import InputError
from gradmm.generation.admm import Objective, admm, best_draws
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.projection import Projector
from gradmm.generation.result import GenerationResult
from gradmm.generation.search import Search
from gradmm.generation.shards import Shard
from gradmm.gradients.full_gradient import FullGradientMatching
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.memory import in_parts_that_fit
from gradmm.lm.perplexity import log_perplexities
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sentences import PAD
from gradmm.lm.template import TokenisedTemplate, tokenise_texts
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens
from gradmm.metrics.text_figures import text_figures
from gradmm.target.probe import Probe
from gradmm.target.target_space import TargetSpace


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
    """Generate the texts of one shard, with the columns of the stage `generation`.

    An example's random draws depend only on (seed, label, its number in the class), and examples do not affect one
    another. Neither shards nor batches therefore change the texts.

    Args:
        target: the class's target, in the coordinates of `space`.
        probe: its loss is added to the matching loss; None if none was released.
        text_tokens: n, the number of tokens that are optimised, or written before a text is cut. Released texts
            are tokenised again, and their matching loss is that of the released text.

    Raises:
        InputError: if instruction and text are too long for the model, if its vocabulary has no words to write
            with, or if the losses are not finite.
    """
    PromptCache(language_model, instruction).check_room(text_tokens, "generation.text_tokens")
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
    log_probabilities = probe.classify(language_model, template, frame["token_ids"].tolist())
    return frame.assign(probe_loss=-log_probabilities[:, probe.labels.index(shard.label)].double().numpy())


def check_generation(
    language_model: LanguageModel, instruction: str, text_tokens: int, settings: GenerationSettings
) -> None:
    """Check what can be known before texts are generated.

    Raises:
        InputError: if instruction and text are too long for the model, if its vocabulary has no words to write
            with, or if a text is too short to have a perplexity.
    """
    PromptCache(language_model, instruction).check_room(text_tokens, "generation.text_tokens")
    allowed_tokens(language_model, settings.projection.language)
    if text_tokens == 1 and language_model.tokenizer.bos_token_id is None:
        problem = "a text of one token has no perplexity without a beginning-of-sequence token"
        raise InputError(problem, "generation.text_tokens", "write longer texts, or use another model")


def generation_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """Compute `text_figures` and the mean cost of a text, in passes of one token through the model's body."""
    return text_figures(texts) | {"token_passes_per_text": float(texts["token_passes"].mean())}


@dataclass(frozen=True)
class _Task:
    """The inputs of a generation method."""

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
        """Return example `number`'s own generator, the only source of randomness for its text."""
        return np.random.default_rng([self.seed, self.label, number])

    def progress(self, steps: int) -> tqdm:
        return tqdm(range(steps), desc=self.title, disable=None, leave=False)


#: Generates the texts of a range of example numbers as one batch.
_Solver = Callable[[range], GenerationResult]


def _search(task: _Task) -> _Solver:
    assert isinstance(task.objective, HeadMatching)  # the recipe's validation requires it
    settings = task.settings.search
    allowed = allowed_tokens(task.language_model, task.settings.projection.language)
    constraints = TextConstraints(task.language_model, task.template)
    search = Search(task.language_model, task.objective, allowed, constraints, task.instruction, settings)

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
    """Draw uniformly random allowed tokens; the first one may start a text."""
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
        raise InputError("the matching loss of a text is not finite", "generation", fix)
    if not np.isfinite(frame["log_perplexity"]).all():
        problem = "a text of one token has no perplexity without a beginning-of-sequence token"
        if language_model.tokenizer.bos_token_id is not None:
            problem = "the log-perplexity of a text is not finite"
        raise InputError(problem, "generation.text_tokens", "write longer texts, or use another model")


@torch.no_grad()
def _released_losses(language_model: LanguageModel, objective: Objective, texts: list[list[int]]) -> list[float]:
    """Compute the matching losses of the released texts, one by one, because they differ in length."""
    ids = [torch.tensor([text], device=language_model.device) for text in texts]
    return [float(objective(language_model.embed(row))) for row in ids]
