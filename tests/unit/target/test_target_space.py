"""Compare target spaces with dense matrices, and check the sensitivity of sums in them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import TargetGradientSettings
from gradmm.generation.objectives import HeadMatching
from gradmm.gradients.head_gradient import HeadGradients, head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.sampling import write_texts
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.target.target_space import (
    FULL,
    TargetSpace,
    difference_shrinkage,
    from_table,
    label_rows,
    make_target_space,
    public_texts,
    to_table,
)
from tests.conftest import examples, tiny_language_model

VOCAB, WIDTH, RESPONSE = 7, 5, 3
INSTRUCTIONS = {0: "a bad day :\n", 1: "a good day :\n"}
SPACES = ["full", "label-rows", "public-subspace"]


def small_space(kind: str, centred: bool) -> TargetSpace:
    random = torch.Generator().manual_seed(1)
    rows = None if kind == "full" else torch.tensor([5, 2, 6])
    basis = None
    if kind == "public-subspace":
        basis = torch.linalg.qr(torch.randn(WIDTH, 2, generator=random, dtype=torch.float64)).Q
    shape = (VOCAB if rows is None else 3, WIDTH if basis is None else 2)
    centre = torch.randn(*shape, generator=random, dtype=torch.float64)
    return TargetSpace(rows, basis, {0: centre} if centred else {})


@st.composite
def batches(draw: st.DrawFn, smallest: int = 1) -> HeadGradients:
    """Draw gradients of very different norms, with padded responses of one to three tokens."""
    count = draw(st.integers(smallest, 6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = torch.tensor(draw(st.lists(st.floats(-6, 6), min_size=count, max_size=count)), dtype=torch.float64)
    residual = torch.randn(count, RESPONSE, VOCAB, generator=random, dtype=torch.float64)
    lengths = torch.randint(1, RESPONSE + 1, (count,), generator=random)
    residual[torch.arange(RESPONSE) >= lengths[:, None]] = 0
    hidden = torch.randn(count, RESPONSE, WIDTH, generator=random, dtype=torch.float64)
    return HeadGradients(residual * 10 ** sizes[:, None, None], hidden)


def without(gradients: HeadGradients, row: int) -> HeadGradients:
    keep = torch.arange(len(gradients.residual)) != row
    return HeadGradients(gradients.residual[keep], gradients.hidden[keep])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", SPACES)
@examples(60)
@given(gradients=batches(2), clipping_norm=st.floats(1e-3, 1e3))
def test_no_pair_of_neighbouring_data_sets_is_further_apart_than_c(
    kind: str, centred: bool, gradients: HeadGradients, clipping_norm: float
) -> None:
    space = small_space(kind, centred)

    def target(records: HeadGradients) -> torch.Tensor:
        return space.project(records, 0).clipped_sum(clipping_norm)

    more, fewer = target(gradients), target(without(gradients, 0))
    replaced = target(without(gradients, 1))
    rounding = 1e-9 * clipping_norm
    assert float((more - fewer).norm()) <= clipping_norm + rounding
    assert float((fewer - replaced).norm()) <= 2 * clipping_norm + rounding


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", SPACES)
@examples(25)
@given(gradients=batches())
def test_a_space_is_a_linear_map_of_the_dense_gradient(kind: str, centred: bool, gradients: HeadGradients) -> None:
    space = small_space(kind, centred)
    dense = gradients.materialise()
    if space.rows is not None:
        dense = dense[:, space.rows]
    if space.basis is not None:
        dense = dense @ space.basis
    if centred:
        dense = dense - space.centres[0]
    projected = space.project(gradients, 0)
    assert torch.allclose(projected.materialise(), dense)
    assert torch.allclose(projected.norms(), dense.flatten(1).norm(dim=1), rtol=1e-6)
    target = torch.randn_like(dense[0])
    assert torch.allclose(projected.inner_products(target), (dense * target).sum(dim=(1, 2)))
    cosines = torch.nn.functional.cosine_similarity(dense.flatten(1), target.flatten()[None])
    assert torch.allclose(projected.matching_losses(target), 1 - cosines, atol=1e-6)
    scales = (0.3 / dense.flatten(1).norm(dim=1)).clamp_max(1)
    assert torch.allclose(projected.clipped_sum(0.3), (dense * scales[:, None, None]).sum(dim=0), atol=1e-6)


def made(
    phi: LanguageModel, template: TokenisedTemplate, clipping_norm: float = 1.0, **changes: object
) -> tuple[TargetSpace, dict]:
    chosen = TargetGradientSettings.model_validate({"public_texts": 12, "public_text_tokens": 6} | changes)
    texts = public_texts(phi, template, INSTRUCTIONS, chosen)
    return make_target_space(phi, template, texts, chosen, clipping_norm)


def public_gradients(phi: LanguageModel, template: TokenisedTemplate, label: int) -> HeadGradients:
    allowed = allowed_tokens(phi, "any")
    uniforms = np.random.default_rng(0).random((12, 6))
    texts = write_texts(phi, allowed, PromptCache(phi, INSTRUCTIONS[label]), uniforms).tolist()
    return head_gradients(phi, make_batch(template, texts, [label] * 12, phi.device))


def test_public_texts_are_written_once_for_a_model(
    phi: LanguageModel, tokenizer: PreTrainedTokenizerFast, template: TokenisedTemplate
) -> None:
    def written(
        model: LanguageModel, instructions: dict[int, str], **changes: object
    ) -> dict[int, list[list[int]]]:
        chosen = TargetGradientSettings.model_validate({"public_texts": 3, "public_text_tokens": 4} | changes)
        return public_texts(model, template, instructions, chosen)

    swapped = dict(zip(INSTRUCTIONS, reversed(INSTRUCTIONS.values()), strict=True))
    first = written(phi, INSTRUCTIONS)
    assert written(phi, INSTRUCTIONS) is first
    assert list(written(phi, swapped).values()) == list(reversed(first.values()))
    assert {len(text) for text in written(phi, INSTRUCTIONS, public_text_tokens=3)[0]} == {3}
    assert len(written(phi, INSTRUCTIONS, public_texts=2)[0]) == 2
    assert written(tiny_language_model(tokenizer, "phi", seed=1), INSTRUCTIONS) != first
    again = written(phi, INSTRUCTIONS)
    assert again is not first
    assert again == first


def test_centres_are_the_mean_gradients_of_public_text(phi: LanguageModel, template: TokenisedTemplate) -> None:
    for kind in SPACES:
        space, statistics = made(phi, template, space=kind, subspace_dimensions=3, centred=True, batch_size=5)
        for label in (0, 1):
            projected = replace(space, centres={}).project(public_gradients(phi, template, label), label)
            mean = projected.materialise().mean(dim=0)
            assert torch.allclose(space.centres[label], mean, atol=1e-10)
            distances = (projected.materialise() - mean).flatten(1).norm(dim=1)
            assert statistics[label].plain == pytest.approx(float(mean.norm()))
            assert statistics[label].clip_scale == pytest.approx(float((1 / distances).clamp_max(1).mean()))


def test_the_basis_is_orthonormal_and_holds_most_of_the_public_hidden_states(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    space, _ = made(phi, template, space="public-subspace", subspace_dimensions=4)
    assert space.basis is not None
    assert torch.allclose(space.basis.mT @ space.basis, torch.eye(4, dtype=torch.float64), atol=1e-10)
    hidden = torch.cat([public_gradients(phi, template, label).hidden[:, 0] for label in (0, 1)])
    kept = (hidden @ space.basis).square().sum() / hidden.square().sum()
    random = torch.linalg.qr(torch.randn(hidden.shape[1], 4, dtype=torch.float64)).Q
    assert float(kept) > float((hidden @ random).square().sum() / hidden.square().sum())
    singular = torch.linalg.svdvals(hidden)
    assert float(kept) == pytest.approx(float(singular[:4].square().sum() / singular.square().sum()))


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("centred", [False, True])
def test_a_space_survives_its_table(
    phi: LanguageModel, template: TokenisedTemplate, kind: str, centred: bool
) -> None:
    space, _ = made(phi, template, space=kind, subspace_dimensions=3, centred=centred)
    chosen = TargetGradientSettings.model_validate({"space": kind, "centred": centred})
    back = from_table(to_table(space), template, chosen, phi.device)
    assert (back.basis is None) == (space.basis is None)
    if back.basis is not None and space.basis is not None:
        assert torch.allclose(back.basis.double(), space.basis, atol=1e-6)
    assert set(back.centres) == set(space.centres)
    for label, centre in space.centres.items():
        assert torch.allclose(back.centres[label].double(), centre, atol=1e-5)
    assert (back.rows is None) == (kind == "full")


def test_the_whole_head_needs_no_table(template: TokenisedTemplate, phi: LanguageModel) -> None:
    assert from_table(None, template, TargetGradientSettings(space="full"), phi.device) == FULL


def test_rows_are_those_of_all_response_tokens_once(phi: LanguageModel) -> None:
    prompt_template = PromptTemplate(
        suffix=" It was", verbalisers={0: " terrible good", 1: " great good"}, max_text_tokens=64
    )
    tokens = [*phi.encode(" terrible good"), *phi.encode(" great good")]
    assert label_rows(tokenise_template(phi, prompt_template)) == list(dict.fromkeys(tokens))


def test_generation_matches_in_the_space_of_the_target(phi: LanguageModel, template: TokenisedTemplate) -> None:
    space, _ = made(phi, template, space="public-subspace", subspace_dimensions=3, centred=True)
    ids = torch.tensor([phi.encode("the soup was warm")])
    target = torch.randn(2, 3, dtype=torch.float64)
    (loss,) = HeadMatching(phi, template, 1, target, space)(phi.embed(ids))
    dense = head_gradients(phi, make_batch(template, ids.tolist(), [1], phi.device)).materialise()[0]
    assert space.rows is not None
    assert space.basis is not None
    inside = dense[space.rows] @ space.basis - space.centres[1]
    cosine = torch.nn.functional.cosine_similarity(inside.flatten(), target.flatten(), dim=0)
    assert float(loss) == pytest.approx(1 - float(cosine), abs=1e-9)


def test_the_mean_gradient_follows_from_the_released_differences(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    """Exactly without clipping, and also if all gradients are clipped by the same factor."""
    space, _ = made(phi, template, space="label-rows", centred=True)
    texts = [phi.encode(text) for text in ("the soup was warm", "rude staff", "fresh bread .")]
    gradients = head_gradients(phi, make_batch(template, texts[:1] * 3, [1] * 3, phi.device))
    plain = space.without_centres()
    expected = plain.project(gradients, 1).materialise().mean(dim=0)
    unclipped = space.project(gradients, 1).clipped_sum(None)
    whole = {"label": 1, "records": 3.0, "shrinkage": 1.0}
    assert torch.allclose(space.mean_gradient(unclipped, **whole, clip_scale=1.0), expected)
    scale = float(space.project(gradients, 1).clip_scales(1e-3)[0])
    assert scale < 1
    clipped = space.project(gradients, 1).clipped_sum(1e-3)
    assert torch.allclose(space.mean_gradient(clipped, **whole, clip_scale=scale), expected)
    # Shrinkage moves the estimate towards the public centre.
    (centre, half) = (space.mean_gradient(clipped, 1, 3.0, scale, shrinkage) for shrinkage in (0.0, 0.5))
    assert torch.equal(centre, space.centres[1])
    assert torch.allclose(half, (centre + expected) / 2)


@pytest.mark.parametrize(("count", "sigma"), [(2, 0.0), (5, 0.0), (20, 0.0), (20, 0.5), (200, 0.0), (200, 5.0)])
def test_a_difference_shrunk_by_its_factor_is_nearer_to_the_truth(count: int, sigma: float) -> None:
    """On average. The gain is smallest with many records and no noise, when there is little to shrink."""
    random = np.random.default_rng(0)
    clipping_norm, truth = 2.0, np.zeros((4, 8))
    truth[0, 0] = 0.8
    shrinkages, errors, shrunk = [], [], []
    for _ in range(400):
        records = truth + random.standard_normal((count, 4, 8))
        norms = np.linalg.norm(records, axis=(1, 2), keepdims=True)
        total = (records * np.minimum(1, clipping_norm / norms)).sum(axis=0) + sigma * random.standard_normal(
            (4, 8)
        )
        shrinkage = difference_shrinkage(torch.from_numpy(total), float(count), clipping_norm, sigma)
        shrinkages.append(shrinkage)
        clipped = truth * clipping_norm / np.sqrt(32 + 0.64)  # approximately the mean after clipping
        errors.append(np.square(total / count - clipped).sum())
        shrunk.append(np.square(shrinkage * total / count - clipped).sum())
    assert min(shrinkages) >= 0
    assert max(shrinkages) < 1
    assert np.mean(shrunk) < (0.9 if count == 20 else 1.0) * np.mean(errors)


def test_a_difference_is_shrunk_more_for_fewer_records_and_more_noise() -> None:
    """The closed form for identical records of norm C: chance explains 1 / N + sigma^2 d / (N C)^2."""
    record = torch.zeros(3, 4, dtype=torch.float64)
    record[1, 2] = 2.0
    assert difference_shrinkage(record, 1.0, 2.0, 0.0) == 0
    assert difference_shrinkage(1e-200 * record, 1.0, 1e-30, 1e-30) == 0  # its square is zero
    assert difference_shrinkage(5 * record, 5.0, 2.0, 0.0) == pytest.approx(1 - 1 / 5)
    assert difference_shrinkage(50 * record, 50.0, 2.0, 3.0) == pytest.approx(1 - 1 / 50 - 9 * 12 / (50 * 2) ** 2)
    assert difference_shrinkage(50 * record, 50.0, 2.0, 300.0) == 0


@pytest.mark.parametrize("probe_dimensions", [None, 3])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", SPACES)
def test_the_progress_bar_ends_at_its_total(
    phi: LanguageModel,
    template: TokenisedTemplate,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    centred: bool,
    probe_dimensions: int | None,
) -> None:
    bars = []

    def shown(**options: Any) -> tqdm:
        bars.append(tqdm(**options | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr("gradmm.target.target_space.tqdm", shown)
    settings = TargetGradientSettings.model_validate(
        {"space": kind, "centred": centred, "subspace_dimensions": 2, "batch_size": 2}
    )
    texts = {0: [[5, 6, 7], [8, 9], [10, 11]], 1: [[12, 13], [14]]}
    make_target_space(phi, template, texts, settings, 1.0, probe_dimensions)
    (bar,) = bars
    assert bar.n == bar.total > 0
