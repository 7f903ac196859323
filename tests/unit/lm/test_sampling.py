"""Sampled public text, compared with the model's next-token distribution from plain forward passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens
from tests.conftest import examples

INSTRUCTION = "a bad day :\n"
#: Largest value of `Generator.random`.
NEARLY_ONE = 1 - 2.0**-53


@pytest.fixture(scope="module")
def allowed(phi: LanguageModel) -> AllowedTokens:
    return allowed_tokens(phi, "english")


def uniforms(rows: int, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, tokens))


def write(phi: LanguageModel, allowed: AllowedTokens, numbers: np.ndarray, **changes) -> torch.Tensor:
    return write_texts(phi, allowed, PromptCache(phi, INSTRUCTION), numbers, **changes)


def next_token(
    phi: LanguageModel, allowed: AllowedTokens, text: list[int], top_k: int, tilt: dict[int, float] | None = None
) -> dict[int, float]:
    """Compute the next token's distribution, likeliest first, in one pass without a cache.

    Args:
        tilt: added to the logits of some tokens.
    """
    ids = torch.tensor([[*phi.prefix_ids, *phi.encode(INSTRUCTION), *text]])
    logits = phi.model(input_ids=ids).logits[0, -1].clone()
    for token, added in (tilt or {}).items():
        logits[token] += added
    every = logits.softmax(dim=0)
    if text:
        chances = {token: float(every[token]) for token in allowed.ids.tolist()}
    else:
        twins = {token: phi.encode(" " + phi.decode([token])) for token in allowed.starting_ids.tolist()}
        chances = {token: float(every[token] + every[twin]) for token, (twin,) in twins.items()}
    likely = dict(sorted(chances.items(), key=lambda item: -item[1])[:top_k])
    return {token: chance / sum(likely.values()) for token, chance in likely.items()}


def test_public_text_is_allowed_repeatable_and_starts_with_a_word(
    phi: LanguageModel, allowed: AllowedTokens
) -> None:
    first = write(phi, allowed, uniforms(40, 5))
    assert first.shape == (40, 5)
    assert torch.equal(first, write(phi, allowed, uniforms(40, 5)))
    assert not torch.equal(first, write(phi, allowed, uniforms(40, 5, seed=1)))
    assert torch.isin(first, allowed.ids).all()
    assert torch.isin(first[:, 0], allowed.starting_ids).all()


@examples(15)
@given(order=st.permutations(range(9)), batch_size=st.integers(1, 10), tokens=st.integers(1, 5))
def test_a_text_depends_on_its_own_numbers_alone(
    phi: LanguageModel, allowed: AllowedTokens, order: list[int], batch_size: int, tokens: int
) -> None:
    numbers = uniforms(9, 5)
    together = write(phi, allowed, numbers)
    apart = write(phi, allowed, numbers[order][:, :tokens], batch_size=batch_size)
    assert torch.equal(apart, together[order][:, :tokens])  # and not on the numbers of later tokens


@pytest.mark.parametrize("top_k", [5, 30, 10_000])
@pytest.mark.parametrize("beginning", [(), (0.0,), (0.7, 0.2, 0.9)])
def test_tokens_have_the_models_probabilities_over_the_likeliest_allowed_ones(
    phi: LanguageModel, allowed: AllowedTokens, beginning: tuple[float, ...], top_k: int
) -> None:
    """On an even grid of numbers, each token's share equals its probability up to one grid cell."""
    count = 2000
    grid = (np.arange(count) + 0.5) / count
    columns = [np.full(count, number) for number in beginning]
    written = write(phi, allowed, np.stack([*columns, grid], axis=1), top_k=top_k)
    assert bool((written[:, :-1] == written[0, :-1]).all())
    expected = next_token(phi, allowed, written[0, :-1].tolist(), top_k)
    assert set(written[:, -1].tolist()) <= set(expected)
    for token, chance in expected.items():
        assert float((written[:, -1] == token).double().mean()) == pytest.approx(chance, abs=1.001 / count)


@pytest.mark.parametrize("beginning", [(), (0.7, 0.2)])
def test_a_tilt_is_added_to_the_logits_of_tokens_that_begin_a_word(
    phi: LanguageModel, allowed: AllowedTokens, beginning: tuple[float, ...]
) -> None:
    count, top_k = 2000, 20
    tilt = torch.randn(len(phi.embeddings), generator=torch.Generator().manual_seed(1)) * 3
    grid = (np.arange(count) + 0.5) / count
    columns = [np.full(count, number) for number in beginning]
    written = write(phi, allowed, np.stack([*columns, grid], axis=1), top_k=top_k, tilt=tilt)
    added = {int(token): float(tilt[token]) for token in allowed.ids[~allowed.continues_word]}
    assert 0 < len(added) < len(allowed.ids)
    # A positive tilt has ended where the token has been used.
    added |= {token: min(0.0, float(tilt[token])) for token in written[0, :-1].tolist()}
    expected = next_token(phi, allowed, written[0, :-1].tolist(), top_k, added)
    assert expected != next_token(phi, allowed, written[0, :-1].tolist(), top_k)
    for token, chance in expected.items():
        assert float((written[:, -1] == token).double().mean()) == pytest.approx(chance, abs=1.001 / count)


def test_a_positive_tilt_ends_with_a_tokens_first_use_in_a_text(
    phi: LanguageModel, allowed: AllowedTokens
) -> None:
    ids = allowed.ids[~allowed.continues_word]
    inside = [token for token in ids.tolist() if phi.decode([token]).startswith(" ")]
    tilt = torch.zeros(len(phi.embeddings))
    tilt[inside[:3]] = 50.0  # certain, while it lasts
    tilt[inside[3]] = -50.0
    texts = write(phi, allowed, uniforms(40, 7), tilt=tilt)
    assert all({*inside[:3]} <= {*text} for text in texts[:, 1:].tolist())
    plain = [next_token(phi, allowed, text[:6], 200)[text[6]] for text in texts.tolist() if text[6] in inside[:3]]
    assert len(plain) < 8  # as likely as the model finds them
    assert not (texts == inside[3]).any()


def test_a_negative_tilt_stays_after_a_tokens_use(phi: LanguageModel, allowed: AllowedTokens) -> None:
    count = 2000
    ids = allowed.ids[~allowed.continues_word]
    tilt = torch.zeros(len(phi.embeddings))
    tilt[ids] = -2.0
    second = np.linspace(0.0, 0.99, 50)
    drawn = write(phi, allowed, np.stack([np.full(50, 0.7), second], axis=1), top_k=10_000, tilt=tilt)
    row = int(torch.isin(drawn[:, 1], ids).nonzero()[0])  # a word, not the rest of one
    columns = [np.full(count, 0.7), np.full(count, second[row]), (np.arange(count) + 0.5) / count]
    written = write(phi, allowed, np.stack(columns, axis=1), top_k=10_000, tilt=tilt)
    used = written[0, :-1].tolist()
    expected = next_token(phi, allowed, used, 10_000, {int(token): float(tilt[token]) for token in ids})
    share = float((written[:, -1] == used[1]).double().mean())
    assert share == pytest.approx(expected[used[1]], abs=1.001 / count)


def test_likelier_tokens_have_smaller_numbers_so_zero_is_the_likeliest_text(
    phi: LanguageModel, allowed: AllowedTokens
) -> None:
    (text,) = write(phi, allowed, np.zeros((1, 5))).tolist()
    assert text == write(phi, allowed, uniforms(1, 5), top_k=1)[0].tolist()
    for j, token in enumerate(text):
        assert token == next(iter(next_token(phi, allowed, text[:j], 1)))


@pytest.mark.parametrize("top_k", [3, 10_000])
def test_numbers_just_below_one_give_the_last_allowed_candidate(
    phi: LanguageModel, allowed: AllowedTokens, top_k: int
) -> None:
    """If fewer than `top_k` tokens may start a text, the others have probability zero."""
    (text,) = write(phi, allowed, np.full((1, 4), NEARLY_ONE), top_k=top_k).tolist()
    for j, token in enumerate(text):
        assert token == list(next_token(phi, allowed, text[:j], top_k))[-1]


def test_several_tokens_are_read_as_one_after_another(phi: LanguageModel, allowed: AllowedTokens) -> None:
    prompt_cache = PromptCache(phi, INSTRUCTION)
    tokens = write(phi, allowed, uniforms(3, 5))
    at_once, _ = prompt_cache.begin(3)
    one_by_one, _ = prompt_cache.begin(3)
    for j in range(5):
        last = prompt_cache.append(one_by_one, tokens[:, j : j + 1])
    assert torch.allclose(prompt_cache.append(at_once, tokens), last, atol=1e-10)
    instruction = torch.tensor([[*phi.prefix_ids, *phi.encode(INSTRUCTION)]]).expand(3, -1)
    plain = phi.hidden_states(input_ids=torch.cat([instruction, tokens], dim=1))[:, -1]
    assert torch.allclose(last, plain, atol=1e-10)
