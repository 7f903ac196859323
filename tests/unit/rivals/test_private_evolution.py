"""Private Evolution: votes as a slow implementation counts them, noise of the published size, and a canary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import GenerationSettings
from gradmm.data.splits import LabelledTexts
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.sampling import write_texts
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.privacy.ledger import composed_epsilon
from gradmm.rivals.private_evolution import (
    VOTED,
    candidate_features,
    count_votes,
    noisy_votes,
    vary_texts,
)
from gradmm.rivals.releases import mechanism_of_part, rival_release
from gradmm.target.features import TextFeatures, text_means
from gradmm.target.record_batches import RecordBatches
from gradmm.target.target_space import TargetSpace
from tests.conftest import examples, make_mechanism, tiny_language_model

GOOD = ("the soup was warm", "fresh bread and good light", "a quiet room , great book", "we liked every page")
BAD = ("the train came late", "rude staff and cold coffee", "a terrible smell again", "bad chairs")
DATA = LabelledTexts((*GOOD, *BAD, *GOOD[:2]), (1,) * 4 + (0,) * 4 + (1,) * 2)
CANDIDATES = {
    0: ("the smell was terrible", "cold coffee", "the train", "bad bad bad chairs again"),
    1: ("warm soup", "we liked this book", "good light , fresh bread", "a great quiet room", "a page"),
}

Setting = tuple[LanguageModel, TokenisedTemplate, TextFeatures, dict[int, list[list[int]]]]


@pytest.fixture(scope="module", params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def setting(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Setting:
    language_model = tiny_language_model(tokenizer, "phi", dtype=request.param)
    wording = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=64)
    template = tokenise_template(language_model, wording)
    ids = torch.randint(3, 370, (40, 6), generator=torch.Generator().manual_seed(7))
    public = text_means(language_model.layers(input_ids=ids), torch.ones_like(ids, dtype=torch.bool))
    candidates = {label: [language_model.encode(text) for text in texts] for label, texts in CANDIDATES.items()}
    return language_model, template, TextFeatures.of_public(public.detach(), 6), candidates


def votes_of(setting: Setting, data: LabelledTexts, rows: int = 4) -> dict[int, list[int]]:
    language_model, template, features, candidates = setting
    space = TargetSpace(torch.arange(5), None, {}, features)
    batches = RecordBatches(language_model, template, space, rows, private=True)
    votes = count_votes(language_model, template, candidates, data, features, batches)
    return {label: counts.tolist() for label, counts in votes.items()}


def test_every_record_votes_for_the_nearest_text_of_its_class(setting: Setting) -> None:
    language_model, template, features, candidates = setting
    expected = {label: [0] * len(texts) for label, texts in candidates.items()}

    def point(text: list[int]) -> torch.Tensor:
        batch = make_batch(template, [text], [0], language_model.device)
        means = text_means(language_model.layers(input_ids=batch.input_ids), batch.text_mask)
        return features(means.double())[0]

    for text, label in zip(DATA.texts, DATA.labels, strict=True):
        own = point(language_model.encode(text))
        distances = [float((own - point(other)).norm()) for other in candidates[label]]
        expected[label][int(np.argmin(distances))] += 1
    assert votes_of(setting, DATA) == expected
    assert sum(expected[0]) == 4
    assert max(expected[1]) < 6  # they do not agree


@examples(20)
@given(st.lists(st.sampled_from([*GOOD, *BAD, "", "!"]), min_size=1, max_size=6), st.integers(0, 1))
def test_a_record_moves_one_vote_whoever_is_in_its_batch(setting: Setting, others: list[str], label: int) -> None:
    with_it = LabelledTexts((*others, "a warm room"), (*[1] * len(others), label))
    without = dataclasses.replace(with_it, texts=tuple(others), labels=(1,) * len(others))
    alone = votes_of(setting, LabelledTexts(("a warm room",), (label,)))
    more, fewer = votes_of(setting, with_it), votes_of(setting, without)
    moved = {of: (np.array(more[of]) - fewer[of]).tolist() for of in more}
    assert moved == alone
    assert sum(map(sum, alone.values())) == 1


@pytest.mark.parametrize("iterations", [1, 10])
@pytest.mark.parametrize(("epsilon", "sigma"), [(0.05, 57.771), (0.2, 16.304), (1.0, 3.7306)])
def test_all_histograms_compose_to_the_claim(epsilon: float, sigma: float, iterations: int) -> None:
    """The noise multipliers are those of Balle and Wang (2018) at delta 1e-5, with sensitivity 1."""
    claim = make_mechanism(epsilon)
    each = mechanism_of_part(claim, iterations)
    assert each.sigma == pytest.approx(sigma * iterations**0.5, rel=1e-4)
    releases = [rival_release("r", claim, "votes", iterations)] * iterations
    assert releases[0].sigma == pytest.approx(each.sigma)
    assert composed_epsilon(releases, 1e-5, "add-or-remove") == pytest.approx(epsilon, rel=1e-6)
    if iterations > 1:
        assert releases[0].epsilon < epsilon / 2


def test_the_noise_is_of_that_size_and_independent_and_a_canary_tells_no_more_than_claimed() -> None:
    claim, draws, iterations = make_mechanism(1.0), 3000, 10
    each = mechanism_of_part(claim, iterations)
    absent, present = {0: np.array([3, 0]), 1: np.array([1])}, {0: np.array([3, 1]), 1: np.array([1])}

    def released(votes: dict[int, np.ndarray]) -> np.ndarray:
        rounds = [[np.concatenate([*noisy_votes(votes, each).values()]) for _ in range(iterations)]
                  for _ in range(draws)]  # fmt: skip
        return np.array(rounds)

    out, of_it = released(absent), released(present)
    noise = (out - np.array([3, 0, 1])) / each.sigma
    squares, count = float(np.square(noise).sum()), noise.size
    assert chi2.ppf(1e-6, count) < squares < chi2.isf(1e-6, count)
    correlations = np.corrcoef(noise.reshape(draws, -1).T) - np.eye(3 * iterations)
    assert np.abs(correlations).max() < 6 / draws**0.5
    # The best attack adds up its entry over all iterations: sensitivity / sigma of the claim.
    scores = [rounds[:, :, 1].sum(axis=1) for rounds in (out, of_it)]
    separation = (scores[1].mean() - scores[0].mean()) / np.std(scores[0])
    assert separation == pytest.approx(claim.sensitivity / claim.sigma, abs=5 * (2 / draws) ** 0.5)


def test_votes_of_the_discrete_sampler_are_on_its_grid() -> None:
    each = mechanism_of_part(make_mechanism(1.0).model_copy(update={"sampler": "discrete"}), 3)
    noisy = noisy_votes({0: np.array([2, 5]), 1: np.array([7])}, each)
    steps = np.concatenate([*noisy.values()]) / each._step
    assert (steps == np.round(steps)).all()
    assert float(1 / each._step).is_integer()  # so that counts are on it too


def test_without_noise_the_votes_are_returned() -> None:
    assert noisy_votes({0: np.array([2, 5])}, None)[0].tolist() == [2.0, 5.0]


def test_a_text_goes_on_from_its_beginning_as_it_would_have(phi: LanguageModel) -> None:
    allowed, cache = allowed_tokens(phi, "english"), PromptCache(phi, "a good day :\n")
    uniforms = np.random.default_rng(0).random((7, 6))
    whole = write_texts(phi, allowed, cache, uniforms, top_k=20)
    for length in (1, 3, 5):
        again = write_texts(phi, allowed, cache, uniforms, 20, batch_size=3, beginnings=whole[:, :length])
        assert torch.equal(again, whole)


def kept_rows(language_model: LanguageModel) -> pd.DataFrame:
    texts = [(label, text) for label, of_class in CANDIDATES.items() for text in of_class[:3]]
    return pd.DataFrame(
        {
            "id": [f"{label}-{row:05d}" for row, (label, _) in enumerate(texts)],
            "label": [label for label, _ in texts],
            "text": [text for _, text in texts],
            "token_ids": [language_model.encode(text) for _, text in texts],
            "log_perplexity": 1.0,
            "token_passes": 1.0,
            "rank": [1, 2, 3] * 2,
            "predicted": pd.NA,
            "probability": np.nan,
            "kept": True,
            "reason": "",
        }
    )


def test_variations_keep_a_beginning_of_their_text_and_its_class(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    kept = kept_rows(phi)
    settings = GenerationSettings(whole_sentences=False)
    instructions, tokens = {0: "a bad day :\n", 1: "a good day :\n"}, {0: 8, 1: 8}
    texts, figures = vary_texts(phi, template, kept, instructions, tokens, settings, 20, (0, 1))
    assert texts[: len(kept)].equals(kept.drop(columns=VOTED))
    new = texts[len(kept) :]
    assert figures == {"variations": len(new)}
    assert len(new) > 100  # few contain an answer
    parents = {row["id"]: row for row in kept.to_dict("records")}
    shared = []
    for row in new.to_dict("records"):
        parent = parents[row["id"].rpartition(".")[0]]
        assert row["label"] == parent["label"]
        # Read again, the last token that was kept may have become another.
        assert row["text"].startswith(phi.decode(parent["token_ids"][:1]))
        both = zip(row["text"], parent["text"], strict=False)
        shared.append(next((i for i, (a, b) in enumerate(both) if a != b), 9))
    assert max(shared) > 8
    assert new["text"].nunique() > 100
    assert new["id"].is_unique
    same, _ = vary_texts(phi, template, kept, instructions, tokens, settings, 20, (0, 1))
    assert same.equals(texts)
    other, _ = vary_texts(phi, template, kept, instructions, tokens, settings, 20, (0, 2))
    assert not other["text"].equals(texts["text"])


def test_candidates_have_the_features_of_records(setting: Setting) -> None:
    language_model, template, features, candidates = setting
    points = candidate_features(language_model, template, features, candidates[1], batch_size=2)
    for text, point in zip(candidates[1], points, strict=True):
        batch = make_batch(template, [text], [0], language_model.device)
        own = features.with_constant(text_means(language_model.layers(input_ids=batch.input_ids), batch.text_mask))
        assert torch.allclose(point, own[0], atol=1e-2 if language_model.head.dtype == torch.bfloat16 else 1e-5)
