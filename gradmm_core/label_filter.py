"""Drops the texts that are taken for another class: by the language model itself, shown a few examples, and by the
probe that was released with the target.

Their log-probabilities are added, so that the one that is surer decides. A probe that has learnt nothing is
undecided, and leaves it to the model; one that has seen enough records outvotes a model that has yet to learn
the task.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm_core.classification import predict
from gradmm_core.filters import token_lists
from gradmm_core.language_model import LanguageModel
from gradmm_core.probe import Probe
from gradmm_core.settings import LabelFilterSettings
from gradmm_core.template import TokenisedTemplate
from gradmm_core.wording import ResponseTemplate


def filter_labels(
    language_model: LanguageModel,
    wording: ResponseTemplate,
    template: TokenisedTemplate,
    texts: pd.DataFrame,
    settings: LabelFilterSettings,
    probe: Probe | None = None,
) -> pd.DataFrame:
    """Adds `predicted`, `probability` (of the text's own class), `kept` and `reason` (GRADMM, section 4.3).

    The exemplars are public and written by hand; before every text stand lines of exemplar + suffix + verbaliser.

    Args:
        probe: has a say too; it is not shown the exemplars.
    """
    lines = [f"{e.text}{wording.suffix}{wording.verbalisers[e.label]}\n" for e in settings.exemplars]
    context, tokens = language_model.encode("".join(lines)), token_lists(texts)
    longest = len(template.prefix) + len(context) + max(map(len, tokens), default=0) + len(template.suffix)
    language_model.check_fits(longest, "a text after all exemplars", "label_filter.exemplars")
    predictions = predict(language_model, template, tokens, batch_size=settings.batch_size, context=context)
    labels = texts["label"].to_numpy()
    own = pd.Index(template.labels).get_indexer(pd.Index(labels))
    probabilities = predictions.probabilities
    if settings.calibrated:
        probabilities = calibrated(probabilities, torch.from_numpy(own))
    if probe is not None:
        by_probe = probe.judge(language_model, template, tokens, settings.batch_size)
        probabilities = (_logs(probabilities) + by_probe.to(probabilities)).softmax(dim=1)
    predicted = np.array(template.labels)[probabilities.argmax(dim=1).numpy()]
    agrees = predicted == labels
    kept = agrees if settings.enabled else np.ones_like(agrees)
    return texts.assign(
        predicted=predicted,
        probability=probabilities.numpy()[np.arange(len(own)), own],
        kept=kept,
        reason=np.where(kept, "", "classified as another label"),
    )


def calibrated(
    probabilities: Float[Tensor, "texts classes"], own: Int[Tensor, " texts"]
) -> Float[Tensor, "texts classes"]:
    """Probabilities without what the model prefers whatever it reads (batch calibration; Zhou et al., 2024).

    From each log-probability its mean is taken, over the texts written for each class alike: as many texts of one
    class as of another would leave a judge without preference undecided on average.

    Args:
        own: the column of the class that each text was written for.
    """
    logs = _logs(probabilities)
    means = torch.stack([logs[own == column].mean(dim=0) for column in own.unique()])
    return (logs - means.mean(dim=0)).softmax(dim=1)


def _logs(probabilities: Float[Tensor, "texts classes"]) -> Float[Tensor, "texts classes"]:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
