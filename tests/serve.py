"""A chat server with a real model behind it, to be killed: a program of its own.

    python -m tests.serve FOLDER PORT [NUMBER]

Serves the model in FOLDER, greedily; kills itself when it has been asked NUMBER times, without an answer to the last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Serving(HTTPServer):
    """A model, asked by one at a time."""

    def __init__(self, folder: str, port: int, fatal: int | None) -> None:
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.asked, self.fatal = 0, fatal
        super().__init__(("127.0.0.1", port), Handler)

    @torch.no_grad()
    def reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the model says next."""
        self.asked += 1
        if self.asked == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        given = self.tokenizer.apply_chat_template(
            asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = self.model.generate(**given, max_new_tokens=asked["max_tokens"], do_sample=False)[0]
        count = given["input_ids"].shape[1]
        text = self.tokenizer.decode(tokens[count:], skip_special_tokens=True)
        return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"prompt_tokens": count}}


class Handler(BaseHTTPRequestHandler):
    server: Serving

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny", "max_model_len": self.server.model.config.max_position_embeddings}]})

    def do_POST(self) -> None:
        self.answer(self.server.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def answer(self, found: dict[str, Any]) -> None:
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *given: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    with Serving(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None) as server:
        server.serve_forever()
