from __future__ import annotations

import pytest
import torch

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate, make_batch
from gradmm.privacy.sensitivity import CONSTANT
from gradmm.target.features import TextFeatures, text_means

TEXTS = ("the soup was warm", "rude staff", "a quiet room with good light and fresh bread")


def public_means(count: int = 60, width: int = 9) -> torch.Tensor:
    """Draw correlated means of very different scales, away from zero."""
    random = torch.Generator().manual_seed(1)
    mixed = torch.randn(count, width, generator=random, dtype=torch.float64) @ torch.randn(
        width, width, generator=random, dtype=torch.float64
    )
    return mixed * torch.logspace(-3, 3, width, dtype=torch.float64) + 5


@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_means_are_over_the_texts_own_tokens_only(
    phi: LanguageModel, template: TokenisedTemplate, prefix: tuple[int, ...]
) -> None:
    template = TokenisedTemplate(prefix, template.suffix, template.responses, template.max_text_tokens)
    texts = [phi.encode(text) for text in TEXTS]
    batch = make_batch(template, texts, [0, 1, 0], phi.device)
    means = text_means(phi.layers(input_ids=batch.input_ids), batch.text_mask)
    for row, text in zip(means, texts, strict=True):
        out = phi.model(torch.tensor([[*prefix, *text]]), output_hidden_states=True)
        layers = [out.hidden_states[i][0, len(prefix) :] for i in (0, len(out.hidden_states) // 2, -1)]
        slow = torch.cat([torch.stack([layer[j] for j in range(len(text))]).mean(dim=0) for layer in layers])
        assert torch.allclose(row, slow, atol=1e-5)


def test_embeddings_give_the_means_of_the_tokens_that_they_stand_for(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    batch = make_batch(template, [phi.encode(TEXTS[0])], [1], phi.device)
    by_ids, by_embeddings = (
        text_means(layers, batch.text_mask)
        for layers in (
            phi.layers(input_ids=batch.input_ids),
            phi.layers(inputs_embeds=phi.embed(batch.input_ids)),
        )
    )
    assert torch.allclose(by_ids, by_embeddings, atol=1e-6)


def test_public_texts_are_white_in_the_leading_directions_and_half_of_them_within_the_norm() -> None:
    means = public_means()
    features = TextFeatures.of_public(means, 4)
    mapped = (means - features.mean) @ features.map.mT
    assert torch.allclose(mapped.mean(dim=0), torch.zeros(4, dtype=torch.float64), atol=1e-9)
    covariance = mapped.mT @ mapped
    assert torch.allclose(covariance, torch.diag(covariance.diagonal()), atol=1e-9 * float(covariance.max()))
    variances = covariance.diagonal()
    assert (variances[:-1] >= variances[1:]).all()
    # Equal variances up to RIDGE.
    assert float(variances[0] / variances[-1]) < 2
    assert float(mapped.norm(dim=1).median()) == pytest.approx(1.0)


def test_features_within_the_norm_are_kept_and_others_are_scaled_to_it() -> None:
    means = public_means()
    features = TextFeatures.of_public(means, 9)
    far = torch.cat([means, 1e3 * means])
    mapped, found = (far - features.mean) @ features.map.mT, features(far)
    norms = mapped.norm(dim=1)
    assert torch.allclose(found[norms <= 1], mapped[norms <= 1])
    outside = norms > 1
    assert outside.sum() > 60
    assert torch.allclose(found[outside], mapped[outside] / norms[outside, None])


def test_a_records_vector_has_a_norm_of_at_most_one_and_counts_it() -> None:
    means = public_means()
    features = TextFeatures.of_public(means, 5)
    vectors = features.with_constant(1e6 * means.float())
    assert vectors.dtype == torch.float64
    assert torch.allclose(vectors.norm(dim=1), torch.ones(60, dtype=torch.float64), atol=1e-12)
    assert float(vectors[:, -1].sum()) * (1 + CONSTANT**2) ** 0.5 / CONSTANT == pytest.approx(60)


def test_there_are_at_most_as_many_directions_as_public_texts_span() -> None:
    means = public_means(count=5)
    assert len(TextFeatures.of_public(means, 1024).map) == 4
    flat = public_means()
    flat[:, 3:] = 1.0  # three columns vary
    features = TextFeatures.of_public(flat, 1024)
    assert len(features.map) == 3
    assert features(flat).isfinite().all()


@pytest.mark.parametrize(
    ("means", "message"),
    [
        (torch.full((4, 3), torch.nan), "hidden states of the model's own text are not finite"),
        (torch.ones(4, 3), "the model's own texts are all the same"),
    ],
)
def test_public_texts_without_variation_or_finite_features_are_an_error(means: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TextFeatures.of_public(means, 2)
