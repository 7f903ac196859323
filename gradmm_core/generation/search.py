"""Generate by discrete search: sample texts from the model, then replace single words to reduce the cost.

One forward pass evaluates both the closed-form matching loss and the likelihood of the text's own tokens. A text
therefore costs one pass; an inner step of ADMM costs a forward and a backward pass. Texts are readable throughout,
because every word is likely under the model. Each example is searched independently:

    start   the cheapest of D texts that were written from the instruction
    rounds  the cheapest of some edits, if it is cheaper than the current text. An edit replaces one word by one
            that the model finds likely after the preceding words. Edits are preselected by the gradient of the
            loss with respect to the text's embeddings (one backward pass for all edits)

A text is cut at its last sentence end, so texts differ in length. A text without one is chosen only if there is no
other. The cost is the matching loss plus a price on log-perplexity above that of the model's own texts. The price
is in units of the draws' standard deviations, so that one setting suits every target, including very noisy ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from gradmm.config.settings import SearchSettings
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.result import GenerationResult
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import PAD, SentenceEnds
from gradmm.lm.vocabulary import AllowedTokens

#: Candidate words at each position. One position may have 1 / POSITION_SHARE of a round's edits.
LIKELY_WORDS, POSITION_SHARE = 50, 4

#: Most texts per forward pass, and most logits, one for each token and word of the vocabulary: they dominate the
#: memory, and take 2 GiB with what is derived of them.
PASS_SIZE, PASS_LOGITS = 128, 2**27


@dataclass(frozen=True)
class Texts:
    """Scored texts, padded with `PAD`. All fields have the same leading dimensions.

    `valid` flags the texts that satisfy the constraints and, if required, end with a sentence.
    """

    ids: Int[Tensor, "*batch tokens"]
    losses: Float[Tensor, "*batch"]
    log_perplexities: Float[Tensor, "*batch"]
    valid: Bool[Tensor, "*batch"]

    def shaped(self, *shape: int) -> Texts:
        ids, *others = self._fields
        return Texts(ids.reshape(*shape, ids.shape[-1]), *(f.reshape(shape) for f in others))

    @property
    def _fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ids, self.losses, self.log_perplexities, self.valid

    def best(self, costs: Float[Tensor, "examples trials"]) -> Texts:
        """Choose each example's cheapest trial."""
        rows, best = torch.arange(len(costs), device=costs.device), costs.argmin(dim=1)
        return Texts(*(f[rows, best] for f in self._fields))

    def take(self, rows: Int[Tensor, " rows"]) -> Texts:
        return Texts(*(f[rows] for f in self._fields))

    def put(self, rows: Int[Tensor, " rows"], texts: Texts) -> Texts:
        """Replace some rows by other texts."""
        pairs = zip(self._fields, texts._fields, strict=True)
        return Texts(*(f.index_put((rows,), new) for f, new in pairs))

    def with_trials(self, trials: Texts) -> Texts:
        """Prepend each example's text to its trials (examples x trials)."""
        pairs = zip(self.shaped(len(self.ids), 1)._fields, trials._fields, strict=True)
        return Texts(*(torch.cat(pair, dim=1) for pair in pairs))


@dataclass(frozen=True)
class Cost:
    """The cost loss + price * max(0, log-perplexity - threshold), with a price and a threshold per example."""

    price: Float[Tensor, " examples"]
    threshold: Float[Tensor, " examples"]

    @classmethod
    def of_draws(cls, draws: Texts, fluency: float) -> Cost:
        """Set the price to `fluency` times the draws' ratio of standard deviations, the threshold to the mean."""
        loss_std = draws.losses.std(dim=1, correction=0)
        perplexity_std = draws.log_perplexities.std(dim=1, correction=0)
        price = fluency * loss_std / perplexity_std.clamp_min(torch.finfo(loss_std.dtype).tiny)
        return cls(price.nan_to_num(posinf=0.0), draws.log_perplexities.mean(dim=1))

    def __call__(self, texts: Texts) -> Float[Tensor, "examples trials"]:
        """Compute costs, comparable within an example's trials. Valid trials are cheaper than all others."""
        costs = texts.losses + self.of_perplexities(texts.log_perplexities)
        penalty = costs.amax(dim=1, keepdim=True) - costs.amin(dim=1, keepdim=True) + 1
        return costs + penalty * ~texts.valid

    def take(self, rows: Int[Tensor, " rows"]) -> Cost:
        return Cost(self.price[rows], self.threshold[rows])

    def of_perplexities(self, log_perplexities: Float[Tensor, "examples ..."]) -> Float[Tensor, "examples ..."]:
        """Compute the cost's second term."""
        shape = (-1, *(1 for _ in log_perplexities.shape[1:]))
        return self.price.view(shape) * (log_perplexities - self.threshold.view(shape)).clamp_min(0)


class Search:
    """A search for texts of one class, for a batch of examples."""

    def __init__(
        self,
        language_model: LanguageModel,
        objective: HeadMatching,
        allowed: AllowedTokens,
        constraints: TextConstraints,
        settings: SearchSettings,
        ends: SentenceEnds | None = None,
    ) -> None:
        self._lm = language_model
        self._objective = objective
        self._constraints = constraints
        self._settings = settings
        self._ends = ends
        vocabulary, device = language_model.embeddings.shape[0], language_model.device
        # Edits insert neither disallowed words nor continuations of a word.
        self._is_word = allowed.beginnings(vocabulary)
        self._continues_word = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._continues_word[allowed.ids[allowed.continues_word]] = True

    def __call__(self, written: Int[Tensor, "examples draws tokens"], rounds: Iterable[int]) -> GenerationResult:
        """Find one text for each example; examples do not affect one another.

        An example is done after a round without improvement, because a further round would try the same edits.

        Args:
            written: each example's texts to begin with, padded with `PAD`.
            rounds: `range(settings.rounds)`, optionally wrapped in a progress bar.
        """
        count, number, tokens = written.shape
        draws = self._score(written.flatten(0, 1)).shaped(count, number)
        cost = Cost.of_draws(draws, self._settings.fluency)
        texts = draws.best(cost(draws))
        history = [texts.losses]
        active = torch.arange(count, device=texts.ids.device)
        for _ in rounds if tokens > 1 else ():  # the first word is not edited
            if len(active):
                before, active_cost = texts.take(active), cost.take(active)
                ids = self._edits(before, active_cost)
                trials = before.with_trials(self._score(ids.flatten(0, 1)).shaped(*ids.shape[:2]))
                after = trials.best(active_cost(trials))
                texts = texts.put(active, after)
                active = active[(after.ids != before.ids).any(dim=1)]
            history.append(texts.losses)
        return GenerationResult(texts.ids, texts.losses, torch.stack(history))

    @torch.no_grad()
    def _score(self, ids: Int[Tensor, "rows tokens"]) -> Texts:
        dtype = self._lm.head_dtype
        losses, log_perplexities = (torch.empty(len(ids), dtype=dtype, device=ids.device) for _ in range(2))
        for rows, length in self._batches(ids):
            part = ids[rows, :length]
            losses[rows], logits = self._objective.with_logits(self._lm.embed_freely(part))
            # The first token is not scored; a text of one token has a log-perplexity of 0.
            log_perplexities[rows] = _token_nll(logits, part).sum(dim=1) / max(1, length - 1)
        valid = self._constraints(ids)
        if self._ends:
            valid = valid & self._ends.complete(ids)
        return Texts(ids, losses, log_perplexities, valid)

    def _batches(self, ids: Int[Tensor, "rows tokens"]) -> Iterator[tuple[Int[Tensor, " part"], int]]:
        """Yield rows of texts of equal length, `texts_per_pass` at a time, and the length."""
        lengths = (ids != PAD).sum(dim=1)
        for length in lengths.unique().tolist():
            at_once = texts_per_pass(length, self._lm.embeddings.shape[0])
            for rows in (lengths == length).nonzero()[:, 0].split(at_once):
                yield rows, length

    def _edits(self, texts: Texts, cost: Cost) -> Int[Tensor, "examples edits tokens"]:
        """Return the edits, each of one word, with the lowest first-order estimates of the cost.

        A short text has fewer edits than a long one; the unedited text fills the rest.
        """
        edits = []
        for rows, length in self._batches(texts.ids):
            batch = texts.take(rows)
            edited = self._edits_of_length(batch.ids[:, :length], batch.log_perplexities, cost.take(rows))
            edits.append((rows, edited))
        count = max(edited.shape[1] for _, edited in edits)
        padded = texts.ids[:, None].repeat(1, count, 1)
        for rows, edited in edits:
            padded[rows, : edited.shape[1], : edited.shape[2]] = edited
        return padded

    def _edits_of_length(
        self, ids: Int[Tensor, "examples tokens"], log_perplexities: Float[Tensor, " examples"], cost: Cost
    ) -> Int[Tensor, "examples edits tokens"]:
        x = self._lm.embed_freely(ids).requires_grad_(True)
        losses, logits = self._objective.with_logits(x)
        (slope,) = torch.autograd.grad(losses.sum(), [x])
        with torch.no_grad():
            # Positions 1, 2, ... only: the logits do not cover the first token.
            current, slope = ids[:, 1:], slope[:, 1:]
            choices = logits.masked_fill(~self._is_word, -math.inf)
            if self._ends:  # a sentence end may only be replaced by a sentence end
                kept = ~self._ends.complete(ids)[:, None] | self._ends.tokens
                choices[:, -1] = choices[:, -1].masked_fill(~kept, -math.inf)
            likely = choices.topk(min(LIKELY_WORDS, choices.shape[-1]), dim=2)
            words = likely.indices
            current_logits = logits.gather(2, current[..., None])
            perplexity_change = (current_logits - likely.values) / current.shape[1]
            estimates = self._loss_changes(slope, words, current)
            estimates = estimates + cost.of_perplexities(log_perplexities[:, None, None] + perplexity_change)
            fixed = self._continues_word[current]
            fixed[:, :-1] |= self._continues_word[current[:, 1:]]
            excluded = fixed[..., None] | (words == current[..., None]) | likely.values.isinf()
            estimates = estimates.masked_fill(excluded, math.inf)
            edits = self._settings.edits
            per_position = min(words.shape[2], max(1, edits // POSITION_SHARE))
            lowest = estimates.topk(per_position, dim=2, largest=False)
            words = words.gather(2, lowest.indices)
            best = lowest.values.flatten(1).topk(min(edits, lowest.values[0].numel()), dim=1, largest=False)
            positions = best.indices // words.shape[2] + 1
            edited = ids[:, None].repeat(1, positions.shape[1], 1)
            new = words.flatten(1).gather(1, best.indices)
            new = torch.where(best.values.isinf(), ids.gather(1, positions), new)  # fewer edits than asked for
            return edited.scatter(2, positions[..., None], new[..., None])

    def _loss_changes(
        self,
        slope: Float[Tensor, "examples positions hidden"],
        words: Int[Tensor, "examples positions choices"],
        current: Int[Tensor, "examples positions"],
    ) -> Float[Tensor, "examples positions choices"]:
        """Compute the first-order change of the loss for each replacement of the current word.

        One position at a time: the embeddings of all candidates would not fit in memory beside a large model.
        """
        changes = [
            (self._lm.embed_freely(choices) - self._lm.embed_freely(word)[:, None]) @ direction[..., None]
            for direction, choices, word in zip(slope.unbind(1), words.unbind(1), current.unbind(1), strict=True)
        ]
        return torch.stack(changes, dim=1)[..., 0]


def texts_per_pass(tokens: int, vocabulary: int) -> int:
    """Return how many texts of `tokens` tokens are read in one pass."""
    return max(1, min(PASS_SIZE, PASS_LOGITS // (tokens * vocabulary)))


def _token_nll(
    logits: Float[Tensor, "batch following vocab"], ids: Int[Tensor, "batch tokens"]
) -> Float[Tensor, "batch following"]:
    """Compute the negative log-likelihood of every token but the first, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
