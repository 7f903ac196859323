"""Label texts by the model's own answer, calibrated, together with what was released with the target.

    p(c | text) = softmax over c of  z_c(text) - a_c + log q(c | text) + t_c(text) - m_c + log s_c

    z  the model's logits of the verbalisers, after text + suffix
    a  the mean of z over texts of all classes alike: over public texts, plus the change of this mean that a linear
       regression on public texts predicts for the released mean of the features
    q  the released probe
    t  the scores of the naive Bayes classifier of the released token rates
    m  the mean of log q + t over the texts that are labelled, each class that they were written for alike
    s  the classes' shares of the records, from the released counts

Terms that were not released are left out. Without any, p is the softmax of z - a with a from public texts alone:
the calibrated model. The rest is post-processing of the release and costs no privacy. The terms share information,
but their plain sum predicts better than corrected ones: see docs/research/labels.md.

Over the records the released classifiers favour no class beyond its share. Over the texts they would: these differ
from the records in ways that have nothing to do with the classes. So m is subtracted, as in batch calibration
(Zhou et al., ICLR 2024), which does so with the model's own answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from gradmm.config.settings import LabellingSettings, TargetGradientSettings
from gradmm.errors import InputError
from gradmm.filters.rows import token_lists
from gradmm.labelling.labelling import labelled_texts, labelling_figures
from gradmm.lm.classification import answer_logits
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate, length_bucketed, make_batch
from gradmm.storage.artifacts import StageOutput
from gradmm.target.features import TextFeatures, text_means
from gradmm.target.matched_target import released_moments, released_naive_bayes
from gradmm.target.naive_bayes import NaiveBayes
from gradmm.target.probe import Moments, Probe, fit_probe
from gradmm.target.target_space import features_from_table, public_texts

#: Leading features that the regression of the model's answers uses. More of them describe public texts only.
REGRESSION_DIMENSIONS = 32

#: The regression's penalty, as a share of the features' mean variance.
RIDGE = 0.01

#: Records added to each class's count, besides the noise's standard deviation, because few records tell little.
PRIOR_RECORDS = 10.0


class Readings(NamedTuple):
    """The model's class logits for texts, their features (no columns if there is no probe) and their token ids."""

    logits: Float[Tensor, "texts classes"]
    features: Float[Tensor, "texts dimensions"]
    texts: Sequence[list[int]]


@dataclass(frozen=True, eq=False)
class Teacher:
    """The terms of p(c | text) that do not depend on the text, and the classifiers; float64, on the CPU."""

    offset: Float[Tensor, " classes"]
    log_shares: Float[Tensor, " classes"]
    probe: Probe | None = None
    naive_bayes: NaiveBayes | None = None

    def probabilities(self, readings: Readings) -> Float[Tensor, "texts classes"]:
        """Compute p(c | text); each row adds up to 1."""
        scores = readings.logits - self.offset + self.log_shares + self.released_scores(readings)
        return scores.softmax(dim=1)

    def released_scores(self, readings: Readings) -> Float[Tensor, "texts classes"]:
        """Compute log q + t: the scores by the released classifiers, zero without any."""
        scores = torch.zeros_like(readings.logits)
        if self.probe is not None:
            scores = scores + self.probe.of_features(readings.features)
        if self.naive_bayes is not None:
            scores = scores + self.naive_bayes.scores(readings.texts)
        return scores


def label_texts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: pd.DataFrame,
    class_names: Mapping[int, str],
    instructions: dict[int, str],
    matching: TargetGradientSettings,
    settings: LabellingSettings,
    target: StageOutput | None,
    space: StageOutput | None,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Give texts their class probabilities: the rows and figures of the stage `labelling`, for soft labels.

    Public texts, written as for the target space, calibrate the model.

    Args:
        texts: without the columns `kept` and `reason`.
        target, space: the release; None to label by the calibrated model alone.
    """
    features = features_from_table(space.read_table(), language_model.device) if space else None
    public = {
        label: read_texts(language_model, template, features, of_label, settings.batch_size)
        for label, of_label in public_texts(language_model, template, instructions, matching).items()
    }
    moments = released_moments(target, template) if target and features else None
    naive_bayes = released_naive_bayes(target, space, template, matching) if target else None
    if naive_bayes:
        naive_bayes = naive_bayes.with_slope([text for read in public.values() for text in read.texts])
    teacher = teacher_of(public, features, moments, naive_bayes)
    readings = read_texts(language_model, template, features, token_lists(texts), settings.batch_size)
    columns = torch.tensor([template.labels.index(label) for label in texts["label"]], dtype=torch.int64)
    mean = mean_released_scores(teacher, readings, columns)
    centred = dataclasses.replace(teacher, offset=teacher.offset + mean)
    labelled = labelled_texts(texts, centred.probabilities(readings).numpy(), class_names)
    names = [str(label) for label in class_names]
    figures = {
        "answer_offset": dict(zip(names, teacher.offset.tolist(), strict=True)),
        "classifier_offset": dict(zip(names, mean.tolist(), strict=True)),
        "class_shares": dict(zip(names, teacher.log_shares.softmax(dim=0).tolist(), strict=True)),
        "probe_shrinkage": teacher.probe.shrinkage if teacher.probe else None,
        "informative_tokens": naive_bayes.informative_tokens if naive_bayes else None,
        "token_slope": naive_bayes.slope if naive_bayes else None,
    }
    return labelled, labelling_figures(labelled, class_names) | figures


@torch.no_grad()
def read_texts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    features: TextFeatures | None,
    texts: Sequence[list[int]],
    batch_size: int,
) -> Readings:
    """Read each text once, for the model's answer and for its features.

    Args:
        texts: token ids, without prefix and suffix.

    Raises:
        InputError: if the model's logits are not finite.
    """
    # One response token suffices to locate the answer.
    responses = {label: response[:1] for label, response in template.responses.items()}
    first_token_only = dataclasses.replace(template, responses=responses)
    logits = torch.empty(len(texts), len(template.labels), dtype=torch.float64)
    mapped = torch.empty(len(texts), 0 if features is None else len(features.map), dtype=torch.float64)
    any_label = template.labels[0]
    batches = length_bucketed([len(text) for text in texts], batch_size)
    for rows in tqdm(batches, desc="labelling", disable=None, leave=False):
        batch = make_batch(
            first_token_only, [texts[i] for i in rows], [any_label] * len(rows), language_model.device
        )
        layers = language_model.layers(input_ids=batch.input_ids)
        logits[rows] = answer_logits(language_model, template, layers[-1], batch).to(logits)
        if features is not None:
            mapped[rows] = features(text_means(layers, batch.text_mask)).to(mapped)
    if not logits.isfinite().all():
        fix = "set model.dtype=float32, or use another model"
        raise InputError("the model's logits are not finite", "model.name", fix)
    return Readings(logits, mapped, texts)


def calibrated_model(public: Mapping[int, Readings]) -> Teacher:
    """Return the teacher that uses no private data.

    Args:
        public: readings of public texts, by the label that they were written for.
    """
    offset = torch.stack([readings.logits.mean(dim=0) for readings in public.values()]).mean(dim=0)
    return Teacher(offset, torch.zeros_like(offset))


def teacher_of(
    public: Mapping[int, Readings],
    features: TextFeatures | None,
    moments: Moments | None,
    naive_bayes: NaiveBayes | None = None,
) -> Teacher:
    """Return the teacher that knows the release; the calibrated model if nothing was released.

    Args:
        public: readings of public texts, by the label that they were written for, with `features`.
        features, moments: of the released probe; None without one.
        naive_bayes: None if no token rates were released.
    """
    teacher = dataclasses.replace(calibrated_model(public), naive_bayes=naive_bayes)
    counts = []
    if moments is not None and features is not None:
        offset = teacher.offset + _answer_shift(public, moments)
        teacher = dataclasses.replace(teacher, offset=offset, probe=fit_probe(features, moments))
        released = moments.class_means()
        counts.append((released.count_noise, released.counts))
    if naive_bayes is not None:
        counts.append((naive_bayes.count_noise, naive_bayes.counts))
    if not counts:
        return teacher
    noise, records = min(counts, key=lambda each: each[0])
    return dataclasses.replace(teacher, log_shares=log_class_shares(records, noise))


def mean_released_scores(
    teacher: Teacher, readings: Readings, written_for: Int[Tensor, " texts"]
) -> Float[Tensor, " classes"]:
    """Return the mean of the released classifiers' scores over texts, that of each written class alike.

    It adds up to 0 over the classes. It is shrunk by the share of its square that the choice of texts explains
    (James and Stein's factor), so that few texts are labelled as they are. It is zero if some class has fewer than
    two texts.

    Args:
        written_for: column of the class that each text was written for.
    """
    classes = len(teacher.offset)
    scores = teacher.released_scores(readings)
    scores = scores - scores.mean(dim=1, keepdim=True)
    by_class = [scores[written_for == column] for column in range(classes)]
    if min(len(of_class) for of_class in by_class) < 2:
        return torch.zeros_like(teacher.offset)
    mean = torch.stack([of_class.mean(dim=0) for of_class in by_class]).mean(dim=0)
    variances = torch.stack([of_class.var(dim=0).sum() / len(of_class) for of_class in by_class])
    return mean * _james_stein_factor(variances.sum() / classes**2, mean.square().sum())


def log_class_shares(
    records: Float[Tensor, " classes"], noise: Float[Tensor, " classes"] | float
) -> Float[Tensor, " classes"]:
    """Return the log of the classes' shares of the records, towards equal ones the fewer and noisier these are.

    Args:
        records: noisy numbers; negative ones count as 0.
        noise: their standard deviations.
    """
    smoothed = records.clamp_min(0.0) + PRIOR_RECORDS + noise
    return (smoothed / smoothed.sum()).log()


def _answer_shift(public: Mapping[int, Readings], moments: Moments) -> Float[Tensor, " classes"]:
    """Predict by how much the mean answer to private texts differs from that to public ones.

    The prediction is shrunk by the share of its square that noise and sampling explain (James and Stein's factor).
    """
    released = moments.class_means()
    logits = torch.cat([readings.logits for readings in public.values()])
    logits = logits - logits.mean(dim=1, keepdim=True)
    features = torch.cat([readings.features for readings in public.values()])[:, :REGRESSION_DIMENSIONS]
    centre = torch.stack([readings.features.mean(dim=0) for readings in public.values()]).mean(dim=0)
    deviations = features - features.mean(dim=0)
    covariance = deviations.mT @ deviations / len(features)
    penalty = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    products = deviations.mT @ (logits - logits.mean(dim=0)) / len(features)
    slopes = torch.linalg.solve(covariance + penalty, products)
    dimensions = features.shape[1]
    shift = (released.means.mean(dim=0) - centre)[:dimensions] @ slopes
    classes = len(released.counts)
    feature_noise = (released.sum_noise / released.counts).square().sum() / classes**2
    sampling = (1 / released.counts).sum() / classes**2  # of the plain mean of the classes' means
    by_chance = feature_noise * slopes.square().sum() + logits.var(dim=0).sum() * sampling
    return shift * _james_stein_factor(by_chance, shift.square().sum())


def _james_stein_factor(
    by_chance: Float[Tensor, "*each"], squared: Float[Tensor, "*each"]
) -> Float[Tensor, "*each"]:
    """Return the positive-part James-Stein factor (1961), in [0, 1]: the share that chance does not explain.

    Args:
        by_chance: expected squared length of a vector of chance alone.
        squared: squared length of the vector found; the factor of a zero vector is 0.
    """
    return (1 - by_chance / squared).clamp(0.0, 1.0).nan_to_num(0.0)
