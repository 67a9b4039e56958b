"""Conversations from files and from the hub, in the forms that they come in; knows no model and no facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from ..rooms import room

BUILTIN, HUB = "builtin", "lmsys"
REPOSITORY = "lmsys/lmsys-chat-1m"
PATIENCE = 5.0  # seconds for the hub's first answer
POOL = 2000  # conversations that are long enough to look for on the hub, in its order
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
FORMS = "LMSYS (conversation), ShareGPT (conversations) or OpenAI (messages)"


@dataclass(frozen=True)
class Conversation:
    """A user's messages with the replies to them."""

    id: str
    exchanges: tuple[tuple[str, str], ...]


def load(source: str, language: str, least: int) -> list[Conversation]:
    """Return the conversations of a source: builtin, lmsys, or a JSON Lines or Parquet file or a folder of them.

    Those known to be in another language are left out, and those of the hub with fewer than `least` exchanges.
    Raises UsageError where there are none, and where a file holds something else.
    """
    if source == HUB:
        return list(_first(_hub(), language, least))
    folder = room("retention") / "conversations" if source == BUILTIN else Path(source).expanduser()
    files = _files(folder, source)
    found = list(_apart(one for path in files for one in _spoken(_records(path), language, str(path))))
    if not found:
        raise UsageError(f"source={source} holds no conversation in {language} with a reply: give another file, or {BUILTIN}")
    return found


def _files(path: Path, source: str) -> list[Path]:
    """The files at a path. Raises UsageError where there are none."""
    files = [path] if path.is_file() else sorted(file for kind in ("*.jsonl", "*.parquet") for file in path.glob(kind))
    if not files:
        hint = nearest(source, (BUILTIN, HUB))
        raise UsageError(
            f"source={source} is no file and no folder with any{hint}: give {BUILTIN}, {HUB}, FILE.jsonl or FILE.parquet"
        )
    return files


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """A file's records, each with where it stands."""
    if path.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            rows = parquet.read_table(path).to_pylist()
        except (ArrowException, OSError) as error:
            raise UsageError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())[:120]})") from None
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as JSON Lines ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}, line {number} is no JSON ({error})") from None


def _spoken(records: Iterable[tuple[str, Any]], language: str, where: str) -> Iterator[Conversation]:
    """Read records as conversations; those in another language, or without a reply, are passed over."""
    for number, (at, record) in enumerate(records, 1):
        exchanges = tuple(_exchanges(_messages(record, at), at))
        if exchanges and str(record.get("language") or language).lower() == language.lower():
            name = record.get("conversation_id") or record.get("id") or f"{Path(where).stem}-{number}"
            yield Conversation(str(name), exchanges)


def _apart(found: Iterable[Conversation]) -> Iterator[Conversation]:
    """Pass over what was had before, word for word, and give others of the same id a number."""
    said, numbers = set[tuple[tuple[str, str], ...]](), dict[str, int]()  # by id, the number given last
    for one in found:
        if one.exchanges not in said:
            said.add(one.exchanges)
            name = one.id
            while name in numbers:
                numbers[one.id] += 1
                name = f"{one.id}-{numbers[one.id]}"
            numbers[name] = 1
            yield replace(one, id=name)


def _messages(record: Any, at: str) -> list[Mapping[str, Any]]:
    """The messages of a record, in whichever form."""
    for field in ("conversation", "messages", "conversations"):
        messages = record.get(field) if isinstance(record, Mapping) else None
        if isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages):
            return messages
    raise UsageError(f"{at} is no conversation: give the form of {FORMS}")


def _exchanges(messages: Iterable[Mapping[str, Any]], at: str) -> Iterator[tuple[str, str]]:
    """Pair what the user says with what is replied; several messages in a row are one, and what lacks its other half goes."""
    asked: list[str] = []
    replied: list[str] = []
    for message in messages:
        role, text = _said(message, at)
        if role == "user" and replied:
            yield "\n\n".join(asked), "\n\n".join(replied)
            asked, replied = [], []
        if role == "user" and text:
            asked.append(text)
        elif role == "assistant" and text and asked:
            replied.append(text)
    if replied:
        yield "\n\n".join(asked), "\n\n".join(replied)


def _said(message: Mapping[str, Any], at: str) -> tuple[str | None, str]:
    """A message's role, None for one that is neither user nor assistant, and its text."""
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if isinstance(content, list):  # parts, of which some are text
        content = "\n".join(part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise UsageError(f"{at} has a message without a role or a text: give the form of {FORMS}")
    return ROLES.get(role.lower()), sound((content or "").strip())


def sound(text: str) -> str:
    """Return a text with a replacement character for each half of a letter, as JSON's escapes may leave them: no file could hold it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# The hub


def _hub() -> Iterator[tuple[str, Any]]:
    """The records of LMSYS-Chat-1M, as the hub gives them."""
    from datasets import load_dataset
    from huggingface_hub import HfApi, get_token

    try:
        if get_token() is None:
            raise UsageError("it is gated and there is no token")
        HfApi().dataset_info(REPOSITORY, timeout=PATIENCE)  # a load would wait long for a network that stays silent
        rows = load_dataset(REPOSITORY, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{REPOSITORY}, row {number}", row
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise UsageError(
            f"source={HUB} cannot be had ({reason}): ask for access at https://huggingface.co/datasets/{REPOSITORY} and set HF_TOKEN, "
            f"or give --source {BUILTIN} or a file in its form"
        ) from None


def _first(records: Iterable[tuple[str, Any]], language: str, least: int) -> Iterator[Conversation]:
    """The first conversations that are long enough."""
    yield from islice(_apart(one for one in _spoken(records, language, HUB) if len(one.exchanges) >= least), POOL)
