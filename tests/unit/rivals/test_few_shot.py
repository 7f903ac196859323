"""DP few-shot: sums as a slow implementation computes them, noise of the composed size, and a canary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import GenerationSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache, with_examples
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.privacy.ledger import composed_epsilon
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals import few_shot
from gradmm.rivals.few_shot import (
    THRESHOLD,
    Prompts,
    _around,
    check_room,
    drawn,
    private_examples,
    prompt_rows,
    rows_and_records,
    sampling_rate,
)
from gradmm.rivals.releases import NEXT_TOKENS, mechanism_of_part, noisy_sum, rival_release
from tests.conftest import examples, make_mechanism, tiny_language_model

INSTRUCTIONS = {0: "a bad day :\n", 1: "a good day :\n"}
TOKENS = {0: 5, 1: 7}
GOOD = ("the soup was warm", "fresh bread and good light", "a quiet room , great book", "we liked every page")
BAD = ("the train came late", "rude staff and cold coffee", "a terrible smell again", "bad chairs")
DATA = LabelledTexts((*GOOD, *BAD), (1,) * 4 + (0,) * 4)
GENERATION = GenerationSettings(whole_sentences=False)
ROOM = 2**30


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one pass for records of the same length."""
    monkeypatch.setattr(few_shot, "ROWS", 4)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return tiny_language_model(tokenizer, "phi", dtype=request.param)


def tolerance(language_model: LanguageModel) -> float:
    return {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02}[language_model.body_dtype]


def prompts_of(language_model: LanguageModel, texts: list[str]) -> Prompts:
    allowed = allowed_tokens(language_model, "english")
    before, after = (language_model.encode(part) for part in (INSTRUCTIONS[1], "\n"))
    records = [language_model.encode(text) for text in texts]
    rows = dict.fromkeys(map(len, records), 4)  # more than one pass for records of the same length
    return Prompts(language_model, allowed, [*language_model.prefix_ids, *before], records, after, rows, room=8)


def slow_probabilities(language_model: LanguageModel, text: str, written: list[int]) -> torch.Tensor:
    """Compute the allowed tokens' probabilities after one record in a single pass, without a cache."""
    allowed = allowed_tokens(language_model, "english")
    pieces = [*language_model.encode(INSTRUCTIONS[1]), *language_model.encode(text), *language_model.encode("\n")]
    ids = torch.tensor([[*language_model.prefix_ids, *pieces, *written]])
    with torch.no_grad():
        hidden = language_model.hidden_states(input_ids=ids)[0, -1:]
        logits = (language_model.augment(hidden) @ language_model.head.mT)[:, allowed.ids]
    return (logits if written else allowed.first_logits(logits)).double().softmax(dim=1)[0]


def every_second(language_model: LanguageModel, first: bool = True) -> torch.Tensor:
    """Every second token; as the first, of those that may begin a text."""
    starts = allowed_tokens(language_model, "english").starts_text
    return (starts if first else torch.ones_like(starts)).nonzero()[::2, 0]


def among(candidates: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities[candidates] / probabilities[candidates].sum()


@torch.no_grad()
def test_probabilities_are_those_of_a_pass_for_each_record(model: LanguageModel) -> None:
    """Token by token, and again after a new beginning; the sum does not tell the order of the records."""
    texts = [*GOOD, *BAD, "the soup was warm", "a soup was cold"]
    prompts = prompts_of(model, texts)
    for _ in range(2):
        prompts.begin_again()
        written: list[int] = []
        for token in (9, 12, 40):
            candidates = every_second(model, first=not written)
            slow = torch.stack([among(candidates, slow_probabilities(model, text, written)) for text in texts])
            found = torch.cat([*prompts.probabilities(candidates)])
            assert found.shape == slow.shape
            assert torch.allclose(found.sum(dim=0), slow.sum(dim=0), atol=len(texts) * tolerance(model))
            written.append(token)
            prompts.append(token)


@torch.no_grad()
@examples(15)
@given(st.lists(st.sampled_from([*GOOD, *BAD, "!"]), max_size=6))
def test_a_record_adds_the_same_vector_of_norm_one_at_most_whoever_else_is_there(
    model: LanguageModel, others: list[str]
) -> None:
    def total(texts: list[str]) -> torch.Tensor:
        prompts = prompts_of(model, texts)
        prompts.append(9)
        parts = [*prompts.probabilities(torch.arange(40)), torch.zeros(0, 40).double()]
        return torch.cat(parts).sum(dim=0)

    alone = total(["a warm room"])
    assert 0 < float(alone.norm()) <= 1 + 1e-12
    assert torch.allclose(total([*others, "a warm room"]) - total(others), alone, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_checked_for_rows_that_depend_on_the_others(
    tokenizer: PreTrainedTokenizerFast,
    template: TokenisedTemplate,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """At every token of an example; where they do, prompts are computed one at a time."""
    language_model = tiny_language_model(tokenizer, "phi", dtype=dtype)
    asked = language_model, template, DATA, INSTRUCTIONS, TOKENS, GENERATION, ROOM, 8
    lengths = {
        (label, len(language_model.encode(text))) for text, label in zip(DATA.texts, DATA.labels, strict=True)
    }
    assert len({count for _, count in lengths}) > 1
    assert prompt_rows(*asked) == dict.fromkeys(lengths, 4)
    whole = Prompts.probabilities

    def tokens_read(prompts: Prompts) -> tuple[int, int]:
        (only,) = prompts._passes
        return only.cache.get_seq_length(), prompts._appended

    reached: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for label, count in lengths:
        before, after = _around(language_model, INSTRUCTIONS[label])
        prompt = len(before) + count + len(after)
        reached[label, count] = {(prompt + place, place) for place in range(TOKENS[label])}

    # Rows that depend on one another in passes of this size: a whole prompt, or one more token after so many.
    for size in {(tokens, bool(place)) for passes in reached.values() for tokens, place in passes}:

        def by_row(prompts: Prompts, candidates: torch.Tensor) -> Iterator[torch.Tensor]:
            tokens, place = tokens_read(prompts)
            for p in whole(prompts, candidates):
                yield p + ((tokens, bool(place)) == size) * 2.0**-40 * torch.arange(len(p))[:, None] * p  # noqa: B023

        monkeypatch.setattr(Prompts, "probabilities", by_row)
        coupled = {shape for shape, passes in reached.items() if size in {(n, bool(place)) for n, place in passes}}
        assert prompt_rows(*asked) == {shape: 1 if shape in coupled else 4 for shape in lengths}, size


@torch.no_grad()
def test_tokens_are_appended_in_the_memory_that_was_allocated(model: LanguageModel) -> None:
    prompts = prompts_of(model, list(GOOD))
    layers = [layer for each in prompts._passes for layer in each.cache.layers]
    began = [each.data_ptr() for layer in layers for each in layer._rooms]
    for _ in range(2):
        for token in (9, 12, 40):
            prompts.append(token)
        assert [each.data_ptr() for layer in layers for each in layer._rooms] == began
        prompts.begin_again()
    for _ in range(8):
        prompts.append(9)
    with pytest.raises(RuntimeError):
        prompts.append(9)


@torch.no_grad()
def test_probabilities_that_are_not_finite_are_left_out(model: LanguageModel) -> None:
    prompts = prompts_of(model, list(GOOD))
    certain = torch.full_like(prompts._passes[0].state, torch.nan)
    prompts._passes[0].state = certain
    left = torch.cat([*prompts.probabilities(every_second(model))])
    assert len(left) == len(GOOD) - prompts._passes[0].records


@torch.no_grad()
def test_a_vector_longer_than_one_is_clipped(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a record's norm must not depend on the softmax being correct."""
    prompts = prompts_of(model, list(GOOD))
    monkeypatch.setattr(torch.Tensor, "softmax", lambda logits, dim: 3 * torch.ones_like(logits))
    vectors = torch.cat([*prompts.probabilities(every_second(model))])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(GOOD)).double())


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.05, 57.771), (1.0, 3.7306)])
def test_the_sums_compose_to_the_claim(epsilon: float, sigma: float) -> None:
    """The noise multipliers are those of Balle and Wang (2018) at delta 1e-5, with sensitivity 1."""
    claim, parts = make_mechanism(epsilon), 4 * 32
    whole = rival_release("r", claim, NEXT_TOKENS)
    assert whole.sigma == pytest.approx(sigma, rel=1e-4)
    each = rival_release("r", claim, NEXT_TOKENS, parts)
    assert each.sigma == pytest.approx(mechanism_of_part(claim, parts).sigma)
    for releases in ([whole], [each] * parts):
        assert composed_epsilon(releases, 1e-5, "add-or-remove") == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_a_sums_noise_has_that_size_and_a_canary_tells_no_more_than_claimed(sampler: str) -> None:
    """Over all E T sums, of which the canary is in each with the largest vector that there is."""
    parts, draws = 8, 400
    claim = make_mechanism(1.0).model_copy(update={"sampler": sampler})
    each = mechanism_of_part(claim, parts)
    canary = torch.tensor([[1.0, 0.0, 0.0]]).double()
    scores, squares = {}, 0.0
    for name, vectors in (("out", []), ("in", [canary])):
        found = np.stack([[noisy_sum(iter(vectors), 3, each) for _ in range(parts)] for _ in range(draws)])
        clean = canary.numpy()[0] * len(vectors)
        squares += float((((found - clean) / each.sigma) ** 2).sum())
        scores[name] = found[:, :, 0].sum(axis=1)  # the best statistic there is
    count = 2 * draws * parts * 3
    assert chi2.ppf(1e-6, count) < squares < chi2.isf(1e-6, count)
    separation = (scores["in"].mean() - scores["out"].mean()) / scores["out"].std()
    assert float(separation) == pytest.approx(claim.sensitivity / claim.sigma, abs=5 * (2 / draws) ** 0.5)


def test_tokens_are_drawn_from_what_stands_out_of_the_noise() -> None:
    random, deviation = np.random.default_rng(0), 2.0
    sums = np.array([THRESHOLD * 2 + 5, -30.0, THRESHOLD * 2 - 0.1, 3 * (THRESHOLD * 2 + 5)])
    counts = np.bincount([drawn(sums, deviation, random) for _ in range(4000)], minlength=4)
    assert counts[[1, 2]].tolist() == [0, 0]
    assert counts[3] / 4000 == pytest.approx(0.75, abs=0.03)
    assert drawn(np.array([-3.0, 1.0, 0.5]), deviation, random) == 1


def written(
    language_model: LanguageModel, template: TokenisedTemplate, data: LabelledTexts, claim: GaussianMechanism
) -> list[str]:
    writing = INSTRUCTIONS, TOKENS, GENERATION, ROOM
    shapes = prompt_rows(language_model, template, data, *writing, 8)
    rows, figures = private_examples(language_model, template, data, shapes, *writing, 3, claim, 8, 0)
    assert rows["label"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["rank"].tolist() == [1, 2, 3] * 2
    assert rows["text"].str.len().min() > 0
    assert figures["share_of_records"] == {"0": 1.0, "1": 1.0}
    assert figures["token_passes"] > 0
    return rows["text"].tolist()


def test_first_tokens_are_drawn_from_the_sums_over_the_records_of_their_class(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []

    def recorded(sums: np.ndarray, deviation: float, random: np.random.Generator) -> int:
        seen.append(sums)
        return drawn(sums, deviation, random)

    monkeypatch.setattr(few_shot, "drawn", recorded)
    monkeypatch.setattr(GaussianMechanism, "noise", lambda _, shape: np.zeros(shape))
    written(phi, template, DATA, make_mechanism(1.0))
    allowed = allowed_tokens(phi, "english")
    head, after, first = phi.head[allowed.ids], phi.encode("\n"), 0
    for label, of_class in ((0, BAD), (1, GOOD)):
        _, state = PromptCache(phi, INSTRUCTIONS[label]).begin(1)
        likely = allowed.first_logits(phi.augment(state) @ head.mT)[0].topk(few_shot.CANDIDATES)
        shown = likely.indices[likely.values > -torch.inf]
        before = [*phi.prefix_ids, *phi.encode(INSTRUCTIONS[label])]
        records = [phi.encode(text) for text in of_class]
        prompts = Prompts(phi, allowed, before, records, after, dict.fromkeys(map(len, records), 4), 0)
        total = torch.cat([*prompts.probabilities(shown)]).sum(dim=0)
        for _ in range(3):
            np.testing.assert_allclose(seen[first], total.numpy(), rtol=1e-9)
            first += TOKENS[label]


def test_each_record_is_in_one_sum_for_each_token_of_its_class_with_the_noise_of_all_of_them(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, float]] = []

    def recorded(vectors: Iterator[torch.Tensor], size: int, mechanism: GaussianMechanism) -> np.ndarray:
        parts = [*vectors]
        seen.append((sum(map(len, parts)), mechanism.sigma))
        return noisy_sum(iter(parts), size, mechanism)

    monkeypatch.setattr(few_shot, "noisy_sum", recorded)
    claim, data = make_mechanism(1.0), LabelledTexts((*GOOD, *BAD[:3]), (1,) * 4 + (0,) * 3)
    written(phi, template, data, claim)
    expected = [
        (records, claim.sigma * (3 * TOKENS[label]) ** 0.5)
        for label, records in ((0, 3), (1, 4))
        for _ in range(3 * TOKENS[label])
    ]
    np.testing.assert_allclose(seen, expected)


def test_every_release_has_fresh_noise(phi: LanguageModel, template: TokenisedTemplate) -> None:
    assert written(phi, template, DATA, make_mechanism(0.5)) != written(phi, template, DATA, make_mechanism(0.5))


def test_a_class_without_records_is_written_by_noise(phi: LanguageModel, template: TokenisedTemplate) -> None:
    assert len(written(phi, template, LabelledTexts(GOOD, (1,) * 4), make_mechanism(1.0))) == 6


def test_the_sampling_rate_follows_from_public_sizes(phi: LanguageModel, template: TokenisedTemplate) -> None:
    config = phi.model.config
    of_token = 2 * config.num_hidden_layers * config.hidden_size * 8  # float64
    tokens = template.max_text_tokens + len(phi.encode("\n")) + 5  # the instruction is kept once
    rows, fitting = rows_and_records(phi, template, INSTRUCTIONS[0], 5, ROOM)
    assert rows == few_shot.ROWS
    assert fitting == pytest.approx(ROOM / (of_token * tokens) - (rows - 1) * template.max_text_tokens)
    assert sampling_rate(fitting, 10**9, 2) == pytest.approx(fitting * 2 / 10**9)
    assert sampling_rate(fitting, 1000, 2) == 1.0


@torch.no_grad()
def test_records_and_rows_without_a_record_have_room_together(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of the longest records as are said to fit, and for every other length a pass of one record."""
    monkeypatch.setattr(few_shot, "ROWS", 64)
    monkeypatch.setattr(few_shot, "independent_rows", lambda _, rows, *__: rows)
    room, longest = 2**27, template.max_text_tokens
    texts = tuple("!" * count for count in range(1, longest + 1))
    data = LabelledTexts(texts, (1,) * len(texts))
    of_shape = prompt_rows(phi, template, data, {1: INSTRUCTIONS[1]}, TOKENS, GENERATION, room, longest)
    rows, fitting = rows_and_records(phi, template, INSTRUCTIONS[1], TOKENS[1], room)
    assert len(of_shape) == longest
    assert 1 < rows < 64
    assert set(of_shape.values()) == {rows}
    records = [[9] * count for count in (*range(1, longest), *[longest] * int(fitting))]
    before, after = (phi.encode(part) for part in (INSTRUCTIONS[1], "\n"))
    of_length = {count: rows for _, count in of_shape}
    prompts = Prompts(phi, allowed_tokens(phi, "english"), before, records, after, of_length, TOKENS[1])
    numbers = [each for part in prompts._passes for layer in part.cache.layers for each in layer._rooms]
    assert 0.8 * room < sum(each.untyped_storage().nbytes() for each in numbers) <= room


@torch.no_grad()
def test_a_class_that_has_no_room_is_refused_before_anything_is_charged(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An equal share of the declared records has; what a class takes is allocated, for comparison."""
    monkeypatch.setattr(few_shot, "independent_rows", lambda _, rows, *__: rows)
    room, longest, instructions = 2**23, template.max_text_tokens, {0: INSTRUCTIONS[1], 1: INSTRUCTIONS[1]}
    length = dict.fromkeys(instructions, TOKENS[1])
    rows, fitting = rows_and_records(phi, template, INSTRUCTIONS[1], TOKENS[1], room)
    before, after = (phi.encode(part) for part in (INSTRUCTIONS[1], "\n"))
    allowed, share = allowed_tokens(phi, "english"), int(fitting)

    def allocated(records: int) -> int:
        inputs, rows_of = [[9] * longest] * records, {longest: rows}
        prompts = Prompts(phi, allowed, before, inputs, after, rows_of, TOKENS[1])
        numbers = [each for part in prompts._passes for layer in part.cache.layers for each in layer._rooms]
        return sum(each.untyped_storage().nbytes() for each in numbers)

    for more, fits in ((0, True), (share // 2, False)):
        labels = (1,) * (share + more) + (0,) * (share - more)
        data = LabelledTexts(("!" * longest,) * len(labels), labels)
        assert (allocated(share + more) <= room) == fits
        expected = nullcontext() if fits else pytest.raises(InputError, match="more memory than they would")
        with expected:
            prompt_rows(phi, template, data, instructions, length, GENERATION, room, 2 * share)


@torch.no_grad()
def test_a_model_that_forgets_the_first_tokens_is_refused_before_anything_is_charged(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate
) -> None:
    """Its window is shorter than the instruction."""
    model = tiny_language_model(tokenizer, "phi3", sliding_window=6)
    instructions = {0: "a bad day , rude staff and cold coffee :\n"}
    asked = DATA, instructions, TOKENS, GENERATION, ROOM, 8
    with pytest.raises(InputError, match=r"^model\.name: the model does not keep keys and values of all tokens"):
        prompt_rows(model, tokenise_template(model, prompt_template), *asked)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_continued_prompts_are_those_of_a_whole_pass(tokenizer: PreTrainedTokenizerFast, family: str) -> None:
    """Every second layer of Gemma 2 sees 12 tokens back, fewer than a prompt has."""
    changes: dict[str, Any] = {"sliding_window": 12} if family == "gemma2" else {}
    model = tiny_language_model(tokenizer, family, **changes)
    prompts, written = prompts_of(model, list(GOOD)), [9, 12, 40]
    for token in written:
        prompts.append(token)
    candidates = every_second(model, first=False)
    slow = torch.stack([among(candidates, slow_probabilities(model, text, written)) for text in GOOD])
    found = torch.cat([*prompts.probabilities(candidates)])
    assert torch.allclose(found.sum(dim=0), slow.sum(dim=0), atol=1e-6)  # positions are in float32


def test_examples_that_have_no_room_are_refused(phi: LanguageModel, template: TokenisedTemplate) -> None:
    check_room(phi, template, INSTRUCTIONS, TOKENS, 4)
    with pytest.raises(InputError, match=r"generation\.text_tokens: 400 examples of 5 tokens, with instruction"):
        check_room(phi, template, INSTRUCTIONS, TOKENS, 400)


def test_examples_follow_the_instruction_line_by_line() -> None:
    assert with_examples("a bad day :\n\n", ["cold soup", "rain"]) == "a bad day :\n\ncold soup\n\nrain\n\n"
    assert with_examples("a bad day :", ["rain"]) == "a bad day :\nrain\n"
