"""Which tokens may appear in generated text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradmm_core.errors import InputError
from gradmm_core.language_model import LanguageModel

#: A token is a word or its beginning (with a leading space), the rest of a word, a contraction's tail, digits, or
#: punctuation.
PATTERNS = {
    "english": r"[A-Za-z]+| (?:[AaI]|[A-Za-z]{2,})| ?'[a-z]{1,2}| ?[0-9]+| ?[.,!?;:'\"()$%&-]| ?--| ?\.\.\.",
    "any": r"\s?\S+",
}


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that generation chooses from.

    `starts_text[i]`: token `ids[i]` may come first. A text is released without surrounding blanks, so a token
    that is another one when it is stripped and tokenised again cannot come first; nor can the rest of a word,
    nor punctuation.
    """

    ids: Int[Tensor, " allowed"]
    starts_text: Bool[Tensor, " allowed"]

    @property
    def starting_ids(self) -> Int[Tensor, " starting"]:
        return self.ids[self.starts_text]


def allowed_tokens(language_model: LanguageModel, language: str) -> AllowedTokens:
    """Drops special, control, undecodable and foreign tokens, by their spelling, all at once.

    Raises:
        InputError: if nothing is left.
    """
    tokenizer = language_model.tokenizer
    size = min(len(tokenizer), language_model.embeddings.shape[0])
    spelling: pd.Series = pd.Series(
        tokenizer.batch_decode([[i] for i in range(size)], clean_up_tokenization_spaces=False)
    )
    decodable = ~spelling.str.contains("\N{REPLACEMENT CHARACTER}") & spelling.map(str.isprintable)
    ordinary = ~spelling.index.isin(tokenizer.all_special_ids)
    spelling = spelling[spelling.str.fullmatch(PATTERNS[language]) & decodable & ordinary]
    ids = spelling.index.to_numpy()
    if not len(ids):
        raise InputError(
            f"no token is a word of {language!r}",
            "generation.projection.language",
            "use 'any', or another model",
        )
    starts = _starts_text(tokenizer, spelling)
    if not starts.any():
        raise InputError(
            "no token can begin a text", "model.name", "use a model with whole words in its vocabulary"
        )
    device = language_model.device
    return AllowedTokens(torch.tensor(ids, device=device), torch.tensor(starts.to_numpy(), device=device))


def _starts_text(tokenizer: Any, spelling: pd.Series) -> pd.Series:
    """Which tokens (id -> spelling) remain themselves at the start of a text, and are no rest of a word there."""

    stripped = spelling.str.strip()
    tokens = tokenizer(stripped.tolist(), add_special_tokens=False)["input_ids"]
    alone = [pieces == [i] for pieces, i in zip(tokens, spelling.index, strict=True)]
    unchanged = stripped.str[0].map(str.isalnum) & pd.Series(alone, index=spelling.index)
    if not spelling.str.startswith(" ").any():
        return unchanged  # the tokenizer marks beginnings of words itself (SentencePiece)
    # Where " film" is allowed, "film" is a word; "uate" has no such twin.
    return unchanged & (" " + stripped).isin(spelling)
