"""How a text becomes an example, in words; `template` has it in tokens."""

from __future__ import annotations

from gradmm_core.settings import Settings


class ResponseTemplate(Settings):
    """The part of a recipe that decides an example's tokens. Instructions and class names are not in it."""

    suffix: str
    verbalisers: dict[int, str]
    max_text_tokens: int
