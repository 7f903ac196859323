"""Draw texts from a model that another process serves, by the completions of the OpenAI protocol.

vLLM, llama.cpp and others speak it. They get the public instruction of a class, and how much to write: no record,
and nothing of the release.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import requests
import torch
from jaxtyping import Int
from requests.adapters import HTTPAdapter
from torch import Tensor
from urllib3 import Retry

from gradmm.config.settings import EndpointSettings
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import PAD, SentenceEnds

WHERE = "generation.endpoint"

#: Environment variable with the key that the server asks for, if it does; other clients use the same.
KEY_VARIABLE = "OPENAI_API_KEY"

#: Requests for a text, after which a server is taken to write none.
ATTEMPTS = 5

#: Tokens asked for, for each one of the recipe's model: another tokenizer may need more for the same words.
TOKENS_ASKED = 2

#: Seconds to wait for a connection, and for a text.
TIMEOUT = (10.0, 120.0)

#: Requests that are lost, or refused by a server that is busy, are sent again after 0.5 s, 1 s, ...
RETRY = Retry(
    total=4, backoff_factor=0.5, status_forcelist=(429, 502, 503, 504), allowed_methods=None, raise_on_status=False
)


class EndpointSampler:
    """Draws texts from a served model: the first line of each completion, cut like texts of the recipe's model."""

    def __init__(
        self,
        language_model: LanguageModel,
        instruction: str,
        settings: EndpointSettings,
        ends: SentenceEnds | None = None,
    ) -> None:
        self._lm = language_model
        self._instruction = instruction
        self._settings = settings
        self._ends = ends

    def __call__(
        self, generators: Sequence[np.random.Generator], tokens: int, draws: int = 1
    ) -> Int[Tensor, "texts tokens"]:
        """See `Sampler`. Texts are the same again as far as the server honours the seeds that it gets.

        Raises:
            InputError: if the server cannot be reached, refuses, or writes no text in `ATTEMPTS` completions.
        """
        seeds = [
            seeds for random in generators for seeds in random.integers(2**31, size=(draws, ATTEMPTS)).tolist()
        ]
        # Unlike those of concurrent.futures, its threads are daemons: Ctrl-C does not wait for texts on their way.
        with _session(self._settings) as session, ThreadPool(self._settings.requests_at_once) as pool:
            texts = list(pool.imap(lambda each: self._text(session, each, tokens), seeds))
        ids = torch.full((len(texts), tokens), PAD)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        ids = ids.to(self._lm.device)
        return ids if self._ends is None else self._ends.cut(ids)

    def _text(self, session: requests.Session, seeds: Sequence[int], tokens: int) -> list[int]:
        for seed in seeds:
            body = {
                "model": self._settings.model,
                "prompt": self._instruction,
                "max_tokens": TOKENS_ASKED * tokens,
                "temperature": self._settings.temperature,
                "seed": seed,
            }
            answer = _answer(session, "POST", "completions", self._settings, body)
            lines = _completion(answer, self._settings).strip().splitlines()
            if lines and (line := lines[0].strip()) and line.isprintable():
                ids = self._lm.encode(line)[:tokens]
                while self._lm.tokenizer.decode(ids).endswith("\ufffd"):  # cut within a character
                    ids.pop()
                if len(ids) > 1:  # neither an edit nor a likelihood begins before the second token
                    return ids
        raise InputError(
            f"{self._settings.model!r} at {self._settings.url} writes no text after {self._instruction!r}",
            WHERE,
            "serve a model that goes on where the instruction ends, or change the instruction",
        )


def check_endpoint(settings: EndpointSettings) -> None:
    """Raise an InputError if the server cannot be reached, or does not serve the model."""
    with _session(settings) as session:
        answer = _answer(session, "GET", "models", settings)
    match answer:
        case {"data": [*models]}:
            served = [each.get("id") for each in models if isinstance(each, dict)]
        case _:
            raise _other_protocol(settings, "models")
    if settings.model not in served:
        raise InputError(
            f"{settings.url} serves no {settings.model!r}",
            f"{WHERE}.model",
            f"choose from {', '.join(map(str, served[:10]))}" if served else "start the server with a model",
        )


def _session(settings: EndpointSettings) -> requests.Session:
    session = requests.Session()
    if key := os.environ.get(KEY_VARIABLE):
        session.headers["Authorization"] = f"Bearer {key}"
    adapter = HTTPAdapter(pool_maxsize=settings.requests_at_once, max_retries=RETRY)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


def _answer(
    session: requests.Session,
    method: str,
    path: str,
    settings: EndpointSettings,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Send a request, and return the JSON object of its answer."""
    try:
        answer = session.request(method, f"{settings.url.rstrip('/')}/{path}", json=body, timeout=TIMEOUT)
    except requests.RequestException as error:
        problem = f"{settings.url} cannot be reached ({type(error).__name__})"
        raise InputError(problem, f"{WHERE}.url", "start the server, or change the address") from error
    if not answer.ok:
        problem = f"{settings.url} answers {answer.status_code} {answer.reason} to {path}"
        fix = f"set {KEY_VARIABLE}" if answer.status_code in (401, 403) else "see the server's log"
        raise InputError(problem, WHERE, fix)
    try:
        content = answer.json()
    except requests.JSONDecodeError as error:
        raise _other_protocol(settings, path) from error
    if not isinstance(content, dict):
        raise _other_protocol(settings, path)
    return content


def _completion(answer: dict[str, Any], settings: EndpointSettings) -> str:
    match answer:
        case {"choices": [{"text": str(text)}, *_]}:
            return text
    raise _other_protocol(settings, "completions")


def _other_protocol(settings: EndpointSettings, path: str) -> InputError:
    problem = f"{settings.url} does not answer {path} as the OpenAI protocol says"
    return InputError(problem, f"{WHERE}.url", "give the address that ends with /v1")
