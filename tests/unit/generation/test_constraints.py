from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.generation.constraints import TextConstraints
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from tests.conftest import examples

WORDS = ["it", "It", "IT", "was", "Was", "good", "bad", "soup", "the", "spit", "goods"]


def is_accepted(phi: LanguageModel, template: TokenisedTemplate, ids: list[int]) -> bool:
    return bool(TextConstraints(phi, template)(torch.tensor([ids]))[0])


@examples(200)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=7))
def test_texts_that_keep_their_tokens_are_accepted_unless_they_contain_an_answer(
    phi: LanguageModel, template: TokenisedTemplate, words: list[str]
) -> None:
    lower = [word.lower() for word in words]
    answers = (["it", "was", "good"], ["it", "was", "bad"])
    given_away = any(lower[i : i + 3] in answers for i in range(len(words)))
    assert is_accepted(phi, template, phi.encode(" ".join(words))) == (not given_away)


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
    assert not is_accepted(phi, template, phi.encode(text))


@pytest.mark.parametrize(
    "text", ["It was good.", "never late, it was bad!", '"It was good" they said', "it, was-good"]
)
def test_the_answer_beside_punctuation_is_refused(
    phi: LanguageModel, template: TokenisedTemplate, text: str
) -> None:
    assert not is_accepted(phi, template, phi.encode(text))


@pytest.mark.parametrize(
    "text", ["the soup was good", "It was goods", "spit was good", "it was not bad", "was good"]
)
def test_parts_of_the_answer_and_longer_words_are_accepted(
    phi: LanguageModel, template: TokenisedTemplate, text: str
) -> None:
    assert is_accepted(phi, template, phi.encode(text))


def test_an_answer_of_several_words_is_refused_only_as_a_whole(phi: LanguageModel) -> None:
    prompt_template = PromptTemplate(
        suffix=" In short, it is", verbalisers={0: " bad", 1: " really very good"}, max_text_tokens=64
    )
    template = tokenise_template(phi, prompt_template)
    assert not is_accepted(phi, template, phi.encode("so in short, it is really very good then"))
    assert is_accepted(phi, template, phi.encode("so in short, it is really good then"))
    assert not is_accepted(phi, template, phi.encode("in short, it is bad"))


def test_texts_that_would_get_other_tokens_are_refused(phi: LanguageModel, template: TokenisedTemplate) -> None:
    text = phi.encode("the soup was warm")
    in_pieces = [*phi.encode("t"), *phi.encode("he"), *phi.encode(" soup was warm")]
    # Only a text that matches a gradient has to keep its tokens.
    assert bool(TextConstraints(phi, template).without_answer(torch.tensor([in_pieces]))[0])
    assert phi.decode(in_pieces) == "the soup was warm"
    assert in_pieces != text
    with_blank = phi.encode(" the soup was warm")  # the blank is stripped on release
    assert with_blank != text
    for ids, expected in ((text, True), (in_pieces, False), (with_blank, False)):
        assert is_accepted(phi, template, ids) is expected


def test_texts_of_a_batch_are_judged_one_by_one(phi: LanguageModel, template: TokenisedTemplate) -> None:
    sentences = [("the soup was", True), ("It was good", False), ("it was a", True), ("it was bad", False)]
    ids = torch.tensor([phi.encode(sentence) for sentence, _ in sentences])
    assert TextConstraints(phi, template)(ids).tolist() == [expected for _, expected in sentences]


def test_an_answer_without_words_is_not_searched_for(phi: LanguageModel) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " :", 1: " good"}, max_text_tokens=20)
    template = tokenise_template(phi, prompt_template)
    assert is_accepted(phi, template, phi.encode("they said it was late"))
    assert not is_accepted(phi, template, phi.encode("they said it was good"))
