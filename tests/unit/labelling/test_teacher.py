"""Compare the teacher with loops over texts, and its terms with what they have to recover."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.special import softmax

from gradmm.errors import InputError
from gradmm.labelling.teacher import (
    Readings,
    Teacher,
    calibrated_model,
    mean_released_scores,
    read_texts,
    teacher_of,
)
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import tokenise_template
from gradmm.target.features import TextFeatures, text_means
from gradmm.target.naive_bayes import NaiveBayes
from gradmm.target.probe import Moments
from tests.conftest import random_probe, tiny_language_model

DIMENSIONS = 4
LABELS = [3, 1]
VOCABULARY = 20


def identity() -> TextFeatures:
    zeros, eye = torch.zeros(DIMENSIONS), torch.eye(DIMENSIONS)
    return TextFeatures(zeros.double(), eye.double())


def readings(count: int, seed: int, shift: float = 0.0) -> Readings:
    """Draw features, and logits that are linear in them but for a little noise. `shift` moves the features."""
    random = torch.Generator().manual_seed(seed)
    features = 0.2 * torch.randn(count, DIMENSIONS, generator=random).double()
    features[:, 0] += shift
    logits = torch.stack([5 * features[:, 0] + 0.4, -1 - 5 * features[:, 0]], dim=1)
    logits += 0.1 * torch.randn(count, 2, generator=random).double()
    texts = torch.randint(0, VOCABULARY, (count, 6), generator=random).tolist()
    return Readings(logits, features, texts)


def moments_of_records(
    counts: list[int], shift: float, apart: float, noise: float = 0.0, seed: int = 10
) -> Moments:
    """Sum the records of two classes, whose features differ in the second direction."""
    sums, second = {}, torch.zeros(DIMENSIONS + 1, DIMENSIONS + 1).double()
    for number, (label, count) in enumerate(zip(LABELS, counts, strict=True)):
        features = readings(count, seed + number, shift).features
        features[:, 1] += apart * (1 - 2 * number)
        vectors = identity().with_constant(features)
        sums[label], second = vectors.sum(dim=0), second + vectors.mT @ vectors
    return Moments(sums, second, noise, noise)


def public_texts() -> dict[int, Readings]:
    return {3: readings(300, 0), 1: readings(200, 1)}


def test_the_calibrated_model_prefers_no_class_over_public_texts_of_all_classes() -> None:
    public = public_texts()
    teacher = calibrated_model(public)
    means = [(each.logits - teacher.offset).mean(dim=0) for each in public.values()]
    torch.testing.assert_close(torch.stack(means).mean(dim=0), torch.zeros(2).double())
    texts = readings(50, 7)
    offset = np.mean([each.logits.numpy().mean(axis=0) for each in public.values()], axis=0)
    expected = softmax(texts.logits.numpy() - offset, axis=1)
    np.testing.assert_allclose(teacher.probabilities(texts).numpy(), expected, rtol=1e-12)


def test_the_teacher_is_the_model_with_its_private_mean_removed_times_probe_times_shares() -> None:
    counts, texts = [3000, 1000], readings(40, 7)
    teacher = teacher_of(public_texts(), identity(), moments_of_records(counts, shift=0.0, apart=0.2))
    assert teacher.probe is not None
    smoothed = np.array(counts) + 10.0
    np.testing.assert_allclose(teacher.log_shares.numpy(), np.log(smoothed / smoothed.sum()), rtol=1e-9)
    probe = -np.stack([teacher.probe.losses(texts.features, label).numpy() for label in LABELS], axis=1)
    scores = texts.logits.numpy() - teacher.offset.numpy() + probe + teacher.log_shares.numpy()
    np.testing.assert_allclose(teacher.probabilities(texts).numpy(), softmax(scores, axis=1), rtol=1e-9)
    assert teacher.probabilities(texts).sum(dim=1).tolist() == pytest.approx([1.0] * 40)


@pytest.mark.parametrize("shift", [0.1, -0.1])
def test_the_offset_follows_the_mean_answer_to_private_records(shift: float) -> None:
    """The answer is linear in the features, so that the regression recovers its mean over the records."""
    public = public_texts()
    moments = moments_of_records([2000, 2000], shift, apart=0.0)
    moved = teacher_of(public, identity(), moments).offset - calibrated_model(public).offset
    features = torch.cat([readings(2000, seed, shift).features for seed in (10, 11)])
    centre = torch.stack([each.features.mean(dim=0) for each in public.values()]).mean(dim=0)
    change = 5 * float((features.mean(dim=0) - centre)[0])
    assert moved.tolist() == pytest.approx([change, -change], rel=0.1)


@pytest.mark.parametrize("counts", [[40, 40], [40, 4000]])
def test_chance_alone_seldom_moves_the_offset_however_small_a_class_is(counts: list[int]) -> None:
    public = public_texts()
    centre = torch.stack([each.features.mean(dim=0) for each in public.values()]).mean(dim=0)
    public = {label: Readings(each.logits, each.features - centre, each.texts) for label, each in public.items()}
    calibrated = calibrated_model(public).offset
    moved = [
        bool(
            (
                teacher_of(public, identity(), moments_of_records(counts, 0.0, 0.0, seed=seed)).offset
                != calibrated
            ).any()
        )
        for seed in range(100, 300, 2)
    ]
    assert np.mean(moved) < 0.5  # of one normal deviation, a third is beyond its standard deviation


def naive_bayes(noise: float, counts: tuple[float, float] = (900.0, 100.0)) -> NaiveBayes:
    weights = torch.linspace(-1, 1, 2 * VOCABULARY).view(2, -1).double()
    none, expected = torch.zeros(VOCABULARY).double(), torch.eye(2).double()
    return NaiveBayes(weights, none, none, expected, torch.tensor(counts).double(), noise, slope=0.5)


@pytest.mark.parametrize("with_probe", [False, True])
def test_the_scores_of_tokens_are_added_to_the_teachers_others(with_probe: bool) -> None:
    texts, classifier = readings(40, 7), naive_bayes(noise=1e9)
    moments = moments_of_records([3000, 1000], shift=0.0, apart=0.2) if with_probe else None
    features = identity() if with_probe else None
    without = teacher_of(public_texts(), features, moments)
    teacher = teacher_of(public_texts(), features, moments, classifier)
    scores = np.array(
        [[0.5 * sum(row[token] for token in set(text)) for row in classifier.weights] for text in texts.texts]
    )
    ours, expected = (
        teacher.probabilities(texts).log().numpy(),
        without.probabilities(texts).log().numpy() + scores,
    )
    np.testing.assert_allclose(ours - ours[:, :1], expected - expected[:, :1], atol=1e-6)


def test_the_shares_come_from_the_counts_with_less_noise() -> None:
    moments = moments_of_records([3000, 1000], 0.0, 0.2, noise=0.1)
    for noise, share in ((1e-3, 910 / 1020), (1e3, 0.75)):
        teacher = teacher_of(public_texts(), identity(), moments, naive_bayes(noise))
        assert float(teacher.log_shares[0].exp()) == pytest.approx(share, abs=0.01)


def test_noise_and_few_records_move_the_teacher_to_the_calibrated_model() -> None:
    public, texts = public_texts(), readings(30, 8)
    by_model = calibrated_model(public).probabilities(texts)
    noisy = teacher_of(public, identity(), moments_of_records([3000, 1000], 0.1, 0.2, noise=1e5))
    torch.testing.assert_close(noisy.probabilities(texts), by_model, atol=0.02, rtol=0)
    few = teacher_of(public, identity(), moments_of_records([2, 2], 0.0, 0.0))
    torch.testing.assert_close(few.probabilities(texts), by_model, atol=0.1, rtol=0)


def test_class_sums_alone_shift_the_answer_and_count_the_classes_as_with_a_second_moment() -> None:
    public = public_texts()
    moments = moments_of_records([3000, 1000], 0.1, 0.2)
    whole = teacher_of(public, identity(), moments)
    alone = teacher_of(public, identity(), Moments(moments.class_sums, None))
    assert torch.equal(alone.offset, whole.offset)
    assert torch.equal(alone.log_shares, whole.log_shares)
    assert alone.probe is not None
    assert alone.probe.shrinkage > 0.9
    # Noise that drowns the counts leaves equal shares.
    drowned = teacher_of(public, identity(), Moments(moments.class_sums, None, 1e5))
    torch.testing.assert_close(drowned.log_shares.exp(), torch.full((2,), 0.5).double(), atol=0.02, rtol=0)


def knowing_teacher() -> Teacher:
    """A teacher with probe and token rates."""
    moments = moments_of_records([3000, 1000], 0.0, 0.2)
    return teacher_of(public_texts(), identity(), moments, naive_bayes(noise=1.0))


def test_the_mean_of_the_released_scores_is_that_of_the_classes_means() -> None:
    teacher, texts = knowing_teacher(), readings(90, 7, shift=0.3)
    columns = torch.tensor([0] * 60 + [1] * 30)
    found = mean_released_scores(teacher, texts, columns)
    scores = teacher.released_scores(texts).numpy()
    scores = scores - scores.mean(axis=1, keepdims=True)
    parts = [scores[:60], scores[60:]]
    mean = np.mean([part.mean(axis=0) for part in parts], axis=0)
    chance = sum(part.var(axis=0, ddof=1).sum() / len(part) for part in parts) / 4
    np.testing.assert_allclose(found.numpy(), mean * max(0.0, 1 - chance / (mean**2).sum()), rtol=1e-9)
    assert 0.5 * abs(mean[0]) < abs(float(found[0])) < abs(mean[0])
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-12)


def test_what_all_texts_have_in_common_does_not_decide_their_labels() -> None:
    """Texts that all lie aside of the records, in the direction of the probe, have no class for that."""
    teacher = knowing_teacher()
    texts, columns = readings(4000, 7), torch.arange(4000) % 2
    moved = Readings(texts.logits, texts.features + torch.tensor([0.0, 0.3, 0.0, 0.0]).double(), texts.texts)
    centred = [
        dataclasses.replace(teacher, offset=teacher.offset + mean_released_scores(teacher, each, columns))
        for each in (texts, moved)
    ]
    before, after = teacher.probabilities(texts), teacher.probabilities(moved)
    assert float((after - before)[:, 0].mean()) > 0.2
    before, after = centred[0].probabilities(texts), centred[1].probabilities(moved)
    torch.testing.assert_close(after, before, atol=0.01, rtol=0)


def test_few_texts_and_texts_of_one_class_are_labelled_as_they_are() -> None:
    teacher = knowing_teacher()
    for count, columns in ((20, [0] * 20), (3, [0, 0, 1])):
        assert not mean_released_scores(teacher, readings(count, 7, shift=0.3), torch.tensor(columns)).any()
    # These texts resemble the records: the true mean is zero, and the mean over eight of them is mostly chance.
    teacher = teacher_of(public_texts(), identity(), moments_of_records([3000, 3000], 0.0, 0.2))
    squares = np.zeros(2)
    for seed in range(200):
        texts, columns = readings(8, seed), torch.arange(8) % 2
        texts.features[:, 1] += 0.2 * (1 - 2 * columns)
        scores = teacher.released_scores(texts).diff(dim=1).mean() / 2
        squares += np.square([float(mean_released_scores(teacher, texts, columns)[1]), float(scores)])
    assert squares[0] < 0.7 * squares[1]


def test_without_a_release_the_offset_stays() -> None:
    teacher = calibrated_model(public_texts())
    assert not mean_released_scores(teacher, readings(40, 7), torch.arange(40) % 2).any()


def test_a_count_below_zero_is_no_error() -> None:
    moments = moments_of_records([50, 50], 0.0, 0.1, noise=10.0)
    moments.class_sums[3][-1] = -40.0
    teacher = teacher_of(public_texts(), identity(), moments)
    assert teacher.probabilities(readings(5, 9)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_readings_are_those_of_texts_one_by_one(tokenizer, prompt_template, dtype: torch.dtype) -> None:
    model = tiny_language_model(tokenizer, "phi", dtype=dtype)
    template = tokenise_template(model, prompt_template)
    probe = random_probe(model, template)
    texts = [[70, 3, 5], [71], [72, 4, 9, 11, 2]]
    read = read_texts(model, template, probe.features, texts, batch_size=2)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for row, text in enumerate(texts):
        ids = torch.tensor([[*template.prefix, *text, *template.suffix]])
        output = model.model(input_ids=ids, use_cache=False)
        expected = output.logits[0, -1, template.first_tokens].double()
        torch.testing.assert_close(read.logits[row], expected, atol=tolerance, rtol=tolerance)
        layers = model.layers(input_ids=ids)
        begin = len(template.prefix)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        mask[0, begin : begin + len(text)] = True
        features = probe.features(text_means(layers, mask))[0].double()
        torch.testing.assert_close(read.features[row], features, atol=tolerance, rtol=tolerance)


def test_logits_that_are_not_finite_are_refused(phi: LanguageModel, prompt_template, monkeypatch) -> None:
    template = tokenise_template(phi, prompt_template)
    monkeypatch.setattr(
        "gradmm.labelling.teacher.answer_logits", lambda *_: torch.full((1, 2), math.nan, dtype=torch.float64)
    )
    with pytest.raises(InputError, match="logits are not finite"):
        read_texts(phi, template, None, [[70]], batch_size=1)
