from __future__ import annotations

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm_core.generation import Shard, generate, plan_shards
from gradmm_core.language_model import LanguageModel
from gradmm_core.perplexity import log_perplexities
from gradmm_core.settings import (
    AdmmSettings,
    GenerationSettings,
    ProjectionSettings,
    RerankSettings,
    TargetGradientSettings,
)
from gradmm_core.target_space import FULL
from gradmm_core.template import TokenisedTemplate, head_gradients, make_batch

SETTINGS = GenerationSettings(
    admm=AdmmSettings(iterations=3, inner_steps=4), projection=ProjectionSettings(candidates=20)
)


def texts(
    phi: LanguageModel,
    template: TokenisedTemplate,
    shard: Shard,
    matching: str = "head",
    seed: int = 0,
    **changes,
) -> pd.DataFrame:
    settings = SETTINGS.model_copy(update=changes)
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if matching != "head":
        size = sum(p.numel() for p in phi.model.parameters())
        target = torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return generate(
        phi,
        template,
        target,
        FULL,
        "they said\n",
        "good",
        shard,
        6,
        TargetGradientSettings(matching=matching),
        settings,
        seed,
    )


def test_shards_and_batches_change_nothing_but_the_shard_column(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    whole = texts(phi, template, Shard(1, 0, 0, 5))
    parts = pd.concat(
        [texts(phi, template, Shard(1, 0, 0, 2)), texts(phi, template, Shard(1, 1, 2, 3), batch_size=2)],
        ignore_index=True,
    )
    exact = ["id", "label", "label_name", "text", "token_ids", "steps"]
    pd.testing.assert_frame_equal(whole[exact], parts[exact])
    pd.testing.assert_frame_equal(
        whole[["matching_loss", "log_perplexity"]], parts[["matching_loss", "log_perplexity"]]
    )
    assert parts["shard"].tolist() == [0, 0, 1, 1, 1]


def test_seed_and_example_number_decide_the_texts(phi: LanguageModel, template: TokenisedTemplate) -> None:
    first = texts(phi, template, Shard(1, 0, 0, 3))["text"].tolist()
    assert first == texts(phi, template, Shard(1, 0, 0, 3))["text"].tolist()
    assert first != texts(phi, template, Shard(1, 0, 0, 3), seed=1)["text"].tolist()
    assert len(set(first)) == 3


def test_loss_and_tokens_are_those_of_the_text_as_released(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for row in texts(phi, template, Shard(1, 0, 0, 4)).itertuples():
        assert row.text == row.text.strip()
        assert row.token_ids == phi.encode(row.text)
        batch = make_batch(template, [phi.encode(row.text)], [1], phi.device)
        assert row.matching_loss == pytest.approx(
            float(head_gradients(phi, batch).matching_losses(target)), abs=1e-7
        )
        assert len(row.loss_history) == SETTINGS.admm.iterations + 1


def test_full_gradient_matching_generates_too(phi: LanguageModel, template: TokenisedTemplate) -> None:
    made = texts(phi, template, Shard(0, 0, 0, 2), matching="full-gradient")
    assert made["text"].str.len().min() > 0
    assert made["matching_loss"].between(0, 2).all()


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


def test_reranking_keeps_the_best_of_each_examples_draws_whatever_the_shards(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    rerank = {"method": "rerank", "rerank": RerankSettings(draws=7, top_k=50)}
    whole = texts(phi, template, Shard(1, 0, 0, 5), **rerank)
    parts = [texts(phi, template, shard, **rerank) for shard in (Shard(1, 0, 0, 2), Shard(1, 1, 2, 3))]
    pd.testing.assert_frame_equal(
        whole.drop(columns="shard"), pd.concat(parts, ignore_index=True).drop(columns="shard")
    )
    assert whole["steps"].tolist() == [0] * 5
    for history, loss in zip(whole["loss_history"], whole["matching_loss"], strict=True):
        assert len(history) == 7
        assert len(set(history)) > 1
        assert loss == pytest.approx(min(history), abs=0.2)  # the released text may be tokenised in another way
    assert texts(phi, template, Shard(1, 0, 0, 5), seed=1, **rerank)["text"].tolist() != whole["text"].tolist()
    more = texts(phi, template, Shard(1, 0, 0, 5), method="rerank", rerank=RerankSettings(draws=70, top_k=50))
    assert more["matching_loss"].mean() < whole["matching_loss"].mean()
