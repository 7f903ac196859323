"""Evaluate the synthetic texts by fine-tuning a model on them, and on equally many real texts.

The protocol follows the paper (GRADMM, section 5): Adam on all parameters, linear decay of the learning rate to
zero, the loss of the response tokens. The paper reports the checkpoint that is best on the test set. `summarise`
gives this figure, and the unbiased one of the checkpoint that was chosen on the validation set. Models that are
too large for that train adapters, with learning rates that would diverge at once: theirs rise from zero
(`ADAPTER_WARMUP`), and gradients are clipped (`ADAPTER_MAX_NORM`).

Each arm has a schedule of its own, a learning rate and a number of steps. The grid is the same for all arms.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from sklearn.metrics import confusion_matrix
from torch import Tensor
from tqdm import tqdm
from transformers import get_linear_schedule_with_warmup

from gradmm.config.settings import FinetuneEvalSettings
from gradmm.data.examples import Examples, HeldOut
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.evaluation.schedule import Schedule
from gradmm.evaluation.trainable import trainable_model
from gradmm.lm.classification import class_losses, score
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.template import TokenisedTemplate, length_bucketed, tokenise_readable
from gradmm.threads import reduced_precision_products

logger = logging.getLogger(__name__)

#: Examples per backward pass. Two passes over halves of similar length are faster than one pass over a batch that
#: is padded to its longest text, by a quarter for sst2 on a CPU. The gradient is the same.
PART_SIZE = 8

#: Share of the steps in which the learning rate of adapters rises from zero.
ADAPTER_WARMUP = 0.1

#: Norm that the gradient of all adapters together is clipped to.
ADAPTER_MAX_NORM = 1.0

#: Whether each row of the test split is answered correctly, in their order, which is the same for all arms.
#: Missing for validation.
CORRECT = "correct"

#: The columns of every evaluation of an arm; those by fine-tuning have `CONFUSION` too.
COLUMNS = ["arm", "seed", "learning_rate", "steps", "step", "split", "accuracy", "loss", CORRECT]

#: Rows of the test split by true and by answered class: a matrix, row by row, in ascending order of the labels.
#: Missing for validation, and for a model that has diverged, which answers nothing.
CONFUSION = "confusion"


@dataclass(frozen=True)
class Finetuning:
    """The inputs that all fine-tuning runs of one model share.

    Runs train float32 weights without dropout (`trainable_model`); the processor may round the factors of matrix
    products (`reduced_precision_products`). On one machine, the result depends only on texts, schedule and seed.
    """

    reference: ModelReference
    tokenizer: Any
    placement: torch.device | str
    template: TokenisedTemplate
    settings: FinetuneEvalSettings

    def tokenised(self, data: LabelledTexts) -> Examples:
        """Tokenise real texts. Those without tokens, which no model can classify, are left out."""
        tokens, kept = tokenise_readable(self.tokenizer, data.texts, self.template.max_text_tokens)
        if len(kept) < len(data):
            logger.warning("%d rows without tokens are left out", len(data) - len(kept))
        return Examples(tokens, tuple(np.array(data.labels)[kept].tolist()))

    def fresh_model(self, seed: int = 0) -> LanguageModel:
        """Load the model before fine-tuning, with its own trainable weights; `seed` draws those of adapters."""
        return trainable_model(self.reference, self.tokenizer, self.placement, self.settings.lora_rank, seed)

    def checkpoints(
        self, examples: Examples, schedule: Schedule, seed: int, description: str
    ) -> Iterator[tuple[int, LanguageModel]]:
        """Train a fresh model; yield (steps taken, model) every `evaluate_every` steps and after the last step.

        The yielded model is one object, and its training continues between yields. A run that diverges is not
        stopped: it continues with NaN weights, and a warning is logged at its end.

        Raises:
            InputError: if there are no examples.
        """
        if not examples:
            raise InputError(
                "there are no texts to fine-tune on", "finetune_eval", "find the stage that dropped all texts"
            )
        learning_rate, steps = schedule
        language_model = self.fresh_model(seed)
        trained = [weights for weights in language_model.model.parameters() if weights.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate, fused=True)
        adapters = self.settings.lora_rank is not None
        warmup = round(ADAPTER_WARMUP * steps) if adapters else 0
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, steps)
        batches = epoch_batches(len(examples), self.settings.batch_size, steps, seed)
        losses = []
        for step, rows in enumerate(tqdm(batches, desc=description, disable=None, leave=False), start=1):
            losses.append(self._accumulate_gradient(language_model, examples.take(rows)))
            if adapters:
                torch.nn.utils.clip_grad_norm_(trained, ADAPTER_MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % self.settings.evaluate_every == 0 or step == steps:
                yield step, language_model
        if not torch.stack(losses).isfinite().all():
            logger.warning("%s: fine-tuning diverged at the learning rate %g", description, learning_rate)

    def finetune(
        self, examples: Examples, schedule: Schedule, seed: int, description: str = "fine-tune"
    ) -> LanguageModel:
        """Train a fresh model; return it after the last step, frozen."""
        *_, (_, language_model) = self.checkpoints(examples, schedule, seed, description)
        language_model.model.requires_grad_(False)
        return language_model

    def _accumulate_gradient(self, language_model: LanguageModel, examples: Examples) -> Float[Tensor, ""]:
        """Add the gradient of the mean response loss to the parameters' `grad`, and return the loss."""
        mean_loss = torch.zeros((), device=language_model.device)
        for rows in length_bucketed([len(text) for text in examples.texts], PART_SIZE):
            part = examples.take(rows)
            probabilities = part.class_probabilities(self.template.labels)
            with reduced_precision_products():
                losses = class_losses(language_model, self.template, part.texts, probabilities)
                loss = losses.sum() / len(examples)
                loss.backward()
            mean_loss += loss.detach()
        return mean_loss


def epoch_batches(size: int, batch_size: int, steps: int, seed: int) -> list[list[int]]:
    """Return `steps` full batches of row numbers, cut from consecutive shuffled epochs.

    A batch may straddle two epochs. At any step, the rows' numbers of uses differ by at most one.
    """
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch_size / size)
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(epochs)])
    return order[: steps * batch_size].view(steps, batch_size).tolist()


def evaluate_before(
    finetuning: Finetuning, held_out: HeldOut, arm: str = "before", offset: Sequence[float] | None = None
) -> pd.DataFrame:
    """Evaluate the model without fine-tuning, after 0 of 0 steps at learning rate 0.

    Args:
        offset: subtracted from the class logits, in the order of the template's labels.
    """
    rows = _evaluate(finetuning, finetuning.fresh_model(), held_out, offset)
    return _frame(rows, arm=arm, seed=finetuning.settings.seeds[0], schedule=Schedule(0.0, 0), step=0)


def evaluate_arm(finetuning: Finetuning, arm: str, examples: Examples, held_out: HeldOut) -> pd.DataFrame:
    """Fine-tune on an arm's examples with each seed and each schedule of the grid, and evaluate the checkpoints.

    Every number of steps is a training of its own, because the learning rate decays over all of them.

    Returns:
        One row per seed, learning rate, number of steps, checkpoint and split, with the columns `COLUMNS` and
        `CONFUSION`. `steps` is the length of the whole training, `step` that of the checkpoint.
    """
    settings = finetuning.settings
    return pd.concat(
        [
            _frame(_evaluate(finetuning, model, held_out), arm, seed, schedule, step)
            for seed in settings.seeds
            for schedule in map(Schedule._make, product(settings.learning_rates, settings.steps))
            for step, model in finetuning.checkpoints(
                examples,
                schedule,
                seed,
                f"fine-tune {arm} lr={schedule.learning_rate:g} steps={schedule.steps} seed={seed}",
            )
        ],
        ignore_index=True,
    )


def chosen_schedule(arm_rows: pd.DataFrame) -> Schedule:
    """Return the schedule of the arm's best checkpoint on the validation set.

    Checkpoints are compared by accuracy, then by loss. Ties go to the first row. In a run, only the first
    seed is trained with all schedules. Rows of the others have its choice and cannot change it.
    """
    best = _validation_best_first(arm_rows)
    return Schedule(best["learning_rate"].tolist()[0], best["steps"].tolist()[0])


def accuracies_by_seed(arm_rows: pd.DataFrame) -> pd.DataFrame:
    """Return each seed's test accuracies with the chosen schedule, in the order of the rows.

    Columns: `seed`; `accuracy`, of the checkpoint with the best validation accuracy (ties: the lowest validation
    loss), which is unbiased; `best_on_test`, of the checkpoint with the best test accuracy. Both are NaN for a
    seed whose chosen checkpoint has diverged: it answers nothing, which is no accuracy.
    """
    rows = _with_chosen_schedule(arm_rows)
    test = rows.loc[rows["split"] == "test"]
    best = test.groupby("seed", sort=False)["accuracy"].max().rename("best_on_test").reset_index()
    found = best.merge(chosen_rows(arm_rows)[["seed", "accuracy", "loss"]])
    figures = found[["best_on_test", "accuracy"]].where(found["loss"].notna())
    return pd.concat([found["seed"], figures], axis=1)


def chosen_rows(arm_rows: pd.DataFrame) -> pd.DataFrame:
    """Return each seed's test row, of the chosen schedule's checkpoint with the best validation accuracy."""
    rows = _with_chosen_schedule(arm_rows)
    picked = _validation_best_first(rows).drop_duplicates("seed")[["seed", "step"]]
    return rows.loc[rows["split"] == "test"].merge(picked)


def correct_by_seed(arm_rows: pd.DataFrame) -> pd.DataFrame:
    """Return whether each test row (a column) is answered correctly by each seed (the index).

    Each seed's answers are those of its row in `chosen_rows`.
    """
    correct = chosen_rows(arm_rows).set_index("seed")[CORRECT]
    return pd.DataFrame(np.stack(correct.tolist()), index=correct.index)


def confusions_by_seed(arm_rows: pd.DataFrame) -> Int[np.ndarray, "seeds classes answers"]:
    """Return each seed's numbers of test rows by true and by answered class, of its row in `chosen_rows`.

    Seeds whose checkpoint has diverged are left out.
    """
    counts = [np.asarray(each) for each in chosen_rows(arm_rows)[CONFUSION].dropna()]
    classes = math.isqrt(len(counts[0])) if counts else 0
    return np.array(counts, dtype=np.int64).reshape(len(counts), classes, classes)


class ClassScores(NamedTuple):
    """Precision, recall and F1 of each class; 0 where a class is never right."""

    precision: Float[np.ndarray, "*seeds classes"]
    recall: Float[np.ndarray, "*seeds classes"]
    f1: Float[np.ndarray, "*seeds classes"]


def class_scores(confusion: Int[np.ndarray, "*seeds classes answers"]) -> ClassScores:
    """Compute each class's scores from one or more confusion matrices."""
    right = np.diagonal(confusion, axis1=-2, axis2=-1)
    answered, true = confusion.sum(axis=-2), confusion.sum(axis=-1)
    return ClassScores(
        precision=right / np.maximum(answered, 1),
        recall=right / np.maximum(true, 1),
        f1=2 * right / np.maximum(answered + true, 1),
    )


def summarise(frame: pd.DataFrame) -> dict[str, float]:
    """Compute the test accuracies of each arm from the rows of `finetune_eval`.

    The arm `before` has only `accuracy_before`. Each other arm has, over the seeds with the chosen schedule:
        accuracy_ARM: mean test accuracy of the checkpoint with the best validation accuracy (ties: the lowest
            validation loss), which is unbiased.
        accuracy_ARM_std: its sample standard deviation; 0 for a single seed.
        accuracy_ARM_best_on_test, ..._std: the same for the checkpoint with the best test accuracy, which the
            paper reports.
            A run that has diverged answers nothing correctly.
        learning_rate_ARM, steps_ARM: the schedule chosen on the validation set.
    """
    figures = {}
    for arm, arm_rows in frame.groupby("arm", sort=False):
        if arm == "before":
            figures["accuracy_before"] = arm_rows.loc[arm_rows["split"] == "test", "accuracy"].tolist()[0]
            continue
        accuracies = accuracies_by_seed(arm_rows).fillna(0.0)
        figures |= _mean_and_std(f"accuracy_{arm}", accuracies["accuracy"].tolist())
        figures |= _mean_and_std(f"accuracy_{arm}_best_on_test", accuracies["best_on_test"].tolist())
        schedule = chosen_schedule(arm_rows)
        figures |= {f"learning_rate_{arm}": schedule.learning_rate, f"steps_{arm}": schedule.steps}
    return figures


def _evaluate(
    finetuning: Finetuning,
    language_model: LanguageModel,
    held_out: HeldOut,
    offset: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Compute accuracy and loss on both splits, and on test the rows that are correct and the confusion.

    An offset changes the classes only, not the loss.
    """
    offsets = torch.tensor(offset or [0.0] * len(finetuning.template.labels), dtype=torch.float64)
    rows = []
    for split, examples in (("validation", held_out.validation), ("test", held_out.test)):
        with reduced_precision_products():
            scores = score(
                language_model,
                finetuning.template,
                examples.texts,
                examples.labels,
                finetuning.settings.eval_batch_size,
            )
        columns = [finetuning.template.labels.index(label) for label in examples.labels]
        answers = (scores.class_logits - offsets).argmax(dim=1)
        correct = answers == torch.tensor(columns)
        # For the NaN logits of a diverged model, argmax would still return a class.
        correct &= scores.class_logits.isfinite().all(dim=1)
        accuracy, loss = correct.double().mean().item(), scores.losses.double().mean().item()
        row: dict[str, Any] = {"split": split, "accuracy": accuracy, "loss": loss, CORRECT: None, CONFUSION: None}
        if split == "test":
            row[CORRECT] = correct.tolist()
        if split == "test" and scores.class_logits.isfinite().all():
            labels = finetuning.template.labels
            answered = [labels[column] for column in answers.tolist()]
            row[CONFUSION] = confusion_matrix(examples.labels, answered, labels=sorted(labels)).ravel().tolist()
        rows.append(row)
    return rows


def _frame(rows: list[dict[str, Any]], arm: str, seed: int, schedule: Schedule, step: int) -> pd.DataFrame:
    run = {"arm": arm, "seed": seed, **schedule._asdict(), "step": step}
    return pd.DataFrame([run | row for row in rows], columns=[*COLUMNS, CONFUSION])


def _with_chosen_schedule(arm_rows: pd.DataFrame) -> pd.DataFrame:
    learning_rate, steps = chosen_schedule(arm_rows)
    return arm_rows.loc[(arm_rows["learning_rate"] == learning_rate) & (arm_rows["steps"] == steps)]


def _validation_best_first(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort the validation rows by accuracy, then by loss; ties keep their order."""
    validation = rows.loc[rows["split"] == "validation"]
    return validation.sort_values(["accuracy", "loss"], ascending=[False, True], kind="stable")


def _mean_and_std(name: str, values: list[float]) -> dict[str, float]:
    return {
        name: statistics.fmean(values),
        f"{name}_std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }
