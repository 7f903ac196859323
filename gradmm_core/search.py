"""Generation by discrete search: texts that the model writes, edited word by word where that matches better.

The matching loss has a closed form that one forward pass evaluates, and the same pass tells how likely the text's
own tokens are. So a text costs one pass, where an inner step of ADMM costs a pass forward and one back, and a text
is readable at every moment, because all of it is what the model would write. For each example, by itself:

    start   the best of D texts that the model writes from the instruction
    rounds  the best of some edits, if it is better than what there is: one word for another that the model finds
            likely after what precedes it, those first that promise most by the gradient of the loss with respect
            to the text's embeddings (one backward pass for all of them)

A text is cut where its last sentence ends, so that texts differ in length; one without such an end is the last
choice. Better means a lower matching loss plus a price on log-perplexity above that of the model's own texts. The
price is in units of the draws' standard deviations: one setting serves every target, those full of noise too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from gradmm_core.admm import GenerationResult
from gradmm_core.language_model import LanguageModel
from gradmm_core.matching import HeadMatching
from gradmm_core.opening import Opening
from gradmm_core.public_text import write_texts
from gradmm_core.readable import Readable
from gradmm_core.sentence_ends import PAD, SentenceEnds
from gradmm_core.settings import SearchSettings
from gradmm_core.vocabulary import AllowedTokens

#: Words that an edit chooses from at each place, and the share of a round's edits that one place may have.
LIKELY_WORDS, SHARE_OF_A_PLACE = 50, 4

#: Texts per forward pass. Their logits are what needs memory: one row for each token.
PASS_SIZE = 128


@dataclass(frozen=True)
class Texts:
    """Scored texts, with `PAD` after their ends; the leading dimensions are all the same."""

    ids: Int[Tensor, "*batch tokens"]
    losses: Float[Tensor, "*batch"]
    log_perplexities: Float[Tensor, "*batch"]
    readable: Bool[Tensor, "*batch"]

    def shaped(self, *shape: int) -> Texts:
        ids, *others = self._fields
        return Texts(ids.reshape(*shape, ids.shape[-1]), *(f.reshape(shape) for f in others))

    @property
    def _fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ids, self.losses, self.log_perplexities, self.readable

    def best(self, costs: Float[Tensor, "examples trials"]) -> Texts:
        """Of each example's trials the cheapest."""
        rows, best = torch.arange(len(costs), device=costs.device), costs.argmin(dim=1)
        return Texts(*(f[rows, best] for f in self._fields))

    def take(self, rows: Int[Tensor, " rows"]) -> Texts:
        return Texts(*(f[rows] for f in self._fields))

    def put(self, rows: Int[Tensor, " rows"], texts: Texts) -> Texts:
        """With others in some rows."""
        pairs = zip(self._fields, texts._fields, strict=True)
        return Texts(*(f.index_put((rows,), new) for f, new in pairs))

    def with_trials(self, trials: Texts) -> Texts:
        """Each example's text and its trials (examples x trials), the text first."""
        pairs = zip(self.shaped(len(self.ids), 1)._fields, trials._fields, strict=True)
        return Texts(*(torch.cat(pair, dim=1) for pair in pairs))


@dataclass(frozen=True)
class Cost:
    """loss + price * max(0, log-perplexity - fluent), with a price and a mark of each example's own."""

    price: Float[Tensor, " examples"]
    fluent: Float[Tensor, " examples"]

    @classmethod
    def of_draws(cls, draws: Texts, fluency: float) -> Cost:
        spread, of_words = draws.losses.std(dim=1, correction=0), draws.log_perplexities.std(dim=1, correction=0)
        price = fluency * spread / of_words.clamp_min(torch.finfo(spread.dtype).tiny)
        return cls(price.nan_to_num(posinf=0.0), draws.log_perplexities.mean(dim=1))

    def __call__(self, texts: Texts) -> Float[Tensor, "examples trials"]:
        """Comparable within an example's trials: of these, every readable one is cheaper than all others."""
        costs = texts.losses + self.of_words(texts.log_perplexities)
        above_all = costs.amax(dim=1, keepdim=True) - costs.amin(dim=1, keepdim=True) + 1
        return costs + above_all * ~texts.readable

    def take(self, rows: Int[Tensor, " rows"]) -> Cost:
        return Cost(self.price[rows], self.fluent[rows])

    def of_words(self, log_perplexities: Float[Tensor, "examples ..."]) -> Float[Tensor, "examples ..."]:
        shape = (-1, *(1 for _ in log_perplexities.shape[1:]))
        return self.price.view(shape) * (log_perplexities - self.fluent.view(shape)).clamp_min(0)


class Search:
    """The search for texts of one class, for any number of examples side by side."""

    def __init__(
        self,
        language_model: LanguageModel,
        objective: HeadMatching,
        allowed: AllowedTokens,
        readable: Readable,
        instruction: str,
        settings: SearchSettings,
    ) -> None:
        self._lm = language_model
        self._objective = objective
        self._allowed = allowed
        self._readable = readable
        self._opening = Opening(language_model, instruction)
        self._settings = settings
        self._ends = SentenceEnds(language_model) if settings.whole_sentences else None
        vocabulary, device = language_model.embeddings.shape[0], language_model.device
        #: Neither disallowed words nor the rest of a word is put in place of a word.
        self._is_word = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_word[allowed.ids[~allowed.continues_word]] = True
        self._continues_word = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._continues_word[allowed.ids[allowed.continues_word]] = True

    def __call__(
        self, uniforms: Float[np.ndarray, "examples draws tokens"], rounds: Iterable[int]
    ) -> GenerationResult:
        """One text for each example; no example affects another.

        An example whose round found nothing better is done: every further round would try the same.

        Args:
            uniforms: numbers in [0, 1) that decide the draws, as `write_texts` has it.
            rounds: `range(settings.rounds)`, perhaps wrapped to show progress.
        """
        count, number, tokens = uniforms.shape
        flat = uniforms.reshape(-1, tokens)
        ids = write_texts(self._lm, self._allowed, self._opening, flat, self._settings.top_k)
        if self._ends:
            ids = self._ends.cut(ids)
        draws = self._score(ids).shaped(count, number)
        cost = Cost.of_draws(draws, self._settings.fluency)
        texts = draws.best(cost(draws))
        history = [texts.losses]
        open_ = torch.arange(count, device=texts.ids.device)
        for _ in rounds if tokens > 1 else ():  # the first word stays
            if len(open_):
                before, price = texts.take(open_), cost.take(open_)
                ids = self._edits(before, price)
                trials = before.with_trials(self._score(ids.flatten(0, 1)).shaped(*ids.shape[:2]))
                after = trials.best(price(trials))
                texts = texts.put(open_, after)
                open_ = open_[(after.ids != before.ids).any(dim=1)]
            history.append(texts.losses)
        return GenerationResult(texts.ids, texts.losses, torch.stack(history))

    @torch.no_grad()
    def _score(self, ids: Int[Tensor, "rows tokens"]) -> Texts:
        dtype = self._lm.head_dtype
        losses, log_perplexities = (torch.empty(len(ids), dtype=dtype, device=ids.device) for _ in range(2))
        for rows, length in _parts(ids):
            part = ids[rows, :length]
            losses[rows], logits = self._objective.with_logits(self._lm.embed_freely(part))
            # A text of one token has none to be surprised by.
            log_perplexities[rows] = _surprise(logits, part).sum(dim=1) / max(1, length - 1)
        readable = self._readable(ids)
        if self._ends:
            readable = readable & self._ends.complete(ids)
        return Texts(ids, losses, log_perplexities, readable)

    def _edits(self, texts: Texts, cost: Cost) -> Int[Tensor, "examples edits tokens"]:
        """Texts with one word changed: those for which loss and log-perplexity promise most, to first order.

        A short text has fewer such edits than a long one; the rest of its are itself.
        """
        edits = []
        for rows, length in _parts(texts.ids):
            of_rows = texts.take(rows)
            edited = self._edits_of(of_rows.ids[:, :length], of_rows.log_perplexities, cost.take(rows))
            edits.append((rows, edited))
        most = max(edited.shape[1] for _, edited in edits)
        every = texts.ids[:, None].repeat(1, most, 1)
        for rows, edited in edits:
            every[rows, : edited.shape[1], : edited.shape[2]] = edited
        return every

    def _edits_of(
        self, ids: Int[Tensor, "examples tokens"], log_perplexities: Float[Tensor, " examples"], cost: Cost
    ) -> Int[Tensor, "examples edits tokens"]:
        x = self._lm.embed_freely(ids).requires_grad_(True)
        losses, logits = self._objective.with_logits(x)
        (slope,) = torch.autograd.grad(losses.sum(), [x])
        with torch.no_grad():
            # Places 1, 2, ... of the text: nothing before the first word makes another one likely.
            now, place = ids[:, 1:], slope[:, 1:]
            choices = logits.masked_fill(~self._is_word, -math.inf)
            if self._ends:  # the end of a sentence becomes another end, if anything
                kept = ~self._ends.complete(ids)[:, None] | self._ends.tokens
                choices[:, -1] = choices[:, -1].masked_fill(~kept, -math.inf)
            likely = choices.topk(min(LIKELY_WORDS, choices.shape[-1]), dim=2)
            words = likely.indices
            gain = self._gains(place, words, now)
            of_now = logits.gather(2, now[..., None])
            change = (of_now - likely.values) / now.shape[1]
            promise = gain + cost.of_words(log_perplexities[:, None, None] + change)
            fixed = self._continues_word[now]
            fixed[:, :-1] |= self._continues_word[now[:, 1:]]
            hopeless = fixed[..., None] | (words == now[..., None]) | likely.values.isinf()
            promise = promise.masked_fill(hopeless, math.inf)
            edits = self._settings.edits
            of_place = promise.topk(min(words.shape[2], max(1, edits // SHARE_OF_A_PLACE)), dim=2, largest=False)
            words = words.gather(2, of_place.indices)
            best = of_place.values.flatten(1).topk(min(edits, of_place.values[0].numel()), dim=1, largest=False)
            places = best.indices // words.shape[2] + 1
            edited = ids[:, None].repeat(1, places.shape[1], 1)
            new = words.flatten(1).gather(1, best.indices)
            new = torch.where(best.values.isinf(), ids.gather(1, places), new)  # nothing left to try
            return edited.scatter(2, places[..., None], new[..., None])

    def _gains(
        self,
        slope: Float[Tensor, "examples places hidden"],
        words: Int[Tensor, "examples places choices"],
        now: Int[Tensor, "examples places"],
    ) -> Float[Tensor, "examples places choices"]:
        """First-order change of the loss by each word in place of the one that is there.

        Place by place: the embeddings of all words of all places would not fit beside a large model.
        """
        changes = [
            (self._lm.embed_freely(choices) - self._lm.embed_freely(word)[:, None]) @ direction[..., None]
            for direction, choices, word in zip(slope.unbind(1), words.unbind(1), now.unbind(1), strict=True)
        ]
        return torch.stack(changes, dim=1)[..., 0]


def _parts(ids: Int[Tensor, "rows tokens"]) -> Iterator[tuple[Int[Tensor, " part"], int]]:
    """Rows of texts of one length, as many as a forward pass takes, and that length."""
    lengths = (ids != PAD).sum(dim=1)
    for length in lengths.unique().tolist():
        for rows in (lengths == length).nonzero()[:, 0].split(PASS_SIZE):
            yield rows, length


def _surprise(
    logits: Float[Tensor, "batch following vocab"], ids: Int[Tensor, "batch tokens"]
) -> Float[Tensor, "batch following"]:
    """Negative log-likelihood of every token but the first, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
