"""What a text has to be, however well it matches."""

from __future__ import annotations

import re

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradmm_core.language_model import LanguageModel
from gradmm_core.sentence_ends import PAD
from gradmm_core.template import TokenisedTemplate


class Readable:
    """Texts that are read as they were written, and do not give the answer away.

    - Released texts are tokenised afresh: one that would get other tokens has another gradient than was matched.
    - A text with a class's answer in it ("It was great") is a shortcut to a low loss, and teaches nothing.
    """

    def __init__(self, language_model: LanguageModel, template: TokenisedTemplate) -> None:
        self._lm = language_model
        suffix = language_model.decode(list(template.suffix))
        responses = [language_model.decode(list(response)) for response in template.responses.values()]
        # A response without words (":)") leaves nothing that could be looked for.
        self._answers = [_words(suffix + response) for response in responses if _words(response).strip()]

    def __call__(self, ids: Int[Tensor, "batch tokens"]) -> Bool[Tensor, " batch"]:
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
    """The words alone, without case, a blank before and after each: whole words can be looked for."""
    words = re.findall(r"\w+", text.casefold())
    return f" {' '.join(words)} "
