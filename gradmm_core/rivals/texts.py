"""Write the texts of a rival that changes the model or its prompt, as many of each class as another stage's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pandas as pd

from gradmm.config.settings import GenerationSettings
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.result import released_texts
from gradmm.generation.sampler import ModelSampler
from gradmm.generation.written import Writer
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.perplexity import log_perplexities
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.rivals.releases import UNFILTERED


def texts_like(
    texts: pd.DataFrame,
    writing: LanguageModel,
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    generation: GenerationSettings,
    seed: int,
    changed: Callable[[int], AbstractContextManager[None]] = nullcontext,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Write as many texts of each class as `texts` has; return the rows and figures of a stage.

    Texts that contain a class's answer are left out.

    Args:
        texts: of the stage `generation`; their ids and classes are kept.
        writing: the model that writes; `language_model`, the recipe's own, measures perplexity.
        text_tokens: the length to which texts are written before they are cut, by label.
        changed: makes the context in which a class's texts are written.
    """
    allowed = allowed_tokens(writing, generation.projection.language)
    constraints = TextConstraints(writing, template)
    ends = SentenceEnds(writing) if generation.whole_sentences else None
    parts = []
    for label in template.labels:
        of_class = texts[texts["label"] == label]
        sampler = ModelSampler(writing, allowed, instructions[label], generation.written.top_k, ends=ends)
        write = Writer(writing, sampler, constraints, generation.written, ends)
        randoms = [np.random.default_rng([seed, label, number]) for number in range(len(of_class))]
        with changed(label), ComputeMeter(writing) as meter:
            ids = write(randoms, text_tokens[label]).token_ids
        written = released_texts(writing, template, ids)
        new = of_class.assign(
            text=written["text"].to_numpy(),
            token_ids=written["token_ids"].to_numpy(),
            token_passes=meter.token_passes / len(of_class),
        )
        new = new[constraints.without_answer(ids).cpu().numpy() & (new["token_ids"].map(len) > 0)]
        parts.append(new.assign(rank=np.arange(1, len(new) + 1)))
    rows = pd.concat(parts, ignore_index=True)
    perplexities = log_perplexities(language_model, rows["token_ids"].tolist())
    rows = rows.assign(log_perplexity=perplexities, **UNFILTERED, predicted=pd.NA)
    return rows, {"texts": len(rows), "log_perplexity": float(np.mean(perplexities))}
