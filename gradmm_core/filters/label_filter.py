"""Drop texts of another class, by the model's few-shot classification and by the probe released with the target.

The log-probabilities of the two are added, so the more confident one decides. A probe that has learnt nothing is
uniform and leaves the decision to the model. A probe of enough records outvotes a model that does not know the
task.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.config.settings import LabelFilterSettings
from gradmm.filters.rows import filter_figures, token_lists
from gradmm.lm.classification import predict
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate
from gradmm.storage.artifacts import StageOutput
from gradmm.target.matched_target import released_probe
from gradmm.target.probe import Probe
from gradmm.target.target_space import features_from_table


def classify_texts(
    language_model: LanguageModel,
    prompt_template: PromptTemplate,
    template: TokenisedTemplate,
    texts: pd.DataFrame,
    settings: LabelFilterSettings,
    target: StageOutput | None,
    space: StageOutput | None,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Classify texts: the rows and figures of the stage `label_filter`, if it is enabled.

    Args:
        target, space: of the probe; None for texts that are generated without one.
    """
    probe = None
    if target and space:
        features = features_from_table(space.read_table(), language_model.device)
        probe = released_probe(target, features, template)
    classified = filter_labels(language_model, prompt_template, template, texts, settings, probe)
    return classified, filter_figures(classified)


def filter_labels(
    language_model: LanguageModel,
    prompt_template: PromptTemplate,
    template: TokenisedTemplate,
    texts: pd.DataFrame,
    settings: LabelFilterSettings,
    probe: Probe | None = None,
) -> pd.DataFrame:
    """Add the columns `predicted`, `probability` (of the text's class), `kept` and `reason` (GRADMM, section 4.3).

    The exemplars are public and written by hand. Each text is preceded by all of them.

    Args:
        probe: adds its log-probabilities, which do not depend on the exemplars; None if none was released.
    """
    tokens = token_lists(texts)
    longest = max(map(len, tokens), default=0)
    context = exemplar_context(language_model, prompt_template, template, settings, longest)
    predictions = predict(language_model, template, tokens, batch_size=settings.batch_size, context=context)
    labels = texts["label"].to_numpy()
    own = pd.Index(template.labels).get_indexer(pd.Index(labels))
    probabilities = predictions.probabilities
    if settings.calibrated:
        probabilities = calibrated(probabilities, torch.from_numpy(own))
    if probe is not None:
        by_probe = probe.classify(language_model, template, tokens, settings.batch_size)
        probabilities = (_logs(probabilities) + by_probe.to(probabilities)).softmax(dim=1)
    predicted = np.array(template.labels)[probabilities.argmax(dim=1).numpy()]
    agrees = predicted == labels
    return texts.assign(
        predicted=predicted,
        probability=probabilities.numpy()[np.arange(len(own)), own],
        kept=agrees,
        reason=np.where(agrees, "", "classified as another label"),
    )


def without_filter(texts: pd.DataFrame) -> pd.DataFrame:
    """Keep all texts, unread: the columns of `filter_labels`, without a prediction."""
    return texts.assign(
        predicted=pd.array([pd.NA] * len(texts), dtype="Int64"), probability=np.nan, kept=True, reason=""
    )


def exemplar_context(
    language_model: LanguageModel,
    prompt_template: PromptTemplate,
    template: TokenisedTemplate,
    settings: LabelFilterSettings,
    text_tokens: int,
) -> list[int]:
    """Tokenise the exemplars: lines of exemplar + suffix + verbaliser.

    Raises:
        InputError: if exemplars, template and a text of `text_tokens` tokens exceed the model's positions.
    """
    lines = [
        f"{e.text}{prompt_template.suffix}{prompt_template.verbalisers[e.label]}\n" for e in settings.exemplars
    ]
    context = language_model.encode("".join(lines))
    longest = len(template.prefix) + len(context) + text_tokens + len(template.suffix)
    language_model.check_fits(longest, "a text after all exemplars", "label_filter.exemplars")
    return context


def calibrated(
    probabilities: Float[Tensor, "texts classes"], own: Int[Tensor, " texts"]
) -> Float[Tensor, "texts classes"]:
    """Remove the model's preference for a class over all texts (batch calibration; Zhou et al., 2024).

    Subtracts from each class's log-probability its mean over the texts. In this mean, the classes that the texts
    were written for have equal weight.

    Args:
        own: the column of the class that each text was written for.
    """
    logs = _logs(probabilities)
    means = torch.stack([logs[own == column].mean(dim=0) for column in own.unique()])
    return (logs - means.mean(dim=0)).softmax(dim=1)


def _logs(probabilities: Float[Tensor, "texts classes"]) -> Float[Tensor, "texts classes"]:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
