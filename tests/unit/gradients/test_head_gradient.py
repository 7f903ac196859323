"""Compare the closed form with autograd's double backward, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gradmm.config.settings import MatchingLoss
from gradmm.generation.objectives import HeadMatching
from gradmm.gradients.head_gradient import HeadGradients, head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import make_batch, tokenise_template
from gradmm.target.features import text_means
from tests.conftest import examples, random_probe, tiny_language_model

FAMILIES = {
    "phi": {},
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tokenizer) -> LanguageModel:
    return tiny_language_model(tokenizer, request.param.removesuffix("-tied"), **FAMILIES[request.param])


def head_parameters(model: LanguageModel) -> list[Tensor]:
    """An untied, trainable copy of weight and bias, so that autograd sees the head alone."""
    head = model.model.get_output_embeddings()
    parts = [head.weight, getattr(head, "bias", None)]
    return [p.detach().clone().requires_grad_(True) for p in parts if p is not None]


def autograd_head_gradient(
    model: LanguageModel, embeds: Tensor, response: list[int], create_graph: bool
) -> Tensor:
    """Differentiate the loss by autograd, and concatenate weight and bias into one matrix."""
    parameters = head_parameters(model)
    hidden = model.model.base_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    logits = F.linear(hidden[0, -len(response) :], *parameters)
    loss = F.cross_entropy(logits, torch.tensor(response, device=logits.device))
    gradients = torch.autograd.grad(loss, parameters, create_graph=create_graph)
    return torch.cat([g if g.ndim == 2 else g[:, None] for g in gradients], dim=1)


def test_losses_come_with_the_logits_of_the_texts_own_tokens(model: LanguageModel) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " not good"}, max_text_tokens=64)
    template = replace(tokenise_template(model, prompt_template), prefix=(3, 4))
    matching = HeadMatching(model, template, 1, torch.randn_like(model.head))
    ids = torch.tensor([model.encode("the soup was warm"), model.encode("a quiet train again")])
    x = model.embed(ids).requires_grad_(True)
    losses, logits = matching.with_logits(x)
    assert torch.allclose(losses, matching(x), atol=1e-10)
    for i, row in enumerate(ids.tolist()):
        plain = model.model(input_ids=torch.tensor([[3, 4, *row]])).logits[0]
        # Predictions of tokens 1, 2, ... Attention's softmax is in float32 in every dtype, and how it rounds
        # depends on the length of the sequence and on the processor.
        assert torch.allclose(logits[i], plain[2:-1], atol=1e-6)
    # The logits are detached: no gradient may flow through them.
    assert not logits.requires_grad
    (slope,) = torch.autograd.grad(losses.sum(), [x])
    (plain_slope,) = torch.autograd.grad(matching(x).sum(), [x])
    assert torch.allclose(slope, plain_slope, atol=1e-10)
    one, no_logits = matching.with_logits(x[:, :1])
    assert one.shape == (2,)
    assert no_logits.shape == (2, 0, len(model.head))


def test_the_probes_losses_and_their_derivatives_are_added_with_their_weight(model: LanguageModel) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=64)
    template = replace(tokenise_template(model, prompt_template), prefix=(3, 4))
    target, probe = torch.randn_like(model.head), random_probe(model, template)
    ids = torch.tensor([model.encode("the soup was warm"), model.encode("a quiet train again")])
    x = model.embed(ids).requires_grad_(True)
    batch = make_batch(template, ids.tolist(), [1, 1], model.device)
    own = probe.losses(text_means(model.layers(input_ids=batch.input_ids), batch.text_mask), 1)
    plain = HeadMatching(model, template, 1, target)
    priced = HeadMatching(model, template, 1, target, probe=probe, probe_weight=0.3)
    losses, logits = priced.with_logits(x)
    assert torch.allclose(losses, plain(x) + 0.3 * own, atol=1e-10)
    assert torch.equal(logits, plain.with_logits(x)[1])
    assert torch.equal(priced(x), plain(x))  # the reported loss excludes the probe's

    def losses_by_first(first: Tensor) -> Tensor:
        return priced.with_logits(torch.cat([first[None], x[1:].detach()]))[0]

    # Attention is in float32, so smaller steps would measure its rounding.
    first = x[0].detach().clone().requires_grad_(True)
    assert torch.autograd.gradcheck(losses_by_first, first, eps=1e-3, atol=1e-3, rtol=1e-2, fast_mode=True)
    free = HeadMatching(model, template, 1, target, probe=probe, probe_weight=0.0)
    assert torch.equal(free.with_logits(x)[0], plain.with_logits(x)[0])


@pytest.mark.parametrize("kind", get_args(MatchingLoss))
@pytest.mark.parametrize("verbaliser", [" good", " not really very good at all"])
def test_loss_and_its_gradient_equal_double_backward_to_1e_8(
    model: LanguageModel, verbaliser: str, kind: MatchingLoss
) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: verbaliser}, max_text_tokens=64)
    template = tokenise_template(model, prompt_template)
    response = list(template.responses[1])
    torch.manual_seed(1)
    target = torch.randn_like(model.head)
    x = (torch.randn(3, 5, model.embeddings.shape[1], dtype=torch.float64) * 0.2).requires_grad_(True)

    ours = HeadMatching(model, template, 1, target, loss=kind)(x)
    (our_gradient,) = torch.autograd.grad(ours.sum(), x)

    tail = model.embed(torch.tensor(template.tail(1)))[None]
    for i in range(len(x)):
        example = x[i : i + 1].detach().requires_grad_(True)
        g = autograd_head_gradient(model, torch.cat([example, tail], dim=1), response, create_graph=True)
        loss = 1 - F.cosine_similarity(g.flatten(), target.flatten(), dim=0)
        if kind == "distance":
            loss = (g - target).square().sum() / target.square().sum()
        (gradient,) = torch.autograd.grad(loss, example)
        assert float((loss - ours[i]).detach().abs()) < 1e-8
        assert float((gradient[0] - our_gradient[i]).abs().max()) < 1e-8


def test_batch_of_mixed_labels_and_lengths_equals_autograd_one_by_one(model: LanguageModel) -> None:
    prompt_template = PromptTemplate(
        suffix=" It was", verbalisers={0: " bad", 1: " good for a train"}, max_text_tokens=64
    )
    template = tokenise_template(model, prompt_template)
    texts = [model.encode(t) for t in ("the soup was cold", "a quiet room with good light and bread", "late")]
    labels = [0, 1, 1]
    gradients = head_gradients(model, make_batch(template, texts, labels, model.device)).materialise()
    for text, label, ours in zip(texts, labels, gradients, strict=True):
        ids = torch.tensor([*template.prefix, *text, *template.tail(label)])
        slow = autograd_head_gradient(model, model.embed(ids)[None], list(template.responses[label]), False)
        assert torch.allclose(ours, slow, atol=1e-7)  # some norms round through float32


def random_gradients(seed: int, batch: int, response: int, vocab: int = 11, width: int = 5) -> HeadGradients:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, response + 1, (batch, 1), generator=generator)
    return HeadGradients.from_logits(
        3 * torch.randn(batch, response, vocab, dtype=torch.float64, generator=generator),
        torch.randn(batch, response, width, dtype=torch.float64, generator=generator),
        torch.randint(vocab, (batch, response), generator=generator),
        torch.arange(response)[None] < lengths,
    )


shapes = {"seed": st.integers(0, 2**31), "batch": st.integers(1, 5), "response": st.integers(1, 4)}


@examples(50)
@given(**shapes)
def test_inner_products_norms_and_losses_equal_those_of_the_matrices(seed: int, batch: int, response: int) -> None:
    gradients = random_gradients(seed, batch, response)
    matrices = gradients.materialise()
    target = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    assert torch.allclose(gradients.inner_products(target), (matrices * target).sum(dim=(1, 2)))
    assert torch.allclose(gradients.norms(), torch.linalg.matrix_norm(matrices))
    cosine = F.cosine_similarity(matrices.flatten(1), target.flatten()[None])
    assert torch.allclose(gradients.matching_losses(target), 1 - cosine)
    apart = (matrices - target).square().sum(dim=(1, 2)) / target.square().sum()
    assert torch.allclose(gradients.matching_losses(target, "distance"), apart)


@examples(50)
@given(centred=st.booleans(), **shapes)
def test_gram_equals_the_inner_products_of_every_pair_of_matrices(
    seed: int, batch: int, response: int, centred: bool
) -> None:
    gradients = random_gradients(seed, batch, response)
    if centred:
        centre = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
        gradients = replace(gradients, centre=centre)
    flat = gradients.materialise().flatten(1)
    assert torch.allclose(gradients.gram(), flat @ flat.mT, atol=1e-10)
    assert torch.allclose(gradients.gram().diagonal().sqrt(), gradients.norms(), atol=1e-6)


@examples(50)
@given(clipping_norm=st.floats(1e-3, 10), **shapes)
def test_clipped_sum_equals_the_sum_of_clipped_matrices(
    seed: int, batch: int, response: int, clipping_norm: float
) -> None:
    gradients = random_gradients(seed, batch, response)
    clipped = [g * min(1.0, clipping_norm / float(g.norm())) for g in gradients.materialise()]
    assert torch.allclose(gradients.clipped_sum(clipping_norm), torch.stack(clipped).sum(dim=0))


@examples(50)
@given(clipping_norm=st.floats(1e-3, 10), **shapes)
def test_clipped_sum_has_sensitivity_c_under_add_remove(
    seed: int, batch: int, response: int, clipping_norm: float
) -> None:
    whole = random_gradients(seed, batch + 1, response)
    without_last = HeadGradients(whole.residual[:-1], whole.hidden[:-1])
    difference = whole.clipped_sum(clipping_norm) - without_last.clipped_sum(clipping_norm)
    assert float(difference.norm()) <= clipping_norm * (1 + 1e-9)


@pytest.mark.parametrize("loss", get_args(MatchingLoss))
def test_a_vanishing_gradient_has_loss_one_and_a_finite_derivative(loss: MatchingLoss) -> None:
    residual = torch.zeros(1, 1, 11, dtype=torch.float64, requires_grad=True)
    gradients = HeadGradients(residual, torch.ones(1, 1, 5, dtype=torch.float64))
    of_text = gradients.matching_losses(torch.ones(11, 5, dtype=torch.float64), loss)
    assert float(of_text.detach()) == 1.0
    of_text.backward()
    assert residual.grad is not None
    assert gradients.clip_scales(1.0).isfinite().all()
