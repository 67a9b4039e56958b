"""Checks requests before anything is computed and gathers them into documents; knows tokens, no model and no lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .documents import Document
from .errors import UsageError
from .ledger import Record


@dataclass(frozen=True)
class Request:
    """An answer to score after a prompt, in tokens; `where` names its document to the user."""

    number: int
    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    where: str
    rolling: bool = False  # a window of a text: the budget is a share of all of it


def admitted(requests: Sequence[Request], longest: int, overlength: str, record: Record) -> list[Request]:
    """Return the requests that can be scored, cut to `longest` positions or left out as `overlength` says, counted in `record`.

    Raises UsageError for an empty answer, an empty prompt, and under overlength=error for a request that is too long.
    """
    ready = []
    for request in requests:
        if not request.answer or not request.prompt:
            part = (
                "continuation has no tokens (a token may span its border with the context)"
                if request.prompt
                else "context has no tokens"
            )
            raise UsageError(f"{request.where}: the {part}: mend the task's text or its target_delimiter")
        over = len(request.prompt) + len(request.answer) - 1 - longest
        if over <= 0:
            ready.append(request)
        elif overlength == "error" or len(request.answer) > longest:
            raise UsageError(
                f"{request.where}: {len(request.prompt)} + {len(request.answer)} tokens are more than the model's {longest} positions: "
                "give overlength=truncate or overlength=skip, or another max_length"
            )
        elif overlength == "truncate":
            record.truncated += 1
            ready.append(replace(request, prompt=request.prompt[over:]))
        else:
            record.skipped += 1
    return ready


def check_start(requests: Sequence[Request], tokenizer: Any, explicit: bool) -> None:
    """Raise UsageError for a prompt that begins with two BOS tokens, or lacks the one its tokenizer would put there."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return
    expected = not explicit and list(tokenizer("a")["input_ids"][:1]) == [bos]
    for request in requests:
        if request.prompt[:2] == (bos, bos):
            raise UsageError(
                f"{request.where}: the prompt begins with two BOS tokens: give add_bos_token=False, or mend the chat template"
            )
        if expected and request.prompt[0] != bos:
            raise UsageError(
                f"{request.where}: the prompt lacks the BOS token its tokenizer puts first: give add_bos_token=True or False"
            )


def gathered(requests: Sequence[Request]) -> tuple[list[Document], dict[int, tuple[int, int]]]:
    """Gather requests with one and the same prompt into documents; return them, and where each request's answer is."""
    groups: dict[tuple[object, ...], dict[tuple[int, ...], int]] = {}
    where: dict[int, tuple[int, int]] = {}
    lengths: list[int | None] = []
    order: dict[tuple[object, ...], int] = {}
    for request in requests:
        length = len(request.prompt) + len(request.answer) - 1 if request.rolling else None
        key = (request.prompt, length)
        if key not in groups:
            groups[key], order[key] = {}, len(order)
            lengths.append(length)
        answers = groups[key]
        where[request.number] = (order[key], answers.setdefault(request.answer, len(answers)))
    documents = [
        Document(request_prompt, tuple(answers), length)  # type: ignore[arg-type]
        for ((request_prompt, _), answers), length in zip(groups.items(), lengths, strict=True)
    ]
    return documents, where
