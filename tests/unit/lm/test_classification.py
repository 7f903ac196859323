"""Batched scoring, compared with the model's own logits for one text at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradmm.data.examples import Examples
from gradmm.lm.classification import (
    class_logits,
    class_losses,
    predict,
    response_logits,
    response_losses,
    score,
    text_embeddings,
)
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template, tokenise_texts
from tests.conftest import examples, tiny_language_model

TEXTS = [
    "we liked every page of this book",
    "cold coffee",
    "rude staff , a terrible smell",
    "fresh bread",
    "a",
]
LABELS = [5, 2, 2, 5, 2]

#: Rotary embeddings and some norms use float32 even in a float64 model.
ROUNDING: dict[str, Any] = {"rtol": 0.0, "atol": 2e-6}

FAMILIES = {"phi": {}, "llama": {}, "llama-tied": {"tie_word_embeddings": True}, "gpt2": {}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tokenizer) -> LanguageModel:
    return tiny_language_model(tokenizer, request.param.removesuffix("-tied"), **FAMILIES[request.param])


def tokenised(model: LanguageModel) -> TokenisedTemplate:
    """A template with responses of different lengths, unordered labels and a prefix."""
    verbalisers = {5: " not really very good", 2: " bad"}
    prompt_template = PromptTemplate(suffix=" It was", verbalisers=verbalisers, max_text_tokens=64)
    template = dataclasses.replace(tokenise_template(model, prompt_template), prefix=(0,))
    assert len(template.responses[5]) > len(template.responses[2])
    return template


def texts_of(model: LanguageModel) -> list[list[int]]:
    return tokenise_texts(model.tokenizer, TEXTS, 64, "test")


def next_token_logits(model: LanguageModel, ids: list[int]) -> Tensor:
    """Compute next-token logits with transformers alone."""
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("context", [[], [3, 1, 4, 1, 5]])
def test_class_logits_are_the_models_own_after_the_suffix_in_the_order_of_the_texts(
    model: LanguageModel, batch_size: int, context: list[int]
) -> None:
    template = tokenised(model)
    expected = torch.stack(
        [
            next_token_logits(model, [0, *context, *text, *template.suffix])[template.first_tokens]
            for text in texts_of(model)
        ]
    )
    actual = class_logits(model, template, texts_of(model), batch_size, context)
    torch.testing.assert_close(actual, expected, **ROUNDING)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_text_embeddings_are_the_last_hidden_states_after_the_suffix(
    model: LanguageModel, batch_size: int
) -> None:
    template = tokenised(model)
    expected = []
    for text in texts_of(model):
        ids = torch.tensor([[0, *text, *template.suffix]])
        with torch.no_grad():
            expected.append(model.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1])
    actual = text_embeddings(model, template, texts_of(model), batch_size)
    torch.testing.assert_close(actual, torch.stack(expected), **ROUNDING)
    assert not actual.requires_grad


@given(order=st.permutations(range(len(TEXTS))), batch_size=st.integers(1, 6))
@examples(20)
def test_scores_do_not_depend_on_the_batch(phi: LanguageModel, order: list[int], batch_size: int) -> None:
    template, texts = tokenised(phi), texts_of(phi)
    alone = score(phi, template, texts, LABELS, 1)
    together = score(phi, template, [texts[i] for i in order], [LABELS[i] for i in order], batch_size)
    torch.testing.assert_close(together.losses, alone.losses[order], **ROUNDING)
    torch.testing.assert_close(together.class_logits, alone.class_logits[order], **ROUNDING)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_losses_are_the_mean_negative_log_probability_of_the_response_tokens(
    model: LanguageModel, batch_size: int
) -> None:
    template = tokenised(model)
    expected = []
    for text, label in zip(texts_of(model), LABELS, strict=True):
        ids, losses = [0, *text, *template.suffix], []
        for token in template.responses[label]:
            losses.append(-next_token_logits(model, ids).log_softmax(0)[token])
            ids.append(token)
        expected.append(sum(losses) / len(losses))
    scores = score(model, template, texts_of(model), LABELS, batch_size)
    torch.testing.assert_close(scores.losses, torch.stack(expected), **ROUNDING)


def test_score_gives_the_same_class_logits_whatever_the_labels(model: LanguageModel) -> None:
    template, texts = tokenised(model), texts_of(model)
    scores = score(model, template, texts, LABELS, 2)
    expected = class_logits(model, template, texts, 3)
    torch.testing.assert_close(scores.class_logits, expected, **ROUNDING)


def test_predict_names_the_label_of_the_likeliest_class_and_its_probability(phi: LanguageModel) -> None:
    template, texts = tokenised(phi), texts_of(phi)
    predictions = predict(phi, template, texts, 2)
    logits = class_logits(phi, template, texts, 2)
    odds = logits.exp()
    torch.testing.assert_close(predictions.probabilities, odds / odds.sum(dim=1, keepdim=True))
    assert predictions.labels == [5 if row[0] > row[1] else 2 for row in logits.tolist()]


def test_no_texts_give_no_rows(phi: LanguageModel) -> None:
    template = tokenised(phi)
    assert class_logits(phi, template, [], 4).shape == (0, 2)
    assert text_embeddings(phi, template, [], 4).shape == (0, 32)
    assert predict(phi, template, [], 4).labels == []
    assert score(phi, template, [], [], 4).losses.shape == (0,)


def test_the_current_head_is_used_not_the_frozen_copy(tokenizer) -> None:
    model = tiny_language_model(tokenizer, "phi")
    template, texts = tokenised(model), texts_of(model)
    assert model.head.shape[0] == model.embeddings.shape[0]  # creates the frozen copy
    before = score(model, template, texts, LABELS, 2)
    with torch.no_grad():
        model.model.get_output_embeddings().weight.mul_(2)
        model.model.get_output_embeddings().bias.mul_(2)
    torch.testing.assert_close(
        score(model, template, texts, LABELS, 2).class_logits, 2 * before.class_logits, **ROUNDING
    )
    torch.testing.assert_close(class_logits(model, template, texts, 2), 2 * before.class_logits, **ROUNDING)


def test_gradients_of_the_losses_reach_all_parameters_and_equal_those_of_the_models_own_logits(
    model: LanguageModel,
) -> None:
    template, texts = tokenised(model), texts_of(model)
    parameters = dict(model.model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    try:
        expected_losses = []
        for text, label in zip(texts, LABELS, strict=True):
            response = list(template.responses[label])
            ids = torch.tensor([[0, *text, *template.suffix, *response]])
            logits = model.model(input_ids=ids, use_cache=False).logits[0, -len(response) - 1 : -1]
            expected_losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(response)))
        expected_loss = torch.stack(expected_losses).sum()
        expected = torch.autograd.grad(expected_loss, list(parameters.values()), allow_unused=True)

        batch = make_batch(template, texts, LABELS, model.device)
        losses = response_losses(response_logits(model, batch), batch)
        actual = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    finally:
        model.model.requires_grad_(False)
    for name, ours, theirs in zip(parameters, actual, expected, strict=True):
        assert ours is not None, name
        torch.testing.assert_close(ours, theirs, **ROUNDING)


def test_the_head_of_a_half_precision_model_is_in_float32(tokenizer) -> None:
    model = tiny_language_model(tokenizer, "phi", dtype=torch.bfloat16)
    scores = score(model, tokenised(model), texts_of(model), LABELS, 2)
    assert scores.losses.dtype == scores.class_logits.dtype == torch.float32


def test_expected_losses_are_the_classes_losses_weighted_by_their_probabilities(model: LanguageModel) -> None:
    """Compare with one text and class at a time; the template has verbalisers of one token and of several."""
    template, texts = tokenised(model), texts_of(model)
    random = torch.Generator().manual_seed(1)
    probabilities = torch.rand(len(texts), len(template.labels), generator=random).double()
    probabilities[0, 0] = 0.0
    probabilities /= probabilities.sum(dim=1, keepdim=True)
    expected = []
    for text, row in zip(texts, probabilities.tolist(), strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for label, probability in zip(template.labels, row, strict=True):
            response = list(template.responses[label])
            ids = torch.tensor([[*template.prefix, *text, *template.suffix, *response]])
            logits = model.model(input_ids=ids, use_cache=False).logits[0, -len(response) - 1 : -1]
            total = total + probability * torch.nn.functional.cross_entropy(logits, torch.tensor(response))
        expected.append(total)
    losses = class_losses(model, template, texts, probabilities)
    torch.testing.assert_close(losses, torch.stack(expected), **ROUNDING)


def test_an_expected_loss_under_certainty_is_the_response_loss(model: LanguageModel) -> None:
    template, texts = tokenised(model), texts_of(model)
    certain = Examples(texts, LABELS).class_probabilities(template.labels)
    batch = make_batch(template, texts, LABELS, model.device)
    expected = response_losses(response_logits(model, batch), batch)
    torch.testing.assert_close(class_losses(model, template, texts, certain), expected, **ROUNDING)
