"""Fine-tuning: gradmm's steps, compared with a plain loop over whole batches in float32.

    python -m benchmarks.finetuning --model ../shared/material/models/reviews-phi-9m

Texts have lengths between 5 and twice `--tokens`, as those of a data set differ. Times include loading the model.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.timing import Way, add_timing_arguments, report, seconds_per_example
from benchmarks.workload import LABEL, Workload
from gradmm.config.settings import FinetuneEvalSettings, ModelSettings
from gradmm.data.examples import Examples
from gradmm.evaluation.finetune_eval import Finetuning, epoch_batches
from gradmm.evaluation.schedule import Schedule
from gradmm.lm.model_reference import resolve_model

STEPS = 30
SCHEDULE = Schedule(3e-4, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tuning by gradmm and by a plain loop")
    add_timing_arguments(parser)
    options = parser.parse_args()
    work = Workload.of(options, "float32")
    lengths = torch.randint(5, 2 * options.tokens, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [ids[:length].tolist() for ids, length in zip(work.texts(1000).repeat(1, 2), lengths, strict=True)]
    examples = Examples(texts, [LABEL] * len(texts))
    settings = FinetuneEvalSettings(evaluate_every=STEPS)
    reference = resolve_model(ModelSettings(name=options.model))
    finetuning = Finetuning(reference, work.model.tokenizer, work.model.device, work.template, settings)
    trained = STEPS * settings.batch_size
    ways = {
        "plain loop, float32": Way(lambda: plain_finetuning(finetuning, examples), trained),
        "gradmm": Way(lambda: finetuning.finetune(examples, SCHEDULE, seed=0), trained),
    }
    seconds = seconds_per_example(ways, options.repeats)
    report("fine-tuning", seconds, "plain loop, float32", options.json, tokens=options.tokens)


def plain_finetuning(finetuning: Finetuning, examples: Examples) -> None:
    """Train as `Finetuning` does: the loss of the response, Adam, linear decay."""
    model = AutoModelForCausalLM.from_pretrained(finetuning.reference.name, dtype=torch.float32)
    model.to(finetuning.placement)  # pyright: ignore[reportArgumentType]  (a decorator hides its signature)
    optimizer = torch.optim.Adam(model.parameters(), lr=SCHEDULE.learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    tail = [*finetuning.template.suffix, *finetuning.template.responses[LABEL]]
    answered = len(finetuning.template.responses[LABEL])
    for rows in epoch_batches(len(examples), finetuning.settings.batch_size, STEPS, seed=0):
        ids = [torch.tensor([*examples.texts[row], *tail]) for row in rows]
        labels = [torch.cat((torch.full((len(row) - answered,), -100), row[-answered:])) for row in ids]
        padded = pad_sequence(ids, batch_first=True).to(finetuning.placement)
        wanted = pad_sequence(labels, batch_first=True, padding_value=-100).to(finetuning.placement)
        logits = model(input_ids=padded, use_cache=False).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()


if __name__ == "__main__":
    main()
