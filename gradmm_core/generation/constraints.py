"""Constraints on a text, whatever its matching loss."""

from __future__ import annotations

import re

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import PAD
from gradmm.lm.template import TokenisedTemplate


class TextConstraints:
    """Accept texts that keep their tokens when tokenised again and that contain no class's answer.

    - Released texts are tokenised again. With other tokens, a text has another gradient than the one matched.
    - A text that contains a class's answer ("It was great") has a low loss, but a model learns nothing from it.
    """

    def __init__(self, language_model: LanguageModel, template: TokenisedTemplate) -> None:
        self._lm = language_model
        suffix = language_model.decode(list(template.suffix))
        responses = [language_model.decode(list(response)) for response in template.responses.values()]
        # A response without words (":)") cannot be searched for.
        self._answers = [_words(suffix + response) for response in responses if _words(response).strip()]

    def __call__(self, ids: Int[Tensor, "batch tokens"]) -> Bool[Tensor, " batch"]:
        """Flag the texts that satisfy the constraints; `ids` may be padded with `PAD`."""
        rows = [[token for token in row if token != PAD] for row in ids.tolist()]
        tokenizer = self._lm.tokenizer
        texts = [text.strip() for text in tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)]
        again = tokenizer(texts, add_special_tokens=False)["input_ids"]
        flags = [
            row == read and not any(answer in _words(text) for answer in self._answers)
            for row, read, text in zip(rows, again, texts, strict=True)
        ]
        return torch.tensor(flags, device=ids.device)


def _words(text: str) -> str:
    """Return the case-folded words, each between spaces, so that whole words can be searched for."""
    words = re.findall(r"\w+", text.casefold())
    return f" {' '.join(words)} "
