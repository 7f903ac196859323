"""The words of a text, in scripts with and without spaces."""

from __future__ import annotations

import re

#: Letters of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana and Chinese.
SPACELESS = "[\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff]"

_WORD = re.compile(rf"{SPACELESS}|(?:(?!{SPACELESS})\S)+")


def words(text: str) -> list[str]:
    """Split a text at white space; a letter of a script without spaces is a word of its own."""
    return _WORD.findall(text)
