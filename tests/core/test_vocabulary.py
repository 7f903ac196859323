from __future__ import annotations

import pytest

from gradmm_core.errors import InputError
from gradmm_core.language_model import LanguageModel
from gradmm_core.vocabulary import PATTERNS, allowed_tokens


def test_special_control_foreign_and_surplus_tokens_are_not_allowed(phi: LanguageModel) -> None:
    allowed = set(allowed_tokens(phi, "english").ids.tolist())
    assert phi.tokenizer.bos_token_id not in allowed
    assert max(allowed) < len(phi.tokenizer) < phi.embeddings.shape[0]
    for token in allowed:
        spelling = phi.decode([token])
        assert spelling.isascii()
        assert spelling.isprintable()
        assert spelling.strip()


def test_words_with_and_without_leading_space_are_allowed(phi: LanguageModel) -> None:
    allowed = set(allowed_tokens(phi, "english").ids.tolist())
    for word in (" good", " It", "a", " ."):
        (token,) = phi.encode(word)
        assert token in allowed


def test_a_token_that_starts_a_text_survives_stripping(phi: LanguageModel) -> None:
    allowed = allowed_tokens(phi, "english")
    assert 0 < len(allowed.starting_ids) < len(allowed.ids)
    for token in allowed.starting_ids.tolist():
        assert phi.encode(phi.decode([token]).strip()) == [token]
    assert phi.encode(" good")[0] not in allowed.starting_ids.tolist()


def test_neither_the_rest_of_a_word_nor_punctuation_starts_a_text(phi: LanguageModel) -> None:
    allowed = allowed_tokens(phi, "english")
    for token in allowed.starting_ids.tolist():
        assert set(phi.encode(" " + phi.decode([token]))) <= set(allowed.ids.tolist())
        assert len(phi.encode(" " + phi.decode([token]))) == 1
        assert phi.decode([token])[0].isalnum()
    pieces = set(allowed.ids.tolist()) - set(allowed.starting_ids.tolist())
    assert any(phi.decode([piece]).isalpha() for piece in pieces)


def test_no_allowed_token_is_an_error(phi: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATTERNS, "none", "§§§")
    with pytest.raises(InputError, match=r"generation\.projection\.language: no token is a word of 'none'"):
        allowed_tokens(phi, "none")
