"""All records of a unit together move the sums by at most C, whatever they are and whoever else is in the data."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_split, tokenise_template
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.target import unit_groups as module
from gradmm.target.checkpoint import UnfinishedSums
from gradmm.target.record_batches import RecordBatches
from gradmm.target.target_gradient import TargetSums, target_sums
from gradmm.target.target_space import TargetSpace
from gradmm.target.unit_groups import unit_groups
from tests.conftest import examples, make_mechanism, tiny_language_model
from tests.unit.target.test_record_batches import moved, spaces

C = 0.1
WORDS = ("the", "soup", "was", "warm", "and", "fresh", "bread", "late", "again", "rude", "great", "book", "cold")


mechanism = partial(make_mechanism, clipping_norm=C)


def people(*sizes: int, seed: int = 0) -> LabelledTexts:
    """Data of people with these numbers of texts, of both classes, in a random order."""
    rng = np.random.default_rng(seed)
    units = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) + f" {i}" for i in range(len(units))]
    return LabelledTexts(tuple(texts), tuple(rng.integers(0, 2, len(units)).tolist()), tuple(units.tolist()))


def without(data: LabelledTexts, unit: int) -> LabelledTexts:
    assert data.units is not None
    return data.take([row for row, other in enumerate(data.units) if other != unit])


def sums_of(
    model: LanguageModel,
    template: TokenisedTemplate,
    data: LabelledTexts,
    space: TargetSpace,
    rows_per_unit: int | None,
    sampler: str = "floating-point",
    clipping_norm: float = C,
    covariance: str = "records",
) -> TargetSums:
    shares = TargetGradientSettings(batch_size=8, token_share=0.3)
    settings = shares.model_copy(update={"probe_covariance": covariance})
    release = mechanism(sampler=sampler)
    return target_sums(model, template, data, settings, clipping_norm, release, space, None, rows_per_unit)


@pytest.mark.parametrize("family", ["phi", "phi3"])
@pytest.mark.parametrize(
    ("dtype", "sampler"),
    [
        (torch.float32, "floating-point"),
        (torch.bfloat16, "floating-point"),
        (torch.float32, "discrete"),
        pytest.param(torch.bfloat16, "discrete", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(("rows_per_unit", "covariance"), [(1, "records"), (20, "records"), (20, "public")])
def test_no_unit_moves_the_sums_by_more_than_the_sensitivity(
    tokenizer: PreTrainedTokenizerFast,
    prompt_template: PromptTemplate,
    family: str,
    dtype: torch.dtype,
    sampler: str,
    rows_per_unit: int,
    covariance: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    model = tiny_language_model(tokenizer, family, dtype=dtype)
    template = tokenise_template(model, prompt_template)
    space = spaces(model, template)["public-subspace"]
    data = people(1, 12, 2, 5, 1)
    of = partial(sums_of, model, template, space=space, sampler=sampler, covariance=covariance)
    whole = of(data, rows_per_unit=rows_per_unit)
    assert (whole.second_moment is None) == (covariance == "public")
    distances = [moved(whole, of(without(data, unit), rows_per_unit=rows_per_unit)) for unit in range(5)]
    assert 0.5 < max(distances) <= mechanism(sampler=sampler).record_norm / C
    # Without the unit column, a person with many texts moves them further.
    assert moved(of(data, rows_per_unit=None), of(without(data, 1), rows_per_unit=None)) > 2


def test_a_units_vector_is_the_clipped_mean_of_its_records(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    """Record by record, in the obvious way, for a clipping norm that clips some units and others not."""
    data, norm = people(1, 4, 3, 2), 2.0
    space = spaces(phi, template)["public-subspace"]
    ids = tokenise_split(phi.tokenizer, data.texts, template.max_text_tokens, None)
    norms = ReleaseNorms.of(norm, TargetGradientSettings().probe_share, 0.3)
    batches = RecordBatches(phi, template, space, 1, private=False)
    gradients: dict[int, Tensor] = {}
    features: dict[int, Tensor] = {}
    tokens: dict[int, Tensor] = {}
    for row, label in enumerate(data.labels):
        ((_, vectors),) = batches(ids, np.array([row]), label)
        assert vectors.features is not None
        gradients[row] = vectors.gradients.materialise()[0]
        assert vectors.tokens is not None
        features[row], tokens[row] = vectors.features[0, 0], vectors.tokens[0]
    values = {label: torch.zeros_like(gradients[0]) for label in (0, 1)}
    class_sums = {label: torch.zeros_like(features[0]) for label in (0, 1)}
    token_sums = {label: torch.zeros_like(tokens[0]) for label in (0, 1)}
    second_moment = torch.zeros(len(features[0]), len(features[0]), dtype=torch.float64)
    assert data.units is not None
    clipped = []
    for unit in range(4):
        rows = [row for row, other in enumerate(data.units) if other == unit][:3]
        for label in (0, 1):
            own = [row for row in rows if data.labels[row] == label]
            if not own:
                continue
            mean = torch.stack([gradients[row] for row in own]).sum(dim=0) / len(rows)
            limit = norms.gradient * (len(own) / len(rows)) ** 0.5
            clipped.append(float(mean.norm()) > limit)
            values[label] += mean * min(1.0, limit / float(mean.norm()))
            class_sums[label] += norms.class_sum * torch.stack([features[r] for r in own]).sum(dim=0) / len(rows)
            token_sums[label] += norms.token_sum * torch.stack([tokens[r] for r in own]).sum(dim=0) / len(rows)
            moments = torch.stack([torch.outer(features[r], features[r]) for r in own]).sum(dim=0)
            second_moment += norms.second_moment * moments / len(rows)
    found = sums_of(phi, template, data, space, 3, clipping_norm=norm)
    assert found.class_sums is not None
    assert found.second_moment is not None
    assert found.token_sums is not None
    for label in (0, 1):
        torch.testing.assert_close(found.values[label], values[label], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.class_sums[label], class_sums[label], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.token_sums[label], token_sums[label], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.second_moment, second_moment, rtol=1e-9, atol=1e-12)
    assert found.clip_fraction == pytest.approx(np.mean(clipped))


@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_units_of_one_record_give_the_sums_of_records(
    phi: LanguageModel, template: TokenisedTemplate, sampler: str
) -> None:
    data = people(*[1] * 9)
    space = spaces(phi, template)["public-subspace"]
    by_unit, by_record = (sums_of(phi, template, data, space, rows, sampler) for rows in (5, None))
    assert by_unit.records == by_record.records
    for label in (0, 1):
        torch.testing.assert_close(by_unit.values[label], by_record.values[label], rtol=0, atol=1e-5 * C)
    assert moved(by_unit, by_record) < 1e-4


def test_a_class_without_records_has_sums_of_zeros(phi: LanguageModel, template: TokenisedTemplate) -> None:
    data = people(3, 2)
    only = LabelledTexts(data.texts, (0,) * len(data), data.units)
    sums = sums_of(phi, template, only, spaces(phi, template)["public-subspace"], 2)
    assert not sums.values[1].any()
    assert sums.records == {0: 2, 1: 0}
    noisy, moments, _ = sums.release(mechanism())
    assert moments is not None
    assert noisy[1].shape == noisy[0].shape


@pytest.mark.parametrize(("chunk", "batch"), [(1, 1), (5, 2), (5, 4)])
@pytest.mark.parametrize("killed_after", [1, 2, 4])
def test_a_killed_sum_of_units_goes_on_to_the_same_bits(
    phi: LanguageModel,
    template: TokenisedTemplate,
    killed_after: int,
    chunk: int,
    batch: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradmm.target.checkpoint.SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(module, "CHUNK", chunk)
    data = people(2, 3, 1, 4, 2, 1, 3, 2, 5)
    settings = TargetGradientSettings(batch_size=batch, token_share=0.3)
    space = spaces(phi, template)["public-subspace"]
    unfinished = UnfinishedSums(tmp_path_factory.mktemp("sums") / "sums")

    def sums(checkpoint: UnfinishedSums | None) -> TargetSums:
        return target_sums(phi, template, data, settings, C, mechanism(), space, checkpoint, 3)

    undisturbed = sums(None)
    writes: list[int] = []
    real = UnfinishedSums.write

    def write(self: UnfinishedSums, running: dict) -> None:
        real(self, running)
        writes.append(1)
        if len(writes) == killed_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(UnfinishedSums, "write", write)
    with pytest.raises(KeyboardInterrupt):
        sums(unfinished)
    resumed = sums(unfinished)
    assert moved(resumed, undisturbed) == 0.0


@pytest.mark.parametrize("chunk", [5, 4096])
def test_any_number_of_groups_can_be_left_out_at_the_beginning(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A run that was killed may be resumed with another batch size, which divides the groups elsewhere."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    data, space = people(*[2] * 9), spaces(phi, template)["public-subspace"]
    ids = tokenise_split(phi.tokenizer, data.texts, template.max_text_tokens, None)
    units = module.UnitGroups(RecordBatches(phi, template, space, 4, private=True), 2)
    groups = unit_groups(data, 0, 2)
    assert len(groups) > 5
    for skip in range(len(groups) + 1):
        records = [row for numbers, _ in units(ids, data, 0, skip) for row in numbers]
        assert records == [row for group, _ in groups[skip:] for row in group]


def test_the_rows_of_units_are_filled_up_in_a_private_run(phi: LanguageModel, template: TokenisedTemplate) -> None:
    data, space = people(2, 3, 1), spaces(phi, template)["public-subspace"]
    ids = tokenise_split(phi.tokenizer, data.texts, template.max_text_tokens, None)
    for private in (True, False):
        batches = RecordBatches(phi, template, space, 8, private=private)
        ((records, vectors),) = module.UnitGroups(batches, 2)(ids, data, 0)
        groups = unit_groups(data, 0, 2)
        assert records == [row for group, _ in groups for row in group]
        assert vectors.present.tolist() == [True] * len(groups) + [False] * (8 - len(groups)) * private
        assert vectors.units is not None
        assert vectors.tokens is not None
        rows = {len(each) for each in (vectors.gradients.hidden, vectors.tokens, vectors.units.records)}
        assert rows == {8 if private else len(groups)}


@given(units=st.lists(st.integers(0, 6), max_size=40), rows_per_unit=st.integers(1, 5), data=st.data())
@examples(100)
def test_groups_hold_the_first_records_of_each_unit_once(
    units: list[int], rows_per_unit: int, data: st.DataObject
) -> None:
    labels = [data.draw(st.integers(0, 1)) for _ in units]
    texts = LabelledTexts(("text",) * len(units), tuple(labels), tuple(units))
    groups = {label: unit_groups(texts, label, rows_per_unit) for label in (0, 1)}
    used: dict[int, list[int]] = {}
    for label, of_label in groups.items():
        for rows, size in of_label:
            (unit,) = {units[row] for row in rows}
            assert {labels[row] for row in rows} == {label}
            assert size == min(rows_per_unit, units.count(unit))
            used.setdefault(unit, []).extend(rows)
    for unit in set(units):
        first = [row for row, other in enumerate(units) if other == unit][:rows_per_unit]
        assert sorted(used[unit]) == first
