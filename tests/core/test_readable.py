from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradmm_core.language_model import LanguageModel
from gradmm_core.readable import Readable
from gradmm_core.template import TokenisedTemplate, tokenise_template
from gradmm_core.wording import ResponseTemplate

WORDS = ["it", "It", "IT", "was", "Was", "good", "bad", "soup", "the", "spit", "goods"]


def is_readable(phi: LanguageModel, template: TokenisedTemplate, ids: list[int]) -> bool:
    return bool(Readable(phi, template)(torch.tensor([ids]))[0])


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=7))
def test_texts_as_the_tokenizer_reads_them_are_readable_but_for_the_answers(
    phi: LanguageModel, template: TokenisedTemplate, words: list[str]
) -> None:
    lower = [word.lower() for word in words]
    answers = (["it", "was", "good"], ["it", "was", "bad"])
    given_away = any(lower[i : i + 3] in answers for i in range(len(words)))
    assert is_readable(phi, template, phi.encode(" ".join(words))) == (not given_away)


@pytest.mark.parametrize(
    "text",
    [
        "It was good",
        "they said it  was GOOD again",
        "IT WAS\nbad",
        "cold , it was bad , never",
        "It was bad and warm",
    ],
)
def test_the_answer_of_any_class_in_any_case_and_spacing_is_refused(
    phi: LanguageModel, template: TokenisedTemplate, text: str
) -> None:
    assert not is_readable(phi, template, phi.encode(text))


@pytest.mark.parametrize(
    "text", ["It was good.", "never late, it was bad!", '"It was good" they said', "it, was-good"]
)
def test_the_answer_beside_punctuation_is_refused(
    phi: LanguageModel, template: TokenisedTemplate, text: str
) -> None:
    assert not is_readable(phi, template, phi.encode(text))


@pytest.mark.parametrize(
    "text", ["the soup was good", "It was goods", "spit was good", "it was not bad", "was good"]
)
def test_parts_of_the_answer_and_longer_words_are_no_answers(
    phi: LanguageModel, template: TokenisedTemplate, text: str
) -> None:
    assert is_readable(phi, template, phi.encode(text))


def test_answers_of_several_words_are_refused_whole(phi: LanguageModel) -> None:
    wording = ResponseTemplate(
        suffix=" In short, it is", verbalisers={0: " bad", 1: " really very good"}, max_text_tokens=64
    )
    template = tokenise_template(phi, wording)
    assert not is_readable(phi, template, phi.encode("so in short, it is really very good then"))
    assert is_readable(phi, template, phi.encode("so in short, it is really good then"))
    assert not is_readable(phi, template, phi.encode("in short, it is bad"))


def test_texts_that_would_get_other_tokens_are_refused(phi: LanguageModel, template: TokenisedTemplate) -> None:
    text = phi.encode("the soup was warm")
    in_pieces = [*phi.encode("t"), *phi.encode("he"), *phi.encode(" soup was warm")]
    assert phi.decode(in_pieces) == "the soup was warm"
    assert in_pieces != text
    with_blank = phi.encode(" the soup was warm")  # which is stripped on release
    assert with_blank != text
    for ids, expected in ((text, True), (in_pieces, False), (with_blank, False)):
        assert is_readable(phi, template, ids) is expected


def test_texts_of_a_batch_are_judged_one_by_one(phi: LanguageModel, template: TokenisedTemplate) -> None:
    sentences = [("the soup was", True), ("It was good", False), ("it was a", True), ("it was bad", False)]
    ids = torch.tensor([phi.encode(sentence) for sentence, _ in sentences])
    assert Readable(phi, template)(ids).tolist() == [expected for _, expected in sentences]


def test_an_answer_without_words_is_nothing_to_look_for(phi: LanguageModel) -> None:
    wording = ResponseTemplate(suffix=" It was", verbalisers={0: " :", 1: " good"}, max_text_tokens=20)
    template = tokenise_template(phi, wording)
    assert is_readable(phi, template, phi.encode("they said it was late"))
    assert not is_readable(phi, template, phi.encode("they said it was good"))
