"""The speed comparison, on a tiny model."""

from pathlib import Path

import pytest

from evalkit import bench
from evalkit.harness.model import PolicyLM, plain_hf
from tests.saved import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def test_the_speed_comparison_runs_and_both_sides_agree(folder, monkeypatch, capsys):
    given = {"dtype": "float64", "device": "cpu"}
    sides = (plain_hf(str(folder), **given), PolicyLM(str(folder), policy="full", **given))
    monkeypatch.setattr(bench, "_models", lambda: sides)
    monkeypatch.setattr(bench, "HF_BATCHES", (1,))
    monkeypatch.setattr(bench, "ROW_TOKENS", (256,))
    bench.run(None, limit=2, repeats=1, tasks=["mini_copa"])
    printed = capsys.readouterr().out
    assert printed.count("greedy flags differing 0") == 2
    assert all(f"{side} / " in printed for side in ("full prompt", "h2o prompt", "h2o stream", "infinigen stream", "fifteen cells"))
    assert "of the machine's matrix-product peak" in printed
    bench.run(None, limit=2, repeats=1, tasks=["mini_copa"], sweep_only=True)
    printed = capsys.readouterr().out
    assert "fifteen cells / hf: " in printed and "full prompt" not in printed and "greedy flags" not in printed
