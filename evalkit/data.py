"""Puts rows on disk behind the names of lm-eval's tasks; knows no model, reads lm-eval's files without importing it."""

import glob
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evalkit.errors import UsageError, nearest
from evalkit.rooms import room

if TYPE_CHECKING:
    from datasets import DatasetDict

SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")

# What the six tasks read from a row. lm-eval would notice a missing column only after the model has loaded.
COLUMNS = {
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "copa": ("premise", "question", "choice1", "choice2", "label"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "openbookqa": ("question_stem", "choices", "answerKey"),
    "boolq": ("passage", "question", "label"),
}

SIGNATURE = "# Written by `evalkit tasks use`, which may overwrite it."
PREAMBLE = f"""{SIGNATURE}
# The official task with another source of rows. After a change of the rows or of the installed lm-eval, write it anew.
# dataset_name is a digest of the rows, so that the cache of `datasets` never serves older ones.
"""


@dataclass(frozen=True)
class Source:
    """One task found on disk: its name, lm-eval's YAML of it, what that says, and the files by split name."""

    task: str
    official: Path
    config: dict[str, Any]
    files: dict[str, Path]


def sources(data: Path) -> list[Source]:
    """Find the tasks under `data`, sorted by name; no row is read.

    A task is a folder `data/<task>` that bears the name of any task of the installed lm-eval. Its splits are the files
    `<split>.jsonl` for the split names that the official task uses. Other files and folders are passed over.

    Raises UsageError when there is no such folder, when a folder with split files bears an unknown name, and when the
    split that a task is evaluated on is missing.
    """
    if not data.is_dir():
        raise UsageError(f"{data} is not a folder; give one with <task>/<split>.jsonl, as in piqa/validation.jsonl")
    known = official_tasks()
    folders = [item for item in sorted(data.iterdir()) if item.is_dir() and (item.name in known or _has_splits(item))]
    if not folders:
        raise UsageError(f"{data} holds no task; expected <task>/<split>.jsonl in it, as in piqa/validation.jsonl")
    return [_source(folder, known) for folder in folders]


def task_names(data: Path) -> list[str]:
    """Return the names of the tasks under `data`, sorted; raises what `sources` raises."""
    return [source.task for source in sources(data)]


def passed_over(data: Path) -> list[Path]:
    """Return the files `data/*/*.jsonl` that no task reads, sorted; raises what `sources` raises."""
    read = {path for source in sources(data) for path in source.files.values()}
    return sorted(set(data.glob("*/*.jsonl")) - read)


def use(data: Path, out: Path) -> list[Path]:
    """Write `out/<task>.yaml` for every task under `data` and return the paths, sorted by task.

    Each file includes the installed official YAML and changes only where the rows come from, so that
    `lm_eval --include_path out --tasks piqa` makes the official requests from the rows under `data`. All rows are
    checked first. The same rows give the same bytes. YAMLs of other tasks in `out` stay.

    Raises UsageError as `sources` does, and when rows are unreadable, not JSON objects or lack a column (file and line
    are named), when `out` cannot be written to, and when a file in the way was not written by this function.
    """
    texts = {out / f"{source.task}.yaml": _text(source) for source in sources(data)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in texts:
            _refuse_foreign(path)
        for path, text in texts.items():
            _write(path, text)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; give a folder that can be written to") from error
    return list(texts)


@contextmanager
def prepared(data: Path) -> Iterator[Path]:
    """Give a temporary folder with what `use` writes for `data`, to be passed to lm-eval as an include path."""
    with tempfile.TemporaryDirectory(prefix="evalkit-tasks-") as folder:
        use(data, Path(folder))
        yield Path(folder)


def mini_rows(*, mini: str, **_settings: object) -> "DatasetDict":
    """Return the rows `tasks/mini/<mini>.jsonl` of the shipped suite as the split `validation`.

    The YAMLs of the suite name this function as their data set, so they work wherever the package is installed. lm-eval
    passes the task's metadata and the model's arguments along, which are ignored.
    """
    from datasets import Dataset, DatasetDict

    rows = read_rows(room("tasks") / "mini" / f"{mini}.jsonl")
    return DatasetDict({"validation": Dataset.from_list(rows)})


def read_rows(path: Path, columns: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, blank lines skipped.

    Raises UsageError naming file and line for what is not a JSON object or has no value for one of `columns`, and for a
    file that cannot be read or holds no rows.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}; expected text with one JSON object a line") from error
    rows = [_row(f"{path}, line {number}", line, columns) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UsageError(f"{path} holds no rows; expected one JSON object a line")
    return rows


@cache
def official_tasks() -> dict[str, Path]:
    """Return the YAML of every task of the installed lm-eval, by task name; groups and tags are not tasks."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("lm-eval is not installed, so there is no official task to build on; pip install lm-eval")
    root = Path(spec.submodule_search_locations[0]) / "tasks"
    found: dict[str, Path] = {}
    # Only the line with the name is looked at: parsing some ten thousand YAMLs would take many seconds.
    name = re.compile(r"""^"?task"?:[ \t]*["']?([^\s"'#\[\]{}|>]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
    for relative in sorted(glob.glob("**/*.yaml", root_dir=root, recursive=True)):
        if match := name.search((root / relative).read_text("utf-8")):
            found.setdefault(match[1], root / relative)
    return found


def _has_splits(folder: Path) -> bool:
    return any((folder / f"{split}.jsonl").is_file() for split in ("train", "validation", "test"))


def _source(folder: Path, known: dict[str, Path]) -> Source:
    task = folder.name
    if task not in known:
        raise UsageError(f"{folder}: lm-eval has no task {task!r}{nearest(task, known)}; rename or move the folder")
    config = _merged(known[task])
    if "class" in config:
        raise UsageError(f"{folder}: {task} is written in Python and finds its own rows; it cannot be read from files")
    splits = [config[key] for key in SPLIT_KEYS if config.get(key)]
    files = {split: folder / f"{split}.jsonl" for split in splits if (folder / f"{split}.jsonl").is_file()}
    evaluated = config.get("test_split") or config.get("validation_split")
    if evaluated not in files:
        raise UsageError(f"{folder / f'{evaluated}.jsonl'} is missing; lm-eval evaluates {task} on that split")
    return Source(task, known[task], config, files)


def _merged(path: Path) -> dict[str, Any]:
    # A `!function` names code; its name is all that is needed here.
    own: dict[str, Any] = yaml.safe_load(path.read_text("utf-8").replace("!function ", ""))
    includes = own.pop("include", [])
    merged: dict[str, Any] = {}
    for include in [includes] if isinstance(includes, str) else includes:
        merged |= _merged(path.parent / include)
    return merged | own


def _text(source: Source) -> str:
    """Check all rows of a source and return the YAML for it."""
    for path in source.files.values():
        read_rows(path, COLUMNS.get(source.task, ()))
    # `datasets` takes a path as a pattern, hence the escape. A tag would shrink the official tag of that name to the
    # tasks of one folder.
    where = {split: glob.escape(str(path.resolve())) for split, path in source.files.items()}
    head = {"include": str(source.official), "task": source.task, "tag": None}
    rows = {"dataset_path": "json", "dataset_name": _digest(source), "dataset_kwargs": {"data_files": where}}
    settings = head | rows | _changed_splits(source)
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=10**6)
    return PREAMBLE + text


def _changed_splits(source: Source) -> dict[str, str | None]:
    """Drop the splits without a file, and keep a document out of its own examples."""
    config, files = source.config, source.files
    changed: dict[str, str | None] = {key: None for key in SPLIT_KEYS if config.get(key) and config[key] not in files}
    # Where examples now come from the test split, lm-eval leaves out the document asked about only if told so.
    own_examples = "samples" in (config.get("fewshot_config") or {})
    if changed and list(files) == [config.get("test_split")] and not own_examples:
        changed["fewshot_split"] = config["test_split"]
    if config.get("custom_dataset"):
        changed["custom_dataset"] = None
    return changed


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    for split, path in sorted(source.files.items()):
        digest.update(f"{split}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"rows-{digest.hexdigest()[:16]}"


def _row(place: str, line: str, columns: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is not valid JSON ({error.msg}); expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise UsageError(f'{place} is not a JSON object; expected one such as {{"label": 0}}')
    if missing := [column for column in columns if row.get(column) is None]:
        raise UsageError(f"{place} has no {', '.join(missing)}; the task reads {', '.join(columns)}")
    return row


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not path.read_text("utf-8", errors="replace").startswith(SIGNATURE):
        raise UsageError(f"{path} was not written by evalkit and stays as it is; move it or give another folder")


def _write(path: Path, text: str) -> None:
    """Write so that nobody ever sees half a file."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(path)
