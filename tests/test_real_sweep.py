"""A sweep of the default model on real data, killed three times, ends with the bytes of one that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.test_sweep import exported, reports

PLAN = {
    "title": "Killed and not", "models": [{"name": "smollm2-135m-instruct", "args": {"dtype": "float32"}}],
    "policies": ["full", "h2o", "infinigen"], "budgets": [0.1, 0.5], "tasks": ["copa", "winogrande"], "limit": 16, "shard": 2,
}  # fmt: skip
KILLS = (0.2, 0.4, 0.6)  # when so many of the packs are on record
SEED = 0


def begun(plan: Path, out: Path, data: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "from evalkit.cli import main; main()",
        "sweep",
        str(plan),
        "--out",
        str(out),
        "--data",
        str(data),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def recorded(run: Path) -> set[Path]:
    return {path.relative_to(run) for path in run.glob("packs/**/*.jsonl")}


def finish(plan: Path, out: Path, data: Path) -> None:
    _, told = (process := begun(plan, out, data)).communicate(timeout=300)
    assert process.returncode == 0, told.decode()


def kill(plan: Path, out: Path, data: Path, count: int, delay: float) -> None:
    """Take a run up until so many packs are on record, and kill it a moment later."""
    process, limit = begun(plan, out, data), time.monotonic() + 300
    while len(recorded(out)) < count and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"


def samples(run: Path) -> dict[str, str]:
    """lm-eval's files of single documents; those of results hold seconds, too."""
    found = {name: text for name, text in exported(run).items() if "samples" in name}
    assert found
    return found


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_a_real_sweep_killed_three_times_ends_with_the_undisturbed_ones_bytes(data, tmp_path, capsys, record_property):
    plan, draw = tmp_path / "plan.yaml", random.Random(SEED)
    plan.write_text(yaml.safe_dump(PLAN))
    finish(plan, tmp_path / "whole", data)
    packs, left = recorded(tmp_path / "whole"), []
    for share in KILLS:
        kill(plan, tmp_path / "killed", data, round(share * len(packs)), draw.uniform(0, 0.1))
        left.append(len(recorded(tmp_path / "killed")))
    times = {path: os.stat(tmp_path / "killed" / path).st_mtime_ns for path in recorded(tmp_path / "killed")}
    finish(plan, tmp_path / "killed", data)
    assert left == sorted(set(left))
    assert left[-1] < len(packs)
    assert recorded(tmp_path / "killed") == packs
    assert all(os.stat(tmp_path / "killed" / path).st_mtime_ns == written for path, written in times.items()), "scored again"
    assert reports(tmp_path / "killed", capsys) == reports(tmp_path / "whole", capsys)
    assert samples(tmp_path / "killed") == samples(tmp_path / "whole")
