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

    A document is left out with all its answers: the others must not compete without the one that is too long. Raises UsageError
    for an empty answer or prompt, and under overlength=error for a request that is too long.
    """
    for request in requests:
        if not request.answer or not request.prompt:
            part = "context" if not request.prompt else "continuation (a token may span its border with the context)"
            raise UsageError(f"{request.where}: no tokens in the {part}: mend the task's text or its target_delimiter")
        if over(request, longest) > 0 and (overlength == "error" or (overlength == "truncate" and len(request.answer) > longest)):
            raise UsageError(
                f"{request.where}: {len(request.prompt)} + {len(request.answer)} tokens are more than the model's {longest} positions: "
                "give overlength=truncate or overlength=skip, or another max_length"
            )
    long = {request.where for request in requests if over(request, longest) > 0}
    if overlength == "skip":
        record.skipped += len(long)
        return [request for request in requests if request.where not in long]
    record.truncated += sum(over(request, longest) > 0 for request in requests)
    return [replace(request, prompt=request.prompt[max(0, over(request, longest)) :]) for request in requests]


def over(request: Request, longest: int) -> int:
    """Return by how many tokens a request is longer than `longest` positions; its last token needs none."""
    return len(request.prompt) + len(request.answer) - 1 - longest


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


def by_task(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Group requests by task, in order."""
    tasks: dict[str, list[Request]] = {}
    for request in requests:
        tasks.setdefault(request.task, []).append(request)
    return tasks
