"""Generate synthetic texts of one class, to match the class's target or as the model writes them.

With released token rates, the words that the model writes are tilted; see `gradmm.generation.word_tilt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from gradmm.config.settings import ClassSettings, GenerationSettings, TargetGradientSettings
from gradmm.errors import InputError
from gradmm.generation.admm import Objective, admm, best_draws
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.endpoint import EndpointSampler
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.parts_that_fit import in_parts_that_fit
from gradmm.generation.projection import Projector
from gradmm.generation.result import GenerationResult, released_texts
from gradmm.generation.sampler import ModelSampler, Sampler
from gradmm.generation.search import Search
from gradmm.generation.shards import Shard
from gradmm.generation.word_tilt import tilt_of
from gradmm.generation.written import Writer
from gradmm.gradients.full_gradient import FullGradientMatching
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.perplexity import log_perplexities
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens
from gradmm.metrics.text_figures import text_figures
from gradmm.storage.artifacts import StageOutput
from gradmm.target.matched_target import matched_target, released_probe
from gradmm.target.probe import Probe
from gradmm.target.target_space import TargetSpace

#: Makes the random numbers different from those of other stages. NumPy fills up a seed with zeros, so without it
#: the first text of label 0 would be that of public text.
STREAM = 1

#: Name of the figure with each class's shrinkage, see `MatchedTarget`.
TARGET_SHRINKAGE = "target_shrinkage"


@dataclass(frozen=True)
class TextRequest:
    """The texts of one shard of a class, as they are asked for.

    Attributes:
        text_tokens: n, the number of tokens that are optimised, or written before a text is cut. Released texts
            are tokenised again, and their matching loss is that of the released text.
        tilt: added to the logits of texts that are written, to be kept or to begin a search with (`write_texts`).
    """

    language_model: LanguageModel
    template: TokenisedTemplate
    instruction: str
    label_name: str
    shard: Shard
    text_tokens: int
    settings: GenerationSettings
    seed: int
    tilt: Float[Tensor, " vocab"] | None = None

    def check_room(self) -> None:
        """Raise an InputError if instruction and text are too long for the model."""
        PromptCache(self.language_model, self.instruction).check_room(self.text_tokens, "generation.text_tokens")

    @property
    def numbers(self) -> range:
        return range(self.shard.start, self.shard.start + self.shard.count)

    @property
    def batches(self) -> list[range]:
        size = self.settings.batch_size
        return [self.numbers[begin : begin + size] for begin in range(0, self.shard.count, size)]

    @property
    def title(self) -> str:
        return f"generation, {self.label_name} {self.numbers[0]}-{self.numbers[-1]}"

    @property
    def ends(self) -> SentenceEnds | None:
        """The sentence ends that texts are cut at; None if they are not cut."""
        return SentenceEnds(self.language_model) if self.settings.whole_sentences else None

    def random(self, number: int) -> np.random.Generator:
        """Return example `number`'s own generator, the only source of randomness for its text."""
        return np.random.default_rng([self.seed, self.shard.label, number, STREAM])

    def sampler(self, allowed: AllowedTokens, top_k: int) -> Sampler:
        """Return what draws the texts to keep, or to begin a search with."""
        if self.settings.endpoint is not None:
            return EndpointSampler(self.language_model, self.instruction, self.settings.endpoint, self.ends)
        return ModelSampler(self.language_model, allowed, self.instruction, top_k, self.tilt, self.ends)

    def progress(self, steps: int) -> tqdm:
        return tqdm(range(steps), desc=self.title, disable=None, leave=False)


def generate_shard(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    category: ClassSettings,
    shard: Shard,
    text_tokens: int,
    settings: GenerationSettings,
    seed: int,
    target: StageOutput | None = None,
    space: StageOutput | None = None,
    records: float | None = None,
    clipping_norm: float | None = None,
    matching: TargetGradientSettings | None = None,
    word_tilt: pd.DataFrame | None = None,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Generate one shard of a class's texts: the rows and figures of the stage `generation_shard`.

    Args:
        target, space, matching, records, clipping_norm: of the target to match; left out for method=written.
        word_tilt: the rows of the stage `word_tilt`; None to leave words as the model writes them.
    """
    label = category.label
    request = TextRequest(
        language_model=language_model,
        template=template,
        instruction=category.instruction,
        label_name=category.name,
        shard=shard,
        text_tokens=text_tokens,
        settings=settings,
        seed=seed,
        tilt=None if word_tilt is None else tilt_of(word_tilt, label, len(language_model.embeddings)),
    )
    if settings.method == "written":
        texts = write(request)
        return texts, generation_figures(texts) | {TARGET_SHRINKAGE: {str(label): None}}
    assert target is not None
    assert matching is not None
    assert clipping_norm is not None
    matched, where, shrinkage = matched_target(
        target, space, template, matching, label, records, clipping_norm, language_model.device
    )
    probe = released_probe(target, where.features, template) if matching.probe_chooses_texts else None
    texts = generate(request, matched, where, matching, probe)
    return texts, generation_figures(texts) | {TARGET_SHRINKAGE: {str(label): shrinkage}}


def merge_shards(
    shards: Sequence[pd.DataFrame], figures: Sequence[dict[str, Any]]
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Concatenate the texts of all shards: the rows and figures of the stage `generation`."""
    texts = pd.concat(shards, ignore_index=True)
    shrinkage = {label: value for each in figures for label, value in each[TARGET_SHRINKAGE].items()}
    return texts, generation_figures(texts) | {TARGET_SHRINKAGE: shrinkage}


def generate(
    request: TextRequest,
    target: Tensor,
    space: TargetSpace,
    matching: TargetGradientSettings,
    probe: Probe | None = None,
) -> pd.DataFrame:
    """Generate texts that match a target, with the columns of the stage `generation`.

    An example's random draws depend only on (seed, label, its number in the class), and examples do not affect
    one another. Neither shards nor batches therefore change the texts, but for rounding: in bfloat16, of 100 texts
    that were written one by one, two differed.

    Args:
        target: the class's target, in the coordinates of `space`.
        probe: its loss is added to the matching loss; None if none was released.

    Raises:
        InputError: if instruction and text are too long for the model, if its vocabulary has no words to write
            with, or if the losses are not finite.
    """
    request.check_room()
    language_model, label, settings = request.language_model, request.shard.label, request.settings
    objective: Objective
    if matching.matching == "head":
        objective = HeadMatching(
            language_model,
            request.template,
            label,
            target,
            space,
            settings.loss,
            probe,
            settings.probe_weight,
            settings.compile_layers,
        )
    else:
        objective = FullGradientMatching(language_model, request.template, label, target)
    with ComputeMeter(language_model) as meter:
        solve = {"search": _search, "admm": _admm}[settings.method](request, objective)
        results = [result for batch in request.batches for result in in_parts_that_fit(solve, batch)]
    frame = _frame(request, results, meter)
    frame["matching_loss"] = _released_losses(language_model, objective, frame["token_ids"].tolist())
    if not np.isfinite(frame["matching_loss"]).all():
        fix = "set model.dtype=float32, or use another model"
        raise InputError("the matching loss of a text is not finite", "generation", fix)
    if probe is None:
        return frame
    log_probabilities = probe.classify(language_model, request.template, frame["token_ids"].tolist())
    return frame.assign(probe_loss=-log_probabilities[:, probe.labels.index(label)].double().numpy())


def write(request: TextRequest) -> pd.DataFrame:
    """Write texts without a search, with the columns of the stage `generation`.

    As in `generate`, neither shards nor batches change the texts, but for rounding. There is no loss:
    `matching_loss` and `probe_loss` are NaN, and `loss_history` is empty.

    Raises:
        InputError: if instruction and text are too long for the model, if its vocabulary has no words to write
            with, or if the log-perplexities are not finite.
    """
    request.check_room()
    with ComputeMeter(request.language_model) as meter:
        solve = _written(request)
        with tqdm(request.batches, desc=request.title, disable=None, leave=False) as batches:
            results = [result for batch in batches for result in in_parts_that_fit(solve, batch)]
    return _frame(request, results, meter)


def check_generation(
    language_model: LanguageModel, instruction: str, text_tokens: int, settings: GenerationSettings
) -> None:
    """Check what can be known before texts are generated.

    Raises:
        InputError: if instruction and text are too long for the model, if its vocabulary has no words to write
            with, if a text is too short to have a perplexity, or if layers are to be compiled and cannot be.
    """
    PromptCache(language_model, instruction).check_room(text_tokens, "generation.text_tokens")
    if settings.compile_layers and settings.method != "written":
        _check_compiler(language_model)
    allowed_tokens(language_model, settings.projection.language)
    if text_tokens == 1 and language_model.tokenizer.bos_token_id is None:
        problem = "a text of one token has no perplexity without a beginning-of-sequence token"
        raise InputError(problem, "generation.text_tokens", "write longer texts, or use another model")


@torch.no_grad()
def _check_compiler(language_model: LanguageModel) -> None:
    embeddings = language_model.embed(language_model.sample_ids)
    try:
        with language_model.compiled_layers():
            language_model.hidden_states(inputs_embeds=embeddings)
    except RuntimeError as error:  # torch._dynamo's errors are of this kind
        problem = f"torch.compile fails ({str(error).partition(chr(10))[0]})"
        fix = "set it to false, or install what torch.compile needs (a C++ compiler; Triton on a GPU)"
        raise InputError(problem, "generation.compile_layers", fix) from error


def generation_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """Compute `text_figures` and the mean cost of a text, in passes of one token through the model's body."""
    return text_figures(texts) | {"token_passes_per_text": float(texts["token_passes"].mean())}


#: Generates the texts of a range of example numbers as one batch.
_Solver = Callable[[range], GenerationResult]


def _search(request: TextRequest, objective: Objective) -> _Solver:
    assert isinstance(objective, HeadMatching)  # the recipe's validation requires it
    settings = request.settings.search
    allowed = allowed_tokens(request.language_model, request.settings.projection.language)
    constraints = TextConstraints(request.language_model, request.template)
    search = Search(request.language_model, objective, allowed, constraints, settings, request.ends)
    sampler = request.sampler(allowed, settings.top_k)

    def solve(numbers: range) -> GenerationResult:
        written = sampler([request.random(number) for number in numbers], request.text_tokens, settings.draws)
        with request.progress(settings.rounds) as rounds:
            return search(written.unflatten(0, (len(numbers), settings.draws)), rounds)

    return solve


def _admm(request: TextRequest, objective: Objective) -> _Solver:
    settings, embed = request.settings.admm, request.language_model.embed_freely
    allowed = allowed_tokens(request.language_model, request.settings.projection.language)
    project = Projector(request.language_model, allowed, request.instruction, request.settings.projection)

    def solve(numbers: range) -> GenerationResult:
        texts = [
            _random_texts(allowed, request.random(n), settings.initial_draws, request.text_tokens) for n in numbers
        ]
        start = best_draws(objective, embed, torch.stack(texts).to(allowed.ids.device))
        with request.progress(settings.iterations) as iterations:
            return admm(objective, project, embed, start, settings, iterations)

    return solve


def _written(request: TextRequest) -> _Solver:
    allowed = allowed_tokens(request.language_model, request.settings.projection.language)
    constraints = TextConstraints(request.language_model, request.template)
    settings = request.settings.written
    writer = Writer(
        request.language_model, request.sampler(allowed, settings.top_k), constraints, settings, request.ends
    )
    return lambda numbers: writer([request.random(number) for number in numbers], request.text_tokens)


def _random_texts(
    allowed: AllowedTokens, random: np.random.Generator, draws: int, tokens: int
) -> Int[Tensor, "draws tokens"]:
    """Draw uniformly random allowed tokens; the first one may start a text."""
    first = random.integers(len(allowed.starting_ids), size=(draws, 1))
    rest = random.integers(len(allowed.ids), size=(draws, tokens - 1))
    return torch.cat([allowed.starting_ids.cpu()[first], allowed.ids.cpu()[rest]], dim=1)


def _frame(request: TextRequest, results: list[GenerationResult], meter: ComputeMeter) -> pd.DataFrame:
    """Tabulate the texts as released, without their losses.

    Raises:
        InputError: if the log-perplexity of a text is not finite.
    """
    language_model, shard = request.language_model, request.shard
    released = released_texts(language_model, request.template, torch.cat([r.token_ids for r in results]))
    frame = pd.DataFrame(
        {
            "id": [f"{shard.label}-{number:05d}" for number in request.numbers],
            "label": shard.label,
            "label_name": request.label_name,
            **released,
            "matching_loss": np.nan,
            "probe_loss": np.nan,
            "log_perplexity": log_perplexities(language_model, released["token_ids"].tolist()),
            "shard": shard.index,
            "token_passes": meter.token_passes / shard.count,
            "loss_history": torch.cat([r.history for r in results], dim=1).T.tolist(),
        }
    )
    if not np.isfinite(frame["log_perplexity"]).all():
        problem = "a text of one token has no perplexity without a beginning-of-sequence token"
        if language_model.tokenizer.bos_token_id is not None:
            problem = "the log-perplexity of a text is not finite"
        raise InputError(problem, "generation.text_tokens", "write longer texts, or use another model")
    return frame


@torch.no_grad()
def _released_losses(language_model: LanguageModel, objective: Objective, texts: list[list[int]]) -> list[float]:
    """Compute the matching losses of the released texts, one by one, because they differ in length."""
    ids = [torch.tensor([text], device=language_model.device) for text in texts]
    return [float(objective(language_model.embed(row))) for row in ids]
