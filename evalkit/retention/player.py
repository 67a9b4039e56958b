"""A model at work on conversations: loads it, chooses what fits it, walks packs of scripts. Knows no folder and no table."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..fetch import DEFAULT
from ..harness.worker import Worker
from ..policies import build
from ..rooms import room
from .chat import Chat
from .protocol import Bucket, Protocol
from .scripts import Casting, Pack, Script
from .walk import Query, Walk


def recall() -> Path:
    """Return the folder of the recall model, a test instrument that ships with evalkit."""
    return room("retention") / "recall"


def named(protocol: Protocol) -> str:
    """Return what the model of a protocol is called: a name, or the recall model's folder."""
    if protocol.model is not None:
        return protocol.model
    if not (recall() / "config.json").is_file():
        raise UsageError(
            f"{recall()} holds no model: give --model NAME (such as {DEFAULT}), or train one: "
            f"python -m evalkit.retention.train_recall --out {recall()}"
        )
    return str(recall())


class Player:
    """A model and its tokenizer."""

    def __init__(self, protocol: Protocol) -> None:
        args = {} if protocol.dtype is None else {"dtype": protocol.dtype}
        self.protocol, self.worker = protocol, Worker(named(protocol), args, {"prefill_chunk": protocol.prefill_chunk})
        self.chat = Chat.of(self.worker.lm.tokenizer, protocol.system)

    def described(self) -> dict[str, Any]:
        """Return what identifies the model, and how conversations are framed for it."""
        frame, how = self.chat.frame, "plain" if self.chat.frame.plain else "template"
        return {
            **self.worker.described(),
            "frame": how,
            "template": [frame.opening, frame.turn, frame.lead, frame.close, frame.between],
        }

    @cached_property
    def casting(self) -> Casting:
        """The conversations and facts to choose from."""
        return Casting.of(self.protocol, self.chat, self.positions)

    @property
    def positions(self) -> int:
        """The longest sequence that the model takes."""
        return int(self.worker.lm.max_length)

    def scripts(self, bucket: Bucket) -> list[Script]:
        """Choose a bucket's conversations."""
        return self.casting.scripts(bucket)

    def score(self, pack: Pack) -> list[list[Query]]:
        """Walk a pack; return each conversation's queries."""
        walk = Walk(self.worker.lm.engine, self.chat, self.protocol, self.positions)
        policy = build(pack.cell.policy, pack.cell.budget, **dict(pack.cell.knobs))
        return walk.through(pack.scripts, policy, control=pack.cell.control)
