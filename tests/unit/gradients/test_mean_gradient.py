"""Compare the mean gradient with autograd example by example, and its head's part with the closed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gradmm.data.examples import Examples
from gradmm.gradients import mean_gradient as module
from gradmm.gradients.head_gradient import head_gradients
from gradmm.gradients.mean_gradient import distance, in_head, inner_products, mean_gradient, squared_distances
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template
from tests.conftest import tiny_language_model

#: Responses of one token and of several; the texts have one to seven.
VERBALISERS = {0: " bad", 1: " not really good"}
PROMPT_TEMPLATE = PromptTemplate(suffix=" It was", verbalisers=VERBALISERS, max_text_tokens=64)
EXAMPLES = Examples([[70 + i] * (1 + i % 7) for i in range(9)], [i % 2 for i in range(9)])


def trainable(tokenizer, family: str) -> tuple[LanguageModel, TokenisedTemplate]:
    language_model = tiny_language_model(tokenizer, family)
    language_model.model.requires_grad_(True)
    return language_model, tokenise_template(language_model, PROMPT_TEMPLATE)


def slow_mean_gradient(model, template: TokenisedTemplate, examples: Examples) -> tuple[float, list[torch.Tensor]]:
    """Average over examples that pass through the whole model one by one, without padding."""
    parameters = list(model.parameters())
    total, mean = [torch.zeros_like(p) for p in parameters], 0.0
    for text, label in zip(examples.texts, examples.labels, strict=True):
        response = list(template.responses[label])
        ids = torch.tensor([[*template.prefix, *text, *template.suffix, *response]])
        logits = model(input_ids=ids, use_cache=False).logits[0, -len(response) - 1 : -1]
        loss = F.cross_entropy(logits, torch.tensor(response)) / len(examples)
        for sum_, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            sum_ += gradient
        mean += loss.item()
    return mean, total


@pytest.mark.parametrize("family", ["phi", "gpt2"])  # untied with a bias; tied without one
def test_the_mean_gradient_is_the_mean_of_the_examples_gradients(tokenizer, family: str) -> None:
    language_model, template = trainable(tokenizer, family)
    loss, gradient = slow_mean_gradient(language_model.model, template, EXAMPLES)
    found = mean_gradient(language_model, template, EXAMPLES, batch_size=4)
    assert found.loss == pytest.approx(loss, rel=1e-8)  # rotary angles are in float32
    for ours, slow in zip(found.gradient, gradient, strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-6, atol=1e-8)
    assert all(p.grad is None for p in language_model.model.parameters())


def test_the_heads_part_is_the_closed_form(tokenizer) -> None:
    language_model, template = trainable(tokenizer, "phi")
    batch = make_batch(template, EXAMPLES.texts, EXAMPLES.labels, language_model.device)
    with torch.no_grad():
        closed = head_gradients(language_model, batch).clipped_sum(None) / len(EXAMPLES)
    gradient = mean_gradient(language_model, template, EXAMPLES).gradient
    weight, bias = (g for g, is_head in zip(gradient, in_head(language_model), strict=True) if is_head)
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], dim=1), closed, rtol=1e-8, atol=1e-12)


def test_a_tied_heads_part_is_the_embeddings(tokenizer) -> None:
    language_model, _ = trainable(tokenizer, "gpt2")
    names = [name for name, _ in language_model.model.named_parameters()]
    (name,) = (name for name, head in zip(names, in_head(language_model), strict=True) if head)
    assert name == "transformer.wte.weight"


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), chunk=st.integers(1, 5), seed=st.integers(0, 9))
def test_sums_over_chunks_are_sums_in_float64(sizes: list[int], chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = [1e3 + torch.randn(size, 2, generator=generator) for size in sizes]
    second = [a + 1e-2 * torch.randn(a.shape, generator=generator) for a in first]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        products, squares = inner_products(first, second), squared_distances(first, second)
    pairs = [(a.double(), b.double()) for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(products, torch.stack([(a * b).sum() for a, b in pairs]))
    torch.testing.assert_close(squares, torch.stack([(a - b).square().sum() for a, b in pairs]))
    assert distance(first, second) == pytest.approx(float(squares.sum().sqrt()))
