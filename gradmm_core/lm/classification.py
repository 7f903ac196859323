"""Classification of texts with a causal language model, by the verbaliser predicted after text + suffix.

A class is scored by the first token of its verbaliser. These tokens differ between classes (`tokenise_template`
refuses a recipe otherwise), so the largest of their next-token logits determines the class. A softmax over them is
the model's distribution over classes, conditional on answering with one of them.

All functions read the head from the model, not from the frozen copy `LanguageModel.head`, and so also work during
training. The head is applied only at positions that predict the response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import (
    Batch,
    TokenisedTemplate,
    length_bucketed,
    make_batch,
    response_hidden_states,
)


@dataclass(frozen=True)
class Predictions:
    """Most likely label of each text, and the probability of each class."""

    labels: list[int]
    probabilities: Float[Tensor, "texts classes"]


@dataclass(frozen=True)
class Scores:
    """Class logits and response losses of labelled texts, in the order of the texts, on the CPU.

    A response loss is the cross-entropy (nats) over the whole vocabulary, averaged over the m response tokens.
    `class_logits` has a column for each of `template.labels`.
    """

    class_logits: Float[Tensor, "texts classes"]
    losses: Float[Tensor, " texts"]


@torch.no_grad()
def class_logits(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    batch_size: int,
    context: Sequence[int] = (),
) -> Float[Tensor, "texts classes"]:
    """Compute the logits of each class's first response token, at the position after the suffix.

    Args:
        texts: token ids, without prefix and suffix.
        batch_size: texts of similar length per forward pass.
        context: token ids of few-shot examples, inserted between the template's prefix and every text.

    Returns:
        A row per text, in order, and a column per class in the order of `template.labels`, on the CPU.
    """
    logits = torch.empty(len(texts), len(template.labels), dtype=language_model.head_dtype)
    for rows, states in _answer_states(language_model, template, texts, batch_size, context):
        logits[rows] = _head_logits(language_model, states, template.first_tokens).cpu()
    return logits


@torch.no_grad()
def text_embeddings(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    batch_size: int,
) -> Float[Tensor, "texts hidden"]:
    """Compute the last hidden state after the suffix, the state that predicts the class.

    Returns:
        A row per text, in order, in the head's dtype, on the CPU.
    """
    width = language_model.model.get_output_embeddings().weight.shape[1]
    embeddings = torch.empty(len(texts), width, dtype=language_model.head_dtype)
    for rows, states in _answer_states(language_model, template, texts, batch_size):
        embeddings[rows] = states.to(embeddings)
    return embeddings


def predict(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    batch_size: int,
    context: Sequence[int] = (),
) -> Predictions:
    """Classify texts; see `class_logits` for the arguments.

    Raises:
        InputError: if the logits are not finite.
    """
    probabilities = class_logits(language_model, template, texts, batch_size, context).softmax(dim=1)
    if not probabilities.isfinite().all():
        fix = "set model.dtype=float32, or use another model"
        raise InputError("the model's logits are not finite", "model.name", fix)
    labels = [template.labels[column] for column in probabilities.argmax(dim=1).tolist()]
    return Predictions(labels, probabilities)


@torch.no_grad()
def score(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    labels: Sequence[int],
    batch_size: int,
) -> Scores:
    """Compute class logits and response losses of labelled texts in one forward pass."""
    logits = torch.empty(len(texts), len(template.labels), dtype=language_model.head_dtype)
    losses = torch.empty(len(texts), dtype=language_model.head_dtype)
    lengths = [len(text) + len(template.tail(label)) for text, label in zip(texts, labels, strict=True)]
    for rows in length_bucketed(lengths, batch_size):
        batch = make_batch(template, [texts[i] for i in rows], [labels[i] for i in rows], language_model.device)
        batch_logits = response_logits(language_model, batch)
        logits[rows] = batch_logits[:, 0, template.first_tokens].cpu()
        losses[rows] = response_losses(batch_logits, batch).cpu()
    return Scores(logits, losses)


def response_logits(language_model: LanguageModel, batch: Batch) -> Float[Tensor, "batch response vocab"]:
    """Compute logits at the positions that predict the response, differentiable in all parameters."""
    hidden = language_model.hidden_states(input_ids=batch.input_ids)
    return _head_logits(language_model, response_hidden_states(hidden, batch.positions))


def answer_logits(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    hidden: Float[Tensor, "batch tokens hidden"],
    batch: Batch,
) -> Float[Tensor, "batch classes"]:
    """Compute the logits of each class's first response token, in the order of `template.labels`.

    Args:
        hidden: the last hidden states of the batch.
    """
    states = response_hidden_states(hidden, batch.positions)[:, 0]
    return _head_logits(language_model, states, template.first_tokens)


def class_losses(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    probabilities: Float[Tensor, "texts classes"],
) -> Float[Tensor, " texts"]:
    """Compute the expected response loss (nats) of each text under class probabilities; differentiable.

    The sum over classes of p(class | text) times the mean cross-entropy over the class's response tokens. Classes
    whose inputs are the same, those with verbalisers of one token, share a forward pass of the text.

    Args:
        texts: token ids, without prefix and suffix.
        probabilities: a column for each of `template.labels`. Classes of probability 0 are not computed.
    """
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    row_labels: list[int] = []
    pairs: list[list[int]] = probabilities.nonzero().tolist()
    row_of_pair = []
    for text, column in pairs:
        label = template.labels[column]
        row = rows.setdefault((text, template.tail(label)), len(rows))
        if row == len(row_labels):
            row_labels.append(label)
        row_of_pair.append(row)
    device = language_model.device
    row_texts = [texts[text] for text, _ in rows]
    logits = response_logits(language_model, make_batch(template, row_texts, row_labels, device))
    responses = [torch.tensor(template.responses[template.labels[column]]) for _, column in pairs]
    tokens = pad_sequence(responses, batch_first=True, padding_value=-1).to(device)
    positions = torch.arange(tokens.shape[1], device=device)
    of_pairs = logits.log_softmax(dim=2)[
        torch.tensor(row_of_pair, device=device)[:, None], positions, tokens.clamp_min(0)
    ]
    present = tokens >= 0
    losses = -(of_pairs * present).sum(dim=1) / present.sum(dim=1)
    text_of_pair = torch.tensor([text for text, _ in pairs], device=device)
    weights = probabilities[tuple(probabilities.nonzero().T)].to(losses)
    return torch.zeros(len(texts), dtype=losses.dtype, device=device).index_add(0, text_of_pair, weights * losses)


def response_losses(logits: Float[Tensor, "batch response vocab"], batch: Batch) -> Float[Tensor, " batch"]:
    """Compute each example's mean cross-entropy (nats) over its own response tokens."""
    token_losses = nn.functional.cross_entropy(logits.mT, batch.response_ids, reduction="none")
    return (token_losses * batch.response_mask).sum(dim=1) / batch.response_mask.sum(dim=1)


def _answer_states(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    batch_size: int,
    context: Sequence[int] = (),
) -> Iterator[tuple[list[int], Float[Tensor, "batch hidden"]]]:
    """Yield the last hidden states after text + suffix, with their row numbers, batch by batch."""
    # One response token suffices to locate the response.
    first_token_only = dataclasses.replace(
        template,
        prefix=(*template.prefix, *context),
        responses={label: response[:1] for label, response in template.responses.items()},
    )
    any_label = template.labels[0]
    for rows in length_bucketed([len(text) for text in texts], batch_size):
        batch = make_batch(
            first_token_only, [texts[i] for i in rows], [any_label] * len(rows), language_model.device
        )
        hidden = language_model.hidden_states(input_ids=batch.input_ids)
        yield rows, response_hidden_states(hidden, batch.positions)[:, 0]


def _head_logits(
    language_model: LanguageModel, hidden: Float[Tensor, "*batch hidden"], tokens: list[int] | None = None
) -> Float[Tensor, "*batch tokens"]:
    """Apply the current head in `head_dtype`, for all tokens or some."""
    weight, bias = language_model.head_weights()
    if tokens is not None:
        weight, bias = weight[tokens], None if bias is None else bias[tokens]
    dtype = language_model.head_dtype
    return nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
