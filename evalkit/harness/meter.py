"""Makes counters of what vLLM says of its requests; knows no model, and imports nothing of vLLM.

vLLM calls its statistics unstable: what a version does not tell is missing here, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..pace import spread

# What vLLM tells of a request that is finished, by our names.
SECONDS = {
    "queue_seconds": "queued_time",
    "prefill_seconds": "prefill_time",
    "decode_seconds": "decode_time",
    "latency_seconds": "e2e_latency",
}
TOKENS = {"prompt_tokens": "num_prompt_tokens", "cached_tokens": "num_cached_tokens", "generated_tokens": "num_generation_tokens"}


@dataclass
class Meter:
    """What one task's requests took: seconds of each one, and sums of tokens."""

    requests: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    usage: float | None = None  # the largest share of the cache's blocks in use at once

    def take(self, scheduler: Any, iteration: Any) -> None:
        """Take in the statistics of one step of vLLM's engine, either of which may be None."""
        used = getattr(scheduler, "kv_cache_usage", None)
        if used is not None:
            self.usage = max(used, self.usage or 0.0)
        self._count(getattr(scheduler, "prefix_cache_stats", None), {"prefix_queries": "queries", "prefix_hits": "hits"})
        self._count(iteration, {"preemptions": "num_preempted_reqs"})
        self.seconds.setdefault("ttft", []).extend(getattr(iteration, "time_to_first_tokens_iter", ()))
        for finished in getattr(iteration, "finished_requests", ()):
            self._finish(finished)

    def _finish(self, finished: Any) -> None:
        self.requests += 1
        self._count(finished, TOKENS)
        named = {name: getattr(finished, theirs, None) for name, theirs in SECONDS.items()}
        if getattr(finished, "num_generation_tokens", 0) > 1:  # vLLM says zero where there is no second token
            named["tpot"] = getattr(finished, "mean_time_per_output_token", None)
        else:
            del named["decode_seconds"]
        for name, seconds in named.items():
            if seconds is not None:
                self.seconds.setdefault(name, []).append(seconds)

    def _count(self, told: Any, names: dict[str, str]) -> None:
        for name, theirs in names.items():
            number = getattr(told, theirs, None)
            if number is not None:
                self.tokens[name] = self.tokens.get(name, 0) + number

    def as_dict(self) -> dict[str, Any]:
        """Return the counters: seconds as mean, p50 and p99 over requests. Prefix hits are missing where no request looked for any."""
        tokens = dict(self.tokens)
        if not tokens.get("prefix_queries"):
            tokens = {name: number for name, number in tokens.items() if not name.startswith("prefix_")}
        spreads = {name: spread(seconds) for name, seconds in self.seconds.items() if seconds}
        usage = {} if self.usage is None else {"cache_usage_peak": self.usage}
        return {"requests": self.requests, **spreads, **tokens, **usage}


@dataclass
class Tap:
    """Stands where vLLM expects one of its loggers of statistics, and hands them to the meter of the task at hand."""

    meter: Meter = field(default_factory=Meter)

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any) -> None:
        self.meter.take(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing, as vLLM's other calls of a logger that tells at the end."""

    def log(self) -> None:
        """Do nothing."""

    def record_sleep_state(self, *_: Any) -> None:
        """Do nothing."""
