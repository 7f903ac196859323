"""Sentence boundaries, used to end texts at the end of a sentence.

A text with a fixed number of tokens usually stops within a sentence, and the suffix (" It was") does not follow
naturally.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradmm.lm.language_model import LanguageModel

#: Padding after the last token of shorter texts in a matrix.
PAD = -1

#: Endings in scripts without spaces, which end a sentence regardless of the next character.
ENDINGS_WITHOUT_SPACE = ("。", "！", "？")
ENDINGS = (".", "!", "?", "…", *ENDINGS_WITHOUT_SPACE)
CLOSING = "\"')]}»”’"


class SentenceEnds:
    """Find sentence ends, and cut texts at the last one.

    A sentence ends at a token with one of `ENDINGS`, optionally followed by closing quotes and brackets, if the
    text ends there or a space follows. The full stops of "3.5" and "a.m" therefore do not count.

    Attributes:
        tokens: mask of the tokens that can end a sentence.
    """

    tokens: Bool[Tensor, " vocabulary"]

    def __init__(self, language_model: LanguageModel) -> None:
        tokenizer, device = language_model.tokenizer, language_model.device
        size = language_model.embeddings.shape[0]
        known = range(min(len(tokenizer), size))
        spelling = tokenizer.batch_decode([[i] for i in known], clean_up_tokenization_spaces=False)
        pieces = tokenizer.convert_ids_to_tokens(list(known))

        def mask(flags: list[bool]) -> Bool[Tensor, " vocabulary"]:
            return torch.tensor(flags + [False] * (size - len(flags)), device=device)

        bare = [word.rstrip(CLOSING) for word in spelling]
        self.tokens = mask([word.endswith(ENDINGS) for word in bare])
        self._without_space = mask([word.endswith(ENDINGS_WITHOUT_SPACE) for word in bare])
        # Decoding a single SentencePiece token removes its leading space.
        after_space = [
            word[:1].isspace() or piece.startswith("\N{LOWER ONE EIGHTH BLOCK}")
            for word, piece in zip(spelling, pieces, strict=True)
        ]
        self._after_space = mask(after_space)
        self._closes = mask(
            [
                bool(word) and not rest and not space
                for word, rest, space in zip(spelling, bare, after_space, strict=True)
            ]
        )

    def __call__(self, ids: Int[Tensor, "texts tokens"]) -> Bool[Tensor, "texts tokens"]:
        """Return a mask of the tokens that end a sentence; False for `PAD`."""
        text = ids != PAD
        tokens = ids.masked_fill(~text, 0)
        ended = self.tokens[tokens] & text
        closes = self._closes[tokens] & text
        for place in range(1, ids.shape[1]):
            ended[:, place] |= closes[:, place] & ended[:, place - 1]
        followed = (self._after_space[tokens] | ~text)[:, 1:] | self._without_space[tokens][:, :-1]
        return torch.cat([ended[:, :-1] & followed, ended[:, -1:]], dim=1)

    def cut(self, ids: Int[Tensor, "texts tokens"]) -> Int[Tensor, "texts tokens"]:
        """Replace tokens after the last sentence by `PAD`, unless it ends in the first half of the text."""
        places = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(self(ids), places, -1).amax(dim=1, keepdim=True)
        late_enough = 2 * (last + 1) > ids.shape[1]
        return ids.masked_fill(late_enough & (places > last), PAD)

    def complete(self, ids: Int[Tensor, "texts tokens"]) -> Bool[Tensor, " texts"]:
        """Return a mask of the texts that end with a sentence."""
        last = (ids != PAD).sum(dim=1, keepdim=True) - 1
        return self(ids).gather(1, last)[:, 0]
