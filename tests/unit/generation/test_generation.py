from __future__ import annotations

from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.settings import (
    AdmmSettings,
    GenerationSettings,
    ProjectionSettings,
    SearchSettings,
    TargetGradientSettings,
    WrittenSettings,
)
from gradmm.errors import InputError
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.generation import TextRequest, check_generation, generate, generation_figures, write
from gradmm.generation.sampler import ModelSampler
from gradmm.generation.shards import Shard, plan_shards
from gradmm.generation.written import Writer
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.perplexity import log_perplexities
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.template import TokenisedTemplate, make_batch
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.target.features import text_means
from gradmm.target.probe import Probe
from gradmm.target.target_space import FULL
from gradmm.target.target_space import SEED as PUBLIC_SEED
from tests.conftest import random_probe

SETTINGS = GenerationSettings(
    method="search",
    admm=AdmmSettings(iterations=3, inner_steps=4),
    projection=ProjectionSettings(candidates=20),
    search=SearchSettings(draws=6, rounds=2, edits=8, top_k=50),
)
RERANK = SearchSettings(draws=7, top_k=50, rounds=0, fluency=0.0)
TOKENS = 6
METHODS = pytest.mark.parametrize("method", ["search", "admm"])


def texts(
    phi: LanguageModel,
    template: TokenisedTemplate,
    shard: Shard,
    matching: str = "head",
    seed: int = 0,
    probe: Probe | None = None,
    **changes,
) -> pd.DataFrame:
    settings = SETTINGS.model_copy(update=changes)
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if matching != "head":
        size = sum(p.numel() for p in phi.model.parameters())
        target = torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    request = TextRequest(phi, template, "they said\n", "good", shard, TOKENS, settings, seed)
    return generate(request, target, FULL, TargetGradientSettings.model_validate({"matching": matching}), probe)


@METHODS
def test_shards_and_batches_change_only_the_shard_column_and_the_cost_of_the_prompt(
    phi: LanguageModel, template: TokenisedTemplate, method: str
) -> None:
    whole = texts(phi, template, Shard(1, 0, 0, 5), method=method)
    parts = pd.concat(
        [
            texts(phi, template, Shard(1, 0, 0, 2), method=method),
            texts(phi, template, Shard(1, 1, 2, 3), batch_size=2, method=method),
        ],
        ignore_index=True,
    )
    apart = ["shard", "token_passes"]
    pd.testing.assert_frame_equal(whole.drop(columns=apart), parts.drop(columns=apart))
    assert parts["shard"].tolist() == [0, 0, 1, 1, 1]
    opening = len(phi.encode("they said\n"))
    # Once per shard, for any batch size.
    assert parts["token_passes"].sum() - whole["token_passes"].sum() == pytest.approx(opening)


@METHODS
def test_seed_and_example_number_determine_the_texts(
    phi: LanguageModel, template: TokenisedTemplate, method: str
) -> None:
    first = texts(phi, template, Shard(1, 0, 0, 3), method=method)["text"].tolist()
    assert first == texts(phi, template, Shard(1, 0, 0, 3), method=method)["text"].tolist()
    assert first != texts(phi, template, Shard(1, 0, 0, 3), seed=1, method=method)["text"].tolist()
    assert len(set(first)) == 3


def test_no_text_has_the_random_numbers_of_public_text(phi: LanguageModel, template: TokenisedTemplate) -> None:
    request = TextRequest(phi, template, "they said\n", "bad", Shard(0, 0, 0, 1), TOKENS, SETTINGS, PUBLIC_SEED)
    assert request.random(0).random() != np.random.default_rng(PUBLIC_SEED).random()


@METHODS
def test_loss_and_tokens_are_those_of_the_text_as_released(
    phi: LanguageModel, template: TokenisedTemplate, method: str
) -> None:
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tried = {"admm": SETTINGS.admm.iterations, "search": SETTINGS.search.rounds}[method]
    for row in texts(phi, template, Shard(1, 0, 0, 4), method=method).to_dict("records"):
        text = row["text"]
        assert text == text.strip()
        assert row["token_ids"] == phi.encode(text)
        gradients = head_gradients(phi, make_batch(template, [phi.encode(text)], [1], phi.device))
        loss = gradients.matching_losses(target, SETTINGS.loss)
        assert row["matching_loss"] == pytest.approx(float(loss), abs=1e-7)
        assert len(row["loss_history"]) == tried + 1


def test_searched_texts_keep_their_tokens_and_losses_when_released(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    found = texts(phi, template, Shard(1, 0, 0, 8), method="search")
    for row in found.to_dict("records"):
        assert TOKENS / 2 < len(row["token_ids"]) <= TOKENS
        assert row["matching_loss"] == pytest.approx(row["loss_history"][-1], abs=1e-9)
        assert bool(TextConstraints(phi, template)(torch.tensor([row["token_ids"]])).all())
    histories = found["loss_history"].tolist()
    assert all(history[-1] <= history[0] for history in histories)
    assert sum(history[-1] < history[0] for history in histories) > len(histories) / 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_full_gradient_matching_generates_too(
    phi: LanguageModel, template: TokenisedTemplate, dtype: torch.dtype
) -> None:
    model = LanguageModel(deepcopy(phi.model).to(dtype), phi.tokenizer)
    made = texts(model, template, Shard(0, 0, 0, 2), matching="full-gradient", method="admm")
    assert made["text"].str.len().min() > 0
    assert made["matching_loss"].between(0, 2).all()


def as_written(
    phi: LanguageModel,
    template: TokenisedTemplate,
    shard: Shard,
    batch_size: int = 100,
    seed: int = 0,
    whole_sentences: bool = True,
    **changes,
) -> pd.DataFrame:
    written = WrittenSettings(top_k=50, **changes)
    settings = GenerationSettings(written=written, batch_size=batch_size, whole_sentences=whole_sentences)
    return write(TextRequest(phi, template, "they said\n", "good", shard, TOKENS, settings, seed))


def test_written_texts_depend_on_seed_label_and_number_only(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    whole = as_written(phi, template, Shard(1, 0, 0, 12))
    parts = pd.concat(
        [
            as_written(phi, template, Shard(1, 0, 0, 5), batch_size=1),
            as_written(phi, template, Shard(1, 1, 5, 7), batch_size=3),
        ],
        ignore_index=True,
    )
    apart = ["shard", "token_passes"]
    pd.testing.assert_frame_equal(whole.drop(columns=apart), parts.drop(columns=apart), rtol=1e-9)
    assert whole["text"].nunique() == 12
    for other in (
        as_written(phi, template, Shard(0, 0, 0, 12)),
        as_written(phi, template, Shard(1, 0, 0, 12), seed=1),
    ):
        assert (whole["text"] != other["text"]).all()


def test_written_texts_have_no_loss(phi: LanguageModel, template: TokenisedTemplate) -> None:
    made = as_written(phi, template, Shard(1, 0, 0, 4))
    assert made["matching_loss"].isna().all()
    assert made["probe_loss"].isna().all()
    assert made["loss_history"].tolist() == [[]] * 4
    figures = generation_figures(made)
    assert set(figures) == {
        "texts",
        "mean_log_perplexity",
        "distinct_2",
        "self_bleu",
        "token_passes_per_text",
    }
    assert made["log_perplexity"].tolist() == pytest.approx(log_perplexities(phi, made["token_ids"].tolist()))


def test_a_written_text_is_the_first_sample_without_an_answer_that_ends_with_a_sentence(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    count, limits, ends, constraints = 30, range(1, 5), SentenceEnds(phi), TextConstraints(phi, template)
    samples, valid, passes = [], [], []
    for draws in limits:
        with ComputeMeter(phi) as meter:
            settings = WrittenSettings(top_k=50, draws=draws)
            allowed = allowed_tokens(phi, "english")
            sampler = ModelSampler(phi, allowed, "they said\n", settings.top_k, ends=ends)
            writer = Writer(phi, sampler, constraints, settings, ends)
            ids = writer([np.random.default_rng(number) for number in range(count)], TOKENS).token_ids
        samples.append(ids)
        valid.append(constraints.without_answer(ids) & ends.complete(ids))
        passes.append(meter.token_passes)
    for before, after, was_valid in zip(samples, samples[1:], valid, strict=False):
        assert torch.equal((before == after).all(dim=1), was_valid)
    shares = [int(flags.sum()) for flags in valid]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1]
    # Nothing is predicted after the last token. Only the samples that are not valid are drawn again.
    prompt = len(phi.prefix_ids) + len(phi.encode("they said\n"))
    drawn = [count + sum(count - share for share in shares[:draws]) for draws in range(len(limits))]
    assert passes == [prompt + number * (TOKENS - 1) for number in drawn]


def test_written_texts_that_may_end_anywhere_have_all_tokens(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    made = as_written(phi, template, Shard(1, 0, 0, 8), whole_sentences=False, draws=20)
    assert made["token_ids"].map(len).tolist() == [TOKENS] * 8


def test_more_examples_go_into_a_shard_of_written_texts() -> None:
    assert GenerationSettings(method="search").examples_per_shard == 25
    assert GenerationSettings(method="admm").examples_per_shard == 25
    assert GenerationSettings(method="written").examples_per_shard == 1000
    assert GenerationSettings(method="written", shard_size=7).examples_per_shard == 7


@given(per_class=st.integers(1, 60), size=st.integers(1, 30))
def test_shards_cover_every_example_of_every_class_once(per_class: int, size: int) -> None:
    covered = [
        (shard.label, number)
        for shard in plan_shards([0, 4], per_class, size)
        for number in range(shard.start, shard.start + shard.count)
    ]
    assert covered == [(label, number) for label in (0, 4) for number in range(per_class)]


def test_log_perplexity_is_the_models_own_loss(phi: LanguageModel) -> None:
    sentences = [phi.encode(t) for t in ("the soup was warm and fresh", "late", "never again : cold coffee")]
    ours = log_perplexities(phi, sentences, batch_size=2)
    for ids, value in zip(sentences, ours, strict=True):
        with_start = torch.tensor([[phi.tokenizer.bos_token_id, *ids]])
        assert value == pytest.approx(float(phi.model(input_ids=with_start, labels=with_start).loss), rel=1e-6)


def test_reranking_is_a_search_without_rounds_for_any_shards(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    def reranked(shard: Shard, seed: int = 0, **changes) -> pd.DataFrame:
        search = RERANK.model_copy(update=changes)
        return texts(phi, template, shard, method="search", search=search, seed=seed)

    whole = reranked(Shard(1, 0, 0, 5))
    parts = pd.concat([reranked(Shard(1, 0, 0, 2)), reranked(Shard(1, 1, 2, 3))], ignore_index=True)
    apart = ["shard", "token_passes"]
    pd.testing.assert_frame_equal(whole.drop(columns=apart), parts.drop(columns=apart))
    assert whole["loss_history"].tolist() == [[pytest.approx(loss)] for loss in whole["matching_loss"]]
    assert reranked(Shard(1, 0, 0, 5), seed=1)["text"].tolist() != whole["text"].tolist()
    more = reranked(Shard(1, 0, 0, 5), draws=300)
    assert more["matching_loss"].mean() < whole["matching_loss"].mean()
    better = reranked(Shard(1, 0, 0, 5), rounds=2)
    assert better["matching_loss"].mean() < whole["matching_loss"].mean()


@pytest.mark.parametrize("method", ["search", "admm"])
def test_a_batch_that_does_not_fit_into_memory_gives_the_same_texts_in_parts(
    phi: LanguageModel, template: TokenisedTemplate, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradmm.generation import generation

    makers = {"search": "_search", "admm": "_admm"}
    whole = texts(phi, template, Shard(1, 0, 0, 5), method=method)
    make = getattr(generation, makers[method])

    def in_little_memory(request, objective):
        solve = make(request, objective)

        def solve_two(numbers: range):
            if len(numbers) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return solve(numbers)

        return solve_two

    monkeypatch.setattr(generation, makers[method], in_little_memory)
    parts = texts(phi, template, Shard(1, 0, 0, 5), method=method)
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-9)


def test_token_passes_are_those_of_the_search_shared_among_a_shards_texts(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    count = 4
    search = SearchSettings(draws=6, rounds=1, edits=8)
    made = texts(phi, template, Shard(1, 0, 0, count), method="search", search=search, whole_sentences=False)
    opening = len(phi.prefix_ids) + len(phi.encode("they said\n"))
    scored = len(template.prefix) + TOKENS + len(template.tail(1))
    written = TOKENS - 1  # nothing is predicted after the last token
    a_round = 3 * scored + 8 * scored  # forward and back, then the edits
    expected = opening / count + 6 * (written + scored) + a_round
    assert made["token_passes"].tolist() == pytest.approx([expected] * count)
    figures = generation_figures(pd.concat([made, made.assign(token_passes=2 * made["token_passes"])]))
    assert figures["token_passes_per_text"] == pytest.approx(1.5 * expected)
    assert figures["texts"] == 2 * count


def test_the_probe_scores_released_texts_and_its_weight_lowers_its_loss(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    probe, shard = random_probe(phi, template), Shard(1, 0, 0, 6)
    free, priced = (texts(phi, template, shard, probe=probe, probe_weight=weight) for weight in (0.0, 1.0))
    for frame in (free, priced):
        for ids, loss in zip(frame["token_ids"], frame["probe_loss"], strict=True):
            layers = phi.layers(input_ids=torch.tensor([ids]))
            means = text_means(layers, torch.ones(1, len(ids), dtype=torch.bool))
            assert float(probe.losses(means, 1)) == pytest.approx(loss, abs=1e-6)
    assert priced["probe_loss"].mean() < free["probe_loss"].mean() - 0.1
    assert priced["matching_loss"].mean() > free["matching_loss"].mean()
    assert texts(phi, template, shard)["probe_loss"].isna().all()
    pd.testing.assert_frame_equal(
        free.drop(columns=["probe_loss"]), texts(phi, template, shard).drop(columns=["probe_loss"])
    )


@pytest.mark.parametrize("method", ["written", "search", "admm"])
def test_a_model_that_cannot_be_compiled_is_refused_before_texts_are_generated(
    phi: LanguageModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(_forward: object) -> object:
        def fail(*_args: object, **_options: object) -> None:
            raise RuntimeError("no C++ compiler found\nSet TORCH_LOGS")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    language_model = LanguageModel(phi.model, phi.tokenizer)
    settings = GenerationSettings.model_validate({"method": method, "loss": "cosine", "compile_layers": True})
    check_generation(language_model, "a\n", 5, settings.model_copy(update={"compile_layers": False}))
    if method == "written":
        check_generation(language_model, "a\n", 5, settings)
        return
    with pytest.raises(
        InputError, match=r"^generation\.compile_layers: torch\.compile fails \(no C\+\+ compiler found\)"
    ):
        check_generation(language_model, "a\n", 5, settings)
    assert not any("forward" in vars(layer) for layer in phi.model.base_model.modules())


def test_compiled_layers_find_the_same_texts(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward) or forward)
    language_model = LanguageModel(phi.model, phi.tokenizer)
    for method in ("search", "admm"):
        plain, with_compiled = (
            texts(language_model, template, Shard(1, 0, 0, 4), method=method, compile_layers=each)
            for each in (False, True)
        )
        assert plain["text"].tolist() == with_compiled["text"].tolist()
    assert len(compiled) == phi.model.config.num_hidden_layers
