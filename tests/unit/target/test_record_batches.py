"""A record's vector has the same bits whatever the other records are, in the dtypes and families that run."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_split, tokenise_template
from gradmm.privacy.clipped_sum import RecordVectors
from gradmm.privacy.mechanism import SUM_SLACK
from gradmm.target import record_batches
from gradmm.target.independent_rows import _warn
from gradmm.target.record_batches import RecordBatches, padded_length
from gradmm.target.target_gradient import TargetSums, target_sums
from gradmm.target.target_space import FULL, TargetSpace, label_rows
from tests.conftest import make_mechanism, random_probe, tiny_language_model

FAMILIES = ("phi", "llama", "gpt2", "gpt_neox", "opt", "phi3", "mixtral")
C = 0.1
LONG = "the soup was warm and the bread was fresh , a quiet room with good light and bad chairs"
SHORT = ("rude staff", "late again !", "fresh bread .", "it was good", "bad chairs", "cold coffee", "great book")

#: Texts that shift all batches, or lengthen a batch, if the first of them is left out.
WORST = {
    "a long text among short ones": (LONG, *(f"{SHORT[i % 7]} {i}" for i in range(63))),
    "a short text before all others": ("a", *(f"{LONG} {SHORT[i % 7]}"[: 20 + i] for i in range(33))),
    "lengths of every bucket": ("it", *(" ".join(LONG.split()[: 1 + i % 18]) + f" {i}" for i in range(50))),
}


@pytest.fixture(autouse=True)
def each_test_is_warned() -> None:
    _warn.cache_clear()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def spaces(language_model: LanguageModel, template: TokenisedTemplate) -> dict[str, TargetSpace]:
    """The whole head, and a centred subspace of the response tokens' rows with a probe and token rates."""
    random = torch.Generator().manual_seed(5)
    width = language_model.head.shape[1]
    basis = torch.linalg.qr(torch.randn(width, 4, generator=random, dtype=torch.float64)).Q
    rows = torch.tensor(label_rows(template))
    centres = {label: 0.1 * torch.randn(len(rows), 4, generator=random, dtype=torch.float64) for label in (0, 1)}
    features = random_probe(language_model, template).features
    # Some tokens are too common to have a weight.
    frequencies = torch.linspace(1e-5, 0.06, len(language_model.embeddings))
    return {"full": FULL, "public-subspace": TargetSpace(rows, basis, centres, features, frequencies)}


mechanism = partial(make_mechanism, clipping_norm=C)


def vectors(batches: RecordBatches, texts: tuple[str, ...], label: int) -> dict[str, tuple[Tensor, ...]]:
    """Return each text's vector, its norm, its features and its tokens."""
    ids = tokenise_split(batches.language_model.tokenizer, texts, batches.template.max_text_tokens, None)
    found: list[tuple[Tensor, ...]] = []
    numbers: list[int] = []
    for records, (gradients, features, present, _, tokens) in batches(ids, np.arange(len(texts)), label):
        parts = [gradients.residual, gradients.hidden, gradients.norms()]
        parts += [each for each in (features, tokens) if each is not None]
        found += zip(*(part[present] for part in parts), strict=True)
        numbers += records
    assert sorted(numbers) == list(range(len(texts)))
    return {texts[i]: parts for i, parts in zip(numbers, found, strict=True)}


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.nightly), torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("rows", [7, 64])
def test_the_other_records_change_no_bit_of_a_records_vector(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate, family: str, dtype: torch.dtype, rows: int
) -> None:
    if (family, dtype) == ("mixtral", torch.float64):
        pytest.skip("torch multiplies experts' weights in at most float32")
    check_bits(tiny_language_model(tokenizer, family, dtype=dtype), prompt_template, rows)


def check_bits(language_model: LanguageModel, prompt_template: PromptTemplate, rows: int) -> None:
    """Compare the bits of all records' vectors with and without the first record."""
    template = tokenise_template(language_model, prompt_template)
    space = spaces(language_model, template)["public-subspace"]
    batches = RecordBatches(language_model, template, space, rows, private=True)
    for texts in WORST.values():
        whole, others = vectors(batches, texts, 1), vectors(batches, texts[1:], 1)
        assert len(others) == len(texts) - 1
        for text, parts in others.items():
            for part, same in zip(parts, whole[text], strict=True):
                assert torch.equal(part, same), text


def moved(whole: TargetSums, part: TargetSums) -> float:
    """Return ||S(D') - S(D)|| / C over all parts of a release."""
    parts = [whole.values[label] - part.values[label] for label in whole.values]
    if whole.class_sums is not None:
        assert part.class_sums is not None
        parts += [whole.class_sums[label] - part.class_sums[label] for label in whole.class_sums]
    if whole.second_moment is not None:
        assert part.second_moment is not None
        parts.append(whole.second_moment - part.second_moment)
    if whole.token_sums is not None:
        assert part.token_sums is not None
        parts += [whole.token_sums[label] - part.token_sums[label] for label in whole.token_sums]
    return float(torch.cat([each.flatten() for each in parts]).norm()) / C


@pytest.mark.parametrize(
    ("dtype", "space", "sampler"),
    [
        (torch.float32, "full", "floating-point"),
        (torch.bfloat16, "public-subspace", "floating-point"),
        (torch.float32, "public-subspace", "discrete"),
        pytest.param(torch.bfloat16, "full", "floating-point", marks=pytest.mark.nightly),
        pytest.param(torch.float32, "public-subspace", "floating-point", marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, "public-subspace", "discrete", marks=pytest.mark.nightly),
    ],
)
def test_no_record_moves_the_sums_by_more_than_the_sensitivity(
    tokenizer: PreTrainedTokenizerFast,
    prompt_template: PromptTemplate,
    family: str,
    dtype: torch.dtype,
    space: str,
    sampler: str,
) -> None:
    check_sensitivity(tiny_language_model(tokenizer, family, dtype=dtype), prompt_template, space, sampler)


def check_sensitivity(
    language_model: LanguageModel, prompt_template: PromptTemplate, space: str, sampler: str
) -> None:
    """Compare the sums with and without the first record."""
    template = tokenise_template(language_model, prompt_template)
    release = mechanism(sampler=sampler)
    for texts in WORST.values():
        whole, part = (
            target_sums(
                language_model,
                template,
                LabelledTexts(chosen, (1,) * len(chosen)),
                TargetGradientSettings(batch_size=16, token_share=0.3),
                C,
                release,
                spaces(language_model, template)[space],
            )
            for chosen in (texts, texts[1:])
        )
        assert 0.5 < moved(whole, part) <= release.record_norm / C


def test_the_slack_is_none_where_sums_are_exact() -> None:
    assert mechanism(sampler="discrete").record_norm == C
    assert mechanism().record_norm == C * (1 + SUM_SLACK)


def coupled(phi: LanguageModel, by_chance: bool) -> LanguageModel:
    """A model in which every row depends on the batch's first row, or every pass on something else."""
    passes = count(1)

    def couple(_body: object, _inputs: object, out: Any) -> None:
        # Draws could round to the same bits. Whole numbers differ by more than the precision.
        first = next(passes) if by_chance else out.last_hidden_state[:1].mean()
        out.last_hidden_state = out.last_hidden_state * (1 + 1e-6 * first)

    model = deepcopy(phi.model)
    model.base_model.register_forward_hook(couple)
    return LanguageModel(model, phi.tokenizer)


def test_a_model_that_couples_rows_is_run_one_record_at_a_time(
    phi: LanguageModel, template: TokenisedTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    batches = RecordBatches(coupled(phi, by_chance=False), template, FULL, 8, private=True)
    texts = WORST["lengths of every bucket"]
    whole, others = vectors(batches, texts, 0), vectors(batches, texts[1:], 0)
    assert all(torch.equal(a, b) for text in others for a, b in zip(whole[text], others[text], strict=True))
    assert set(batches._verified.values()) == {1}
    assert caplog.text.count("some texts are computed one at a time") == 1


def test_a_mixture_of_experts_is_run_one_record_at_a_time(
    tokenizer: PreTrainedTokenizerFast,
    prompt_template: PromptTemplate,
    family: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    language_model = tiny_language_model(tokenizer, family, dtype=torch.float32)
    batches = RecordBatches(
        language_model, tokenise_template(language_model, prompt_template), FULL, 8, private=True
    )
    vectors(batches, SHORT, 0)
    assert ("mixture of experts: some texts" in caplog.text) == (family == "mixtral")
    if family == "mixtral":
        assert set(batches._verified.values()) == {1}


def test_a_quantised_model_is_run_one_record_at_a_time(
    phi: LanguageModel, template: TokenisedTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    """Its texts, long or short, may change how the inputs of a layer are rounded, unlike random ones."""
    model = deepcopy(phi.model)
    model.is_quantized = True  # as transformers marks a model with quantised weights
    batches = RecordBatches(LanguageModel(model, phi.tokenizer), template, FULL, 8, private=True)
    vectors(batches, SHORT, 0)
    assert set(batches._verified.values()) == {1}
    assert "the model's weights are quantised: some texts" in caplog.text


def test_a_model_of_chance_is_refused(phi: LanguageModel, template: TokenisedTemplate) -> None:
    batches = RecordBatches(coupled(phi, by_chance=True), template, FULL, 8, private=True)
    with pytest.raises(InputError, match="different numbers in two passes"):
        vectors(batches, SHORT, 0)


@given(tokens=st.integers(1, 5000), positions=st.one_of(st.none(), st.integers(1, 5000)))
def test_padded_lengths_are_few_and_near(tokens: int, positions: int | None) -> None:
    length = padded_length(tokens, positions)
    if positions is None or tokens <= positions:
        assert tokens <= length
    assert length <= (positions or length)
    assert length < tokens + max(record_batches.STEP, tokens / 4 + 1)
    assert padded_length(length) >= length
    lengths = {padded_length(n) for n in range(1, tokens + 1)}
    assert len(lengths) <= 4 + 4 * max(0, (tokens - 1).bit_length() - 5)


def test_without_privacy_no_row_is_filled_up_and_nothing_is_checked(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    ids = tokenise_split(phi.tokenizer, SHORT, 64, "train")
    batches = RecordBatches(phi, template, FULL, 64, private=False)
    assert all(vectors.present.all() for _, vectors in batches(ids, np.arange(len(SHORT)), 0))
    assert not batches._verified


@pytest.mark.parametrize("bad", ["nan", "inf", "no tokens"])
def test_one_record_cannot_stop_a_private_sum(
    phi: LanguageModel, template: TokenisedTemplate, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record whose vector is not finite counts as zero, in every part of the release."""
    space = replace(FULL, features=random_probe(phi, template).features)
    broken = "" if bad == "no tokens" else "zzzz"
    texts = (*SHORT, broken)
    ids = phi.encode("zzzz")
    real = RecordBatches._vectors

    def spoilt(self: RecordBatches, chosen: list[list[int]], length: int, label: int, rows: int) -> RecordVectors:
        gradients, features, present, _, _ = real(self, chosen, length, label, rows)
        assert features is not None
        for row, text in enumerate(chosen):
            if text == ids and bad == "nan":
                features[row, 0, 0] = torch.nan
            elif text == ids:
                gradients.hidden[row] = torch.inf
        return RecordVectors(gradients, features, present)

    monkeypatch.setattr(RecordBatches, "_vectors", spoilt)
    settings = TargetGradientSettings(batch_size=4, token_share=0.3)
    with_, without = (
        target_sums(phi, template, LabelledTexts(chosen, (0,) * len(chosen)), settings, C, mechanism(), space)
        for chosen in (texts, SHORT)
    )
    assert with_.ignored == 1
    assert without.ignored == 0
    assert moved(with_, without) == 0.0
    noisy, moments, _ = with_.release(mechanism())
    assert moments is not None
    assert moments.second_moment is not None
    assert all(value.isfinite().all() for value in (*noisy.values(), moments.second_moment))


@pytest.mark.parametrize("with_probe", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_record_without_tokens_counts_as_zero(
    phi: LanguageModel, template: TokenisedTemplate, with_probe: bool, alone: bool
) -> None:
    """Even where it is all that the model would read, as there are no tokens around it."""
    if alone:
        template = replace(template, prefix=(), suffix=())
    space = replace(FULL, features=random_probe(phi, template).features) if with_probe else FULL
    settings = TargetGradientSettings(batch_size=4, probe_share=0.4 if with_probe else 0.0, token_share=0.0)
    with_, without = (
        target_sums(phi, template, LabelledTexts(chosen, (0,) * len(chosen)), settings, C, mechanism(), space)
        for chosen in (("", *SHORT), SHORT)
    )
    assert (with_.ignored, without.ignored) == (1, 0)
    # Not 0: a batch of other records is another product, which some processors round otherwise.
    assert moved(with_, without) < 1e-13


@pytest.mark.parametrize("with_probe", [False, True])
def test_a_class_without_records_is_released_as_noise(
    phi: LanguageModel, template: TokenisedTemplate, with_probe: bool
) -> None:
    space = replace(FULL, features=random_probe(phi, template).features) if with_probe else FULL
    sums = target_sums(
        phi,
        template,
        LabelledTexts(SHORT, (0,) * len(SHORT)),
        TargetGradientSettings(token_share=0.3),
        C,
        mechanism(),
        space,
    )
    assert not sums.values[1].any()
    assert sums.values[1].shape == sums.values[0].shape
    noisy = sums.release(mechanism()).values
    assert float(noisy[1].std()) == pytest.approx(mechanism().sigma, rel=0.1)
