from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from gradmm.errors import InputError
from gradmm.lm import template as template_module
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, length_bucketed, make_batch, tokenise_template, tokenise_texts


def test_example_is_text_suffix_and_verbaliser(phi: LanguageModel, template: TokenisedTemplate) -> None:
    texts = ["the soup was cold", "good"]
    batch = make_batch(template, [phi.encode(t) for t in texts], [0, 1], phi.device)
    for row, (text, verbaliser) in enumerate(zip(texts, (" bad", " good"), strict=True)):
        whole = phi.encode(f"{text} It was{verbaliser}")
        predicted_at = int(batch.positions[row, 0])
        assert batch.input_ids[row, : predicted_at + 1].tolist() == whole[: predicted_at + 1]
        assert int(batch.response_ids[row, 0]) == whole[predicted_at + 1]
        assert len(whole) == predicted_at + 2


def test_verbalisers_with_the_same_first_token_are_refused(phi: LanguageModel) -> None:
    prompt_template = PromptTemplate(
        suffix=" It was", verbalisers={0: " good", 1: " good again"}, max_text_tokens=8
    )
    with pytest.raises(
        InputError, match=r"classes: the verbalisers ' good' and ' good again' begin with the same"
    ):
        tokenise_template(phi, prompt_template)


def test_texts_are_cut_and_a_text_of_zero_tokens_is_refused(phi: LanguageModel) -> None:
    assert tokenise_texts(phi.tokenizer, ["the soup was cold"], 2, "train") == [
        phi.encode("the soup was cold")[:2]
    ]
    with pytest.raises(InputError, match="train: text 1 has no tokens; remove the row"):
        tokenise_texts(phi.tokenizer, ["fine", ""], 64, "train")


class CountedTokenizer:
    """Counts the texts in all tokenizer outputs that are still alive."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._alive = self.most = 0

    def __call__(self, texts: list[str], **options: Any) -> BatchEncoding:
        output = self._tokenizer(texts, **options)
        self._alive += len(texts)
        self.most = max(self.most, self._alive)
        weakref.finalize(output, self._release, len(texts))
        return output

    def _release(self, texts: int) -> None:
        self._alive -= texts


@pytest.mark.parametrize("count", [0, 1, 4, 5, 13])
def test_few_texts_are_in_the_tokenizer_at_once(
    phi: LanguageModel, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "TEXTS_AT_ONCE", 4)
    texts = [f"{'good ' * (i % 3)}soup {i}" for i in range(count)]
    tokenizer = CountedTokenizer(phi.tokenizer)
    assert tokenise_texts(tokenizer, texts, 3, "train") == [phi.encode(text)[:3] for text in texts]
    # The output for the previous part may still be alive while the next is tokenised.
    assert tokenizer.most <= 8
    with pytest.raises(InputError, match=f"train: text {count} has no tokens"):
        tokenise_texts(tokenizer, [*texts, "", "fine"], 3, "train")


def test_no_warning_says_how_long_a_text_is(
    phi: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(phi.tokenizer, "model_max_length", 2)
    transformers_logging.enable_propagation()
    try:
        phi.tokenizer("the soup was cold")
        assert "longer than the specified maximum" in caplog.text
        caplog.clear()
        phi.tokenizer.deprecation_warnings.clear()  # it is said once
        tokenise_texts(phi.tokenizer, ["the soup was cold"], 64, "train")
    finally:
        transformers_logging.disable_propagation()
    assert caplog.text == ""


@pytest.mark.parametrize("count", [0, 1, 13])
def test_a_split_has_the_same_tokens(phi: LanguageModel, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "TEXTS_AT_ONCE", 4)
    texts = [f"{'good ' * (i % 3)}soup {i}" for i in range(count)]
    split = template_module.tokenise_split(phi.tokenizer, texts, 3, "train")
    lists = tokenise_texts(phi.tokenizer, texts, 3, "train")
    assert list(split) == lists
    assert [split[i - count] for i in range(count)] == lists
    assert template_module.token_counts(split).tolist() == list(map(len, lists))
    for out in (count, -count - 1):
        with pytest.raises(IndexError):
            split[out]


@given(lengths=st.lists(st.integers(1, 50), max_size=40), batch_size=st.integers(1, 9))
def test_buckets_contain_every_example_once_sorted_by_length(lengths: list[int], batch_size: int) -> None:
    batches = length_bucketed(lengths, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths)
    assert all(len(batch) <= batch_size for batch in batches)


def test_padding_does_not_change_what_comes_before_it(phi: LanguageModel, template: TokenisedTemplate) -> None:
    text = phi.encode("a quiet room")
    alone = make_batch(template, [text], [1], phi.device)
    padded = make_batch(template, [text, phi.encode("never again : cold coffee , rude staff")], [1, 0], phi.device)
    at = int(alone.positions[0, 0])
    first = phi.hidden_states(input_ids=alone.input_ids)[0, at]
    second = phi.hidden_states(input_ids=padded.input_ids)[0, at]
    assert torch.allclose(first, second, atol=1e-7)


def test_texts_without_tokens_are_left_out_and_the_others_keep_their_row_numbers(phi: LanguageModel) -> None:
    texts = ["", "good film", "", "bad", "the food was good"]
    tokens, rows = template_module.tokenise_readable(phi.tokenizer, texts, 3)
    assert rows.tolist() == [1, 3, 4]
    assert list(tokens) == [phi.encode(texts[row])[:3] for row in rows]
