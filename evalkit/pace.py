"""How fast tokens came, from counted seconds: to the first token, per later token, per second; knows no model. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy import percentile


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean, the median and the 99th percentile; nothing of nothing."""
    if not seconds:
        return {}
    middle, late = percentile(seconds, (50, 99)).tolist()
    return {"mean": sum(seconds) / len(seconds), "p50": middle, "p99": late}


def pace(
    firsts: Sequence[float], steps: Sequence[float], seconds: Mapping[str, float], prompt_tokens: int, decoded: int
) -> dict[str, Any]:
    """Return what can be told of a run's pace; what was not counted is not there.

    `firsts` and `steps` are `Counters`'; `prompt_tokens` were taken in during the phase prefill, `decoded` ones said during decode.
    """
    found: dict[str, Any] = {"ttft": spread(firsts), "tpot": spread(steps)}
    for phase, tokens in (("prefill", prompt_tokens), ("decode", decoded)):
        if tokens and seconds.get(phase):
            found[f"{phase}_tokens_per_second"] = tokens / seconds[phase]
    if "forward" in seconds:  # attention and policy are parts of it
        found["model_seconds"] = seconds["forward"] - seconds.get("policy", 0.0)
    return {name: value for name, value in found.items() if value != {}}
