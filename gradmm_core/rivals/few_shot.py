"""DP few-shot: examples that many prompts write together, each with one record (Tang et al., ICLR 2024).

For each class, each of E examples, and each of the T tokens of an example:

    K = the likeliest next tokens after the class's instruction and the example so far
    p_i = the model's probabilities after the instruction, record i, and the example so far, among K alone
    s = sum of p_i over the class's records + noise of standard deviation tau = sigma sqrt(E T)
    the next token is drawn with probabilities proportional to s, where s is larger than THRESHOLD tau

The examples are released. After the class's instruction and its examples, the model then writes any number of
texts. A record is in each of the E T sums of its class with a vector p_i of norm at most 1. Together these sums
are one release of the Gaussian mechanism with sensitivity 1 and standard deviation sigma, because Gaussian
mechanisms compose exactly (Dong, Roth and Su, 2022), later ones depending on earlier results too.

In the paper a prompt has several records, of which each can change its p by sqrt(2), and the next token is the
one with the largest s. Here, with noise that is small for many records, all examples of a class would be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from gradmm.config.settings import GenerationSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.generation.result import released_texts
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache, line_end, prompt_ids, with_examples
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.template import TokenisedTemplate, tokenise_split
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import AllowedTokens, allowed_tokens
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals.releases import mechanism_of_part, noisy_sum
from gradmm.target.independent_rows import independent_rows

#: The number of tokens K that a sum has entries for.
CANDIDATES = 100

#: Standard deviations of the noise that an entry of a sum has to be above, or count as zero.
THRESHOLD = 2.0

#: Records in a forward pass; 1 where a row may depend on the others. Public: it affects the last bits of every p.
ROWS = 64

#: Token of rows without a record.
FILLER = 0

#: The shape of a pass: the label of its records, and their number of tokens.
Shape = tuple[int, int]


class Prompts:
    """Prompts of one record each, that are continued together.

    Every pass has prompts of the same length, and as many rows as all passes of this length, in which a row does
    not depend on the others. So a record's probabilities depend on that record alone.

    Args:
        before: token ids of what precedes the records, `after` of what follows them.
        records: token ids.
        rows: of a pass, by the number of a record's tokens.
        room: for this number of tokens that are appended, memory is allocated once.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        allowed: AllowedTokens,
        before: Sequence[int],
        records: Sequence[list[int]],
        after: Sequence[int],
        rows: Mapping[int, int],
        room: int = 0,
    ) -> None:
        self._lm, self._allowed, self._room = language_model, allowed, room
        self._head = language_model.head[allowed.ids]
        self._passes = [
            self._read([[*before, *record, *after] for record in part], rows[len(part[0])])
            for part in _of_one_length(records, rows)
        ]
        self._appended = 0

    def append(self, token: int) -> None:
        """Append a token to every prompt."""
        for each in self._passes:
            ids = torch.full((len(each.state), 1), token, device=self._lm.device)
            out = self._lm.model.base_model(input_ids=ids, past_key_values=each.cache, use_cache=True)
            each.state = out.last_hidden_state[:, -1]
        self._appended += 1

    def begin_again(self) -> None:
        """Remove all tokens that were appended.

        Raises:
            InputError: if the model has forgotten the tokens before them, as a sliding window does.
        """
        for each in self._passes:
            if self._appended:
                try:
                    each.cache.crop(-self._appended)
                except RuntimeError as error:
                    raise _needs_all_tokens() from error
            each.state = each.after_prompt
        self._appended = 0

    def probabilities(self, candidates: Int[Tensor, " k"]) -> Iterator[Float[Tensor, "records k"]]:
        """Compute each record's probabilities of the next token, in float64 on the CPU, with norms of at most 1.

        Args:
            candidates: indices in the allowed tokens. Their probabilities add up to 1.
        """
        for each in self._passes:
            logits = self._lm.augment(each.state) @ self._head.mT
            if not self._appended:
                logits = self._allowed.first_logits(logits)
            p = logits[: each.records, candidates.to(logits.device)].double().softmax(dim=1).cpu()
            p = p[p.isfinite().all(dim=1)]  # a record without finite probabilities takes no part
            yield p / p.norm(dim=1, keepdim=True).clamp_min(1.0)

    def _read(self, inputs: Sequence[list[int]], rows: int) -> _Pass:
        ids = torch.full((rows, len(inputs[0])), FILLER)
        ids[: len(inputs)] = torch.tensor(inputs)
        out = self._lm.model.base_model(input_ids=ids.to(self._lm.device), use_cache=True)
        state = out.last_hidden_state[:, -1].clone()
        cache = out.past_key_values
        cache.layers = [
            _RoomyLayer(layer, self._room) if type(layer) is DynamicLayer else layer for layer in cache.layers
        ]
        return _Pass(len(inputs), cache, state, state)


class _RoomyLayer(DynamicLayer):
    """Keys and values of one layer, with room for more tokens.

    A `DynamicLayer` copies all of them for every token, into new memory, and what it frees is too small for the
    next copy: with many caches the process grows to several times their size.
    """

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        vars(self).update(vars(layer))
        keys, values = layer.keys, layer.values
        assert keys is not None  # of a pass that was made
        assert values is not None
        self._rooms = [
            torch.cat([each, each.new_zeros(*each.shape[:2], room, each.shape[3])], dim=2)
            for each in (keys, values)
        ]
        self._show(keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of tokens; return those of all tokens.

        Raises:
            RuntimeError: if there is no room for them.
        """
        begin, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = states
        return self._show(end)

    def _show(self, tokens: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[:, :, :tokens] for room in self._rooms)
        return self.keys, self.values


@dataclass(eq=False)
class _Pass:
    """The prompts of one forward pass: `records` rows have a record, and `state` predicts the next token."""

    records: int
    cache: Any
    after_prompt: Float[Tensor, "rows hidden"]
    state: Float[Tensor, "rows hidden"]


def _of_one_length(records: Sequence[list[int]], rows: Mapping[int, int]) -> Iterator[list[list[int]]]:
    """Group records of the same length, at most as many together as `rows` has for it."""
    lengths = np.array([len(each) for each in records])
    for length in np.unique(lengths).tolist():
        of_length = [records[row] for row in np.flatnonzero(lengths == length).tolist()]
        yield from (of_length[begin : begin + rows[length]] for begin in range(0, len(of_length), rows[length]))


def prompts_that_fit(
    language_model: LanguageModel, template: TokenisedTemplate, instruction: str, length: int, cache_bytes: int
) -> float:
    """Return how many prompts of the longest record and `length` more tokens have room in `cache_bytes`.

    Raises:
        InputError: if the model does not keep keys and values of all tokens.
    """
    before, after = _around(language_model, instruction)
    longest = len(before) + template.max_text_tokens + len(after) + length
    cache, _ = PromptCache(language_model, instruction).begin(1)
    try:
        numbers = [each for layer in cache.layers for each in (layer.keys, layer.values)]
        of_token = sum(each.nbytes for each in numbers) / numbers[0].shape[2]
    except AttributeError as error:
        raise _needs_all_tokens() from error
    return cache_bytes / (of_token * longest)


def _needs_all_tokens() -> InputError:
    problem = "the model does not keep keys and values of all tokens, which dp-few-shot goes back to"
    return InputError(problem, "model.name", "take another, or leave dp-few-shot out of the arms")


def sampling_rate(fitting: float, declared_records: int, classes: int) -> float:
    """Return the share of the records that take part, if not all of them fit in memory, by classes of equal size.

    It follows from public quantities, and each record is drawn by itself. Amplification by sampling is not
    counted.

    Args:
        fitting: see `prompts_that_fit`.
    """
    return min(1.0, fitting * classes / declared_records)


def check_room(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    examples: int,
) -> None:
    """Check that a record and an example, and all examples and a text, have room after an instruction.

    Raises:
        InputError: if they have not.
    """
    for label, instruction in instructions.items():
        length, end = text_tokens[label], len(language_model.encode(line_end(instruction)))
        longest = max(template.max_text_tokens + end + length, examples * (length + end) + length)
        what = f"{examples} examples of {length} tokens, with instruction and text"
        begin = len(prompt_ids(language_model, instruction))
        language_model.check_fits(begin + longest, what, "generation.text_tokens")


def _around(language_model: LanguageModel, instruction: str) -> tuple[list[int], list[int]]:
    """Return the token ids before and after a record in its prompt."""
    before = prompt_ids(language_model, with_examples(instruction, ()))
    return before, language_model.encode(line_end(instruction))


def _probabilities(
    language_model: LanguageModel,
    allowed: AllowedTokens,
    before: Sequence[int],
    after: Sequence[int],
    length: int,
    records: Int[np.ndarray, "records tokens"],
) -> Float[Tensor, "records numbers"]:
    """Compute the probabilities of some tokens at each place of an example, in one pass."""
    rows = {records.shape[1]: len(records)}
    prompts = Prompts(language_model, allowed, before, records.tolist(), after, rows, length)
    may_begin = allowed.first_logits(torch.zeros(1, len(allowed.ids)))[0] > -torch.inf
    candidates, parts = may_begin.nonzero()[:CANDIDATES, 0], []
    for _ in range(length):
        parts += prompts.probabilities(candidates)
        prompts.append(int(allowed.ids[0]))
    prompts.begin_again()  # raises what it would raise after the charge
    return torch.cat(parts, dim=1)


@torch.no_grad()
def prompt_rows(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    data: LabelledTexts,
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    generation: GenerationSettings,
    cache_bytes: int,
) -> dict[Shape, int]:
    """Return how many rows the passes of each shape have; to be checked before a release is charged.

    So few that passes of all lengths, with no record in most of their rows, have room in `cache_bytes`.

    Raises:
        InputError: if the model gives one text different probabilities in two passes, or does not keep the keys
            and values of all tokens.
    """
    allowed = allowed_tokens(language_model, generation.projection.language)
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)
    found = {}
    for label, instruction in instructions.items():
        before, after = _around(language_model, instruction)
        probabilities = partial(_probabilities, language_model, allowed, before, after, text_tokens[label])
        fitting = prompts_that_fit(language_model, template, instruction, text_tokens[label], cache_bytes)
        most = max(1, min(ROWS, int(fitting / template.max_text_tokens)))
        for count in sorted({len(tokens[int(row)]) for row in data.of_class(label)} - {0}):
            found[label, count] = independent_rows(language_model, most, count, probabilities)
    return found


@torch.no_grad()
def private_examples(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    data: LabelledTexts,
    rows: Mapping[Shape, int],
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    generation: GenerationSettings,
    cache_bytes: int,
    examples: int,
    claim: GaussianMechanism,
    declared_records: int,
    seed: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Write and release examples of every class: the rows and figures of the stage `private_examples`.

    Formal guarantee: `claim`'s for the rows, one release of sensitivity 1. Every call draws fresh noise: one more
    release. The figure `token_passes` follows from the records' number and lengths, and is not released.

    Args:
        rows: see `prompt_rows`.
        text_tokens: the length to which examples are written before they are cut, by label.
        cache_bytes: memory for the keys and values of one class's records; and as much again for rows without a
            record. It must not depend on the records.
        claim: the mechanism of all sums together.
        seed: draws the tokens from the noisy sums.
    """
    allowed = allowed_tokens(language_model, generation.projection.language)
    ends = SentenceEnds(language_model) if generation.whole_sentences else None
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)
    parts, rates = [], {}
    with ComputeMeter(language_model) as meter:
        for label, instruction in instructions.items():
            length = text_tokens[label]
            before, after = _around(language_model, instruction)
            prompt_cache = PromptCache(language_model, with_examples(instruction, ()))
            fitting = prompts_that_fit(language_model, template, instruction, length, cache_bytes)
            rate = sampling_rate(fitting, declared_records, len(instructions))
            own = data.of_class(label)
            # Not by the seed: who takes part must not depend on the other records' places.
            own = own[np.random.default_rng().random(len(own)) < rate]
            records = [record for row in own if (record := tokens[int(row)])]
            of_length = {count: rows[label, count] for count in {len(record) for record in records}}
            prompts = Prompts(language_model, allowed, before, records, after, of_length, length)
            mechanism = mechanism_of_part(claim, examples * length)
            written = [
                _example(language_model, allowed, prompt_cache, prompts, mechanism, length, [seed, label, number])
                for number in tqdm(range(examples), desc=f"private_examples, {label}", disable=None, leave=False)
            ]
            ids = torch.stack(written)
            released = released_texts(language_model, template, ids if ends is None else ends.cut(ids))
            parts.append(released.assign(label=label, rank=np.arange(1, examples + 1)))
            rates[str(label)] = rate
            del prompts  # before the next class's take as much memory
    return pd.concat(parts, ignore_index=True), {"share_of_records": rates, "token_passes": meter.token_passes}


def _example(
    language_model: LanguageModel,
    allowed: AllowedTokens,
    prompt_cache: PromptCache,
    prompts: Prompts,
    mechanism: GaussianMechanism,
    length: int,
    seed: list[int],
) -> Int[Tensor, " tokens"]:
    """Write one example, token by token."""
    random = np.random.default_rng(seed)
    prompts.begin_again()
    cache, state = prompt_cache.begin(1)
    head, written = language_model.head[allowed.ids], []
    for position in range(length):
        logits = language_model.augment(state) @ head.mT
        if not position:
            logits = allowed.first_logits(logits)
        likely = logits[0].topk(min(CANDIDATES, len(head)))
        candidates = likely.indices[likely.values > -torch.inf]
        noisy = noisy_sum(prompts.probabilities(candidates), len(candidates), mechanism)
        token = int(allowed.ids[candidates[drawn(noisy, mechanism.sigma, random)]])
        written.append(token)
        if position + 1 < length:
            prompts.append(token)
            state = prompt_cache.append(cache, torch.tensor([[token]], device=language_model.device))
    return torch.tensor(written)


def drawn(sums: Float[np.ndarray, " k"], deviation: float, random: np.random.Generator) -> int:
    """Draw an entry in proportion to the sums above `THRESHOLD` deviations; the largest, where none is."""
    clear = np.where(sums > THRESHOLD * deviation, sums, 0.0)
    if not clear.any():
        return int(sums.argmax())
    return int(random.choice(len(sums), p=clear / clear.sum()))
