from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm_core.errors import InputError
from gradmm_core.language_model import LanguageModel
from gradmm_core.template import (
    ResponseTemplate,
    TokenisedTemplate,
    length_bucketed,
    make_batch,
    tokenise_template,
    tokenise_texts,
)


def test_example_is_text_suffix_and_verbaliser(phi: LanguageModel, template: TokenisedTemplate) -> None:
    texts = ["the soup was cold", "good"]
    batch = make_batch(template, [phi.encode(t) for t in texts], [0, 1], phi.device)
    for row, (text, verbaliser) in enumerate(zip(texts, (" bad", " good"), strict=True)):
        whole = phi.encode(f"{text} It was{verbaliser}")
        predicted_at = int(batch.positions[row, 0])
        assert batch.input_ids[row, : predicted_at + 1].tolist() == whole[: predicted_at + 1]
        assert int(batch.response_ids[row, 0]) == whole[predicted_at + 1]
        assert len(whole) == predicted_at + 2


def test_classes_whose_verbalisers_begin_alike_are_refused(phi: LanguageModel) -> None:
    wording = ResponseTemplate(suffix=" It was", verbalisers={0: " good", 1: " good again"}, max_text_tokens=8)
    with pytest.raises(
        InputError, match=r"classes: the verbalisers ' good' and ' good again' begin with the same"
    ):
        tokenise_template(phi, wording)


def test_texts_are_cut_and_a_text_of_zero_tokens_is_refused(phi: LanguageModel) -> None:
    assert tokenise_texts(phi.tokenizer, ["the soup was cold"], 2, "train") == [
        phi.encode("the soup was cold")[:2]
    ]
    with pytest.raises(InputError, match="train: text 1 has no tokens; remove the row"):
        tokenise_texts(phi.tokenizer, ["fine", ""], 64, "train")


@given(lengths=st.lists(st.integers(1, 50), max_size=40), batch_size=st.integers(1, 9))
def test_buckets_hold_every_example_once_and_neighbours_in_length(lengths: list[int], batch_size: int) -> None:
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
