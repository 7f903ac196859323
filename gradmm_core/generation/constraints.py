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

    Texts that match no target need to satisfy only the second.
    """

    def __init__(self, language_model: LanguageModel, template: TokenisedTemplate) -> None:
        self._lm = language_model
        suffix = language_model.decode(list(template.suffix))
        responses = [language_model.decode(list(response)) for response in template.responses.values()]
        # A response without words (":)") cannot be searched for.
        self._answers = [_words(suffix + response) for response in responses if _words(response).strip()]

    def __call__(self, ids: Int[Tensor, "batch tokens"]) -> Bool[Tensor, " batch"]:
        """Flag the texts that satisfy the constraints; `ids` may be padded with `PAD`."""
        rows, texts = self._texts(ids)
        again = self._lm.tokenizer(texts, add_special_tokens=False)["input_ids"]
        same = [row == read for row, read in zip(rows, again, strict=True)]
        return torch.tensor(same, device=ids.device) & self._lack_answers(texts, ids.device)

    def without_answer(self, ids: Int[Tensor, "batch tokens"]) -> Bool[Tensor, " batch"]:
        """Flag the texts that contain no class's answer."""
        _, texts = self._texts(ids)
        return self._lack_answers(texts, ids.device)

    def _lack_answers(self, texts: list[str], device: torch.device) -> Bool[Tensor, " batch"]:
        flags = [not any(answer in _words(text) for answer in self._answers) for text in texts]
        return torch.tensor(flags, device=device)

    def _texts(self, ids: Int[Tensor, "batch tokens"]) -> tuple[list[list[int]], list[str]]:
        """Return the texts' own tokens, and their words without surrounding white space."""
        rows = [[token for token in row if token != PAD] for row in ids.tolist()]
        texts = self._lm.tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
        return rows, [text.strip() for text in texts]


def _words(text: str) -> str:
    """Return the case-folded words, each between spaces, so that whole words can be searched for."""
    words = re.findall(r"\w+", text.casefold())
    return f" {' '.join(words)} "
