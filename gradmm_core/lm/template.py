"""Prompt template text + suffix + verbaliser, and batches of token ids made with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.temporary_rows import TemporaryRows, TemporaryRowsWriter

#: Token ids of many texts. As lists, those of a million texts take a gigabyte.
TokenIds = TemporaryRows[list[int]]

#: Texts per call of the tokenizer. Its spellings, offsets and masks take several times the memory of the ids.
TEXTS_AT_ONCE = 1000


@dataclass(frozen=True)
class TokenisedTemplate:
    """A template in the tokens of one model.

    `responses` maps a label to its verbaliser's tokens y_1..y_m. The first tokens differ between classes, so the
    next-token distribution after the suffix determines the class.
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
        """First response token of each class, in the order of `labels`."""
        return [tokens[0] for tokens in self.responses.values()]

    @property
    def longest_response(self) -> int:
        """Number of tokens of the longest response."""
        return max(map(len, self.responses.values()))

    def tail(self, label: int) -> tuple[int, ...]:
        """Return the tokens after the text in the model's input: the suffix and the response[:-1]."""
        return self.suffix + self.responses[label][:-1]


@dataclass(frozen=True)
class Batch:
    """Right-padded examples. Position `positions[i, t]` predicts response token t of example i.

    `text_mask` is true at tokens of the text, and false at those of the template.
    """

    input_ids: Int[Tensor, "batch tokens"]
    text_mask: Bool[Tensor, "batch tokens"]
    positions: Int[Tensor, "batch response"]
    response_ids: Int[Tensor, "batch response"]
    response_mask: Bool[Tensor, "batch response"]


def tokenise_template(language_model: LanguageModel, template: PromptTemplate) -> TokenisedTemplate:
    """Tokenise the suffix and the verbalisers.

    Raises:
        InputError: if a verbaliser has no tokens, two verbalisers share the first token, or a text of maximum
            length does not fit the model.
    """
    responses: dict[int, tuple[int, ...]] = {}
    owner: dict[int, str] = {}
    for label, verbaliser in template.verbalisers.items():
        tokens = tuple(language_model.encode(verbaliser))
        if not tokens:
            raise InputError(f"the verbaliser {verbaliser!r} has no tokens", "classes", "choose another word")
        if tokens[0] in owner:
            blank = not language_model.tokenizer.decode([tokens[0]]).strip()
            raise InputError(
                f"the verbalisers {owner[tokens[0]]!r} and {verbaliser!r} begin with the same token",
                "classes",
                "leave out their leading spaces, which this model takes for words"
                if blank
                else "choose words with different first tokens",
            )
        owner[tokens[0]] = verbaliser
        responses[label] = tokens
    tokenised = TokenisedTemplate(
        language_model.prefix_ids,
        tuple(language_model.encode(template.suffix)),
        responses,
        template.max_text_tokens,
    )
    max_tail = max(len(tokenised.tail(label)) for label in tokenised.labels)
    max_length = len(tokenised.prefix) + tokenised.max_text_tokens + max_tail
    what = f"a text of {tokenised.max_text_tokens} tokens with suffix and verbaliser"
    language_model.check_fits(max_length, what, "template.max_text_tokens")
    return tokenised


def tokenise_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int, where: str) -> list[list[int]]:
    """Tokenise texts without special tokens, truncated to `max_tokens`.

    Raises:
        InputError: naming the row, if a text has no tokens.
    """
    return list(_tokenised(tokenizer, texts, max_tokens, where))


def tokenise_split(tokenizer: Any, texts: Sequence[str], max_tokens: int, where: str | None) -> TokenIds:
    """Do the same for a whole data set, of which memory holds little.

    Args:
        where: None accepts texts without tokens.

    Raises:
        InputError: naming the row, if a text has no tokens.
    """
    tokens = TemporaryRowsWriter()
    tokens.extend(np.array(ids, np.int32).tobytes() for ids in _tokenised(tokenizer, texts, max_tokens, where))
    return tokens.finish(_token_ids)


def tokenise_readable(
    tokenizer: Any, texts: Sequence[str], max_tokens: int
) -> tuple[TokenIds, Int[np.ndarray, " readable"]]:
    """Tokenise a data set without the texts that have no tokens, which no model can read.

    Returns:
        The others' token ids and row numbers.
    """
    tokens = tokenise_split(tokenizer, texts, max_tokens, None)
    rows = np.flatnonzero(token_counts(tokens))
    return tokens.take(rows), rows


def _token_ids(row: bytes) -> list[int]:
    return np.frombuffer(row, np.int32).tolist()


def token_counts(texts: TokenIds) -> Int[np.ndarray, " texts"]:
    return texts.sizes // np.dtype(np.int32).itemsize


def _tokenised(tokenizer: Any, texts: Sequence[str], max_tokens: int, where: str | None) -> Iterator[list[int]]:
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        # verbose=False: it would say how many tokens a private text has.
        part = tokenizer(list(texts[start : start + TEXTS_AT_ONCE]), add_special_tokens=False, verbose=False)
        encoded = part["input_ids"]
        for row, ids in enumerate(encoded, start):
            if not ids and where is not None:
                raise InputError(f"text {row} has no tokens", where, "remove the row, or set data.min_words=1")
            yield ids[:max_tokens]


def make_batch(
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    labels: Sequence[int],
    device: torch.device,
    length: int = 0,
) -> Batch:
    """Build a batch for one forward pass over prefix + text + suffix + response[:-1].

    Args:
        length: pad to at least this number of tokens.
    """
    rows = [[*template.prefix, *text, *template.tail(label)] for text, label in zip(texts, labels, strict=True)]
    responses = [template.responses[label] for label in labels]
    begin = len(template.prefix)
    columns: tuple[Sequence[Sequence[int]], ...] = (
        rows,
        [[begin <= i < begin + len(text) for i in range(len(row))] for row, text in zip(rows, texts, strict=True)],
        [range(len(row) - len(response), len(row)) for row, response in zip(rows, responses, strict=True)],
        responses,
        [[True] * len(response) for response in responses],
    )
    input_ids, *others = (pad_sequence([*map(torch.tensor, column)], batch_first=True) for column in columns)
    text_mask, positions, response_ids, response_mask = others
    missing = (0, max(0, length - input_ids.shape[1]))
    input_ids, text_mask = pad(input_ids, missing), pad(text_mask, missing)
    parts = (input_ids, text_mask, positions, response_ids, response_mask)
    return Batch(*(part.to(device) for part in parts))


def response_hidden_states(
    hidden: Float[Tensor, "batch tokens hidden"], positions: Int[Tensor, "batch response"]
) -> Float[Tensor, "batch response hidden"]:
    """Select the hidden states that predict the response tokens."""
    return hidden.take_along_dim(positions[..., None], dim=1)


def length_bucketed(lengths: Sequence[int] | np.ndarray, batch_size: int) -> list[list[int]]:
    """Group indices into batches of similar length, shortest first, to minimise padding."""
    order = np.argsort(np.asarray(lengths), kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
