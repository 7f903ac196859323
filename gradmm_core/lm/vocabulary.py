"""Tokens allowed in generated text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.metrics.words import SPACELESS

#: A token is a word or its beginning (with a leading space), the rest of a word, the end of a contraction, digits,
#: or punctuation.
PATTERNS = {
    "english": r"[A-Za-z]+| (?:[AaI]|[A-Za-z]{2,})| ?'[a-z]{1,2}| ?[0-9]+| ?[.,!?;:'\"()$%&-]| ?--| ?\.\.\.",
    "any": r"\s?\S+",
}


@dataclass(frozen=True)
class AllowedTokens:
    """Candidate tokens for generation.

    `starts_text[i]`: token `ids[i]` may come first. Texts are released without surrounding whitespace, so a token
    that changes when stripped and tokenised again may not come first; nor may the rest of a word or punctuation.
    `within_text[i]`: index in `ids` of the same word after a space, or i if there is none.
    `continues_word[i]`: the token is the rest of a word.
    """

    ids: Int[Tensor, " allowed"]
    starts_text: Bool[Tensor, " allowed"]
    within_text: Int[Tensor, " allowed"]
    continues_word: Bool[Tensor, " allowed"]

    @property
    def starting_ids(self) -> Int[Tensor, " starting"]:
        return self.ids[self.starts_text]

    def beginnings(self, vocabulary: int) -> Bool[Tensor, " vocabulary"]:
        """Return a mask, over the whole vocabulary, of the tokens that begin a word."""
        mask = torch.zeros(vocabulary, dtype=torch.bool, device=self.ids.device)
        mask[self.ids[~self.continues_word]] = True
        return mask

    def first_logits(self, logits: Float[Tensor, "batch allowed"]) -> Float[Tensor, "batch allowed"]:
        """Return the logits of a text's first token.

        The text may continue the prompt with or without a space, so each word gets the probability of both tokens.
        """
        return logits.logaddexp(logits[:, self.within_text]).masked_fill(~self.starts_text, -torch.inf)


def allowed_tokens(language_model: LanguageModel, language: str, spaceless_words: bool = True) -> AllowedTokens:
    """Select tokens by their spelling: drop special, control, undecodable and foreign ones.

    Args:
        spaceless_words: take tokens of scripts without spaces for words. False for public text, since with other
            first tokens the target space, and with it every release, would be another.

    Raises:
        InputError: if no token remains, or none can begin a text.
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
    spaceless = spelling.str.match(SPACELESS) & spaceless_words
    starts = _starts_text(tokenizer, spelling, spaceless)
    if not starts.any():
        raise InputError(
            "no token can begin a text", "model.name", "use a model with whole words in its vocabulary"
        )
    # A word without a token that includes the space maps to itself.
    index = {word: i for i, word in reversed(list(enumerate(spelling)))}
    within = np.array([index.get(f" {word}", i) for i, word in enumerate(spelling)])
    continues = _continues(tokenizer, spelling) & ~spaceless
    columns = (ids, starts.to_numpy(bool), within, continues.to_numpy(bool))
    return AllowedTokens(*(torch.tensor(column, device=language_model.device) for column in columns))


def _starts_text(tokenizer: Any, spelling: pd.Series, spaceless: pd.Series) -> pd.Series:
    """Flag tokens (id -> spelling) that are unchanged at the start of a text and are not the rest of a word."""
    stripped = spelling.str.strip()
    tokens = tokenizer(stripped.tolist(), add_special_tokens=False)["input_ids"]
    alone = [pieces == [i] for pieces, i in zip(tokens, spelling.index, strict=True)]
    unchanged = stripped.str[0].map(str.isalnum) & pd.Series(alone, index=spelling.index)
    if not spelling.str.startswith(" ").any():
        return unchanged  # SentencePiece marks the beginnings of words
    # "film" is a word because " film" is allowed; " uate" is not.
    return unchanged & ((" " + stripped).isin(spelling) | spaceless)


def _continues(tokenizer: Any, spelling: pd.Series) -> pd.Series:
    """Flag tokens that continue a word: its rest, or the end of a contraction ("'t")."""
    joined = spelling.str[0].map(str.isalnum) | spelling.str.fullmatch(r"'[a-z]{1,2}")
    if spelling.str.startswith(" ").any():
        return joined
    pieces = pd.Series(tokenizer.convert_ids_to_tokens(spelling.index.tolist()), index=spelling.index)
    return joined & ~pieces.str.startswith("\N{LOWER ONE EIGHTH BLOCK}")
