"""A small server on loopback that speaks the completions of the OpenAI protocol, and records what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

MODEL = "served"
WORDS = ("good", "bad", "day", "soup", "the", "was")

Reply = Callable[[dict[str, Any]], str]


def words_of(body: dict[str, Any]) -> str:
    """Four words drawn by the seed, and a line that does not belong to the text."""
    drawn = np.random.default_rng(body["seed"]).choice(WORDS, 4)
    return f"\n {' '.join(drawn)}\nanother line"


class ServedModel:
    """The server. `requests` are the headers and bodies of those for texts.

    `reply` writes a text, and `answer`, if there is one, the status and body of every answer.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.reply: Reply = words_of
        self.answer: Callable[[str], tuple[int, bytes]] | None = None
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept

            def do_GET(self) -> None:
                self.finish_with({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.requests.append((dict(self.headers), body))
                self.finish_with(
                    {"object": "text_completion", "choices": [{"index": 0, "text": served.reply(body)}]}
                )

            def finish_with(self, content: dict[str, Any]) -> None:
                status, payload = 200, json.dumps(content).encode()
                if served.answer:
                    status, payload = served.answer(payload.decode())
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def served_model() -> Iterator[ServedModel]:
    model = ServedModel()
    thread = threading.Thread(target=model.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield model
    finally:
        model.server.shutdown()
        model.server.server_close()
        thread.join()
