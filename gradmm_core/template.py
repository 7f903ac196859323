"""From labelled texts to batches of token ids: text + suffix + verbaliser."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradmm_core.errors import InputError
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.language_model import LanguageModel
from gradmm_core.wording import ResponseTemplate

#: Of a data set, given to the tokenizer together: with each token it keeps spellings, offsets and masks, which
#: take several times the memory of the token ids.
TEXTS_AT_ONCE = 1000


@dataclass(frozen=True)
class TokenisedTemplate:
    """A template in one model's tokens.

    `responses` maps a label to its verbaliser's tokens y_1..y_m. Their first tokens differ between classes,
    so that the next-token distribution after the suffix decides the class.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    responses: dict[int, tuple[int, ...]]
    max_text_tokens: int

    @property
    def labels(self) -> list[int]:
        return list(self.responses)

    @property
    def first_tokens(self) -> list[int]:
        """The first response token of each class, in the order of `labels`."""
        return [tokens[0] for tokens in self.responses.values()]

    def tail(self, label: int) -> tuple[int, ...]:
        """What follows the text in the model's input: the suffix, and the response but for its last token."""
        return self.suffix + self.responses[label][:-1]


@dataclass(frozen=True)
class Batch:
    """Right-padded examples. `positions[i, t]` is where response token t of example i is predicted.

    `text_mask` is true at the text's own tokens: not at the template's.
    """

    input_ids: Int[Tensor, "batch tokens"]
    text_mask: Bool[Tensor, "batch tokens"]
    positions: Int[Tensor, "batch response"]
    response_ids: Int[Tensor, "batch response"]
    response_mask: Bool[Tensor, "batch response"]


class TokenIds(Sequence[list[int]]):
    """Token ids of many texts, in one array: as lists of numbers, a million texts' would take a gigabyte."""

    def __init__(self, flat: Int[np.ndarray, " tokens"], bounds: Int[np.ndarray, " bounds"]) -> None:
        self._flat, self._bounds = flat, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, text: int) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        text = range(len(self))[text]
        return self._flat[self._bounds[text] : self._bounds[text + 1]].tolist()

    @property
    def lengths(self) -> Int[np.ndarray, " texts"]:
        return np.diff(self._bounds)


def tokenise_template(language_model: LanguageModel, template: ResponseTemplate) -> TokenisedTemplate:
    """Tokenises suffix and verbalisers.

    Raises:
        InputError: if a verbaliser has no tokens, or two share their first token; or if a text of the greatest
            length does not fit the model.
    """
    responses: dict[int, tuple[int, ...]] = {}
    owner: dict[int, str] = {}
    for label, verbaliser in template.verbalisers.items():
        tokens = tuple(language_model.encode(verbaliser))
        if not tokens:
            raise InputError(f"the verbaliser {verbaliser!r} has no tokens", "classes", "choose another word")
        if tokens[0] in owner:
            raise InputError(
                f"the verbalisers {owner[tokens[0]]!r} and {verbaliser!r} begin with the same token",
                "classes",
                "choose words that differ from their first token on",
            )
        owner[tokens[0]] = verbaliser
        responses[label] = tokens
    tokenised = TokenisedTemplate(
        language_model.prefix_ids,
        tuple(language_model.encode(template.suffix)),
        responses,
        template.max_text_tokens,
    )
    longest_tail = max(len(tokenised.tail(label)) for label in tokenised.labels)
    longest = len(tokenised.prefix) + tokenised.max_text_tokens + longest_tail
    what = f"a text of {tokenised.max_text_tokens} tokens with suffix and verbaliser"
    language_model.check_fits(longest, what, "template.max_text_tokens")
    return tokenised


def tokenise_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int, where: str) -> list[list[int]]:
    """Token ids of each text, without special tokens, cut at `max_tokens`.

    Raises:
        InputError: naming the row, if a text has no tokens.
    """
    return list(_tokenised(tokenizer, texts, max_tokens, where))


def tokenise_split(tokenizer: Any, texts: Sequence[str], max_tokens: int, where: str) -> TokenIds:
    """The same of as many texts as a data set has.

    Raises:
        InputError: naming the row, if a text has no tokens.
    """
    flat, bounds = array("i"), array("q", [0])
    for ids in _tokenised(tokenizer, texts, max_tokens, where):
        flat.extend(ids)
        bounds.append(len(flat))
    return TokenIds(np.frombuffer(flat, np.int32), np.frombuffer(bounds, np.int64))


def _tokenised(tokenizer: Any, texts: Sequence[str], max_tokens: int, where: str) -> Iterator[list[int]]:
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        encoded = tokenizer(list(texts[start : start + TEXTS_AT_ONCE]), add_special_tokens=False)["input_ids"]
        for row, ids in enumerate(encoded, start):
            if not ids:
                raise InputError(f"text {row} has no tokens", where, "remove the row, or set data.min_words=1")
            yield ids[:max_tokens]


def make_batch(
    template: TokenisedTemplate, texts: Sequence[list[int]], labels: Sequence[int], device: torch.device
) -> Batch:
    """Lays out examples for one forward pass over prefix + text + suffix + response[:-1]."""
    rows = [[*template.prefix, *text, *template.tail(label)] for text, label in zip(texts, labels, strict=True)]
    responses = [template.responses[label] for label in labels]
    length, response_length = max(map(len, rows)), max(map(len, responses))
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    text_mask = torch.zeros(len(rows), length, dtype=torch.bool)
    begin = len(template.prefix)
    positions = torch.zeros(len(rows), response_length, dtype=torch.long)
    response_ids = torch.zeros(len(rows), response_length, dtype=torch.long)
    mask = torch.zeros(len(rows), response_length, dtype=torch.bool)
    for i, (row, text, response) in enumerate(zip(rows, texts, responses, strict=True)):
        m = len(response)
        text_mask[i, begin : begin + len(text)] = True
        input_ids[i, : len(row)] = torch.tensor(row)
        positions[i, :m] = torch.arange(len(row) - m, len(row))
        response_ids[i, :m] = torch.tensor(response)
        mask[i, :m] = True
    parts = (input_ids, text_mask, positions, response_ids, mask)
    return Batch(*(part.to(device) for part in parts))


def response_hidden_states(
    hidden: Float[Tensor, "batch tokens hidden"], positions: Int[Tensor, "batch response"]
) -> Float[Tensor, "batch response hidden"]:
    """The hidden states that predict the response tokens."""
    return hidden.take_along_dim(positions[..., None], dim=1)


def head_gradients(
    language_model: LanguageModel, batch: Batch, hidden: Float[Tensor, "batch tokens hidden"] | None = None
) -> HeadGradients:
    """Head gradients of a batch of examples: one forward pass of the body.

    Args:
        hidden: the last hidden states, where they are at hand.
    """
    if hidden is None:
        hidden = language_model.hidden_states(input_ids=batch.input_ids)
    augmented = language_model.augment(response_hidden_states(hidden, batch.positions))
    return HeadGradients.from_logits(
        language_model.logits(augmented), augmented, batch.response_ids, batch.response_mask
    )


def length_bucketed(lengths: Sequence[int] | np.ndarray, batch_size: int, skip: int = 0) -> list[list[int]]:
    """Indices in batches of examples of like length, the shortest first, so that little of a batch is padding.

    Args:
        skip: leave out so many of the shortest.
    """
    order = np.argsort(np.asarray(lengths), kind="stable").tolist()[skip:]
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
