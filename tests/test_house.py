"""The house rules that can be read off the source: who imports whom, how long things are, and what must not be there."""

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "evalkit"
POLICIES = sorted(path for path in (PACKAGE / "policies").glob("*.py") if path.name != "__init__.py")
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# A module imports from rows above its own only.
ROWS = (
    (
        "evalkit",
        "errors",
        "trie",
        "entries",
        "shares",
        "pace",
        "perf",
        "perf.machine",
        "hook",
        "build_hook",
        "model",
        "masks",
        "marks",
        "retention",
        "retention.chat",
        "retention.clusters",
        "retention.scores",
        "retention.recall_words",
        "retention.recall_attention",
    ),
    ("layer", "retention.recall_rows"),
    (
        "cache",
        "counters",
        "offload",
        "figures",
        "rooms",
        "fetch",
        "sampling",
        "store",
        "stats",
        "budget",
        "naming",
        "reading",
        "retention.recall_start",
    ),
    (
        "policy",
        "retention.recall_places",
        "kernels",
        "data",
        "plan",
        "runs",
        "likeness",
        "retention.records",
        "footprint",
        "perf.records",
        "harness.meter",
        "retention.sources",
        "retention.facts",
        "retention.address",
    ),
    ("policies._codes", "picking", "tokens", "spots", "retention.protocol", "retention.client", "perf.report"),
    ("policies._packed", "memory", "report", "retention.scripts"),
    ("row",),
    (
        "policies.*",
        "policies",
        "attention",
        "decoding",
        "replies",
        "documents",
        "simulation",
        "formats",
        "plots",
        "perf.plots",
        "html",
    ),
    ("packing", "calibration", "settings", "listing", "sections", "paged", "retention.recall_depth"),
    ("engine", "ledger", "compare", "retention.report", "size", "perf.sections", "retention.train_recall"),
    ("scoring", "requests", "sizing", "retention.sections", "retention.page", "retention.plots", "perf.asked"),
    ("session", "gallery", "showing"),
    ("batch",),
    ("trial", "harness.model", "group", "perf.mass"),
    ("contract", "retention.walk", "perf.measure"),
    ("harness", "harness.tasks", "spread", "manifest"),
    ("doctor", "harness.worker", "harness.vllm", "bench"),
    ("harness.export", "harness.versus", "retention.player", "perf.child"),
    ("sweep", "retention.run", "perf.run"),
    ("retention.endpoint", "perf.options"),
    ("cli",),
)
WHERE = {name: number for number, row in enumerate(ROWS) for name in row}


def named(path: Path) -> str:
    """A module's name without the package's, as ROWS has it."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "evalkit"


def row(name: str) -> int:
    """The row of a module; policies are one to the others."""
    return WHERE.get(name, WHERE["policies.*"] if name.startswith("policies.") else -1)


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, at its head or inside a function, but not for its types alone."""
    tree = ast.parse(path.read_text())
    typing = {
        id(below)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for below in ast.walk(node)
    }
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing:
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""]) if node.level else node.module or ""
            base = base.rstrip(".")
            origins = [f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names]
        else:
            continue
        yield from (origin.removeprefix("evalkit.") for origin in origins if origin.split(".")[0] == "evalkit")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def functions(path: Path) -> dict[str, int]:
    """The lines of every function in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    return {f"{path.name}:{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1 for node in found}


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_a_module_imports_from_rows_above_its_own(path: Path) -> None:
    assert row(named(path)) >= 0, "a new module needs a place in ROWS"
    below = [name for name in imported(path) if row(name) >= row(named(path))]
    assert below == []


def test_every_place_in_the_rows_is_taken() -> None:
    assert set(WHERE) - {named(path) for path in MODULES} == {"policies.*"}


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_policy_sees_policies_caches_and_torch_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    ours = set(imported(path)) - {name for name in imported(path) if name.startswith("policies._")}
    assert ours <= {"policy", "cache", "entries", "errors", "kernels"}
    absolute = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    absolute += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in absolute} <= {"torch", *sys.stdlib_module_names}


def test_no_function_is_longer_than_40_lines_and_half_are_shorter_than_10() -> None:
    lines = {name: count for path in MODULES for name, count in functions(path).items()}
    assert {name: count for name, count in lines.items() if count > 40} == {}
    assert statistics.median(lines.values()) < 10


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_a_module_is_shorter_than_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 300


@pytest.mark.parametrize("path", MODULES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name != "policies"], ids=named)
def test_nobody_asks_which_policy_it_is_given(path: Path) -> None:
    names = {"Policy"} | {
        node.name for policy in POLICIES for node in ast.parse(policy.read_text()).body if isinstance(node, ast.ClassDef)
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            asked = {
                name for below in ast.walk(node.args[1]) for name in (getattr(below, "id", None), getattr(below, "attr", None))
            }
            assert not asked & names, f"line {node.lineno}"


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(rb"(?<![\w.~:/-])/(?:work|root|home|Users|mnt|opt)/\w")
    made = ("__pycache__", "dist", "build", "runs")
    hidden = lambda path: any(part.startswith(".") or part in made for part in path.relative_to(ROOT).parts)  # noqa: E731
    files = [path for path in ROOT.rglob("*") if path.is_file() and not hidden(path) and path != Path(__file__)]
    assert len(files) > 50
    assert [str(path.relative_to(ROOT)) for path in files if machine.search(path.read_bytes())] == []
