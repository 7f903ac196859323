"""The result of a generation method, and the texts that are released of it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import PAD
from gradmm.lm.template import TokenisedTemplate, tokenise_texts


@dataclass(frozen=True)
class GenerationResult:
    """Texts, their losses and the history of the search.

    `token_ids` are padded with `PAD` after a text's end. `losses` belong to `token_ids`. `history[t]` holds the
    matching losses of the texts at iteration t.
    """

    token_ids: Int[Tensor, "batch tokens"]
    losses: Float[Tensor, " batch"]
    history: Float[Tensor, "iterations batch"]


def released_texts(
    language_model: LanguageModel, template: TokenisedTemplate, token_ids: Int[Tensor, "batch tokens"]
) -> pd.DataFrame:
    """Decode generated tokens to texts, and tokenise these again, as their readers will.

    Args:
        token_ids: padded with `PAD`.

    Returns:
        The columns `text`, without surrounding whitespace, and `token_ids`.
    """
    texts = [language_model.decode([i for i in ids if i != PAD]).strip() for ids in token_ids.tolist()]
    tokens = tokenise_texts(language_model.tokenizer, texts, template.max_text_tokens, "generation")
    return pd.DataFrame({"text": texts, "token_ids": tokens})
