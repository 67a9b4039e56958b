"""A chat server in a thread of the tests, whose memory is perfect; it fails as it is told to."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from evalkit.retention import facts

Fault = Callable[["Handler"], None]
UNTOLD, GO_ON = "Nobody told me.", "Go on, this is number"


class Chatter(ThreadingHTTPServer):
    """The server; `faults` befall its requests one after another, and those after them are answered."""

    daemon_threads = True

    def __init__(self, *faults: Fault, usage: bool = True, models: Any = 404) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.usage, self.models = deque(faults), usage, models
        self.asked: list[dict[str, Any]] = []  # bodies, in the order in which they came
        self.authorized: list[str | None] = []
        self.lock, self.facts = Lock(), facts.load()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *given: Any) -> None:
        """Say nothing of clients that are gone."""

    def reply(self, messages: list[dict[str, str]]) -> str:
        """What is asked for if it was told, and something to go on with if nothing is asked for."""
        *before, last = (message["content"] for message in messages)
        asked = [fact for fact in self.facts if last in fact.questions]
        if not asked:
            return f"{GO_ON} {len(messages)}."
        return next((f"It is {fact.answers[0]}." for fact in asked if fact.statement in before), UNTOLD)


class Handler(BaseHTTPRequestHandler):
    server: Chatter

    def do_GET(self) -> None:
        if isinstance(self.server.models, int):
            status(self.server.models)(self)
        else:
            self.answer(json.dumps({"data": self.server.models}))

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(self.body)
            self.server.authorized.append(self.headers["Authorization"])
            fault = self.server.faults.popleft() if self.server.faults else Handler.well
        fault(self)

    def well(self) -> None:
        """Answer as the API has it."""
        messages = self.body["messages"]
        found: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": self.server.reply(messages)}}]}
        if self.server.usage:
            found["usage"] = {"prompt_tokens": counted(messages)}
        self.answer(json.dumps(found))

    def answer(self, text: str, code: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(text.encode())), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *given: Any) -> None:
        """Say nothing."""


def counted(messages: list[dict[str, str]]) -> int:
    """How many tokens the server says that messages are."""
    return sum(10 + len(message["content"]) for message in messages)


@contextmanager
def chatting(*faults: Fault, **given: Any):
    """A running server."""
    with Chatter(*faults, **given) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# Faults


def status(code: int, said: object = "", **headers: str) -> Fault:
    """An HTTP error that says something, as JSON does unless it is a text."""
    text = said if isinstance(said, str) else json.dumps(said)
    return lambda handler: handler.answer(text, code, **headers)


def body(text: str, **headers: str) -> Fault:
    """An answer of another form."""
    return lambda handler: handler.answer(text, **headers)


def message(**fields: object) -> Fault:
    """An answer whose message has other fields."""
    return body(json.dumps({"choices": [{"message": {"role": "assistant", **fields}}]}))


def dropped(handler: Handler) -> None:
    """A connection that is closed without an answer."""
    handler.connection.shutdown(socket.SHUT_RDWR)


def reset(handler: Handler) -> None:
    """A connection that breaks."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.rfile.close()
    handler.wfile.close()
    handler.connection.close()


def cut(handler: Handler) -> None:
    """An answer that ends too early."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


def slow(seconds: float) -> Fault:
    """An answer that comes late."""

    def late(handler: Handler) -> None:
        time.sleep(seconds)
        handler.well()

    return late


def dripping(handler: Handler) -> None:
    """An answer that never ends, a letter at a time."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.02)
