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

from collections import Counter
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
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

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

#: Share of the memory that rows without a record take at most.
FILLERS_SHARE = 0.25

#: The shape of a pass: the label of its records, and their number of tokens.
Shape = tuple[int, int]


class Prompts:
    """Prompts of one record each, that are continued together. What precedes the records is read once.

    Every pass has prompts of the same length, and as many rows as all passes of this length, in which a row does
    not depend on the others. So a record's probabilities depend on that record alone.

    Args:
        before: token ids of what precedes the records, `after` of what follows them.
        records: token ids.
        rows: of a pass, by the number of a record's tokens.
        room: the number of tokens that can be appended.

    Raises:
        InputError: if the model does not keep keys and values of all tokens.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        allowed: AllowedTokens,
        before: Sequence[int],
        records: Sequence[list[int]],
        after: Sequence[int],
        rows: Mapping[int, int],
        room: int,
    ) -> None:
        self._lm, self._allowed, self._room = language_model, allowed, room
        self._before = _read_once(language_model, before)
        self._passes = [
            self._read([[*record, *after] for record in part], rows[len(part[0])])
            for part in _of_one_length(records, rows)
        ]
        self._appended = 0

    def append(self, token: int) -> None:
        """Append a token to every prompt.

        Raises:
            RuntimeError: if there is no room for it.
        """
        for each in self._passes:
            each.state = self._next_state(each.cache, torch.full((len(each.state), 1), token))
        self._appended += 1

    def begin_again(self) -> None:
        """Remove all tokens that were appended."""
        for each in self._passes:
            each.cache.crop(-self._appended)
            each.state = each.after_prompt
        self._appended = 0

    def probabilities(self, candidates: Int[Tensor, " k"]) -> Iterator[Float[Tensor, "records k"]]:
        """Compute each record's probabilities of the next token, in float64 on the CPU, with norms of at most 1.

        Args:
            candidates: indices in the allowed tokens; at first, of tokens that may begin a text. Their
                probabilities add up to 1.
        """
        # The first token may follow the prompt with or without a space, as in AllowedTokens.first_logits.
        spelled = [candidates] if self._appended else [candidates, self._allowed.within_text[candidates]]
        head = self._lm.head[self._allowed.ids[torch.cat(spelled)]]
        for each in self._passes:
            logits = self._lm.augment(each.state) @ head.mT
            both = logits[: each.records].double().softmax(dim=1).cpu()
            p = both.unflatten(1, (len(spelled), len(candidates))).sum(dim=1)
            p = p[p.isfinite().all(dim=1)]  # a record without finite probabilities takes no part
            yield p / p.norm(dim=1, keepdim=True).clamp_min(1.0)

    def _read(self, inputs: Sequence[list[int]], rows: int) -> _Pass:
        ids = torch.full((rows, len(inputs[0])), FILLER)
        ids[: len(inputs)] = torch.tensor(inputs)
        cache = Cache([_ContinuedLayer(layer, rows, ids.shape[1] + self._room) for layer in self._before])
        state = self._next_state(cache, ids)
        return _Pass(len(inputs), cache, state, state)

    def _next_state(self, cache: Cache, ids: Int[Tensor, "rows tokens"]) -> Float[Tensor, "rows hidden"]:
        out = self._lm.model.base_model(input_ids=ids.to(self._lm.device), past_key_values=cache, use_cache=True)
        return out.last_hidden_state[:, -1].clone()


class _ContinuedLayer(DynamicLayer):
    """One layer's keys and values, of rows that begin with the same tokens, whose keys and values are kept once.

    Args:
        beginning: keys and values of the same tokens, from one row.
        room: memory for this number of tokens of every row is allocated once. A `DynamicLayer` copies all of them
            into new memory for every token, and what it frees is too small for the next copy: with many caches
            the process grows to several times their size.
    """

    def __init__(self, beginning: DynamicLayer, rows: int, room: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._beginning = _keys_and_values(beginning)
        self._rooms = [each.new_zeros(rows, each.shape[1], room, each.shape[3]) for each in self._beginning]
        self._tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of tokens; return those of all tokens.

        Raises:
            RuntimeError: if there is no room for them.
        """
        begin, self._tokens = self._tokens, self._tokens + key_states.shape[2]
        found = []
        for beginning, room, states in zip(self._beginning, self._rooms, (key_states, value_states), strict=True):
            room.narrow(2, begin, states.shape[2]).copy_(states)
            found.append(torch.cat([beginning.expand(len(room), -1, -1, -1), room[:, :, : self._tokens]], dim=2))
        return found[0], found[1]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is negative, as in transformers."""
        self._tokens += tokens_to_remove

    def get_seq_length(self) -> int:
        return self._beginning[0].shape[2] + self._tokens


def _keys_and_values(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    assert layer.keys is not None  # of a pass that was made
    assert layer.values is not None
    return layer.keys, layer.values


def _read_once(language_model: LanguageModel, ids: Sequence[int]) -> list[DynamicLayer]:
    """Compute every layer's keys and values of tokens, in one row.

    Raises:
        InputError: if the model does not keep them of all tokens.
    """
    inputs = torch.tensor([ids], device=language_model.device)
    cache = language_model.model.base_model(input_ids=inputs, use_cache=True).past_key_values
    layers = getattr(cache, "layers", [None])
    if not all(_keeps_all(layer, len(ids)) for layer in layers):
        problem = "the model does not keep keys and values of all tokens, which dp-few-shot goes back to"
        raise InputError(problem, "model.name", "take another, or leave dp-few-shot out of the arms")
    return layers


def _keeps_all(layer: Any, tokens: int) -> bool:
    growing = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.is_initialized
    return growing and _keys_and_values(layer)[0].shape[2] == tokens


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


def rows_and_records(
    language_model: LanguageModel, template: TokenisedTemplate, instruction: str, length: int, cache_bytes: int
) -> tuple[int, float]:
    """Return how many rows a pass has at most, and how many records then have room in `cache_bytes`.

    Room is for records of the largest length, with `length` more tokens of each, and for a pass of every length
    that has one record.

    Raises:
        InputError: if the model does not keep keys and values of all tokens.
    """
    before, after = _around(language_model, instruction)
    lengths = template.max_text_tokens
    fitting = cache_bytes / (_bytes_of_token(language_model, before) * (lengths + len(after) + length))
    rows = max(1, min(ROWS, int(FILLERS_SHARE * fitting / lengths)))
    return rows, fitting - (rows - 1) * lengths


def _bytes_of_token(language_model: LanguageModel, ids: Sequence[int]) -> float:
    numbers = [each for layer in _read_once(language_model, ids) for each in _keys_and_values(layer)]
    return sum(each.nbytes for each in numbers) / len(ids)


def sampling_rate(records: float, declared_records: int, classes: int) -> float:
    """Return the share of the records that take part, if not all of them fit in memory, by classes of equal size.

    It follows from public quantities, and each record is drawn by itself. Amplification by sampling is not
    counted.

    Args:
        records: those that fit, see `rows_and_records`.
    """
    return min(1.0, records * classes / declared_records)


def check_room(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    examples: int,
) -> None:
    """Check that a record and an example, and all examples and a text, have room after an instruction.

    Raises:
        InputError: if they have not, or if the model does not keep keys and values of all tokens.
    """
    _read_once(language_model, _around(language_model, next(iter(instructions.values())))[0])
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
    places: int,
    records: Int[np.ndarray, "records tokens"],
) -> Float[Tensor, "records numbers"]:
    """Compute the probabilities of some tokens at the first places of an example of `length`, in one pass."""
    rows = {records.shape[1]: len(records)}
    prompts = Prompts(language_model, allowed, before, records.tolist(), after, rows, length)
    parts = [*prompts.probabilities(allowed.starts_text.nonzero()[:CANDIDATES, 0])]
    candidates = torch.arange(min(CANDIDATES, len(allowed.ids)), device=allowed.ids.device)
    for _ in range(1, places):
        prompts.append(int(allowed.ids[0]))
        parts += prompts.probabilities(candidates)
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
    declared_records: int,
) -> dict[Shape, int]:
    """Return how many rows the passes of each shape have; to be checked before a release is charged.

    A pass of one more token has the shape of every other with as many rows and tokens before it, so that prompts
    that are n tokens shorter than those checked before differ from them in their first n passes alone.

    Raises:
        InputError: if the model gives one text different probabilities in two passes, or does not keep the keys
            and values of all tokens; and if those of a class's records have no room, of which `sampling_rate`
            assumes that all classes are of equal size. The message has no figure, as these are of the records.
    """
    allowed = allowed_tokens(language_model, generation.projection.language)
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)
    found = {}
    for label, instruction in instructions.items():
        before, after = _around(language_model, instruction)
        length, longer = text_tokens[label], None
        probabilities = partial(_probabilities, language_model, allowed, before, after, length)
        most, fitting = rows_and_records(language_model, template, instruction, length, cache_bytes)
        of_length = Counter(len(tokens[int(row)]) for row in data.of_class(label))
        for count in sorted(of_length.keys() - {0}, reverse=True):
            places = length if longer is None else min(length, 1 + longer - count)
            found[label, count] = independent_rows(language_model, most, count, partial(probabilities, places))
            longer = count if found[label, count] == most else None
        rate = sampling_rate(fitting, declared_records, len(instructions))
        kept = sum(
            (rate * of_length[count] + rows - 1) * (count + len(after) + length)
            for (of, count), rows in found.items()
            if of == label
        )
        if kept * _bytes_of_token(language_model, before) > cache_bytes:
            problem = "the records of a class need more memory than they would in classes of equal size"
            raise InputError(f"dp-few-shot: {problem}", "arms", "leave it out, or use a machine with more memory")
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
        cache_bytes: memory for the keys and values of one class. It must not depend on the records.
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
            _, fitting = rows_and_records(language_model, template, instruction, length, cache_bytes)
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
