"""Compare fine-tuning with a plain training loop, and the figures with hand-made tables."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, f1_score, precision_score, recall_score

from gradmm.config.settings import FinetuneEvalSettings, ModelSettings
from gradmm.data.examples import Examples, HeldOut, sample_class_rows
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.evaluation import finetune_eval
from gradmm.evaluation.finetune_eval import (
    COLUMNS,
    CONFUSION,
    CORRECT,
    Finetuning,
    accuracies_by_seed,
    chosen_rows,
    chosen_schedule,
    class_scores,
    confusions_by_seed,
    correct_by_seed,
    epoch_batches,
    evaluate_arm,
    evaluate_before,
    summarise,
)
from gradmm.evaluation.schedule import Schedule
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import ModelReference, resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import tokenise_template, tokenise_texts
from tests.conftest import tiny_language_model


def finetuning_of(reference: ModelReference, prompt_template: PromptTemplate, **settings: Any) -> Finetuning:
    model = load_language_model(reference, "cpu")
    template = tokenise_template(model, prompt_template)
    return Finetuning(reference, model.tokenizer, model.device, template, FinetuneEvalSettings(**settings))


def separable(count: int, first: int = 0) -> Examples:
    """Make examples whose class is given by one token; the others are uninformative."""
    labels = [i % 2 for i in range(first, first + count)]
    texts = [[70 + label] + [100 + i % 7] * (i % 5) for i, label in enumerate(labels, start=first)]
    return Examples(texts, labels)


def parameters_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.model.named_parameters()}


@pytest.mark.parametrize("verbaliser", [" good", " not really very good"])
def test_training_is_adam_with_linear_decay_to_zero_on_the_mean_response_loss(
    tiny_model: ModelReference, verbaliser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loop: rows one by one through the whole model, unfused Adam, a manually set learning rate."""
    # A processor that rounds the factors of products to bfloat16 would need another tolerance.
    monkeypatch.setattr("gradmm.evaluation.finetune_eval.reduced_precision_products", nullcontext)
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: verbaliser}, max_text_tokens=64)
    finetuning = finetuning_of(tiny_model, prompt_template, batch_size=11)
    examples = separable(14)
    plain = finetuning.fresh_model().model
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.0)
    for step, rows in enumerate(epoch_batches(14, 11, 6, seed=3)):
        optimizer.param_groups[0]["lr"] = 2e-3 * (6 - step) / 6
        optimizer.zero_grad()
        losses = []
        for row in rows:
            response = list(finetuning.template.responses[examples.labels[row]])
            ids = [*examples.texts[row], *finetuning.template.suffix, *response]
            logits = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -len(response) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(response)))
        torch.stack(losses).mean().backward()
        optimizer.step()

    before = parameters_of(finetuning.fresh_model())
    tuned = parameters_of(finetuning.finetune(examples, Schedule(2e-3, 6), seed=3))
    for name, parameter in plain.named_parameters():
        if name.endswith("k_proj.bias"):
            continue  # attention hardly depends on it, and Adam turns its rounding errors into full steps
        torch.testing.assert_close(tuned[name] - before[name], parameter - before[name], rtol=0.02, atol=2e-5)
        assert (parameter - before[name]).abs().max() > 1e-3, name


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 20),
    steps=st.integers(1, 20),
    seed=st.integers(-5, 2**40),
)
def test_batches_are_full_and_use_all_rows_equally_often(
    size: int, batch_size: int, steps: int, seed: int
) -> None:
    batches = epoch_batches(size, batch_size, steps, seed)
    assert [len(batch) for batch in batches] == [batch_size] * steps
    order = [row for batch in batches for row in batch]
    for start in range(0, len(order), size):
        epoch = order[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(size))


def test_the_seed_determines_the_batches() -> None:
    assert epoch_batches(50, 8, 10, 1) == epoch_batches(50, 8, 10, 1)
    assert epoch_batches(50, 8, 10, 1) != epoch_batches(50, 8, 10, 2)
    assert epoch_batches(50, 8, 10, 1)[0] != sorted(epoch_batches(50, 8, 10, 1)[0])


@pytest.mark.parametrize("family", ["phi", "gpt2"])  # GPT-2's configuration has dropout
def test_a_run_depends_only_on_texts_schedule_and_seed(
    tokenizer, prompt_template: PromptTemplate, tmp_path: Path, family: str
) -> None:
    tiny_language_model(tokenizer, family, dtype=torch.float32).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    finetuning = finetuning_of(resolve_model(ModelSettings(name=str(tmp_path))), prompt_template, batch_size=4)
    runs = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 5)):
        with torch.random.fork_rng():
            torch.manual_seed(global_seed)
            runs.append(parameters_of(finetuning.finetune(separable(10), Schedule(1e-3, 3), seed)))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_fine_tuning_touches_neither_the_shared_model_nor_the_files(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    finetuning = finetuning_of(tiny_model, prompt_template, batch_size=4)
    shared = load_language_model(tiny_model, "cpu")
    before = parameters_of(shared)
    tuned = finetuning.finetune(separable(10), Schedule(1e-2, 3), 0)
    for other in (shared, finetuning.fresh_model()):
        assert all(torch.equal(before[name], now) for name, now in parameters_of(other).items())
    assert resolve_model(ModelSettings(name=tiny_model.name)) == tiny_model
    assert not any(torch.equal(before[name], now) for name, now in parameters_of(tuned).items())


def test_the_fine_tuned_model_is_frozen_and_its_head_is_the_trained_one(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    tuned = finetuning_of(tiny_model, prompt_template, batch_size=4).finetune(separable(10), Schedule(1e-2, 3), 0)
    assert not any(parameter.requires_grad for parameter in tuned.model.parameters())
    ids = torch.tensor([[5, 6, 7]])
    logits = tuned.logits(tuned.augment(tuned.hidden_states(input_ids=ids)))
    torch.testing.assert_close(logits, tuned.model(input_ids=ids).logits)


def test_models_in_half_precision_are_trained_in_float32(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    half = tiny_model.model_copy(update={"dtype": "bfloat16"})
    tuned = finetuning_of(half, prompt_template).finetune(separable(4), Schedule(1e-3, 1), 0)
    assert {parameter.dtype for parameter in tuned.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("steps", "every", "expected"), [(6, 2, [2, 4, 6]), (5, 2, [2, 4, 5]), (3, 9, [3])])
def test_checkpoints_come_at_intervals_and_at_the_end(
    tiny_model: ModelReference, prompt_template: PromptTemplate, steps: int, every: int, expected: list[int]
) -> None:
    finetuning = finetuning_of(tiny_model, prompt_template, evaluate_every=every, batch_size=2)
    taken = [step for step, _ in finetuning.checkpoints(separable(4), Schedule(1e-3, steps), 0, "test")]
    assert taken == expected


def test_no_texts_are_refused(tiny_model: ModelReference, prompt_template: PromptTemplate) -> None:
    with pytest.raises(InputError, match="no texts"):
        finetuning_of(tiny_model, prompt_template).finetune(Examples([], []), Schedule(1e-3, 1), 0)


@given(
    labels=st.lists(st.integers(0, 3), max_size=30),
    wanted=st.dictionaries(st.integers(0, 3), st.integers(0, 9)),
)
def test_class_samples_have_the_requested_count_of_each_label_or_all_there_are(
    labels: list[int], wanted: dict[int, int]
) -> None:
    rows = sample_class_rows(labels, wanted, seed=0)
    assert Counter(labels[row] for row in rows) == +Counter(
        {k: min(n, labels.count(k)) for k, n in wanted.items()}
    )
    assert len(set(rows)) == len(rows)


def test_samples_are_random_rows_determined_by_the_seed() -> None:
    examples = Examples([[row] for row in range(50)], [row % 2 for row in range(50)])
    assert examples.sample(None, 0) == examples.sample(50, 0) == examples
    assert examples.sample(10, 1) == examples.sample(10, 1) != examples.sample(10, 2)
    assert len({row for (row,) in examples.sample(10, 1).texts}) == 10
    counts = {0: 5, 1: 5}
    once, again, other = (sample_class_rows(examples.labels, counts, seed) for seed in (1, 1, 2))
    assert once == again != other


def test_fine_tuning_learns_what_the_texts_teach(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    settings = {"steps": 60, "evaluate_every": 30, "learning_rates": (3e-3,), "seeds": (0, 1)}
    finetuning = finetuning_of(tiny_model, prompt_template, **settings)
    train, unseen = separable(40), separable(40, first=1000)
    opposite = Examples(train.texts, [1 - label for label in train.labels])
    held_out = HeldOut(unseen, unseen)
    right = summarise(evaluate_arm(finetuning, "right", train, held_out))
    wrong = summarise(evaluate_arm(finetuning, "wrong", opposite, held_out))
    assert right["accuracy_right"] == 1.0
    assert wrong["accuracy_wrong_best_on_test"] < 0.1


def test_an_arm_is_measured_at_every_checkpoint_with_every_schedule_and_seed(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    settings = {"steps": (4, 3), "evaluate_every": 2, "batch_size": 4}
    settings |= {"learning_rates": (1e-6, 3e-3), "seeds": (7, 8)}
    limits = {"max_validation_rows": 20, "max_test_rows": 30}
    finetuning = finetuning_of(tiny_model, prompt_template, **settings, **limits)
    held_out = HeldOut(separable(50, first=500), separable(60, first=700)).limited(finetuning.settings, 7)
    frame = evaluate_arm(finetuning, "arm", separable(6), held_out)
    assert list(frame.columns) == [*COLUMNS, CONFUSION]
    runs = frame[["seed", "learning_rate", "steps"]].drop_duplicates().to_numpy().tolist()
    assert runs == [[seed, rate, steps] for seed in (7, 8) for rate in (1e-6, 3e-3) for steps in (4, 3)]
    checkpoints = frame.groupby("steps")["step"].unique()
    assert [checkpoints[steps].tolist() for steps in (3, 4)] == [[2, 3], [2, 4]]
    assert len(frame) == len(runs) * 2 * 2
    # Each number of steps is a training of its own: the learning rate decays over all of its steps.
    after_two = frame[(frame["step"] == 2) & (frame["learning_rate"] == 3e-3) & (frame["split"] == "test")]
    assert after_two["loss"].nunique() == 4
    for steps in (3, 4):
        alone = finetuning_of(tiny_model, prompt_template, **settings | {"steps": steps}, **limits)
        expected = frame[frame["steps"] == steps].reset_index(drop=True)
        assert evaluate_arm(alone, "arm", separable(6), held_out).equals(expected)
    in_units_of_a_row = frame["accuracy"] * frame["split"].map({"validation": 20, "test": 30})
    assert (in_units_of_a_row - in_units_of_a_row.round()).abs().max() < 1e-9
    assert evaluate_arm(finetuning, "arm", separable(6), held_out).equals(frame)
    before = evaluate_before(finetuning, held_out)
    run = before[["seed", "learning_rate", "steps", "step"]].drop_duplicates()
    assert run.to_numpy().tolist() == [[7, 0.0, 0, 0]]


def test_an_offset_changes_the_classes_of_the_model_and_not_its_losses(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    finetuning = finetuning_of(tiny_model, prompt_template, seeds=(7,))
    held_out = HeldOut(separable(20), separable(30))
    before = evaluate_before(finetuning, held_out)
    zero = evaluate_before(finetuning, held_out, "before", [0.0, 0.0])
    pd.testing.assert_frame_equal(zero, before)
    for label, offset in ((0, [-1e6, 0.0]), (1, [0.0, -1e6])):
        frame = evaluate_before(finetuning, held_out, "calibrated model", offset)
        assert set(frame["arm"]) == {"calibrated model"}
        expected = [held.labels.count(label) / len(held) for held in (held_out.validation, held_out.test)]
        assert frame["accuracy"].tolist() == pytest.approx(expected)
        assert frame["loss"].tolist() == before["loss"].tolist()


def test_a_diverged_learning_rate_is_logged_and_never_chosen(
    tiny_model: ModelReference, prompt_template: PromptTemplate, caplog
) -> None:
    """The held-out texts are all of the class that argmax over NaN returns."""
    finetuning = finetuning_of(
        tiny_model,
        prompt_template,
        steps=8,
        batch_size=4,
        evaluate_every=4,
        learning_rates=(1e38, 1e-3),
        seeds=(0, 1),
    )
    only_first = Examples([[70, 3], [71, 4], [70]], [0, 0, 0])
    with caplog.at_level(logging.WARNING):
        frame = evaluate_arm(finetuning, "arm", only_first, HeldOut(only_first, only_first))
    assert "diverged at the learning rate 1e+38" in caplog.text
    diverged = frame[(frame["learning_rate"] == 1e38) & (frame["step"] == 8)]
    assert diverged["loss"].isna().all()
    assert diverged["accuracy"].eq(0.0).all()
    assert not np.any(diverged.loc[diverged["split"] == "test", CORRECT].tolist())
    assert diverged[CONFUSION].isna().all()
    assert confusions_by_seed(diverged).shape == (0, 0, 0)
    figures = summarise(frame)
    assert figures["learning_rate_arm"] == 1e-3
    assert all(math.isfinite(figure) for figure in figures.values())


def test_the_confusion_counts_the_test_rows_of_each_class_by_what_the_model_answers(
    tiny_model: ModelReference,
) -> None:
    """The classes are listed in descending order of their labels; the offset forces the answer."""
    descending = PromptTemplate(
        suffix=" It was", verbalisers={7: " great", 5: " odd", 2: " bad"}, max_text_tokens=64
    )
    finetuning = finetuning_of(tiny_model, descending, seeds=(7,))
    test = Examples([[70], [71], [72], [73], [74], [75]], [2, 5, 7, 7, 5, 7])
    held_out = HeldOut(test.take([0, 1]), test)
    for column, label in enumerate((7, 5, 2)):
        offset = [0.0 if other == column else 1e6 for other in range(3)]
        frame = evaluate_before(finetuning, held_out, "before", offset)
        assert frame.loc[frame["split"] == "validation", CONFUSION].isna().all()
        (counts,) = confusions_by_seed(frame)
        assert counts.sum(axis=1).tolist() == [1, 2, 3]
        assert counts[:, sorted((2, 5, 7)).index(label)].tolist() == [1, 2, 3]
        assert counts.trace() / 6 == pytest.approx(frame["accuracy"].tolist()[1])


def test_a_checkpoints_confusion_has_its_accuracy_and_survives_parquet(
    tiny_model: ModelReference, prompt_template: PromptTemplate, tmp_path: Path
) -> None:
    finetuning = finetuning_of(tiny_model, prompt_template, steps=4, evaluate_every=2, seeds=(0, 1), batch_size=4)
    frame = evaluate_arm(finetuning, "arm", separable(6), HeldOut(separable(10), separable(20, first=30)))
    frame.to_parquet(tmp_path / "frame.parquet")
    counts = confusions_by_seed(pd.read_parquet(tmp_path / "frame.parquet"))
    assert counts.shape == (2, 2, 2)
    assert counts.sum(axis=(1, 2)).tolist() == [20, 20]
    right = [each.trace() / 20 for each in counts]
    assert right == pytest.approx(accuracies_by_seed(frame)["accuracy"].tolist())
    assert len(chosen_rows(frame)) == 2
    correct = correct_by_seed(pd.read_parquet(tmp_path / "frame.parquet"))
    assert correct.shape == (2, 20)
    accuracies = accuracies_by_seed(frame).set_index("seed")["accuracy"]
    assert correct.mean(axis=1).to_dict() == pytest.approx(accuracies.to_dict())
    assert frame.loc[frame["split"] == "validation", CORRECT].isna().all()


def test_correct_rows_are_those_that_the_model_answers_with_their_label(
    tiny_model: ModelReference, prompt_template: PromptTemplate
) -> None:
    """The offset forces the answer."""
    finetuning = finetuning_of(tiny_model, prompt_template, seeds=(7,))
    test = Examples([[70], [71], [72], [73]], [1, 0, 0, 1])
    for label, offset in ((0, [-1e6, 0.0]), (1, [0.0, -1e6])):
        frame = evaluate_before(finetuning, HeldOut(test, test), "before", offset)
        assert correct_by_seed(frame).to_numpy()[0].tolist() == [other == label for other in test.labels]


@given(
    pairs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40),
)
def test_scores_of_classes_are_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    true, answered = zip(*pairs, strict=True)
    counts = confusion_matrix(true, answered, labels=[0, 1, 2])
    for average, name in ((precision_score, "precision"), (recall_score, "recall"), (f1_score, "f1")):
        expected = average(true, answered, labels=[0, 1, 2], average=None, zero_division=0)  # pyright: ignore[reportArgumentType]
        np.testing.assert_allclose(getattr(class_scores(counts), name), expected, atol=1e-12)
        of_two = getattr(class_scores(np.stack([counts * 3, counts.T * 0])), name)
        np.testing.assert_allclose(of_two, [expected, [0, 0, 0]], atol=1e-12)


def table(*runs: tuple[int, float, int, float, float, float], steps: int = 100) -> pd.DataFrame:
    """Make rows of (seed, learning rate, step, validation accuracy, validation loss, test accuracy)."""
    rows = []
    for seed, learning_rate, step, validation, loss, test in runs:
        run = ("synthetic", seed, learning_rate, steps, step)
        rows += [(*run, "validation", validation, loss), (*run, "test", test, 0.5)]
    return pd.DataFrame(rows, columns=COLUMNS[:-1])


def test_accuracy_is_of_the_checkpoint_chosen_on_validation_and_best_on_test_of_the_papers_choice() -> None:
    frame = table(
        (0, 1e-4, 50, 0.60, 0.9, 0.99),
        (0, 1e-3, 50, 0.80, 0.5, 0.70),
        (0, 1e-3, 100, 0.70, 0.4, 0.90),
        (1, 1e-3, 50, 0.60, 0.5, 0.95),
        (1, 1e-3, 100, 0.65, 0.7, 0.60),
    )
    assert summarise(frame) == {
        "accuracy_synthetic": pytest.approx(0.65),
        "accuracy_synthetic_std": pytest.approx(math.sqrt(2) * 0.05),
        "accuracy_synthetic_best_on_test": pytest.approx(0.925),
        "accuracy_synthetic_best_on_test_std": pytest.approx(math.sqrt(2) * 0.025),
        "learning_rate_synthetic": 1e-3,
        "steps_synthetic": 100,
    }


def test_ties_in_validation_accuracy_are_broken_by_validation_loss() -> None:
    frame = table((0, 1e-4, 50, 0.8, 0.4, 0.5), (0, 1e-3, 50, 0.8, 0.2, 0.6), (0, 1e-3, 100, 0.8, 0.1, 0.7))
    figures = summarise(frame)
    assert figures["learning_rate_synthetic"] == 1e-3
    assert figures["accuracy_synthetic"] == 0.7


def test_steps_are_chosen_with_the_learning_rate_and_not_pooled_with_those_of_other_trainings() -> None:
    """The best pair has neither the best mean rate nor the best number of steps of another rate."""
    frame = pd.concat(
        [
            table((0, 1e-4, 50, 0.70, 0.5, 0.99), (0, 1e-4, 100, 0.80, 0.5, 0.98), steps=100),
            table((0, 1e-3, 50, 0.80, 0.5, 0.97), (0, 1e-3, 100, 0.82, 0.5, 0.96), steps=100),
            table((0, 1e-4, 50, 0.60, 0.5, 0.95), (0, 1e-4, 300, 0.90, 0.5, 0.70), steps=300),
            table((0, 1e-3, 50, 0.89, 0.5, 0.94), (0, 1e-3, 300, 0.20, 0.5, 0.93), steps=300),
            table((1, 1e-4, 50, 0.50, 0.5, 0.60), (1, 1e-4, 300, 0.40, 0.5, 0.80), steps=300),
        ]
    )
    assert chosen_schedule(frame) == Schedule(1e-4, 300)
    assert accuracies_by_seed(frame).to_dict("list") == {
        "seed": [0, 1],
        "best_on_test": [0.95, 0.80],
        "accuracy": [0.70, 0.60],
    }
    figures = summarise(frame)
    assert (figures["learning_rate_synthetic"], figures["steps_synthetic"]) == (1e-4, 300)
    assert figures["accuracy_synthetic"] == pytest.approx(0.65)


def test_of_equal_checkpoints_the_first_one_decides() -> None:
    short = table((0, 1e-4, 50, 0.8, 0.4, 0.5), (0, 1e-3, 50, 0.8, 0.4, 0.6), steps=50)
    long = table((0, 1e-4, 50, 0.8, 0.4, 0.7), steps=100)
    assert chosen_schedule(pd.concat([short, long])) == Schedule(1e-4, 50)
    assert chosen_schedule(pd.concat([long, short])) == Schedule(1e-4, 100)


@given(data=st.data())
def test_the_choice_is_that_of_a_slow_search_and_other_seeds_cannot_change_it(data: st.DataObject) -> None:
    def checkpoints(seed: int, rate: float, steps: int) -> pd.DataFrame:
        share = st.sampled_from([0.25, 0.5, 0.75])  # few values, so that there are ties
        drawn = data.draw(st.lists(st.tuples(share, share, share), min_size=1, max_size=3))
        return table(*((seed, rate, 10 * i, *figures) for i, figures in enumerate(drawn, start=1)), steps=steps)

    grid = [(rate, steps) for rate in (1e-4, 1e-3) for steps in (10, 30)]
    searched = pd.concat([checkpoints(0, *pair) for pair in grid])
    best = None
    for row in searched[searched["split"] == "validation"].to_dict("records"):
        if best is None or (row["accuracy"], -row["loss"]) > (best["accuracy"], -best["loss"]):
            best = row
    assert best is not None
    chosen = chosen_schedule(searched)
    assert chosen == (best["learning_rate"], best["steps"])
    repeated = pd.concat([searched, *(checkpoints(seed, *chosen) for seed in (1, 2))])
    assert chosen_schedule(repeated) == chosen
    assert accuracies_by_seed(repeated)["seed"].tolist() == [0, 1, 2]


def test_the_learning_rate_is_that_of_the_best_checkpoint_on_validation_for_any_order_of_rows() -> None:
    frame = table((5, 1e-4, 50, 0.8, 0.4, 0.5), (5, 1e-3, 50, 0.7, 0.2, 0.9), (0, 1e-4, 50, 0.1, 0.2, 0.6))
    assert chosen_schedule(frame[::-1]) == Schedule(1e-4, 100)
    assert chosen_schedule(frame) == Schedule(1e-4, 100)
    assert summarise(frame)["accuracy_synthetic"] == pytest.approx(0.55)


def test_before_fine_tuning_the_only_figure_is_the_test_accuracy() -> None:
    rows = [
        ("before", 0, 0.0, 0, 0, split, accuracy, 0.5) for split, accuracy in (("validation", 0.6), ("test", 0.7))
    ]
    assert summarise(pd.DataFrame(rows, columns=COLUMNS[:-1])) == {"accuracy_before": 0.7}


def test_the_summary_is_json_without_nan_also_for_one_seed_and_after_parquet(
    tiny_model: ModelReference, prompt_template: PromptTemplate, tmp_path: Path
) -> None:
    finetuning = finetuning_of(tiny_model, prompt_template, steps=1, learning_rates=(1e-4, 1e-3), seeds=(0,))
    held_out = HeldOut(separable(4), separable(6))
    arms = {"synthetic": separable(6), "real": separable(6, first=100)}
    parts = [evaluate_arm(finetuning, arm, examples, held_out) for arm, examples in arms.items()]
    frame = pd.concat([evaluate_before(finetuning, held_out), *parts], ignore_index=True)
    frame.to_parquet(tmp_path / "frame.parquet")
    figures = summarise(pd.read_parquet(tmp_path / "frame.parquet"))
    assert json.loads(json.dumps(figures, allow_nan=False)) == summarise(frame) == figures
    assert figures["accuracy_real_std"] == 0.0
    expected = {"accuracy_before"} | {
        name.format(arm)
        for arm in ("synthetic", "real")
        for name in (
            "accuracy_{}",
            "accuracy_{}_std",
            "accuracy_{}_best_on_test",
            "accuracy_{}_best_on_test_std",
            "learning_rate_{}",
            "steps_{}",
        )
    }
    assert set(figures) == expected


@pytest.mark.material
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [pytest.param("reviews-phi-9m-base", 0.686, marks=pytest.mark.nightly), ("reviews-phi-9m", 0.763)],
)
def test_the_demo_models_have_the_stated_zero_shot_accuracy(material: Path, name: str, expected: float) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " great"}, max_text_tokens=128)
    reference = resolve_model(ModelSettings(name=str(material / "models" / name)))
    finetuning = finetuning_of(reference, prompt_template)
    data = pd.read_parquet(material / "data" / "sst2" / "validation.parquet")
    tokens = tokenise_texts(finetuning.tokenizer, data["text"].str.strip().tolist(), 128, "sst2")
    examples = Examples(tokens, data["label"].tolist())
    frame = evaluate_before(finetuning, HeldOut(examples.take([0]), examples))
    assert summarise(frame)["accuracy_before"] == pytest.approx(expected, abs=0.002)


def test_products_have_reduced_precision_in_training_and_evaluation_only(
    tiny_model: ModelReference, prompt_template: PromptTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, as where private records are summed, float32 is computed as it is."""
    seen = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen[name] = torch.get_float32_matmul_precision()
            return function(*arguments)

        return call

    for name in ("class_losses", "score"):
        monkeypatch.setattr(finetune_eval, name, watched(name, getattr(finetune_eval, name)))
    finetuning = finetuning_of(tiny_model, prompt_template, steps=2, learning_rates=[1e-3], evaluate_every=1)
    assert torch.get_float32_matmul_precision() == "highest"
    for step, _ in finetuning.checkpoints(separable(4), Schedule(1e-3, 2), 0, ""):
        assert torch.get_float32_matmul_precision() == "highest", step
    evaluate_before(finetuning, HeldOut(separable(4), separable(4)))
    assert seen == {"class_losses": "medium", "score": "medium"}

    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(finetune_eval, "class_losses", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        finetuning.finetune(separable(4), Schedule(1e-3, 2), 0)
    assert torch.get_float32_matmul_precision() == "highest"


def test_real_texts_without_tokens_are_left_out(
    tiny_model: ModelReference, prompt_template: PromptTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer may have none for a text that is not empty; a private run does not stop for one record."""
    finetuning = finetuning_of(tiny_model, prompt_template)
    examples = finetuning.tokenised(LabelledTexts(("good soup", "", "bad chairs"), (1, 0, 0)))
    assert examples.labels == (1, 0)
    expected = tokenise_texts(finetuning.tokenizer, ["good soup", "bad chairs"], 64, "test")
    assert [examples.texts[i] for i in range(2)] == expected
    assert "1 rows without tokens are left out" in caplog.text
