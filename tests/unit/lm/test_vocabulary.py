from __future__ import annotations

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.vocabulary import PATTERNS, _continues, allowed_tokens
from tests.conftest import WORDS, tiny_language_model


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


def spellings(model: LanguageModel, ids: torch.Tensor) -> list[str]:
    return [model.decode([token]) for token in ids.tolist()]


def test_within_text_is_the_index_of_the_word_with_a_space_or_its_own(phi: LanguageModel) -> None:
    for language in PATTERNS:
        allowed = allowed_tokens(phi, language)
        words = spellings(phi, allowed.ids)
        twins = spellings(phi, allowed.ids[allowed.within_text])
        for word, twin in zip(words, twins, strict=True):
            assert twin == (" " + word if " " + word in words else word)
        assert any(word != twin for word, twin in zip(words, twins, strict=True))


def test_letters_and_digits_without_a_space_continue_a_word(phi: LanguageModel) -> None:
    allowed = allowed_tokens(phi, "english")
    continues = dict(zip(spellings(phi, allowed.ids), allowed.continues_word.tolist(), strict=True))
    for spelling, flag in continues.items():
        assert flag == spelling[0].isalnum()
    assert continues["the"]
    assert continues["7"]
    assert not continues[" the"]
    assert not continues["."]


def test_the_end_of_a_contraction_continues_a_word() -> None:
    spelling = pd.Series([" don", "'t", " 't", "'", "ing", " cat"])
    assert _continues(None, spelling).tolist() == [False, True, False, False, True, False]


def test_a_first_word_has_the_probability_of_both_its_tokens(phi: LanguageModel) -> None:
    allowed = allowed_tokens(phi, "english")
    logits = 3 * torch.randn(4, len(allowed.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probabilities = logits.softmax(dim=1)
    places = {spelling: i for i, spelling in enumerate(spellings(phi, allowed.ids))}
    first = allowed.first_logits(logits)
    for word, i in places.items():
        if allowed.starts_text[i]:
            both = probabilities[:, i] + probabilities[:, places[" " + word]]
            # Logits are log-probabilities up to a constant per row.
            assert torch.allclose(first[:, i] - both.log(), logits.logsumexp(dim=1))
        else:
            assert first[:, i].isneginf().all()


def sentencepiece_like(strip: bool) -> PreTrainedTokenizerFast:
    """Train a tokenizer with visible spaces. Like Llama 2 and Mistral (not Gemma), it may strip the first one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    stripped = [decoders.Strip(content=" ", left=1)] if strip else []
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.Fuse(), *stripped]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], show_progress=False)
    bpe.train_from_iterator([WORDS + " bookish freshbread unfilm"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<s>", pad_token="<s>")


def test_words_of_a_script_without_spaces_begin_texts_and_continue_no_word() -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([WORDS, "这部电影非常好看，演员很棒。", "味道不错，下次还会再来。"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<s>", pad_token="<s>")
    model = tiny_language_model(tokenizer, "phi")
    allowed, public = (allowed_tokens(model, "any", spaceless) for spaceless in (True, False))
    names = [model.decode([int(i)]) for i in allowed.ids]
    chinese = torch.tensor(["\u4e00" <= name[0] <= "\u9fff" for name in names])
    assert chinese.sum() > 5
    assert not (allowed.continues_word & chinese).any()
    whole = [model.encode(name) == [int(i)] for name, i in zip(names, allowed.ids, strict=True)]
    assert torch.equal(allowed.starts_text & chinese, torch.tensor(whole) & chinese)
    assert (allowed.starts_text & chinese).any()
    assert not (public.starts_text & chinese).any()
    for ours, theirs in (
        (allowed.starts_text, public.starts_text),
        (allowed.continues_word, public.continues_word),
    ):
        assert torch.equal(ours[~chinese], theirs[~chinese])


@pytest.mark.parametrize("strip", [False, True])
def test_words_of_a_sentencepiece_tokenizer_begin_a_text_and_its_pieces_continue_words(strip: bool) -> None:
    tokenizer = sentencepiece_like(strip)
    model = tiny_language_model(tokenizer, "llama")
    allowed = allowed_tokens(model, "english")
    names = tokenizer.convert_ids_to_tokens(allowed.ids.tolist())
    columns = (allowed.starts_text, allowed.within_text, allowed.continues_word)
    for i, (name, starts, within, continues) in enumerate(
        zip(names, *(column.tolist() for column in columns), strict=True)
    ):
        begins = name.startswith("\N{LOWER ONE EIGHTH BLOCK}")
        assert continues == (name[0].isalnum())
        assert within == i or not begins
        if starts:
            assert begins
            assert model.encode(model.decode([int(allowed.ids[i])]).strip()) == [int(allowed.ids[i])]
    assert allowed.starts_text.sum() > 10
    assert allowed.continues_word.any()
