"""One X-update of the ADMM: the closed form against autograd's double backward.

    python -m benchmarks.x_update --model ../shared/material/models/reviews-phi-9m

Both compute the matching loss of each example and its gradient with respect to the example's embeddings, for
the same embeddings and the same target; the results are compared. The plain way builds each example's head
gradient as a matrix with `create_graph=True` and differentiates through it, one example at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gradmm_core.language_model import LanguageModel, load_language_model, resolve_model
from gradmm_core.matching import HeadMatching
from gradmm_core.settings import ModelSettings
from gradmm_core.template import ResponseTemplate, TokenisedTemplate, tokenise_template


def main() -> None:
    parser = argparse.ArgumentParser(description="Closed form against double backward")
    parser.add_argument("--model", required=True, help="a model folder or hub id")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--verbaliser", default=" great")
    options = parser.parse_args()

    model = load_language_model(resolve_model(ModelSettings(name=options.model)))
    wording = ResponseTemplate(suffix=" It was", verbalisers={1: options.verbaliser}, max_text_tokens=128)
    template = tokenise_template(model, wording)
    torch.manual_seed(0)
    ids = torch.randint(len(model.tokenizer), (options.batch, options.tokens), device=model.device)
    x = model.embed_freely(ids)
    target = torch.randn_like(model.head)

    objective = HeadMatching(model, template, 1, target)
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "closed form": lambda: closed_form(objective, x),
        "double backward": lambda: double_backward(model, template, target, x),
    }
    loss_gap, gradient_gap = gaps(*(way() for way in ways.values()))  # also warms both up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):  # in turns, so that a busy machine slows both alike
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["double backward"] / medians["closed form"]
    report = {
        "batch": options.batch,
        "tokens": options.tokens,
        "vocabulary": model.embeddings.shape[0],
        "threads": torch.get_num_threads(),
        "milliseconds": {name: round(1000 * value, 1) for name, value in medians.items()},
        "ratio": round(ratio, 2),
        "largest_loss_difference": loss_gap,
        "largest_relative_gradient_difference": gradient_gap,
    }
    print(json.dumps(report, indent=2))
    print(f"closed form is {ratio:.1f} x faster per X-update at batch {options.batch}")


def closed_form(objective: HeadMatching, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_(True)
    losses = objective(x)
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    return losses.detach(), gradient


def double_backward(
    model: LanguageModel, template: TokenisedTemplate, target: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    head = model.model.get_output_embeddings()
    parameters = [p.requires_grad_(True) for p in (head.weight, head.bias) if p is not None]
    tail = model.embed(torch.tensor(template.tail(1), device=model.device))[None]
    response = torch.tensor(template.responses[1], device=model.device)
    losses, gradients = [], []
    for example in x:
        free = example[None].detach().requires_grad_(True)
        embeds = torch.cat([free.to(model.body_dtype), tail], dim=1)
        logits = model.model(inputs_embeds=embeds, use_cache=False).logits[0, -len(response) :]
        parts = torch.autograd.grad(F.cross_entropy(logits, response), parameters, create_graph=True)
        g = torch.cat([p if p.ndim == 2 else p[:, None] for p in parts], dim=1)
        loss = 1 - F.cosine_similarity(g.flatten(), target.flatten(), dim=0)
        gradients.append(torch.autograd.grad(loss, free)[0][0])
        losses.append(loss.detach())
    head.requires_grad_(False)
    return torch.stack(losses), torch.stack(gradients)


def gaps(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> tuple[float, float]:
    loss = float((ours[0] - theirs[0]).abs().max())
    return loss, float((ours[1] - theirs[1]).abs().max() / theirs[1].abs().max())


if __name__ == "__main__":
    main()
