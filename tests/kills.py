"""Kills a sweep again and again at random moments, and takes it up again; a program of its own, so that it may fork.

    python -m tests.kills FOLDER KILLS SEED

A sweep that ends before its kill begins anew in another folder, so that kills land everywhere. Prints the finished runs' folders and
what was in each folder at each kill, as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evalkit.harness.export import export  # noqa: F401  imported once, before all forks
from evalkit.sweep import Sweep
from tests.stub import loader, mini_alone, noted, planned

NAP = 0.01  # seconds of a pack
STUCK = 60  # seconds after which a sweep counts as stuck
PLAN: dict[str, Any] = {
    "policies": ["h2o"], "budgets": [0.1], "protocols": ["prompt", "stream"], "tasks": ["mini_copa", "mini_boolq"], "limit": 6, "shard": 1,
}  # fmt: skip


def sweep(folder: Path) -> Sweep:
    """The sweep that is killed; its scorer's record lies beside the folder."""
    return Sweep(planned(**PLAN), folder, loader=loader(folder.with_suffix(".log"), NAP))


def forked(folder: Path) -> int:
    """Run the sweep in a child; return its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.dup2(os.open(folder.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        faulthandler.dump_traceback_later(STUCK - 10)  # should it hang, the file says where
        sweep(folder).run()
        code = 0
    finally:
        os._exit(code)


def ended(child: int, seconds: float) -> bool:
    """Kill a child after so many seconds; whether it had ended by itself before, which must be well."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the sweep failed: {status}"
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def state(folder: Path) -> dict[str, Any]:
    """What a kill left: the documents of the packs on record, how many lines the scorer's record has, and what else is there."""
    packs = [json.loads(path.read_text().split("\n")[0]) for path in sorted(folder.glob("packs/**/*.jsonl"))]
    return {
        "recorded": [[pack["pack"].split("/")[2], pack["pack"].split("/")[1], pack["documents"]] for pack in packs],
        "noted": len(noted(folder.with_suffix(".log"))),
        "begun": (folder / "run.json").exists(),
        "exported": len(list(folder.glob("cells/**/results_*.json"))),
    }


def main(folder: Path, kills: int, seed: int) -> None:
    tqdm.monitor_interval = 0  # no thread, which forks would lose
    draw = random.Random(seed)
    sweep(folder / "undisturbed").run()  # also loads lm-eval's tasks, which the forks then have
    start = time.monotonic()
    sweep(folder / "again").run()
    span = time.monotonic() - start
    runs: list[tuple[Path, list[Any]]] = [(folder / "killed0", [])]
    while kills:
        current, left = runs[-1]
        if ended(forked(current), draw.uniform(0, span)):
            runs.append((folder / f"killed{len(runs)}", []))
        else:
            left.append(state(current))
            kills -= 1
    last = runs[-1][0]
    assert ended(forked(last), STUCK), last.with_suffix(".err").read_text()
    print(json.dumps({"span": span, "runs": [[str(run), left] for run, left in runs]}))


if __name__ == "__main__":
    with mini_alone():
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
