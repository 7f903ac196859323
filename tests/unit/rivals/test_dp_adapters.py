"""DP adapters: gradients as autograd has them for one record, steps of a plain loop, noise and a canary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import nn
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import GenerationSettings, ModelSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.lm.loading import load_language_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from gradmm.privacy.ledger import composed_epsilon
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals import dp_adapters
from gradmm.rivals.dp_adapters import (
    AdaptedModel,
    RecordGradients,
    check_room,
    gradient_rows,
    train_adapters,
)
from gradmm.rivals.releases import ADAPTERS, noisy_sum, rival_release
from gradmm.rivals.texts import texts_like
from tests.conftest import examples, make_mechanism, tiny_language_model
from tests.unit.rivals.test_epsvec import own_texts

pytest.importorskip("peft")

RANK = 2
INSTRUCTIONS = {0: "a bad day :\n", 1: "a good day :\n"}
GOOD = ("the soup was warm", "fresh bread and good light", "a quiet room , great book", "we liked every page")
BAD = ("the train came late", "rude staff and cold coffee", "a terrible smell again", "bad chairs")
DATA = LabelledTexts((*GOOD, "", *BAD), (1,) * 5 + (0,) * 4)

#: More than one pass for records of the same length.
ANY_SHAPE: dict[tuple[int, int], int] = defaultdict(lambda: 3)


def adapted_model(
    tokenizer: PreTrainedTokenizerFast, folder: Path, family: str = "phi", dtype: str = "float32"
) -> AdaptedModel:
    tiny_language_model(tokenizer, family, dtype=torch.float32).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = ModelSettings.model_validate({"name": str(folder), "dtype": dtype})
    return AdaptedModel.of(load_language_model(settings, "cpu"), RANK, seed=0)


@pytest.fixture
def adapted(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> AdaptedModel:
    return adapted_model(tokenizer, tmp_path)


@pytest.fixture
def wording(adapted: AdaptedModel) -> TokenisedTemplate:
    template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=16)
    return tokenise_template(adapted.language_model, template)


def ids_of(adapted: AdaptedModel, text: str) -> list[int]:
    language_model = adapted.language_model
    return [*language_model.prefix_ids, *language_model.encode(text)]


def found_gradients(adapted: AdaptedModel, label: int, texts: tuple[str, ...]) -> list[torch.Tensor]:
    """Each text's x, in order of length."""
    records = [adapted.language_model.encode(text) for text in texts]
    with RecordGradients(adapted, ANY_SHAPE) as gradients:
        return [row for part in gradients(ids_of(adapted, INSTRUCTIONS[label]), records) for row in part]


def slow_gradient(adapted: AdaptedModel, label: int, text: str) -> torch.Tensor:
    """One text's x by autograd, from the whole model's own logits."""
    begin = len(ids_of(adapted, INSTRUCTIONS[label]))
    ids = torch.tensor([[*ids_of(adapted, INSTRUCTIONS[label]), *adapted.language_model.encode(text)]])
    logits = adapted.language_model.model(input_ids=ids).logits[0].float()
    loss = nn.functional.cross_entropy(logits[begin - 1 : -1], ids[0, begin:])
    parts = torch.autograd.grad(loss, [*adapted.weights.values()])
    whole = torch.cat([part.flatten() for part in parts]).double()
    return whole / whole.norm()


def test_only_linear_layers_have_adapters(adapted: AdaptedModel) -> None:
    """Others would be drawn first, and a seed would give other A than those of weights already released."""
    names = [name for name, _ in adapted.language_model.model.named_parameters() if ".lora_" in name]
    factors_b = [name.removesuffix(".weight") for name in names if ".lora_B." in name]
    assert sorted(factors_b) == sorted(adapted.weights)
    assert len(names) == 2 * len(factors_b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["phi", "llama", "gpt2", "opt"])
def test_gradients_are_those_of_autograd_for_one_record(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str, dtype: str
) -> None:
    adapted = adapted_model(tokenizer, tmp_path, family, dtype)
    for weight in adapted.weights.values():  # so that the adapters do something
        weight.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    texts = tuple(sorted((*GOOD, *BAD), key=lambda text: len(adapted.language_model.encode(text))))
    found = found_gradients(adapted, 1, texts)
    assert len(found) == len(texts)
    for text, x in zip(texts, found, strict=True):
        assert float(x.norm()) == pytest.approx(1.0)
        assert float(x @ slow_gradient(adapted, 1, text)) > (0.999999 if dtype == "float32" else 0.99)


@examples(15)
@given(st.lists(st.sampled_from([*GOOD, *BAD, "soup"]), max_size=6))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_record_adds_the_same_bits_whoever_else_is_there(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    others: list[str],
) -> None:
    adapted = adapted_model(tokenizer, tmp_path_factory.mktemp("model"), dtype=dtype)
    (alone,) = found_gradients(adapted, 0, ("a warm room",))
    assert any(torch.equal(alone, x) for x in found_gradients(adapted, 0, (*others, "a warm room")))


@pytest.mark.parametrize("family", ["phi", "opt"])
def test_shapes_are_checked_for_rows_that_depend_on_the_others(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where they do, records are computed one at a time; where two passes differ, nothing is."""
    adapted = adapted_model(tokenizer, tmp_path, family)
    template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=16)
    asked = adapted, tokenise_template(adapted.language_model, template), DATA, INSTRUCTIONS
    monkeypatch.setattr(dp_adapters, "ROWS", 5)
    shapes = gradient_rows(*asked)
    assert set(shapes.values()) == {5}
    begins = {len(ids_of(adapted, instruction)) for instruction in INSTRUCTIONS.values()}
    assert {begin for begin, _ in shapes} == begins
    whole = RecordGradients.unclipped

    def by_row(*arguments: Any, **named: Any) -> torch.Tensor:
        gradients = whole(*arguments, **named)
        return gradients + 2.0**-40 * torch.arange(len(gradients))[:, None] * gradients

    monkeypatch.setattr(RecordGradients, "unclipped", by_row)
    assert set(gradient_rows(*asked).values()) == {1}
    first, second = (ids_of(adapted, instruction) for instruction in INSTRUCTIONS.values())
    assert len(first) == len(second)

    def by_row_of_first(gradients: Any, records: Any, instruction: list[int], *more: Any, **named: Any) -> Any:
        return (by_row if instruction == first else whole)(gradients, records, instruction, *more, **named)

    monkeypatch.setattr(RecordGradients, "unclipped", by_row_of_first)
    of_both = gradient_rows(*asked)
    monkeypatch.setattr(RecordGradients, "unclipped", whole)
    only_second = gradient_rows(*asked[:3], {1: INSTRUCTIONS[1]})
    only_first = gradient_rows(*asked[:3], {0: INSTRUCTIONS[0]})
    assert {of_both[shape] for shape in only_first} == {1}
    assert {of_both[shape] for shape in only_second if shape not in only_first} <= {5}
    passes = count()

    def by_pass(*arguments: Any, **named: Any) -> torch.Tensor:
        return whole(*arguments, **named) * (1 + 2.0**-40 * next(passes))

    monkeypatch.setattr(RecordGradients, "unclipped", by_pass)
    with pytest.raises(InputError, match="gives one text different numbers in two passes"):
        gradient_rows(*asked)


def test_shapes_are_checked_for_products_of_the_adapters_that_depend_on_the_row(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are zero before the first step, and are not later."""
    adapted = adapted_model(tokenizer, tmp_path)
    template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=16)
    monkeypatch.setattr(dp_adapters, "ROWS", 5)

    def by_row(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-3 * torch.arange(len(output))[:, None, None])

    next(iter(adapted.layers.values())).register_forward_hook(by_row)
    rows = gradient_rows(adapted, tokenise_template(adapted.language_model, template), DATA, INSTRUCTIONS)
    assert set(rows.values()) == {1}
    assert not any(weight.any() for weight in adapted.weights.values())


def test_a_record_without_a_finite_gradient_takes_no_part(
    adapted: AdaptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RecordGradients.unclipped

    def broken(*arguments: Any) -> torch.Tensor:
        gradients = whole(*arguments)
        gradients[0, 3] = torch.nan
        return gradients

    monkeypatch.setattr(RecordGradients, "unclipped", broken)
    found = found_gradients(adapted, 1, ("the soup was warm",) * 3)
    assert len(found) == 2
    assert all(float(x.norm()) == pytest.approx(1.0) for x in found)


def test_without_noise_training_takes_the_steps_of_a_plain_loop(
    adapted: AdaptedModel,
    wording: TokenisedTemplate,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GaussianMechanism, "noise", lambda _, shape: np.zeros(shape))
    figures = train_adapters(adapted, wording, DATA, ANY_SHAPE, INSTRUCTIONS, 3, 1, 0.01, make_mechanism(1.0))
    slow = adapted_model(tokenizer, tmp_path)
    optimizer = torch.optim.Adam([*slow.weights.values()], lr=0.01)
    records = [(text, label) for text, label in zip(DATA.texts, DATA.labels, strict=True) if text]
    for _ in range(3):
        total = torch.stack([slow_gradient(slow, label, text) for text, label in records]).sum(dim=0)
        for weight, part in zip(
            slow.weights.values(), total.split([w.numel() for w in slow.weights.values()]), strict=True
        ):
            weight.grad = part.float().view_as(weight)
        optimizer.step()
    assert figures["weights"] == sum(weight.numel() for weight in adapted.weights.values())
    assert figures["token_passes"] > 0
    for name, weight in adapted.weights.items():
        assert float(weight.detach().abs().max()) > 0
        torch.testing.assert_close(weight, slow.weights[name], atol=1e-3, rtol=1e-2)


def test_the_passes_compose_to_the_claim() -> None:
    release = rival_release("r", make_mechanism(1.0), ADAPTERS)
    assert release.space == "weights of adapters"
    assert composed_epsilon([release], 1e-5, "add-or-remove") == pytest.approx(1.0, rel=1e-6)
    parts = [rival_release("r", make_mechanism(1.0), ADAPTERS, 4)] * 4
    assert composed_epsilon(parts, 1e-5, "add-or-remove") == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_each_pass_has_every_record_once_and_noise_of_the_composed_size(
    adapted: AdaptedModel, wording: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    passes, steps = 2, 3
    counts: list[int] = []
    noises: list[np.ndarray] = []

    def recorded(vectors: Iterator[torch.Tensor], size: int, mechanism: GaussianMechanism) -> np.ndarray:
        each = [*vectors]
        counts.append(sum(map(len, each)))
        noisy = noisy_sum(iter(each), size, mechanism)
        noises.append(noisy - sum((part.numpy().sum(axis=0) for part in each), np.zeros(size)))
        return noisy

    monkeypatch.setattr(dp_adapters, "noisy_sum", recorded)
    claim = make_mechanism(1.0).model_copy(update={"sampler": sampler})
    train_adapters(adapted, wording, DATA, ANY_SHAPE, INSTRUCTIONS, passes, steps, 0.01, claim)
    assert len(counts) == passes * steps
    assert [sum(counts[:steps]), sum(counts[steps:])] == [len(DATA) - 1] * 2  # one record is empty
    noise = np.concatenate(noises) / (claim.sigma * passes**0.5)
    assert chi2.ppf(1e-6, noise.size) < float((noise**2).sum()) < chi2.isf(1e-6, noise.size)


@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_a_canary_tells_no_more_than_claimed(
    adapted: AdaptedModel, wording: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """With the largest vector that there is, of its own direction, in each sum that training asks for."""
    draws, passes = 200, 2
    claim = make_mechanism(1.0).model_copy(update={"sampler": sampler})
    canary = adapted.language_model.encode("a terrible book")
    scores: list[float] = []

    def fixed(_: Any, __: list[int], records: list[list[int]]) -> Iterator[torch.Tensor]:
        yield torch.tensor(
            [[float(record == canary), float(record != canary), 0.0] for record in records]
        ).double()

    def three_numbers(vectors: Iterator[torch.Tensor], size: int, mechanism: GaussianMechanism) -> np.ndarray:
        noisy = noisy_sum(vectors, 3, mechanism)
        scores.append(noisy[0])
        return np.concatenate([noisy, np.zeros(size - 3)])

    monkeypatch.setattr(RecordGradients, "__call__", fixed)
    monkeypatch.setattr(dp_adapters, "noisy_sum", three_numbers)
    for data in (DATA, LabelledTexts((*DATA.texts, "a terrible book"), (*DATA.labels, 1))):
        for _ in range(draws):
            train_adapters(adapted, wording, data, ANY_SHAPE, INSTRUCTIONS, passes, 1, 0.01, claim)
    without, within = np.reshape(scores, (2, draws, passes)).sum(axis=2)
    separation = (within.mean() - without.mean()) / np.std(
        [*(within - within.mean()), *(without - without.mean())]
    )
    assert float(separation) == pytest.approx(claim.sensitivity / claim.sigma, abs=5 * (2 / draws) ** 0.5)
    assert np.std(without) == pytest.approx(claim.sigma * passes, rel=0.25)


def test_released_weights_write_the_texts_and_the_model_stays_as_it_is(
    adapted: AdaptedModel, wording: TokenisedTemplate
) -> None:
    language_model = load_language_model(adapted.language_model.model.config._name_or_path, "cpu")
    own = own_texts(language_model)
    asked = wording, INSTRUCTIONS, {0: 5, 1: 7}, GenerationSettings(whole_sentences=False), 0
    before, _ = texts_like(
        own, AdaptedModel.of(language_model, RANK, seed=0).language_model, language_model, *asked
    )
    unchanged, _ = texts_like(own, language_model, language_model, *asked)
    pd.testing.assert_frame_equal(before, unchanged)
    train_adapters(adapted, wording, DATA, ANY_SHAPE, INSTRUCTIONS, 2, 1, 0.3, make_mechanism(1.0))
    again = AdaptedModel.of(language_model, RANK, seed=0)
    again.load(adapted.table())
    for name, weight in adapted.weights.items():
        assert torch.equal(weight, again.weights[name])
    rows, figures = texts_like(own, again.language_model, language_model, *asked)
    assert set(rows["id"]) <= set(own["id"])
    assert rows["text"].tolist() != unchanged["text"].tolist()
    assert figures["texts"] == len(rows) > 0
    assert rows["token_passes"].min() > 0
    same, _ = texts_like(own, language_model, language_model, *asked)
    pd.testing.assert_frame_equal(same, unchanged)


def test_a_record_has_to_have_room_after_an_instruction(adapted: AdaptedModel, wording: TokenisedTemplate) -> None:
    check_room(adapted.language_model, wording, INSTRUCTIONS)
    with pytest.raises(
        InputError, match=r"template\.max_text_tokens: an instruction and a record of 16 tokens take"
    ):
        check_room(adapted.language_model, wording, INSTRUCTIONS | {1: "a good day " * 2000})
