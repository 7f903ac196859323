"""Fine-tuning a model on the synthetic texts, and on as many real ones: what the synthetic texts are worth.

The protocol is that of the paper (GRADMM, section 5): Adam on all parameters, a linear decay of the learning
rate to zero, the loss of the response tokens. The paper reports the checkpoint that is best on the test set;
`summarise` gives that figure beside the honest one, of the checkpoint picked on the validation set.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from gradmm_core.classification import response_logits, response_losses, score
from gradmm_core.errors import InputError
from gradmm_core.language_model import LanguageModel, read_pretrained
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.template import TokenisedTemplate, length_bucketed, make_batch

logger = logging.getLogger(__name__)

#: Examples per backward pass. Two passes over halves of like length beat one over a batch padded to its
#: longest text: by a quarter on sst2, on a CPU. The gradient is the same.
PART_SIZE = 8

COLUMNS = ["arm", "seed", "learning_rate", "step", "split", "accuracy", "loss"]


@dataclass(frozen=True)
class Examples:
    """Token ids of texts, without prefix and suffix, and their labels."""

    texts: Sequence[list[int]]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Examples:
        return Examples([self.texts[i] for i in rows], [self.labels[i] for i in rows])

    def sample(self, max_rows: int | None, seed: int) -> Examples:
        """At most `max_rows` random rows; all of them, in their order, where there are no more."""
        if max_rows is None or len(self) <= max_rows:
            return self
        return self.take(torch.randperm(len(self), generator=_generator(seed))[:max_rows].tolist())

    def sample_classes(self, counts: Mapping[int, int], seed: int) -> Examples:
        """`counts[label]` random rows of each label, or all where the label has fewer."""
        return self.take(sample_class_rows(self.labels, counts, seed))


def sample_class_rows(labels: Sequence[int], counts: Mapping[int, int], seed: int) -> list[int]:
    """`counts[label]` random rows of each label, or all where the label has fewer. Fewer are the first of more."""
    left = dict(counts)
    rows = []
    for row in torch.randperm(len(labels), generator=_generator(seed)).tolist():
        label = labels[row]
        if left.get(label, 0) > 0:
            left[label] -= 1
            rows.append(row)
    return rows


@dataclass(frozen=True)
class HeldOut:
    """The texts that a fine-tuned model is measured on."""

    validation: Examples
    test: Examples

    def limited(self, settings: FinetuneEvalSettings, seed: int) -> HeldOut:
        """At most as many random rows of each as the settings allow."""
        return HeldOut(
            self.validation.sample(settings.max_validation_rows, seed),
            self.test.sample(settings.max_test_rows, seed),
        )


@dataclass(frozen=True)
class Finetuning:
    """What all fine-tuning runs of one model share.

    Runs train all parameters in float32, whatever dtype `reference` names, and without dropout, so that
    texts, learning rate and seed decide the result.
    """

    reference: ModelReference
    tokenizer: Any
    device: torch.device
    template: TokenisedTemplate
    settings: FinetuneEvalSettings

    def fresh_model(self) -> LanguageModel:
        """The model before fine-tuning: weights of its own, trainable."""
        reference = self.reference.model_copy(update={"dtype": "float32"})
        return LanguageModel(read_pretrained(reference, str(self.device)), self.tokenizer)

    def checkpoints(
        self, examples: Examples, learning_rate: float, seed: int, description: str
    ) -> Iterator[tuple[int, LanguageModel]]:
        """Trains a fresh model; yields (steps taken, model) every `evaluate_every` steps and after the last.

        It is one model that trains on between yields. A run that diverges is not stopped: it goes on with
        NaN weights to its end, and is warned of.

        Raises:
            InputError: if there are no examples.
        """
        if not examples:
            raise InputError(
                "there are no texts to fine-tune on", "finetune_eval", "see which stage dropped them all"
            )
        settings = self.settings
        language_model = self.fresh_model()
        optimizer = torch.optim.Adam(language_model.model.parameters(), lr=learning_rate, fused=True)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)
        batches = epoch_batches(len(examples), settings.batch_size, settings.steps, seed)
        losses = []
        for step, rows in enumerate(tqdm(batches, desc=description, disable=None, leave=False), start=1):
            losses.append(self._accumulate_gradient(language_model, examples.take(rows)))
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            if step % settings.evaluate_every == 0 or step == settings.steps:
                yield step, language_model
        if not torch.stack(losses).isfinite().all():
            logger.warning("%s: fine-tuning diverged at the learning rate %g", description, learning_rate)

    def finetune(
        self, examples: Examples, learning_rate: float, seed: int, description: str = "fine-tune"
    ) -> LanguageModel:
        """The model after the last step, frozen."""
        *_, (_, language_model) = self.checkpoints(examples, learning_rate, seed, description)
        language_model.model.requires_grad_(False)
        return language_model

    def _accumulate_gradient(self, language_model: LanguageModel, examples: Examples) -> Float[Tensor, ""]:
        """Adds the gradient of the mean response loss to the parameters' `grad`; returns that loss."""
        mean_loss = torch.zeros((), device=self.device)
        for rows in length_bucketed([len(text) for text in examples.texts], PART_SIZE):
            part = examples.take(rows)
            batch = make_batch(self.template, part.texts, part.labels, self.device)
            losses = response_losses(response_logits(language_model, batch), batch)
            loss = losses.sum() / len(examples)
            loss.backward()
            mean_loss += loss.detach()
        return mean_loss


def epoch_batches(size: int, batch_size: int, steps: int, seed: int) -> list[list[int]]:
    """`steps` full batches of row numbers, cut from one shuffled epoch after another.

    A batch may straddle two epochs; after any number of steps no row was used two times more than another.
    """
    generator = _generator(seed)
    epochs = math.ceil(steps * batch_size / size)
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(epochs)])
    return order[: steps * batch_size].view(steps, batch_size).tolist()


def evaluate_before(finetuning: Finetuning, held_out: HeldOut) -> pd.DataFrame:
    """The arm `before`: step 0, at a learning rate of zero."""
    rows = _evaluate(finetuning, finetuning.fresh_model(), held_out)
    return _frame(rows, arm="before", seed=finetuning.settings.seeds[0], learning_rate=0.0, step=0)


def evaluate_arm(finetuning: Finetuning, arm: str, examples: Examples, held_out: HeldOut) -> pd.DataFrame:
    """The checkpoints of fine-tuning on an arm's examples, with each learning rate of the settings and each seed.

    Returns:
        One row per seed, learning rate, step and split, with the columns `COLUMNS`.
    """
    settings = finetuning.settings
    return pd.concat(
        [
            _frame(_evaluate(finetuning, model, held_out), arm, seed, rate, step)
            for seed in settings.seeds
            for rate in settings.learning_rates
            for step, model in finetuning.checkpoints(
                examples, rate, seed, f"fine-tune {arm} lr={rate:g} seed={seed}"
            )
        ],
        ignore_index=True,
    )


def chosen_learning_rate(arm_rows: pd.DataFrame) -> float:
    """The learning rate of the arm's best checkpoint on validation.

    The rows of the other seeds cannot change what the first one chose: they are all at that learning rate.
    """
    return _validation_best_first(arm_rows)["learning_rate"].tolist()[0]


def accuracies_by_seed(arm_rows: pd.DataFrame) -> pd.DataFrame:
    """Of each seed, in the rows' order, the test accuracy of two checkpoints at the chosen learning rate.

    Columns `seed`; `accuracy`, of the checkpoint with the best validation accuracy (of equal ones, the lowest
    validation loss): the honest figure; and `best_on_test`, of the one with the best test accuracy.
    """
    rows = arm_rows.loc[arm_rows["learning_rate"] == chosen_learning_rate(arm_rows)]
    test = rows.loc[rows["split"] == "test"]
    picked = _validation_best_first(rows).drop_duplicates("seed")[["seed", "step"]]
    best = test.groupby("seed", sort=False)["accuracy"].max().rename("best_on_test").reset_index()
    return best.merge(test.merge(picked)[["seed", "accuracy"]])


def summarise(frame: pd.DataFrame) -> dict[str, float]:
    """Test accuracies of each arm, from the rows of `finetune_eval`.

    `before` has `accuracy_before` alone. Each other arm has, over the seeds at the chosen learning rate:
        accuracy_ARM: mean test accuracy of the checkpoint with the best validation accuracy (of equal ones,
            the lowest validation loss): the honest figure.
        accuracy_ARM_std: its sample standard deviation; 0 for a single seed.
        accuracy_ARM_best_on_test, ..._std: the same of the checkpoint with the best test accuracy, which is
            what the paper reports.
        learning_rate_ARM: the learning rate chosen on validation.
    """
    figures = {}
    for arm, arm_rows in frame.groupby("arm", sort=False):
        if arm == "before":
            figures["accuracy_before"] = arm_rows.loc[arm_rows["split"] == "test", "accuracy"].tolist()[0]
            continue
        accuracies = accuracies_by_seed(arm_rows)
        figures |= _mean_and_std(f"accuracy_{arm}", accuracies["accuracy"].tolist())
        figures |= _mean_and_std(f"accuracy_{arm}_best_on_test", accuracies["best_on_test"].tolist())
        figures[f"learning_rate_{arm}"] = chosen_learning_rate(arm_rows)
    return figures


def _evaluate(finetuning: Finetuning, language_model: LanguageModel, held_out: HeldOut) -> list[dict[str, Any]]:
    rows = []
    for split, examples in (("validation", held_out.validation), ("test", held_out.test)):
        scores = score(
            language_model,
            finetuning.template,
            examples.texts,
            examples.labels,
            finetuning.settings.eval_batch_size,
        )
        columns = [finetuning.template.labels.index(label) for label in examples.labels]
        correct = scores.class_logits.argmax(dim=1) == torch.tensor(columns)
        # A diverged model gives NaN, and argmax would name a class all the same.
        correct &= scores.class_logits.isfinite().all(dim=1)
        accuracy, loss = correct.double().mean().item(), scores.losses.double().mean().item()
        rows.append({"split": split, "accuracy": accuracy, "loss": loss})
    return rows


def _frame(rows: list[dict[str, Any]], arm: str, seed: int, learning_rate: float, step: int) -> pd.DataFrame:
    run = {"arm": arm, "seed": seed, "learning_rate": learning_rate, "step": step}
    return pd.DataFrame([run | row for row in rows], columns=COLUMNS)


def _validation_best_first(rows: pd.DataFrame) -> pd.DataFrame:
    """Validation rows by accuracy, then by loss; of wholly equal ones the earlier stays first."""
    validation = rows.loc[rows["split"] == "validation"]
    return validation.sort_values(["accuracy", "loss"], ascending=[False, True], kind="stable")


def _mean_and_std(name: str, values: list[float]) -> dict[str, float]:
    return {
        name: statistics.fmean(values),
        f"{name}_std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
