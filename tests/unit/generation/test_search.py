"""Check the search against slow versions of its steps, by replaying all the texts that it tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gradmm.config.settings import SearchSettings
from gradmm.generation import search as search_module
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.result import GenerationResult
from gradmm.generation.sampler import ModelSampler
from gradmm.generation.search import LIKELY_WORDS, POSITION_SHARE, Cost, Search, Texts
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.sentences import PAD, SentenceEnds
from gradmm.lm.template import TokenisedTemplate, make_batch
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens
from tests.conftest import examples

INSTRUCTION = "they said\n"
LABEL, TOKENS = 1, 6

Verdict = Callable[[Tensor], Tensor]


def any_text(ids: Tensor) -> Tensor:
    return torch.ones(len(ids), dtype=torch.bool)


def no_text(ids: Tensor) -> Tensor:
    return ~any_text(ids)


def few_texts(ids: Tensor) -> Tensor:
    return ids.sum(dim=1) % 9 == 0


class Recorded(TextConstraints):
    """Constraints that record all texts tried, optionally with another verdict."""

    def __init__(self, phi: LanguageModel, template: TokenisedTemplate, verdict: Verdict | None = None) -> None:
        super().__init__(phi, template)
        self._verdict = verdict or super().__call__
        self.tried: list[Tensor] = []

    def __call__(self, ids: Tensor) -> Tensor:
        self.tried.append(ids)
        return self._verdict(ids)


@dataclass
class Workshop:
    """A class's search, and slow versions of its losses and log-perplexities."""

    phi: LanguageModel
    template: TokenisedTemplate
    allowed: AllowedTokens

    @property
    def target(self) -> Tensor:
        return torch.randn(self.phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    @property
    def objective(self) -> HeadMatching:
        return HeadMatching(self.phi, self.template, LABEL, self.target)

    def search(self, constraints: TextConstraints, chosen: SearchSettings, ends: bool = False) -> Search:
        """Random models hardly ever end a sentence. Texts cut at an end are tested separately below."""
        sentences = SentenceEnds(self.phi) if ends else None
        return Search(self.phi, self.objective, self.allowed, constraints, chosen, sentences)

    def run(
        self, numbers: range, verdict: Verdict | None = None, tokens: int = TOKENS, ends: bool = False, **chosen
    ) -> tuple[GenerationResult, Recorded]:
        recorded = Recorded(self.phi, self.template, verdict)
        settings = SearchSettings.model_validate(
            {"draws": 8, "rounds": 3, "edits": 12, "top_k": 50, "fluency": 0.2} | chosen
        )
        sentences = SentenceEnds(self.phi) if ends else None
        sampler = ModelSampler(self.phi, self.allowed, INSTRUCTION, settings.top_k, ends=sentences)
        drawn = sampler([generator(number) for number in numbers], tokens, settings.draws)
        written = drawn.unflatten(0, (len(numbers), settings.draws))
        return self.search(recorded, settings, ends)(written, range(settings.rounds)), recorded

    def losses(self, ids: Tensor) -> Tensor:
        """Compute losses from the gradients of a batch of examples, without free embeddings."""
        flat = ids.reshape(-1, ids.shape[-1])
        batch = make_batch(self.template, flat.tolist(), [LABEL] * len(flat), self.phi.device)
        return head_gradients(self.phi, batch).matching_losses(self.target).view(ids.shape[:-1])

    def log_perplexities(self, ids: Tensor) -> Tensor:
        """Compute the cross-entropy of all tokens but the first, after the template's prefix."""
        flat = ids.reshape(-1, ids.shape[-1])
        prefix = torch.tensor(self.template.prefix, dtype=torch.long).expand(len(flat), -1)
        logits = self.phi.model(input_ids=torch.cat([prefix, flat], dim=1)).logits[:, prefix.shape[1] : -1]
        token_nll = F.cross_entropy(logits.mT, flat[:, 1:], reduction="none")
        return token_nll.mean(dim=1).view(ids.shape[:-1])


@pytest.fixture(scope="module", params=[(), (3, 4)], ids=["no prefix", "prefix"])
def shop(request: pytest.FixtureRequest, phi: LanguageModel, template: TokenisedTemplate) -> Workshop:
    return Workshop(phi, replace(template, prefix=request.param), allowed_tokens(phi, "english"))


def limits_of_a_pass(shop: Workshop) -> list[tuple[str, int]]:
    """Limits, each set beside those before it, that divide texts among fewer and more passes."""
    logits = 2 * TOKENS * len(shop.phi.embeddings)
    return [("PASS_SIZE", 128), ("PASS_SIZE", 3), ("PASS_LOGITS", logits), ("PASS_LOGITS", 1)]


def generator(example: int) -> np.random.Generator:
    return np.random.default_rng([9, example])


@dataclass
class Round:
    """One example's round: the text before, the texts tried and the cheapest text, by the slow versions."""

    before: Tensor
    tried: Tensor
    after: Tensor
    cost_after: float
    loss_after: float
    log_perplexity_before: float
    price: float
    threshold: float


def replay(
    shop: Workshop, recorded: Recorded, examples: int, fluency: float, verdict: Verdict | None
) -> list[list[Round]]:
    """Replay every example's rounds. The first chooses among the draws; one without improvement is the last."""
    judge = verdict or TextConstraints(shop.phi, shop.template)
    draws = recorded.tried[0].view(examples, -1, TOKENS)
    players = [Player(shop, judge, ids, fluency) for ids in draws]
    active = players
    for tried in recorded.tried[1:]:
        for player, trials in zip(active, tried.view(len(active), -1, TOKENS), strict=True):
            player.play(trials)
        active = [player for player in active if not torch.equal(player.rounds[-1].before, player.text)]
    return [player.rounds for player in players]


class Player:
    """One example's search, by the slow versions."""

    def __init__(self, shop: Workshop, judge: Verdict, draws: Tensor, fluency: float) -> None:
        self._shop, self._judge = shop, judge
        spreads = [float(np.std(of(draws).numpy())) for of in (shop.losses, shop.log_perplexities)]
        self._price = fluency * spreads[0] / spreads[1]
        self._threshold = float(shop.log_perplexities(draws).mean())
        self.text = draws[0]
        self.rounds: list[Round] = []
        self.play(draws)

    def _costs(self, ids: Tensor) -> Tensor:
        excess = (self._shop.log_perplexities(ids) - self._threshold).clamp_min(0)
        return self._shop.losses(ids) + self._price * excess + 1e6 * ~self._judge(ids)

    def play(self, trials: Tensor) -> None:
        before, candidates = self.text, torch.cat([self.text[None], trials])
        self.text = after = candidates[self._costs(candidates).argmin()]
        self.rounds.append(
            Round(
                before,
                trials,
                after,
                float(self._costs(after[None])),
                float(self._shop.losses(after[None])),
                float(self._shop.log_perplexities(before[None])),
                self._price,
                self._threshold,
            )
        )


@pytest.mark.parametrize("verdict", [None, few_texts], ids=["valid", "few valid"])
@pytest.mark.parametrize("fluency", [0.0, 0.5])
def test_each_round_keeps_the_cheapest_of_its_trials_and_the_current_text(
    shop: Workshop, fluency: float, verdict: Verdict | None
) -> None:
    result, recorded = shop.run(range(4), verdict, fluency=fluency)
    replayed = replay(shop, recorded, 4, fluency, verdict)
    for i, rounds in enumerate(replayed):
        assert [len(each.tried) for each in rounds] == [8, 12, 12, 12][: len(rounds)]
        better = [not torch.equal(each.before, each.after) for each in rounds]
        assert all(better[1:-1])
        assert len(rounds) == 4 or not better[-1]  # the draws, and three rounds
        rounds += [rounds[-1]] * (4 - len(rounds))
        assert torch.equal(result.token_ids[i], rounds[-1].after)
        assert result.history[:, i].tolist() == pytest.approx([each.loss_after for each in rounds], abs=1e-9)
        assert float(result.losses[i]) == pytest.approx(rounds[-1].loss_after, abs=1e-9)
        paid = [each.cost_after for each in rounds]
        assert paid == sorted(paid, reverse=True)
        invalid = ~(verdict or TextConstraints(shop.phi, shop.template))(
            torch.cat([each.tried for each in rounds])
        )
        assert (paid[-1] > 1e5) == bool(invalid.all())  # such a text is chosen only if there is no other
    assert any(rounds[-1].cost_after < rounds[0].cost_after for rounds in replayed)


def test_with_a_price_on_perplexity_the_loss_may_rise_but_not_the_cost(shop: Workshop) -> None:
    """The test above would not distinguish loss from cost."""
    result, _ = shop.run(range(12), few_texts, fluency=2.0)
    assert bool((result.history.diff(dim=0) > 1e-6).any())
    free, _ = shop.run(range(12), any_text, fluency=0.0)
    assert bool((free.history.diff(dim=0) <= 0).all())
    assert float((free.history[-1] < free.history[0]).double().mean()) > 0.5


def test_without_rounds_and_price_the_result_is_the_best_draw(shop: Workshop) -> None:
    result, recorded = shop.run(range(10), rounds=0, fluency=0.0, draws=12)
    assert len(recorded.tried) == 1
    assert result.history.shape == (1, 10)
    for i in range(10):
        numbers = generator(i).random((12, TOKENS))
        draws = write_texts(shop.phi, shop.allowed, PromptCache(shop.phi, INSTRUCTION), numbers, top_k=50)
        losses = shop.losses(draws).masked_fill(~TextConstraints(shop.phi, shop.template)(draws), torch.inf)
        assert torch.equal(result.token_ids[i], draws[losses.argmin()])
        assert float(result.losses[i]) == pytest.approx(float(losses.min()), abs=1e-9)


def test_scores_equal_plain_passes_in_batches_of_any_size(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    ids = shop.allowed.ids[torch.randint(len(shop.allowed.ids), (7, TOKENS), generator=random)]
    for name, most in limits_of_a_pass(shop):
        monkeypatch.setattr(search_module, name, most)
        texts = shop.search(Recorded(shop.phi, shop.template, few_texts), SearchSettings())._score(ids)
        assert torch.equal(texts.ids, ids)
        assert torch.allclose(texts.losses, shop.losses(ids), atol=1e-9)
        assert torch.allclose(texts.log_perplexities, shop.log_perplexities(ids), atol=1e-9)
        assert torch.equal(texts.valid, few_texts(ids))


@given(tokens=st.integers(1, 400), vocabulary=st.integers(1, 300_000))
def test_as_many_texts_as_allowed_are_read_at_once_within_the_limit_of_logits(
    tokens: int, vocabulary: int
) -> None:
    texts = search_module.texts_per_pass(tokens, vocabulary)
    assert 1 <= texts <= search_module.PASS_SIZE
    each = tokens * vocabulary
    assert texts * each <= search_module.PASS_LOGITS or texts == 1
    assert (texts + 1) * each > search_module.PASS_LOGITS or texts == search_module.PASS_SIZE


def is_word(shop: Workshop, ids: Tensor) -> Tensor:
    """Flag tokens that do not continue a word."""
    return torch.tensor([not shop.phi.decode([i])[0].isalnum() for i in ids.tolist()])


def may_be_edited(shop: Workshop, text: Tensor) -> list[int]:
    """List the positions of whole words after the first: neither the token nor its successor continues a word."""
    words = [*is_word(shop, text).tolist(), True]
    return [j for j in range(1, len(text)) if words[j] and words[j + 1]]


def slow_edits(shop: Workshop, each: Round, count: int) -> dict[tuple[int, ...], float]:
    """Compute the edits with the lowest estimates, and the estimates, position by position."""
    x = shop.phi.embed(each.before).requires_grad_(True)
    (slope,) = torch.autograd.grad(shop.objective(x[None]).sum(), [x])
    prefix = torch.tensor(shop.template.prefix, dtype=torch.long)
    logits = shop.phi.model(input_ids=torch.cat([prefix, each.before])[None]).logits[0].log_softmax(dim=1)
    words = shop.allowed.ids[is_word(shop, shop.allowed.ids)]
    estimates: dict[tuple[int, ...], float] = {}
    for j in may_be_edited(shop, each.before):
        predicted = logits[len(prefix) + j - 1]
        old = int(each.before[j])
        likely = words[predicted[words].argsort(descending=True)][:LIKELY_WORDS]
        likely = likely[likely != old]
        changes = torch.stack([(shop.phi.embed(word) - x[j].detach()) @ slope[j] for word in likely])
        log_perplexities = each.log_perplexity_before + (predicted[old] - predicted[likely]) / (TOKENS - 1)
        costs = changes + each.price * (log_perplexities - each.threshold).clamp_min(0)
        for k in costs.argsort()[: max(1, count // POSITION_SHARE)].tolist():
            edited = each.before.clone()
            edited[j] = likely[k]
            estimates[tuple(edited.tolist())] = float(costs[k])
    return dict(sorted(estimates.items(), key=lambda item: item[1])[:count])


@pytest.mark.parametrize("count", [1, 6, 40])
@pytest.mark.parametrize("fluency", [0.0, 0.7])
def test_edits_replace_whole_words_by_likely_ones_with_the_lowest_estimates(
    shop: Workshop, fluency: float, count: int
) -> None:
    _, recorded = shop.run(range(3), any_text, edits=count, fluency=fluency)
    for first, *rounds in replay(shop, recorded, 3, fluency, any_text):
        assert torch.equal(first.after, rounds[0].before)
        for each in rounds:
            changed = [tuple(text) for text in each.tried.tolist() if text != each.before.tolist()]
            assert len(set(changed)) == len(changed)
            assert set(changed) == set(slow_edits(shop, each, count))


def test_estimates_without_a_price_are_directional_derivatives_of_the_loss(shop: Workshop) -> None:
    _, recorded = shop.run(range(4), any_text, edits=6, rounds=1, fluency=0.0)
    first_rounds = [each for _, each in replay(shop, recorded, 4, 0.0, any_text)]
    can_change = [each for each in first_rounds if may_be_edited(shop, each.before)]
    assert can_change
    for each in can_change:
        estimates = slow_edits(shop, each, 6)
        x = shop.phi.embed(each.before)
        step = 0.01 * (shop.phi.embed(torch.tensor(list(estimates))) - x)
        slopes = (shop.objective(x + step) - shop.objective(x - step)) / 0.02
        assert slopes.tolist() == pytest.approx(list(estimates.values()), rel=0.02, abs=1e-5)
        assert max(estimates.values()) < 0


def test_edits_change_one_word_and_never_part_of_a_word(shop: Workshop) -> None:
    _, recorded = shop.run(range(12), edits=40, rounds=4, draws=3)
    pieces = 0
    for _, *rounds in replay(shop, recorded, 12, 0.2, None):
        for each in rounds:
            positions = may_be_edited(shop, each.before)
            pieces += TOKENS - 1 - len(positions)
            for text in each.tried:
                (changed,) = torch.nonzero(text != each.before, as_tuple=True)
                assert len(changed) <= 1
                assert set(changed.tolist()) <= set(positions)
                assert is_word(shop, text[changed]).all()
                assert torch.isin(text[changed], shop.allowed.ids).all()
            # One position has at most a quarter of the edits; with fewer than four, some trials are unedited.
            assert int((each.tried != each.before).any(dim=1).sum()) == min(40, 10 * len(positions))
    assert pieces > 20  # some tokens were not editable


def test_a_text_without_editable_words_is_unchanged(shop: Workshop) -> None:
    no_words = replace(shop.allowed, continues_word=torch.ones_like(shop.allowed.continues_word))
    result, recorded = replace(shop, allowed=no_words).run(range(3), any_text, rounds=2)
    _, tried = recorded.tried  # no second round with the same edits
    assert torch.equal(tried.view(3, -1, TOKENS), result.token_ids[:, None].expand(3, 12, TOKENS))
    assert result.history.shape == (3, 3)


def test_examples_do_not_affect_one_another(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = shop.run(range(5))
    for size in (128, 4):
        monkeypatch.setattr(search_module, "PASS_SIZE", size)
        parts = [shop.run(numbers)[0] for numbers in (range(2), range(2, 5))]
        assert torch.equal(torch.cat([part.token_ids for part in parts]), together.token_ids)
        history = torch.cat([part.history for part in parts], dim=1)
        assert torch.allclose(history, together.history, atol=1e-9)


def test_an_example_is_done_after_a_round_without_improvement(shop: Workshop) -> None:
    """More rounds than needed give the same texts by the same passes."""
    long, tried = shop.run(range(6), any_text, rounds=40, fluency=0.0)
    stalled = int((long.history.diff(dim=0) == 0).all(dim=1).nonzero()[0])
    assert 3 < stalled < 40
    assert len(tried.tried) == 1 + stalled + 1
    short, _ = shop.run(range(6), any_text, rounds=stalled, fluency=0.0)
    assert torch.equal(short.token_ids, long.token_ids)
    again = shop.search(tried, SearchSettings(draws=8, rounds=1, edits=12, top_k=50, fluency=0.0))
    cost = Cost(torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64))
    ended = Texts(long.token_ids, long.losses, torch.zeros_like(long.losses), torch.ones(6, dtype=torch.bool))
    assert bool((shop.losses(again._edits(ended, cost)) >= long.losses[:, None]).all())


def test_the_numbers_determine_the_texts(shop: Workshop) -> None:
    first, _ = shop.run(range(4))
    assert torch.equal(first.token_ids, shop.run(range(4))[0].token_ids)
    other = shop.run(range(4, 8))[0].token_ids
    assert bool((first.token_ids != other).any(dim=1).all())


def test_the_search_is_the_same_if_all_or_no_texts_are_valid(shop: Workshop) -> None:
    everything, _ = shop.run(range(4), any_text)
    nothing, _ = shop.run(range(4), no_text)
    assert torch.equal(nothing.token_ids, everything.token_ids)
    assert torch.equal(nothing.losses, everything.losses)


@pytest.mark.parametrize("fluency", [0.0, 0.2])
def test_texts_of_one_token_are_the_best_first_words_drawn(shop: Workshop, fluency: float) -> None:
    result, recorded = shop.run(range(6), any_text, tokens=1, fluency=fluency)
    assert result.history.shape == (1, 6)
    assert torch.isin(result.token_ids, shop.allowed.starting_ids).all()
    (draws,) = recorded.tried
    best = shop.losses(draws.view(6, 8, 1)).min(dim=1).values
    assert torch.allclose(result.losses, best, atol=1e-9)


def test_in_texts_of_two_tokens_only_the_second_is_edited(shop: Workshop) -> None:
    result, recorded = shop.run(range(4), any_text, tokens=2, edits=5, fluency=0.0)
    tried = [len(ids) for ids in recorded.tried]
    assert tried[:2] == [4 * 8, 4]  # a quarter of five edits, rounded down
    assert tried == sorted(tried, reverse=True)
    starts = {int(token) for token in recorded.tried[0][:, 0]}
    assert {int(token) for ids in recorded.tried for token in ids[:, 0]} == starts
    assert bool((result.history.diff(dim=0) <= 0).all())


def test_at_a_very_high_price_texts_stay_as_likely_as_the_models_own(shop: Workshop) -> None:
    free, recorded = shop.run(range(8), any_text, fluency=0.0)
    expensive, _ = shop.run(range(8), any_text, fluency=1e5)
    draws = recorded.tried[0].view(8, 8, TOKENS)
    mean = shop.log_perplexities(draws).mean(dim=1)
    start, _ = shop.run(range(8), any_text, rounds=0, fluency=1e5)
    limit = torch.maximum(mean, shop.log_perplexities(start.token_ids)) + 1e-4
    assert bool((shop.log_perplexities(expensive.token_ids) <= limit).all())
    assert bool((shop.log_perplexities(free.token_ids) > limit).any())
    assert float(expensive.losses.mean()) < float(shop.losses(draws).mean())  # the loss is still reduced


def test_an_invalid_text_is_never_preferred_at_any_price(shop: Workshop) -> None:
    result, recorded = shop.run(range(20), few_texts, rounds=0, fluency=1e7)
    could_be = few_texts(recorded.tried[0]).view(20, -1).any(dim=1)
    assert 0 < int(could_be.sum()) < 20
    assert torch.equal(few_texts(result.token_ids), could_be)


def texts_of(losses: list[list[float]], log_perplexities: list[list[float]]) -> Texts:
    loss, perplexity = (torch.tensor(v, dtype=torch.float64) for v in (losses, log_perplexities))
    ids = torch.arange(loss.numel()).view(*loss.shape, 1)
    return Texts(ids, loss, perplexity, torch.ones(loss.shape, dtype=torch.bool))


@examples(60)
@given(seed=st.integers(0, 2**31), fluency=st.floats(0, 10), scale=st.floats(1e-3, 1e3), shift=st.floats(-5, 5))
def test_the_price_is_in_standard_deviations_and_independent_of_units(
    seed: int, fluency: float, scale: float, shift: float
) -> None:
    random = np.random.default_rng(seed)
    losses, perplexities = random.random((2, 3, 6))
    cost = Cost.of_draws(texts_of(losses.tolist(), perplexities.tolist()), fluency)
    assert cost.price.tolist() == pytest.approx((fluency * losses.std(axis=1) / perplexities.std(axis=1)).tolist())
    assert cost.threshold.tolist() == pytest.approx(perplexities.mean(axis=1).tolist())
    trials = texts_of(losses.tolist(), (perplexities * 1.5).tolist())
    other = Cost.of_draws(texts_of((scale * losses).tolist(), (perplexities + shift).tolist()), fluency)
    moved = texts_of((scale * losses).tolist(), (perplexities * 1.5 + shift).tolist())
    assert torch.allclose(other(moved), scale * cost(trials), rtol=1e-6)


def test_costs_are_losses_plus_the_price_of_perplexity_above_the_draws() -> None:
    cost = Cost(torch.tensor([2.0, 10.0]), torch.tensor([4.0, 3.0]))
    texts = Texts(
        torch.zeros(2, 3, 1, dtype=torch.long),
        torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]]),
        torch.tensor([[5.0, 4.0, 1.0], [3.5, 2.0, 3.0]]),
        torch.tensor([[True, True, True], [True, True, True]]),
    )
    assert torch.allclose(cost(texts), torch.tensor([[2.1, 0.2, 0.3], [5.1, 0.2, 0.3]]))
    costs = cost(replace(texts, valid=torch.tensor([[True, False, True], [True, False, False]])))
    assert costs.argsort(dim=1).tolist() == [[2, 0, 1], [0, 1, 2]]  # more expensive than all valid ones


@pytest.mark.parametrize("draws", [1, 4])
def test_identical_draws_give_a_price_of_zero(draws: int) -> None:
    alike = texts_of([[0.5] * draws], [[4.0] * draws])
    cost = Cost.of_draws(alike, 0.2)
    assert cost.price.tolist() == [0.0]
    assert cost(alike).isfinite().all()


def test_the_best_text_of_each_example_keeps_all_its_fields() -> None:
    texts = texts_of([[0.3, 0.1, 0.2], [0.1, 0.2, 0.3]], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    best = texts.best(torch.tensor([[3.0, 2.0, 1.0], [2.0, 1.0, 3.0]]))
    assert best.ids.tolist() == [[2], [4]]
    assert best.losses.tolist() == [0.2, 0.2]
    assert best.log_perplexities.tolist() == [3.0, 5.0]
    assert best.valid.tolist() == [True, True]


def cut_texts(shop: Workshop, count: int) -> Tensor:
    """Draw words, put a sentence end at a random position, and cut there."""
    random = torch.Generator().manual_seed(3)
    words = torch.tensor([i for i in shop.allowed.ids.tolist() if shop.phi.decode([i])[:1] == " "])
    ids = words[torch.randint(len(words), (count, TOKENS), generator=random)]
    (end,) = shop.phi.encode("late.")[-1:]
    positions = torch.randint(2, TOKENS, (count, 1), generator=random)
    return SentenceEnds(shop.phi).cut(ids.scatter(1, positions, end))


def alone(text: Tensor) -> Tensor:
    return text[text != PAD][None]


def test_texts_of_several_lengths_are_scored_as_if_alone(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = cut_texts(shop, 20)
    assert len((ids != PAD).sum(dim=1).unique()) > 2
    for name, most in limits_of_a_pass(shop):
        monkeypatch.setattr(search_module, name, most)
        texts = shop.search(Recorded(shop.phi, shop.template, any_text), SearchSettings(), ends=True)._score(ids)
        assert torch.allclose(texts.losses, torch.cat([shop.losses(alone(text)) for text in ids]), atol=1e-9)
        slow = torch.cat([shop.log_perplexities(alone(text)) for text in ids])
        assert torch.allclose(texts.log_perplexities, slow, atol=1e-9)
        assert torch.equal(texts.valid, SentenceEnds(shop.phi).complete(ids))


def test_texts_of_several_lengths_are_edited_as_if_alone_and_keep_their_ends(shop: Workshop) -> None:
    ids = cut_texts(shop, 20)
    search = shop.search(Recorded(shop.phi, shop.template, any_text), SearchSettings(edits=8), ends=True)
    texts = search._score(ids)
    cost = Cost(torch.full((20,), 0.1, dtype=torch.float64), texts.log_perplexities - 0.1)
    together = search._edits(texts, cost)
    ends = SentenceEnds(shop.phi)
    complete, other_ends = ends.complete(ids), 0
    assert complete.any()
    for row, (text, edits) in enumerate(zip(ids, together, strict=True)):
        length = int((text != PAD).sum())
        assert bool((edits[:, length:] == PAD).all())
        rows = torch.tensor([row])
        own = search._edits(replace(texts.take(rows), ids=alone(text)), cost.take(rows))[0]
        assert torch.equal(edits[: len(own), :length], own)
        assert bool((edits[len(own) :] == text).all())
        assert bool(((edits != text).sum(dim=1) <= 1).all())
        if complete[row]:
            assert bool(ends.complete(edits).all())
            other_ends += int((edits[:, length - 1] != text[length - 1]).sum())
    assert other_ends > 0  # "late." may become "late !"


def test_texts_end_with_a_sentence_if_any_draw_does(shop: Workshop) -> None:
    result, recorded = shop.run(range(12), ends=True, draws=12)
    ends, judge = SentenceEnds(shop.phi), TextConstraints(shop.phi, shop.template)
    draws = recorded.tried[0].view(12, 12, TOKENS)
    lengths = set()
    for text, loss, of_example in zip(result.token_ids, result.losses, draws, strict=True):
        assert torch.equal(of_example, ends.cut(of_example))
        assert bool(ends.complete(text[None])) == bool((ends.complete(of_example) & judge(of_example)).any())
        assert float(loss) == pytest.approx(float(shop.losses(alone(text))), abs=1e-9)
        lengths.add(int((text != PAD).sum()))
    assert len(lengths) > 1
    assert bool((result.history.diff(dim=0) < 0).any())
