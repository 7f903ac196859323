"""Compute the memory that each stage of a run needs, from the model's shape and the recipe, before anything runs.

Besides the loaded model, a stage needs memory for copies of the head, logits over the whole vocabulary, the
key-value cache of texts being written, activations, and the weights that fine-tuning trains.
`benchmarks/rehearsal.py` compares these figures with measured peaks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from gradmm.config.recipe import Recipe
from gradmm.config.settings import ExecutionSettings
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import PART_SIZE
from gradmm.evaluation.trainable import SUGGESTED_RANK, check_in_memory, linear_layers
from gradmm.generation.search import texts_per_pass
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import LARGE_MODEL
from gradmm.lm.sampling import BATCH_SIZE
from gradmm.lm.template import TokenisedTemplate

#: A process with Python, torch, transformers and Prefect; on a GPU, these are elsewhere.
LIBRARIES = 720 * 2**20

#: Memory of the tokenizer and of lists of spellings, per token of the vocabulary.
BYTES_PER_SPELLING = 1000

#: Bytes for each trained number: itself, its gradient and Adam's two moments, all in float32.
BYTES_PER_TRAINED = 16

#: Bytes per entry of a matrix of logits, with what is derived of it at the same time.
WRITING, GRADIENTS, GRADIENTS_IN_FLOAT64, SCORES = 12, 12, 28, 16

#: A container's memory limit, in bytes, or "max" (cgroup v2).
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

#: Stages whose work is divided among `execution.workers`.
SHARDED = ("generation", "finetune_eval")

#: Stages that fine-tune.
TRAINING = ("finetune_eval", "mia_audit")


class MemoryPlan(NamedTuple):
    """The number of parameters; and in bytes the weights, the peak of each stage, and the memory available.

    A stage's peak is that of all its processes together.
    """

    parameters: int
    weights: int
    stages: dict[str, int]
    available: int


class _Shape(NamedTuple):
    """The sizes that decide. `intermediate` is the larger side of the widest linear layer of the body.

    `mapped` is the part of `weights` that all processes of a machine share, see `_mapped_bytes`.
    `cached_per_token` is what keys and values of a token take in all layers, `head_copies` what stays in memory of
    the head beside the weights: W~ and, if texts are searched for, W~ in the body's dtype.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int
    cached_per_token: int
    weights: int
    mapped: int
    head_copies: int
    number_bytes: int

    @classmethod
    def of(cls, language_model: LanguageModel, searched: bool) -> _Shape:
        config = language_model.model.config.get_text_config()
        output = language_model.model.get_output_embeddings()
        vocabulary, width = output.weight.shape
        number = language_model.body_dtype.itemsize
        layers, heads = getattr(config, "num_hidden_layers", 1), getattr(config, "num_attention_heads", 1)
        groups = getattr(config, "num_key_value_heads", None) or heads
        each_head = getattr(config, "head_dim", None) or width // heads
        biased = getattr(output, "bias", None) is not None
        copied = biased or language_model.head_dtype != language_model.body_dtype
        half = number if searched and language_model.body_dtype == torch.bfloat16 else 0
        linear = [max(layer.weight.shape) for layer in linear_layers(language_model.model).values()]
        return cls(
            vocabulary=vocabulary,
            width=width,
            layers=layers,
            heads=heads,
            intermediate=max(linear, default=4 * width),
            cached_per_token=2 * layers * groups * each_head * number,
            weights=language_model.bytes_on_device,
            mapped=_mapped_bytes(language_model),
            head_copies=vocabulary * (width + biased) * (language_model.head_dtype.itemsize * copied + half),
            number_bytes=number,
        )

    @property
    def head_in_float32(self) -> int:
        return 4 * self.vocabulary * self.width

    def layer(self, texts: int, tokens: int) -> int:
        """One layer while it is computed: attention, and what the widest matrix gives."""
        attention = self.heads * tokens * tokens * (self.number_bytes + 4)
        return texts * (attention + tokens * (2 * self.intermediate + 6 * self.width) * self.number_bytes)

    def all_layers(self, texts: int, tokens: int) -> int:
        """The hidden states of all layers, as the features need them."""
        return self.layer(texts, tokens) + texts * tokens * (self.layers + 1) * self.width * self.number_bytes

    def activations(self, texts: int, tokens: int, number_bytes: int) -> int:
        """Activations of all layers that are kept for the backward pass."""
        states = 8 * self.width + 4 * self.intermediate
        of_layer = texts * tokens * (states * number_bytes + self.heads * tokens * (number_bytes + 4))
        return self.layers * of_layer

    def logits(self, rows: int, bytes_per_entry: int) -> int:
        return rows * self.vocabulary * bytes_per_entry

    def writing(self, texts: int, prompt: int, tokens: int) -> int:
        """Texts that are written together: the head's rows of their words, logits, and keys and values."""
        return (
            self.head_in_float32
            + self.logits(texts, WRITING)
            + texts * (prompt + tokens) * self.cached_per_token * (self.layers + 1) // self.layers
        )


def memory_plan(recipe: Recipe, language_model: LanguageModel, template: TokenisedTemplate) -> MemoryPlan:
    """Compute what a run takes on the model's device, and check that it is there.

    For a model spread over several devices, this is the device that holds the embeddings, the copy of the head and
    the logits.

    Raises:
        InputError: for the first stage that does not fit, with the settings that would; or if fine-tuning trains
            weights that do not fit on the devices.
    """
    if recipe.finetune_eval.lora_rank is None:
        check_in_memory(language_model.model)
    plan = MemoryPlan(
        parameters=sum(each.numel() for each in language_model.model.parameters()),
        weights=language_model.weight_bytes,
        stages=_stages(recipe, language_model, template),
        available=_available_bytes(language_model.device),
    )
    for stage, needed in plan.stages.items():
        if needed > plan.available:
            raise _too_large(stage, plan, recipe, language_model, template)
    return plan


def finetuning_bytes(language_model: LanguageModel, lora_rank: int | None) -> int:
    """Compute the bytes of one fine-tuning's weights, gradients and moments."""
    if lora_rank is None:
        return BYTES_PER_TRAINED * sum(each.numel() for each in language_model.model.parameters())
    adapted = [layer.weight for layer in linear_layers(language_model.model).values()]
    trained = sum(lora_rank * sum(weight.shape) for weight in (*adapted, language_model.embeddings))
    return language_model.weight_bytes + BYTES_PER_TRAINED * trained


def _stages(recipe: Recipe, language_model: LanguageModel, template: TokenisedTemplate) -> dict[str, int]:
    """Compute each stage's bytes, of all its processes."""
    target, generation, finetuning = recipe.target_gradient, recipe.generation, recipe.finetune_eval
    searched = generation.method != "written"
    shape = _Shape.of(language_model, searched)
    device = language_model.device
    on_cpu = device.type == "cpu"
    without_model = LIBRARIES + BYTES_PER_SPELLING * shape.vocabulary if on_cpu else 0
    at_rest = without_model + shape.weights + shape.head_copies
    large = language_model.weight_bytes > LARGE_MODEL
    beside_trained = without_model if large else at_rest
    response = template.longest_response
    around = len(template.prefix) + len(template.suffix) + response - 1
    longest = template.max_text_tokens + around
    prompt = max(len(language_model.encode(words)) for words in recipe.instructions.values())
    tokens = template.max_text_tokens if generation.text_tokens == "auto" else generation.text_tokens

    batch, public = target.batch_size, min(target.public_text_tokens, template.max_text_tokens)
    space = max(
        shape.writing(min(target.public_texts, BATCH_SIZE), prompt, public),
        shape.logits(batch * response, GRADIENTS_IN_FLOAT64) + shape.all_layers(batch, public + around),
    )
    gradients = shape.logits(batch * response, GRADIENTS) + shape.all_layers(batch, longest)

    texts = min(generation.batch_size, generation.per_class)
    drawn = texts * generation.search.draws if searched else texts
    made = shape.writing(min(drawn, BATCH_SIZE), prompt, tokens)
    if searched:
        made = max(made, shape.logits(min(drawn, texts_per_pass(tokens, shape.vocabulary)) * tokens, SCORES))

    rank = finetuning.lora_rank
    # A text with soft labels is read once for each beginning of a response (`class_losses`).
    soft = recipe.labelling.labels == "soft"
    part = PART_SIZE * (len({template.tail(label) for label in template.labels}) if soft else 1)
    trained = (
        finetuning_bytes(language_model, rank) * shape.weights // language_model.weight_bytes
        + (shape.head_in_float32 if rank and shape.number_bytes < 4 else 0)
        + shape.logits(part * response, GRADIENTS)
        + shape.activations(part, longest, shape.number_bytes if rank else 4)
    )
    # A worker loads the frozen model, unless it is large, and the one that it trains.
    copies = (not large) + bool(rank)
    return {
        **({"target_space": at_rest + space} if target.uses_public_text else {}),
        "target_gradient": at_rest + gradients,
        "generation": _of_workers(at_rest, at_rest + made, shape.mapped, recipe, device),
        "labelling": at_rest + shape.all_layers(recipe.labelling.batch_size, tokens + around),
        "finetune_eval": _of_workers(at_rest, beside_trained + trained, copies * shape.mapped, recipe, device),
        "mia_audit": beside_trained + trained,
    }


def _of_workers(at_rest: int, stage: int, shared: int, recipe: Recipe, device: torch.device) -> int:
    """Add up the run's own process and its workers, each of which loads the model.

    Args:
        shared: the part of a worker's memory shared with the run's own process.
    """
    if recipe.execution.runner == "in-process":
        return stage
    return at_rest + _workers(recipe.execution, device) * (stage - shared)


def _workers(settings: ExecutionSettings, device: torch.device) -> int:
    """Return how many workers share the memory of this machine, or of one GPU; 1 of a cluster elsewhere."""
    if settings.runner == "in-process" or settings.address is not None:
        return 1
    if device.type == "cuda":
        devices = max(1, torch.cuda.device_count())
        return math.ceil((settings.workers or devices) / devices)
    cores = 1 if settings.runner == "processes" else os.cpu_count()  # Ray and Dask use all cores
    return settings.workers or cores or 1


def _mapped_bytes(language_model: LanguageModel) -> int:
    """Return the bytes of weights that are mapped from their files, not converted to another dtype."""
    if language_model.device.type != "cpu":
        return 0
    try:
        maps = psutil.Process().memory_maps(grouped=False)
    except (AttributeError, psutil.Error):  # no such list on this system
        return 0
    ranges = [tuple(int(end, 16) for end in each.addr.split("-")) for each in maps if each.path.startswith("/")]
    weights = language_model.model.parameters()
    return sum(each.nbytes for each in weights if any(low <= each.data_ptr() < high for low, high in ranges))


def _too_large(
    stage: str, plan: MemoryPlan, recipe: Recipe, language_model: LanguageModel, template: TokenisedTemplate
) -> InputError:
    workers = _workers(recipe.execution, language_model.device)
    problem = (
        f"takes {plan.stages[stage] / 2**30:.1f} GiB of memory with a model of {plan.parameters / 1e6:,.0f} "
        "million parameters"
        + (f" and {workers} workers" if workers > 1 and stage in SHARDED else "")
        + f", but only {plan.available / 2**30:.1f} GiB are available"
    )
    for change, changed in _smaller(stage, recipe, language_model.device):
        needed = _stages(changed, language_model, template)[stage]
        if needed <= plan.available:
            return InputError(problem, stage, f"set {change} ({needed / 2**30:.1f} GiB)")
    fix = "use a smaller model, or one in bfloat16 (model.dtype)"
    if language_model.device.type == "cuda" and torch.cuda.device_count() > 1 and not language_model.device_map:
        fix += ", or spread it over the GPUs (model.device=balanced)"
    return InputError(problem, stage, fix)


def _smaller(stage: str, recipe: Recipe, device: torch.device) -> Iterable[tuple[str, Recipe]]:
    """Yield settings that make a stage smaller, as on the command line, and the recipe with them."""

    def changed(block: str, **values: object) -> Recipe:
        return recipe.model_copy(update={block: getattr(recipe, block).model_copy(update=values)})

    fewer = changed("execution", workers=1)
    if stage in SHARDED and _workers(recipe.execution, device) > 1:
        yield "execution.workers=1", fewer
    if stage not in TRAINING:
        block = "target_gradient" if stage == "target_space" else stage
        size = getattr(recipe, block).batch_size
        while size > 1:
            size //= 2
            yield f"{block}.batch_size={size}", changed(block, batch_size=size)
    elif recipe.finetune_eval.lora_rank is None:
        lora = {"finetune_eval": recipe.finetune_eval.model_copy(update={"lora_rank": SUGGESTED_RANK})}
        yield f"finetune_eval.lora_rank={SUGGESTED_RANK}", recipe.model_copy(update=lora)
        yield f"finetune_eval.lora_rank={SUGGESTED_RANK} and execution.workers=1", fewer.model_copy(update=lora)


def _available_bytes(device: torch.device) -> int:
    """Return what this process has and what is free beside it, within the limit of a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return _within_container(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def machine_bytes(device: torch.device) -> int:
    """Return the total memory of the machine or of its container, or of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _within_container(psutil.virtual_memory().total)


def _within_container(memory: int) -> int:
    try:
        return min(memory, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return memory
