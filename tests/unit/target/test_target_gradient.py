from __future__ import annotations

import stat
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradmm.config.settings import TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.gradients.full_gradient import example_gradient
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate, make_batch
from gradmm.privacy import clipped_sum
from gradmm.privacy.clipped_sum import ClippedSum, RecordSums, RecordVectors
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.storage.location import location
from gradmm.target import checkpoint, target_gradient
from gradmm.target.checkpoint import UnfinishedSums
from gradmm.target.features import TextFeatures, text_means
from gradmm.target.record_batches import RecordBatches
from gradmm.target.tables import matrix_of, to_table
from gradmm.target.target_gradient import TargetSums, target_sums
from gradmm.target.target_space import FULL, TargetSpace, label_rows
from tests.conftest import random_probe

DATA = LabelledTexts(
    texts=(
        "the soup was warm",
        "rude staff",
        "a quiet room with good light",
        "late again !",
        "fresh bread .",
    ),
    labels=(1, 0, 1, 0, 1),
)
MECHANISM = GaussianMechanism(
    epsilon=1.0, delta=1e-5, clipping_norm=0.1, adjacency="add-or-remove", calibration="analytic"
)


def slow_sum(phi: LanguageModel, template: TokenisedTemplate, label: int, clipping_norm: float) -> torch.Tensor:
    total = torch.zeros_like(phi.head)
    for row in DATA.of_class(label):
        batch = make_batch(template, [phi.encode(DATA.texts[int(row)])], [label], phi.device)
        gradient = head_gradients(phi, batch).materialise()[0]
        total += gradient * min(1.0, clipping_norm / float(gradient.norm()))
    return total


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("clipping_norm", [0.1, 1e6])
def test_target_is_the_sum_of_clipped_gradients_of_each_class(
    phi: LanguageModel, template: TokenisedTemplate, batch_size: int, clipping_norm: float
) -> None:
    settings = TargetGradientSettings(batch_size=batch_size)
    target = target_sums(phi, template, DATA, settings, clipping_norm, None)
    for label in (0, 1):
        assert torch.allclose(target.values[label], slow_sum(phi, template, label, clipping_norm), atol=1e-7)
    assert target.records == {0: 2, 1: 3}
    assert target.clip_fraction == (1.0 if clipping_norm == 0.1 else 0.0)


def test_noise_is_added_once_to_every_coordinate_and_differs_between_runs(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    clean = target_sums(phi, template, DATA, TargetGradientSettings(), 0.1, None)
    noisy = [clean.release(MECHANISM)[0] for _ in range(2)]
    noise = [torch.stack([run[label] - clean.values[label] for label in (0, 1)]) for run in noisy]
    for each in noise:
        assert float(each.std()) == pytest.approx(MECHANISM.sigma, rel=0.05)
        assert float(each.mean()) == pytest.approx(0.0, abs=0.05 * MECHANISM.sigma)
        # The same noise in two classes would cancel in their difference.
        assert abs(float(torch.corrcoef(each.flatten(1))[0, 1])) < 0.05
    assert abs(float(torch.corrcoef(torch.stack([n.flatten() for n in noise]))[0, 1])) < 0.05


def test_one_record_more_moves_the_target_by_no_more_than_c(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    fewer = LabelledTexts(DATA.texts[:-1], DATA.labels[:-1])
    settings = TargetGradientSettings(batch_size=2)
    whole, part = (target_sums(phi, template, data, settings, 0.1, None).values for data in (DATA, fewer))
    difference = torch.stack([whole[label] - part[label] for label in (0, 1)])
    assert 0 < float(difference.norm()) <= 0.1 * (1 + 1e-6)


def test_long_centres_of_the_whole_vocabulary_are_refused_beside_a_small_clipping_norm(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record's factors are then summed without its vector, whose terms would be much longer than C."""
    centred = replace(FULL, centres=dict.fromkeys((0, 1), torch.zeros_like(phi.head, dtype=torch.float64)))
    centred.centres[1][0, 0] = 2.0
    settings = TargetGradientSettings()
    target_sums(phi, template, DATA, settings, 0.1, MECHANISM, centred)  # built, so clipped by its own norm
    monkeypatch.setattr(clipped_sum, "MAX_BUILT", phi.head.numel() - 1)
    monkeypatch.setattr(target_gradient, "MAX_BUILT", phi.head.numel() - 1)
    target_sums(phi, template, DATA, settings, 0.15, MECHANISM, centred)
    target_sums(phi, template, DATA, settings, 0.1, MECHANISM.model_copy(update={"sampler": "discrete"}), centred)
    with pytest.raises(
        InputError, match=r"clipping_norm: 0\.1 is too little beside centres of norm 2; set at least 0\.15"
    ):
        target_sums(phi, template, DATA, settings, 0.1, MECHANISM, centred)


@pytest.fixture(scope="session")
def probed_space(phi: LanguageModel, template: TokenisedTemplate) -> TargetSpace:
    return replace(FULL, features=random_probe(phi, template).features)


def slow_vectors(phi: LanguageModel, template: TokenisedTemplate, features: TextFeatures) -> torch.Tensor:
    rows = []
    for text, label in zip(DATA.texts, DATA.labels, strict=True):
        batch = make_batch(template, [phi.encode(text)], [label], phi.device)
        rows.append(features.with_constant(text_means(phi.layers(input_ids=batch.input_ids), batch.text_mask))[0])
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_the_probes_moments_are_sums_over_records(
    phi: LanguageModel, template: TokenisedTemplate, probed_space: TargetSpace, batch_size: int
) -> None:
    settings = TargetGradientSettings(batch_size=batch_size, probe_share=0.4, token_share=0.0)
    sums = target_sums(phi, template, DATA, settings, 0.1, None, probed_space)
    moments = sums.clean.moments
    assert moments is not None
    assert probed_space.features is not None
    vectors = slow_vectors(phi, template, probed_space.features)
    for label in (0, 1):
        expected = vectors[DATA.of_class(label)].sum(dim=0)
        assert torch.allclose(moments.class_sums[label], expected, atol=1e-9)
        # The probe reduces the gradient's share of C.
        assert torch.allclose(sums.values[label], slow_sum(phi, template, label, 0.1 * 0.6**0.5), atol=1e-7)
    assert moments.second_moment is not None
    assert torch.allclose(moments.second_moment, vectors.mT @ vectors, atol=1e-9)


def test_class_sums_alone_are_those_of_a_probe_with_a_second_moment(
    phi: LanguageModel, template: TokenisedTemplate, probed_space: TargetSpace
) -> None:
    whole, alone = (
        target_sums(
            phi,
            template,
            DATA,
            TargetGradientSettings(probe_share=0.4, token_share=0.0, probe_covariance=covariance),
            0.1,
            None,
            probed_space,
        )
        for covariance in ("records", "public")
    )
    assert alone.norms == ReleaseNorms.of(0.1, 0.4, class_sum_share=1.0)
    assert alone.second_moment is None
    found, expected = alone.clean.moments, whole.clean.moments
    assert found is not None
    assert expected is not None
    assert found.second_moment is None
    for label in (0, 1):
        torch.testing.assert_close(found.class_sums[label], expected.class_sums[label], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(alone.values[label], whole.values[label])


def released_vector(sums: TargetSums) -> torch.Tensor:
    """Return the whole released vector, in the units in which the noise is drawn."""
    values, moments, tokens = sums.clean
    assert moments is not None
    parts = [*values.values(), *(sums.norms.class_sum * each for each in moments.class_sums.values())]
    if moments.second_moment is not None:
        parts.append(sums.norms.second_moment * moments.second_moment)
    if tokens is not None:
        parts += [sums.norms.token_sum * each for each in tokens.sums.values()]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize(("probe_share", "token_share"), [(0.1, 0.0), (0.5, 0.4), (0.9, 0.0), (0.1, 0.8)])
@pytest.mark.parametrize("covariance", ["records", "public"])
@pytest.mark.parametrize("left_out", range(len(DATA.texts)))
def test_one_record_more_moves_all_parts_together_by_no_more_than_c(
    phi: LanguageModel,
    template: TokenisedTemplate,
    probed_space: TargetSpace,
    probe_share: float,
    token_share: float,
    covariance: str,
    left_out: int,
) -> None:
    frequencies = torch.linspace(1e-5, 0.06, len(phi.embeddings))  # some of them too common to have a weight
    space = replace(probed_space, frequencies=frequencies if token_share else None)
    fewer = DATA.take([row for row in range(len(DATA.texts)) if row != left_out])
    shares = TargetGradientSettings(batch_size=2, probe_share=probe_share, token_share=token_share)
    settings = shares.model_copy(update={"probe_covariance": covariance})
    whole, part = (
        released_vector(target_sums(phi, template, data, settings, 0.1, None, space)) for data in (DATA, fewer)
    )
    assert 0.05 < float((whole - part).norm()) <= 0.1 * (1 + 1e-9)


@pytest.mark.parametrize("covariance", ["records", "public"])
@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_every_number_beside_the_gradient_has_the_noise_that_its_norm_asks_for(
    phi: LanguageModel, template: TokenisedTemplate, probed_space: TargetSpace, sampler: str, covariance: str
) -> None:
    mechanism = MECHANISM.model_copy(update={"sampler": sampler})
    shares = TargetGradientSettings(probe_share=0.4, token_share=0.3)
    settings = shares.model_copy(update={"probe_covariance": covariance})
    frequencies = torch.linspace(1e-5, 0.06, len(phi.embeddings))  # some of them too common to have a weight
    space = replace(probed_space, rows=torch.tensor(label_rows(template)), frequencies=frequencies)
    sums = target_sums(phi, template, DATA, settings, 0.1, mechanism, space)
    _, moments, tokens = sums.clean
    assert moments is not None
    assert tokens is not None
    drawn: dict[str, list[torch.Tensor]] = {"class": [], "token": []} | (
        {"second": []} if covariance == "records" else {}
    )
    for _ in range(60):
        _, noisy, noisy_tokens = sums.release(mechanism)
        assert noisy is not None
        assert noisy_tokens is not None
        drawn["class"] += [noisy.class_sums[label] - moments.class_sums[label] for label in (0, 1)]
        assert (noisy.second_moment is None) == (moments.second_moment is None) == (covariance == "public")
        if noisy.second_moment is not None and moments.second_moment is not None:
            drawn["second"].append((noisy.second_moment - moments.second_moment).flatten())
        drawn["token"] += [noisy_tokens.sums[label] - tokens.sums[label] for label in (0, 1)]
    assert noisy.class_sum_noise == pytest.approx(mechanism.sigma / sums.norms.class_sum)
    assert noisy_tokens.noise == pytest.approx(mechanism.sigma / sums.norms.token_sum)
    deviations = {"class": noisy.class_sum_noise, "token": noisy_tokens.noise}
    if covariance == "records":
        assert noisy.second_moment_noise == pytest.approx(mechanism.sigma / sums.norms.second_moment)
        deviations["second"] = noisy.second_moment_noise
    for part, deviation in deviations.items():
        every = torch.stack(drawn[part])
        assert float(every.std()) == pytest.approx(deviation, rel=0.1)
        assert len(every.unique()) > 0.99 * every.numel()  # exact noise is on a grid


def test_full_gradient_target_is_one_flat_vector_and_survives_its_table(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    settings = TargetGradientSettings(matching="full-gradient")
    target = target_sums(phi, template, DATA, settings, 1.0, None)
    size = len(target.values[0])
    embeddings = phi.model.get_input_embeddings().weight.numel()
    assert size == sum(p.numel() for p in phi.model.parameters()) - embeddings
    back = matrix_of(to_table(target.values), 1)
    assert torch.allclose(back.flatten()[:size].double(), target.values[1], atol=1e-6)


def test_full_gradients_in_bfloat16_are_summed_in_float32(phi: LanguageModel, template: TokenisedTemplate) -> None:
    half = LanguageModel(deepcopy(phi.model).to(torch.bfloat16), phi.tokenizer)
    many = DATA.take([0] * 400 + list(range(1, len(DATA))))
    settings = TargetGradientSettings(matching="full-gradient")
    label = many.labels[0]
    total, once = (target_sums(half, template, data, settings, 1.0, None).values[label] for data in (many, DATA))
    expected = 399 * example_gradient(half, template, half.encode(DATA.texts[0]), label).double()
    expected = once.double() + expected * min(1.0, 1 / float(expected.norm() / 399))
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-3


def test_table_keeps_every_class_and_row_in_place() -> None:
    values = {3: torch.arange(12.0).view(4, 3), 1: -torch.arange(12.0).view(4, 3)}
    table = to_table(values).take(torch.randperm(8).tolist())
    for label, value in values.items():
        assert torch.equal(matrix_of(table, label), value)


def test_vanishing_gradients_are_an_error(phi: LanguageModel, template: TokenisedTemplate) -> None:
    certain = LanguageModel(deepcopy(phi.model), phi.tokenizer)  # of " good", whatever the text
    certain.model.lm_head.bias[template.first_tokens[1]] = 1e6
    with pytest.raises(InputError, match="target_gradient: the gradients of label 1 vanish"):
        target_sums(certain, template, DATA, TargetGradientSettings(), 1.0, None)


class Killed(Exception):
    pass


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the batches that pass through the model. A first entry of -n kills batch n once."""
    batches: list[int] = []

    real = RecordBatches._vectors

    def of_batch(self: RecordBatches, texts: list[list[int]], length: int, label: int, rows: int) -> RecordVectors:
        if batches and batches[0] < 0 and len(batches) == -batches[0]:
            batches.clear()
            raise Killed
        vectors = real(self, texts, length, label, rows)
        batches.append(len(texts))
        return vectors

    monkeypatch.setattr(RecordBatches, "_vectors", of_batch)
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
    return batches


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("probe", ["none", "public", "records"])
def test_a_killed_sum_goes_on_where_it_was_to_the_same_bits(
    phi: LanguageModel,
    template: TokenisedTemplate,
    probed_space: TargetSpace,
    watched: list[int],
    killed_after: int,
    discrete: bool,
    probe: str,
    tmp_path: Path,
) -> None:
    mechanism = MECHANISM.model_copy(update={"sampler": "discrete"}) if discrete else None
    settings = TargetGradientSettings(batch_size=1, token_share=0.3)
    if probe != "none":
        settings = settings.model_copy(update={"probe_covariance": probe})
    frequencies = torch.linspace(1e-5, 0.06, len(phi.embeddings))  # some of them too common to have a weight
    space = FULL if probe == "none" else replace(probed_space, frequencies=frequencies)
    undisturbed = target_sums(phi, template, DATA, settings, 0.1, mechanism, space)
    watched[:] = [-(killed_after + 1)]
    unfinished = UnfinishedSums(tmp_path / "sums")
    with pytest.raises(Killed):
        target_sums(phi, template, DATA, settings, 0.1, mechanism, space, unfinished)
    assert unfinished.file.exists() == (killed_after > 0)
    resumed = target_sums(phi, template, DATA, settings, 0.1, mechanism, space, unfinished)
    assert watched == [1] * (5 - killed_after)
    assert resumed.clip_fraction == undisturbed.clip_fraction
    for label in (0, 1):
        assert torch.equal(resumed.values[label], undisturbed.values[label])
    if probe != "none":
        assert torch.equal(released_vector(resumed), released_vector(undisturbed))
    assert stat.S_IMODE(unfinished.file.stat().st_mode) == 0o600
    unfinished.delete()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_checkpoint_is_not_used(
    phi: LanguageModel, template: TokenisedTemplate, watched: list[int], damage: str, tmp_path: Path
) -> None:
    unfinished = UnfinishedSums(tmp_path / "sums")
    settings = TargetGradientSettings(batch_size=1)
    target_sums(phi, template, DATA, settings, 0.1, None, unfinished=unfinished)
    content = unfinished.file.read_bytes()
    watched.clear()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    unfinished.file.write_bytes({"cut": content[:-1], "flipped": flipped, "emptied": b""}[damage])
    target_sums(phi, template, DATA, settings, 0.1, None, unfinished=unfinished)
    assert watched == [1] * 5


def test_a_checkpoint_may_be_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
    unfinished = UnfinishedSums(location("memory://bucket/unfinished/sums"))
    assert unfinished.read() == {}
    low = torch.full((2, 2), 1e-20, dtype=torch.float64)
    gradient = ClippedSum(torch.eye(2, dtype=torch.float64), low, clipped=3)
    unfinished.write({1: RecordSums(gradient, records=7, ignored=2)})
    (of_class,) = unfinished.read().values()
    assert (of_class.records, of_class.ignored, of_class.gradient.clipped) == (7, 2, 3)
    assert torch.equal(of_class.gradient.high, torch.eye(2, dtype=torch.float64))
    assert torch.equal(of_class.gradient.low, low)
    assert of_class.class_sum.clipped == of_class.second_moment.clipped == of_class.token_sum.clipped == 0
    unfinished.delete()
    assert unfinished.read() == {}


def test_a_checkpoint_of_a_version_with_other_parts_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
    unfinished = UnfinishedSums(tmp_path / "sums")
    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoint, "PARTS", checkpoint.PARTS[:-1])
        unfinished.write({1: RecordSums(records=7)})
        assert unfinished.read()
    assert unfinished.read() == {}


def test_checkpoints_are_written_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    unfinished = UnfinishedSums(tmp_path / "sums")
    seen = []
    for now[0] in (1.0, 29.0, 31.0, 60.0, 62.0):
        unfinished.write({0: RecordSums()})
        seen.append(unfinished.file.exists())
        unfinished.delete()
    assert seen == [False, False, True, False, True]


@pytest.mark.parametrize(("covariance", "parts"), [("records", 5), ("public", 4)])
def test_exact_noise_is_added_to_sums_that_lie_exactly_on_its_grid(
    phi: LanguageModel,
    template: TokenisedTemplate,
    probed_space: TargetSpace,
    monkeypatch: pytest.MonkeyPatch,
    covariance: str,
    parts: int,
) -> None:
    mechanism = MECHANISM.model_copy(update={"sampler": "discrete"})
    space = replace(probed_space, rows=torch.tensor(label_rows(template)))
    shares = TargetGradientSettings(probe_share=0.4, token_share=0.0)
    settings = shares.model_copy(update={"probe_covariance": covariance})
    sums = target_sums(phi, template, DATA, settings, 0.1, mechanism, space)
    noised: list[torch.Tensor] = []

    def seen(values: dict[int, torch.Tensor], _: GaussianMechanism) -> dict[int, torch.Tensor]:
        noised.extend(values.values())
        return values

    monkeypatch.setattr(target_gradient, "_noisy", seen)
    sums.release(mechanism)
    assert len(noised) == parts
    for total in noised:
        steps = total / mechanism._step
        assert torch.equal(steps, steps.round())
