from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gradmm.generation.objectives import HeadMatching
from gradmm.gradients.head_gradient import HeadGradients
from gradmm.lm import bfloat16_product
from gradmm.lm.bfloat16_product import FrozenProduct
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate
from tests.conftest import tiny_language_model


def hidden_and_matrix(texts: int = 4) -> tuple[Tensor, Tensor]:
    """Create float32 tensors rounded to bfloat16, as a bfloat16 body yields."""
    generator = torch.Generator().manual_seed(0)
    h = 3 * torch.randn(texts, 1, 65, generator=generator)
    matrix = torch.randn(700, 65, generator=generator)
    return h.bfloat16().float(), matrix.bfloat16().float()


@pytest.mark.parametrize("texts", [1, 2, 3, 100])
def test_two_bfloat16_products_are_nearly_as_accurate_as_one_in_float32(texts: int) -> None:
    """Includes a single text: libraries multiply a vector differently from a matrix."""
    h, matrix = hidden_and_matrix(texts)
    exact = h.double() @ matrix.double().mT
    one = (h.bfloat16() @ matrix.bfloat16().mT).double()
    two = FrozenProduct(matrix, torch.bfloat16)(h)
    assert two.dtype == torch.float32
    largest = exact.abs().max()
    assert (two - exact).abs().max() < 2**-15 * largest
    assert (one - exact).abs().max() > 2**-11 * largest


def test_the_gradient_equals_that_of_the_exact_product() -> None:
    h, matrix = hidden_and_matrix()
    slope = torch.randn(4, 1, 700, generator=torch.Generator().manual_seed(1))
    h.requires_grad_(True)
    (gradient,) = torch.autograd.grad(FrozenProduct(matrix, torch.bfloat16)(h), [h], slope)
    exact = slope.double() @ matrix.double()
    assert gradient.dtype == torch.float32
    assert (gradient - exact).abs().max() < 2**-7 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_of_the_body_use_the_plain_product(dtype: torch.dtype) -> None:
    h, matrix = hidden_and_matrix()
    assert torch.equal(FrozenProduct(matrix, dtype)(h), h @ matrix.mT)


def test_a_device_with_inaccurate_products_uses_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a device rounds a product before the addition."""
    h, matrix = hidden_and_matrix()
    monkeypatch.setattr(bfloat16_product, "_two_products", lambda h, half: (h @ half.mT).float())
    assert torch.equal(FrozenProduct(matrix, torch.bfloat16)(h), h @ matrix.mT)


def test_a_bfloat16_body_has_the_matching_losses_of_its_hidden_states(
    tokenizer: PreTrainedTokenizerFast, template: TokenisedTemplate
) -> None:
    phi = tiny_language_model(tokenizer, "phi", seed=0, dtype=torch.bfloat16)
    check_losses_of_hidden_states(phi, template)
    assert phi.head_product._half is not None


def check_losses_of_hidden_states(phi: LanguageModel, template: TokenisedTemplate) -> None:
    """Compare with float64 arithmetic on the same hidden states."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(phi.head.shape, generator=generator).to(phi.device)
    x = phi.embed_freely(torch.randint(len(phi.embeddings), (6, 5), generator=generator).to(phi.device))
    free_text = HeadMatching(phi, template, 1, target)._free_text
    response = free_text.response_ids.expand(6, -1)
    with torch.no_grad():
        losses = HeadMatching(phi, template, 1, target)(x)
        hidden = phi.augment(phi.hidden_states(inputs_embeds=free_text(x))[:, -response.shape[1] :]).double()
        gradients = HeadGradients.from_logits(
            hidden @ phi.head.double().mT, hidden, response, torch.ones_like(response, dtype=torch.bool)
        )
        exact = gradients.matching_losses(target.double())
    assert (losses - exact).abs().max() < 5e-5
