"""The workload of the timings: a model, a prompt template, random texts and a random target."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.published import Published
from benchmarks.timing import Way
from gradmm.config.settings import ModelSettings
from gradmm.generation.objectives import HeadMatching
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens

DType = Literal["float32", "bfloat16"]
LABEL, INSTRUCTION = 1, "A short review of a movie that I liked:"
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")


def ways_of_gradmm(
    options: argparse.Namespace, make: Callable[[Workload, int], Callable[[], Any]]
) -> dict[str, Way]:
    """Apply `make` to each precision of the body and each of `--batches`."""
    works = {dtype: Workload.of(options, dtype) for dtype in DTYPES}
    return {
        f"gradmm, {dtype}, batch {examples}": Way(make(work, examples), examples)
        for dtype, work in works.items()
        for examples in options.batches
    }


@dataclass(frozen=True)
class Workload:
    """One model with its body in one precision. Texts and target are the same for all precisions."""

    model: LanguageModel
    template: TokenisedTemplate
    allowed: AllowedTokens
    target: Tensor
    tokens: int

    @classmethod
    def plain(cls, options: argparse.Namespace) -> Workload:
        """Load the model in float32 by transformers."""
        language_model = load_language_model(resolve_model(ModelSettings(name=options.model)))
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        model.eval().requires_grad_(False)
        model.to(language_model.device)  # pyright: ignore[reportArgumentType]  (a decorator hides its signature)
        return cls._on(LanguageModel(model, language_model.tokenizer), options)

    @classmethod
    def of(cls, options: argparse.Namespace, dtype: DType) -> Workload:
        """Load the model by gradmm."""
        return cls._on(load_language_model(resolve_model(ModelSettings(name=options.model, dtype=dtype))), options)

    @classmethod
    def _on(cls, model: LanguageModel, options: argparse.Namespace) -> Workload:
        prompt_template = PromptTemplate(suffix=" It was", verbalisers={LABEL: " great"}, max_text_tokens=128)
        target = torch.randn(model.head.shape, generator=torch.Generator().manual_seed(0)).to(model.device)
        allowed = allowed_tokens(model, "english")
        return cls(model, tokenise_template(model, prompt_template), allowed, target, options.tokens)

    @property
    def objective(self) -> HeadMatching:
        return HeadMatching(self.model, self.template, LABEL, self.target)

    @property
    def published(self) -> Published:
        return Published(self.model, self.template, LABEL, self.target, INSTRUCTION, self.allowed)

    def texts(self, count: int) -> Tensor:
        drawn = torch.randint(
            len(self.allowed.ids), (count, self.tokens), generator=torch.Generator().manual_seed(0)
        )
        return self.allowed.ids[drawn.to(self.model.device)]
