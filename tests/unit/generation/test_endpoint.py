from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest
import torch

from gradmm.config.settings import EndpointSettings, GenerationSettings, SearchSettings, TargetGradientSettings
from gradmm.errors import InputError
from gradmm.generation import endpoint
from gradmm.generation.endpoint import ATTEMPTS, KEY_VARIABLE, EndpointSampler, check_endpoint
from gradmm.generation.generation import TextRequest, generate, write
from gradmm.generation.shards import Shard
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import PAD, SentenceEnds
from gradmm.lm.template import TokenisedTemplate
from gradmm.target.target_space import FULL
from tests.served_model import MODEL, ServedModel, served_model, words_of

INSTRUCTION, TOKENS = "they said\n", 8


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedModel]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with served_model() as model:
        yield model


def endpoint_of(served: ServedModel, **changes: object) -> EndpointSettings:
    return EndpointSettings.model_validate({"url": served.url, "model": MODEL} | changes)


def generators(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng([3, number]) for number in range(count)]


def test_texts_are_the_first_lines_in_order_and_the_same_whatever_is_asked_at_once(
    served: ServedModel, phi: LanguageModel
) -> None:
    one_by_one = EndpointSampler(phi, INSTRUCTION, endpoint_of(served, requests_at_once=1))(
        generators(6), TOKENS, 2
    )
    at_once = EndpointSampler(phi, INSTRUCTION, endpoint_of(served, requests_at_once=5))(generators(6), TOKENS, 2)
    assert torch.equal(one_by_one, at_once)
    assert one_by_one.shape == (12, TOKENS)
    texts = [phi.decode([i for i in row if i != PAD]) for row in one_by_one.tolist()]
    seeds = [body["seed"] for _, body in served.requests[:12]]
    assert len(set(seeds)) == 12
    lines = [words_of({"seed": seed}).strip().splitlines()[0] for seed in seeds]
    assert texts == [phi.decode(phi.encode(line)[:TOKENS]) for line in lines]
    alone = EndpointSampler(phi, INSTRUCTION, endpoint_of(served))(generators(6)[4:5], TOKENS, 2)
    assert torch.equal(alone, one_by_one[8:10])


def test_a_server_gets_the_instruction_and_how_much_to_write_and_nothing_else(
    served: ServedModel, phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a-key")
    settings = GenerationSettings(endpoint=endpoint_of(served, temperature=0.5), whole_sentences=False)
    tilt = torch.randn(len(phi.embeddings), generator=torch.Generator().manual_seed(1))
    texts = write(TextRequest(phi, template, INSTRUCTION, "good", Shard(1, 0, 0, 5), TOKENS, settings, 0, tilt))
    assert len(texts) == len(served.requests) == 5
    assert texts["log_perplexity"].notna().all()
    for headers, body in served.requests:
        assert headers["Authorization"] == "Bearer a-key"
        seed = body.pop("seed")
        assert 0 <= seed < 2**31
        assert body == {"model": MODEL, "prompt": INSTRUCTION, "max_tokens": 2 * TOKENS, "temperature": 0.5}


def test_a_search_without_rounds_keeps_the_best_of_the_served_texts(
    served: ServedModel, phi: LanguageModel, template: TokenisedTemplate
) -> None:
    target = torch.randn(phi.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def losses(draws: int) -> list[float]:
        settings = GenerationSettings(
            method="search",
            loss="cosine",
            whole_sentences=False,
            endpoint=endpoint_of(served),
            search=SearchSettings(draws=draws, rounds=0, fluency=0.0),
        )
        request = TextRequest(phi, template, INSTRUCTION, "good", Shard(1, 0, 0, 4), TOKENS, settings, 0)
        return generate(request, target, FULL, TargetGradientSettings())["matching_loss"].tolist()

    few, many = losses(2), losses(12)
    assert len(served.requests) == 4 * (2 + 12)
    assert sum(many) < sum(few)


def test_a_text_that_is_empty_or_has_control_characters_is_asked_for_again(
    served: ServedModel, phi: LanguageModel
) -> None:
    replies = iter([" \n", "bad\x1b[2J day", "good day"])
    served.reply = lambda _: next(replies)
    ids = EndpointSampler(phi, INSTRUCTION, endpoint_of(served))(generators(1), TOKENS)
    assert phi.decode([i for i in ids[0].tolist() if i != PAD]) == "good day"
    assert len({body["seed"] for _, body in served.requests}) == 3
    served.reply = lambda _: ""
    with pytest.raises(InputError, match=r"'served' at http://127.* writes no text after 'they said"):
        EndpointSampler(phi, INSTRUCTION, endpoint_of(served, requests_at_once=1))(generators(3), TOKENS)
    assert len(served.requests) <= 3 + 3 * ATTEMPTS


def test_an_interrupt_does_not_wait_for_texts_on_their_way(
    served: ServedModel, phi: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, asked = threading.Event(), threading.Event()

    def reply(body: dict[str, Any]) -> str:
        if len(served.requests) == 2:
            asked.set()
        may_answer.wait(60)
        return words_of(body)

    class Interrupted(ThreadPool):
        def imap(self, *arguments: Any) -> Any:
            super().imap(*arguments)
            asked.wait(60)
            raise KeyboardInterrupt

    served.reply = reply
    monkeypatch.setattr(endpoint, "ThreadPool", Interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        EndpointSampler(phi, INSTRUCTION, endpoint_of(served, requests_at_once=2))(generators(4), TOKENS)
    assert not may_answer.is_set()
    waiting = [thread for thread in set(threading.enumerate()) - before if "worker" in thread.name]
    assert waiting  # the requests are still on their way
    assert all(thread.daemon for thread in waiting)  # and the end of Python does not wait for them
    may_answer.set()
    for thread in waiting:
        thread.join(60)
    assert len(served.requests) == 2  # the other two were not sent


def test_texts_are_cut_at_their_number_of_tokens_and_at_sentence_ends(
    served: ServedModel, phi: LanguageModel
) -> None:
    served.reply = lambda _: "the soup was good. the day was bad and the soup"
    ends = SentenceEnds(phi)
    cut = EndpointSampler(phi, INSTRUCTION, endpoint_of(served), ends)(generators(1), TOKENS)
    assert phi.decode([i for i in cut[0].tolist() if i != PAD]) == "the soup was good."
    assert ends.complete(cut).all()
    whole = EndpointSampler(phi, INSTRUCTION, endpoint_of(served))(generators(1), TOKENS)
    assert (whole[0] != PAD).sum() == TOKENS


def test_a_text_of_one_token_is_asked_for_again_and_none_ends_within_a_character(
    served: ServedModel, phi: LanguageModel
) -> None:
    replies = iter(["s", "good \U0001f602\U0001f602\U0001f602\U0001f602"])
    served.reply = lambda _: next(replies)
    ids = EndpointSampler(phi, INSTRUCTION, endpoint_of(served))(generators(1), TOKENS)
    written = phi.decode([i for i in ids[0].tolist() if i != PAD])
    assert written.startswith("good")
    assert "\ufffd" not in written
    assert len(served.requests) == 2


@pytest.mark.parametrize(
    ("answer", "problem", "fix"),
    [
        ((401, b"{}"), "answers 401 Unauthorized to models", f"set {KEY_VARIABLE}"),
        ((500, b"{}"), "answers 500 Internal Server Error to models", "see the server's log"),
        ((200, b"<html>"), "does not answer models as the OpenAI protocol says", "ends with /v1"),
        ((200, b"[]"), "does not answer models as the OpenAI protocol says", "ends with /v1"),
        ((200, b'{"data": null}'), "does not answer models as the OpenAI protocol says", "ends with /v1"),
        ((200, b'{"data": [{"id": "a"}, {"id": "b"}]}'), "serves no 'served'", "choose from a, b"),
        ((200, b'{"data": []}'), "serves no 'served'", "start the server with a model"),
    ],
)
def test_what_is_wrong_with_a_server_is_told_in_a_line(
    served: ServedModel, answer: tuple[int, bytes], problem: str, fix: str
) -> None:
    check_endpoint(endpoint_of(served))
    served.answer = lambda _: answer
    with pytest.raises(InputError) as error:
        check_endpoint(endpoint_of(served))
    assert problem in error.value.what
    assert fix in error.value.fix
    assert error.value.where.startswith("generation.endpoint")


@pytest.mark.parametrize("answer", [b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": "x"}}]}'])
def test_an_answer_without_a_text_is_told_in_a_line(
    served: ServedModel, phi: LanguageModel, answer: bytes
) -> None:
    served.answer = lambda _: (200, answer)
    with pytest.raises(InputError, match="does not answer completions as the OpenAI protocol says"):
        EndpointSampler(phi, INSTRUCTION, endpoint_of(served))(generators(1), TOKENS)


def test_a_busy_server_is_asked_again(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([429, 503, 200])
    served.answer = lambda payload: (next(statuses), payload.encode())
    monkeypatch.setattr(endpoint, "RETRY", endpoint.RETRY.new(backoff_factor=0.0))
    check_endpoint(endpoint_of(served))
    assert next(statuses, None) is None


def test_no_server_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRY", endpoint.RETRY.new(backoff_factor=0.0))
    settings = EndpointSettings(url="http://127.0.0.1:9/v1", model=MODEL)
    with pytest.raises(InputError, match=r"generation.endpoint.url: http://127.0.0.1:9/v1 cannot be reached"):
        check_endpoint(settings)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/v1", "ftp://host/v1", "http://user:secret@host/v1", "http://h/v1?k=1"]
)
def test_addresses_that_are_none_or_hold_a_secret_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        EndpointSettings(url=url, model=MODEL)


def test_only_a_served_model_is_in_the_key_of_texts() -> None:
    without = GenerationSettings()
    assert "endpoint" not in without.key_fields()
    keys = [
        GenerationSettings(
            endpoint=EndpointSettings.model_validate({"url": "http://h/v1", "model": "a"} | changes)
        )
        for changes in ({}, {"requests_at_once": 3}, {"temperature": 0.7}, {"model": "b"})
    ]
    first, more_at_once, colder, other = (each.key_fields()["endpoint"] for each in keys)
    assert first == more_at_once
    assert first not in (colder, other)
