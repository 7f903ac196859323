"""Which tokens may appear in generated text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
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
    nor punctuation. `within_text[i]` is the place in `ids` of the same word after a blank, where there is one.
    `continues_word[i]`: it is the rest of a word, not a word or its beginning.
    """

    ids: Int[Tensor, " allowed"]
    starts_text: Bool[Tensor, " allowed"]
    within_text: Int[Tensor, " allowed"]
    continues_word: Bool[Tensor, " allowed"]

    @property
    def starting_ids(self) -> Int[Tensor, " starting"]:
        return self.ids[self.starts_text]

    def first_logits(self, logits: Float[Tensor, "batch allowed"]) -> Float[Tensor, "batch allowed"]:
        """Logits of a text's first token.

        What goes on from an opening may do so with a blank or without: a word is as likely as its two tokens.
        """
        return logits.logaddexp(logits[:, self.within_text]).masked_fill(~self.starts_text, -torch.inf)


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
    # A word without a token of its own after a blank stands for itself.
    place = {word: i for i, word in reversed(list(enumerate(spelling)))}
    within = np.array([place.get(f" {word}", i) for i, word in enumerate(spelling)])
    columns = (ids, starts.to_numpy(bool), within, _continues(tokenizer, spelling).to_numpy(bool))
    return AllowedTokens(*(torch.tensor(column, device=language_model.device) for column in columns))


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


def _continues(tokenizer: Any, spelling: pd.Series) -> pd.Series:
    """Which tokens are joined to the word before them: the rest of a word, or a contraction's tail ("'t")."""
    joined = spelling.str[0].map(str.isalnum) | spelling.str.fullmatch(r"'[a-z]{1,2}")
    if spelling.str.startswith(" ").any():
        return joined
    pieces = pd.Series(tokenizer.convert_ids_to_tokens(spelling.index.tolist()), index=spelling.index)
    return joined & ~pieces.str.startswith("\N{LOWER ONE EIGHTH BLOCK}")
