"""Takes single classes and functions out of a checked-out file at run time; knows no method, holds no borrowed line."""

import __future__

import ast
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN = {"contextlib", "dataclasses", "math", "os", "random", "types", "typing", "warnings", "numpy", "torch"}


@dataclass(frozen=True)
class Source:
    """One file of one repository, and the names taken from it; `folder` is the checkout."""

    folder: Path
    repository: str
    file: str
    function: str

    def borrow(self, others: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The names in `function` (separated by commas), with `others` standing in for what the file imports."""
        return borrow(self.folder / self.file, [name.strip() for name in self.function.split(",")], others or {})

    def described(self) -> dict[str, str]:
        """Where the names come from, as a fixture records it."""
        return {
            "repository": self.repository,
            "commit": commit(self.folder),
            "file": self.file,
            "function": self.function,
        }


def borrow(file: Path, names: list[str], others: Mapping[str, object]) -> dict[str, Any]:
    """Runs only the definitions called `names` in `file`, after the file's imports of plain libraries.

    Annotations stay unread, so a type the file imports from an old library needs no stand-in. Raises KeyError
    naming the definitions the file does not hold.
    """
    tree = ast.parse(file.read_text())
    chosen = [node for node in tree.body if _is_plain_import(node) or getattr(node, "name", None) in names]
    found = {getattr(node, "name", "") for node in chosen}
    if missing := set(names) - found:
        raise KeyError(f"{file} defines no {sorted(missing)}")
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module(chosen, type_ignores=[]), str(file), "exec", flags=flags, dont_inherit=True)
    namespace: dict[str, Any] = {"__name__": __name__, **others}
    exec(code, namespace)
    namespace.update(others)  # once more: what the file imports or defines under these names gives way
    return namespace


def _is_plain_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in PLAIN for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in PLAIN


def commit(folder: Path) -> str:
    """The commit of a checkout: what a file `.commit` in it says, else what git says."""
    written = folder / ".commit"
    if written.exists():
        return written.read_text().strip()
    return subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
