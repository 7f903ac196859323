"""Where sentences end, so that a text can end there too.

A model that writes so many tokens stops in the middle of a sentence. Nobody calls that a sentence, and what the
model is asked next (" It was") does not follow from it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradmm_core.language_model import LanguageModel

#: Stands after a text's last token, where texts of several lengths share a matrix.
PAD = -1

#: Those of scripts without blanks end a sentence whatever follows.
ENDINGS_WITHOUT_BLANK = ("。", "！", "？")
ENDINGS = (".", "!", "?", "…", *ENDINGS_WITHOUT_BLANK)
CLOSING = "\"')]}»”’"


class SentenceEnds:
    """Cuts texts where their last sentence ends.

    A sentence ends with a token that ends in one of `ENDINGS`, closing quotes and brackets after it included, and
    either is the text's last or has a blank after it: that of "3.5" or "a.m" ends nothing.

    Attributes:
        tokens: which tokens can be such an end.
    """

    tokens: Bool[Tensor, " vocabulary"]

    def __init__(self, language_model: LanguageModel) -> None:
        tokenizer, device = language_model.tokenizer, language_model.device
        size = language_model.embeddings.shape[0]
        known = range(min(len(tokenizer), size))
        spelling = tokenizer.batch_decode([[i] for i in known], clean_up_tokenization_spaces=False)
        pieces = tokenizer.convert_ids_to_tokens(list(known))

        def those(verdicts: list[bool]) -> Bool[Tensor, " vocabulary"]:
            return torch.tensor(verdicts + [False] * (size - len(verdicts)), device=device)

        bare = [word.rstrip(CLOSING) for word in spelling]
        self.tokens = those([word.endswith(ENDINGS) for word in bare])
        self._without_blank = those([word.endswith(ENDINGS_WITHOUT_BLANK) for word in bare])
        # A SentencePiece token loses its blank when it is decoded by itself.
        after_blank = [
            word[:1].isspace() or piece.startswith("\N{LOWER ONE EIGHTH BLOCK}")
            for word, piece in zip(spelling, pieces, strict=True)
        ]
        self._after_blank = those(after_blank)
        self._closes = those(
            [
                bool(word) and not rest and not blank
                for word, rest, blank in zip(spelling, bare, after_blank, strict=True)
            ]
        )

    def __call__(self, ids: Int[Tensor, "texts tokens"]) -> Bool[Tensor, "texts tokens"]:
        """Whether a sentence ends with each token; `PAD` ends none."""
        text = ids != PAD
        tokens = ids.masked_fill(~text, 0)
        ended = self.tokens[tokens] & text
        closes = self._closes[tokens] & text
        for place in range(1, ids.shape[1]):
            ended[:, place] |= closes[:, place] & ended[:, place - 1]
        followed = (self._after_blank[tokens] | ~text)[:, 1:] | self._without_blank[tokens][:, :-1]
        return torch.cat([ended[:, :-1] & followed, ended[:, -1:]], dim=1)

    def cut(self, ids: Int[Tensor, "texts tokens"]) -> Int[Tensor, "texts tokens"]:
        """With `PAD` after the last sentence's end. A text whose last one ends in its first half stays whole."""
        places = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(self(ids), places, -1).amax(dim=1, keepdim=True)
        late_enough = 2 * (last + 1) > ids.shape[1]
        return ids.masked_fill(late_enough & (places > last), PAD)

    def complete(self, ids: Int[Tensor, "texts tokens"]) -> Bool[Tensor, " texts"]:
        """Which texts end where a sentence does."""
        last = (ids != PAD).sum(dim=1, keepdim=True) - 1
        return self(ids).gather(1, last)[:, 0]
