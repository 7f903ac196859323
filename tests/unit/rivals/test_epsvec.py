"""EPSVec: sums as a slow loop computes them, noise of the claimed size, and texts that a vector steers."""

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

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template
from gradmm.privacy.ledger import composed_epsilon
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals.epsvec import (
    PublicMeans,
    class_sums,
    middle_layer,
    public_means,
    released_vectors,
    steered,
    steered_texts,
)
from gradmm.rivals.releases import rival_release
from gradmm.target.tables import matrix_of
from tests.conftest import examples, make_mechanism, tiny_language_model

GOOD = ("the soup was warm", "fresh bread and good light", "a quiet room , great book", "we liked every page")
BAD = ("the train came late", "rude staff and cold coffee", "a terrible smell again", "bad chairs")
DATA = LabelledTexts((*GOOD, *BAD, *GOOD[:2]), (1,) * 4 + (0,) * 4 + (1,) * 2)
OWN = {0: ("a train", "cold coffee again", "bad light"), 1: ("warm soup", "a good book", "great bread , warm")}
MATCHING = TargetGradientSettings(space="label-rows", centred=False, batch_size=4)
MECHANISM = make_mechanism(1.0)

Setting = tuple[LanguageModel, TokenisedTemplate, PublicMeans]


def own_texts(language_model: LanguageModel) -> pd.DataFrame:
    """Rows of the stage `generation`, as far as they are read."""
    rows = [(label, text) for label, texts in OWN.items() for text in texts]
    return pd.DataFrame(
        {
            "id": [f"{label}-{row:05d}" for row, (label, _) in enumerate(rows)],
            "label": [label for label, _ in rows],
            "text": [text for _, text in rows],
            "token_ids": [language_model.encode(text) for _, text in rows],
            "token_passes": 1.0,
            "log_perplexity": 1.0,
        }
    )


@pytest.fixture(scope="module", params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def setting(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Setting:
    language_model = tiny_language_model(tokenizer, "phi", dtype=request.param)
    wording = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=64)
    template = tokenise_template(language_model, wording)
    return language_model, template, public_means(language_model, template, own_texts(language_model))


def middle_mean(language_model: LanguageModel, template: TokenisedTemplate, text: str) -> torch.Tensor:
    """The mean of the middle layer's hidden state over a text's own tokens, one text at a time."""
    batch = make_batch(template, [language_model.encode(text)], [0], language_model.device)
    middle = language_model.layers(input_ids=batch.input_ids)[1][0]
    return torch.stack([middle[i].double() for i in batch.text_mask[0].nonzero()[:, 0].tolist()]).mean(dim=0)


def tolerance(language_model: LanguageModel) -> float:
    return {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05}[language_model.head.dtype]


def sums_of(
    setting: Setting, data: LabelledTexts, mechanism: GaussianMechanism = MECHANISM
) -> dict[int, torch.Tensor]:
    language_model, template, public = setting
    return class_sums(language_model, template, public.features, data, None, MATCHING, mechanism)


def test_sums_are_those_of_a_slow_loop(setting: Setting) -> None:
    language_model, template, public = setting
    own = [middle_mean(language_model, template, text) for texts in OWN.values() for text in texts]
    centre = torch.stack(own).mean(dim=0)
    unit = float(torch.stack([(each - centre).norm() for each in own]).median())
    assert public.unit == pytest.approx(unit, rel=tolerance(language_model))
    expected = {0: torch.zeros(len(centre) + 1).double(), 1: torch.zeros(len(centre) + 1).double()}
    for text, label in zip(DATA.texts, DATA.labels, strict=True):
        mapped = (middle_mean(language_model, template, text) - centre) / unit
        mapped = mapped / max(1.0, float(mapped.norm()))
        expected[label] += torch.cat([mapped, torch.tensor([0.5]).double()]) / 1.25**0.5
    sums = sums_of(setting, DATA)
    for label, total in expected.items():
        assert torch.allclose(sums[label], total, atol=6 * tolerance(language_model))
    assert sums[1][-1] / sums[0][-1] == pytest.approx(6 / 4)


@examples(20)
@given(st.lists(st.sampled_from([*GOOD, *BAD, "", "!"]), min_size=1, max_size=6), st.integers(0, 1))
def test_a_record_moves_its_own_sum_by_the_same_vector_whoever_is_in_its_batch(
    setting: Setting, others: list[str], label: int
) -> None:
    with_it = LabelledTexts((*others, "a warm room"), (*[1] * len(others), label))
    without = dataclasses.replace(with_it, texts=tuple(others), labels=(1,) * len(others))
    alone = sums_of(setting, LabelledTexts(("a warm room",), (label,)))
    more, fewer = sums_of(setting, with_it), sums_of(setting, without)
    for of in (0, 1):
        assert torch.allclose(more[of] - fewer[of], alone[of], atol=1e-12)
    assert not alone[1 - label].any()
    assert 0 < float(alone[label].norm()) <= 1 + 1e-12


def test_sums_for_the_discrete_sampler_are_on_its_grid(setting: Setting) -> None:
    """Noise on a grid hides nothing of what lies between its points."""
    discrete = make_mechanism(1.0, sampler="discrete")
    rounded, plain = sums_of(setting, DATA, discrete), sums_of(setting, DATA)
    for label, total in rounded.items():
        steps = total / discrete._step
        assert torch.equal(steps, steps.round())
        assert 0 < float((total - plain[label]).abs().max()) < len(DATA) * discrete._step


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.05, 57.771), (1.0, 3.7306)])
def test_the_release_costs_what_it_claims(epsilon: float, sigma: float) -> None:
    """The noise multipliers are those of Balle and Wang (2018) at delta 1e-5, with sensitivity 1."""
    release = rival_release("r", make_mechanism(epsilon), "means")
    assert release.sigma == pytest.approx(sigma, rel=1e-4)
    assert composed_epsilon([release], 1e-5, "add-or-remove") == pytest.approx(epsilon, rel=1e-6)


def test_the_noise_is_of_that_size_and_a_canary_tells_no_more_than_claimed(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    """Released with a unit of 1 and public means of zero, a vector is the noisy sum over the noisy count."""
    public = public_means(phi, template, own_texts(phi))
    claim, draws = make_mechanism(1.0), 2000
    width = len(public.features.map)
    plain = dataclasses.replace(
        public, unit=1.0, of_class={label: torch.zeros(width).double() for label in (0, 1)}
    )
    absent = {label: torch.zeros(width + 1).double() for label in (0, 1)}
    for sums in absent.values():
        sums[-1] = 1e6
    canary = torch.zeros(width + 1).double()
    canary[0] = 1.0
    scores, squares = {}, 0.0
    for name, sums in (("out", absent), ("in", absent | {1: absent[1] + canary})):
        found = []
        for _ in range(draws):
            table, figures = released_vectors(sums, plain, claim)
            noisy = [matrix_of(table, label)[0].double() * figures["records"][str(label)] for label in (0, 1)]
            found.append(torch.stack(noisy) / 1.25**0.5)
        scores[name] = torch.stack(found)[:, 1, 0]
        clean = torch.stack([each[:-1] for each in sums.values()])
        squares += float(((torch.stack(found) - clean) / claim.sigma).square().sum())
    count = 2 * draws * 2 * width
    assert chi2.ppf(1e-6, count) < squares < chi2.isf(1e-6, count)
    separation = (scores["in"].mean() - scores["out"].mean()) / scores["out"].std()
    assert float(separation) == pytest.approx(claim.sensitivity / claim.sigma, abs=5 * (2 / draws) ** 0.5)


def test_a_vector_is_the_way_from_the_models_texts_to_the_records(setting: Setting) -> None:
    """With many records, and so little noise, and a unit so large that nothing is clipped."""
    language_model, template, public = setting
    centre, unit = public.features.mean, 50 * public.unit
    own = {
        label: torch.stack([middle_mean(language_model, template, each) for each in texts]).mean(dim=0)
        for label, texts in OWN.items()
    }
    middle = centre[public.features.map.any(dim=0)]
    features = dataclasses.replace(public.features, map=public.features.map / 50)
    wide = PublicMeans(features, unit, {label: (mean - middle) / unit for label, mean in own.items()})
    sums = class_sums(
        language_model,
        template,
        features,
        LabelledTexts((GOOD[0], GOOD[0]), (0, 1)),
        None,
        MATCHING,
        MECHANISM,
    )
    many = {label: 1e11 * total for label, total in sums.items()}
    table, figures = released_vectors(many, wide, make_mechanism(1.0))
    for label, mean in own.items():
        expected = middle_mean(language_model, template, GOOD[0]) - mean
        found = matrix_of(table, label)[0].double()
        assert torch.allclose(found, expected, atol=tolerance(language_model) * float(expected.norm()))
        assert figures["records"][str(label)] == pytest.approx(1e11, rel=1e-4)
        assert figures["length"][str(label)] == pytest.approx(float(found.norm()), rel=1e-5)


def test_a_class_without_records_has_a_vector_of_noise_that_is_no_longer_than_one_of_records(
    setting: Setting,
) -> None:
    _, _, public = setting
    sums = sums_of(setting, LabelledTexts(GOOD, (1,) * 4))
    table, figures = released_vectors(sums, public, make_mechanism(0.01))
    mean = matrix_of(table, 0)[0].double() / public.unit + public.of_class[0]
    assert float(mean.norm()) == pytest.approx(1.0, rel=1e-4)
    assert abs(figures["records"]["0"]) < 6 * figures["records_deviation"]["0"]


@pytest.mark.parametrize("family", ["phi", "gpt2", "llama", "opt", "gemma2"])
def test_the_middle_layer_reads_the_middle_hidden_state_and_is_steered_there(
    tokenizer: PreTrainedTokenizerFast, family: str
) -> None:
    language_model = tiny_language_model(tokenizer, family)
    ids = torch.tensor([[5, 9, 12, 40]])
    first, middle, last = language_model.layers(input_ids=ids)
    vector = torch.randn(middle.shape[-1], generator=torch.Generator().manual_seed(0)).double()
    with steered(middle_layer(language_model), vector):
        moved = language_model.hidden_states(input_ids=ids)
    assert not torch.allclose(moved, last)
    layer, reads = middle_layer(language_model), []
    hook = layer.register_forward_pre_hook(lambda _, inputs: reads.append(inputs[0]))
    again = language_model.layers(input_ids=ids)
    hook.remove()
    assert torch.equal(reads[0], middle)
    for before, after in zip((first, middle, last), again, strict=True):
        assert torch.equal(before, after)  # no trace is left
    with steered(layer, torch.zeros_like(vector)):
        assert torch.equal(language_model.hidden_states(input_ids=ids), last)


def test_a_model_of_one_layer_cannot_be_steered(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="no middle layer"):
        middle_layer(tiny_language_model(tokenizer, "phi", num_hidden_layers=1))


def test_texts_are_steered_and_the_same_again(phi: LanguageModel, template: TokenisedTemplate) -> None:
    own = own_texts(phi)
    public = public_means(phi, template, own)
    sums = class_sums(phi, template, public.features, DATA, None, MATCHING, MECHANISM)
    released, _ = released_vectors({k: 1e6 * v for k, v in sums.items()}, public, make_mechanism(1.0))
    settings = GenerationSettings(whole_sentences=False)
    asked = ({0: "a bad day :\n", 1: "a good day :\n"}, {0: 8, 1: 6}, settings)
    texts, figures = steered_texts(phi, template, own, released, *asked, 1.0, 0)
    assert len(texts) == figures["texts"] <= len(own)
    assert set(zip(texts["id"], texts["label"], strict=True)) <= set(zip(own["id"], own["label"], strict=True))
    assert texts.groupby("label")["rank"].apply(list).to_dict() == {
        label: list(range(1, count + 1)) for label, count in texts["label"].value_counts().items()
    }
    assert texts["kept"].all()
    again, _ = steered_texts(phi, template, own, released, *asked, 1.0, 0)
    pd.testing.assert_frame_equal(again, texts)
    for strength, seed in ((0.0, 0), (1.0, 1)):
        other, _ = steered_texts(phi, template, own, released, *asked, strength, seed)
        assert other["text"].tolist() != texts["text"].tolist()
    assert np.isfinite(texts["log_perplexity"]).all()


def test_texts_that_are_all_the_same_have_no_unit(phi: LanguageModel, template: TokenisedTemplate) -> None:
    same = own_texts(phi).assign(token_ids=pd.Series([phi.encode("the same")] * 6))
    with pytest.raises(InputError, match="the model's own texts are all the same, or their hidden states"):
        public_means(phi, template, same)
