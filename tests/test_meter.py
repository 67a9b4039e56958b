"""What is made of vLLM's statistics: spreads and sums, and nothing of what it does not tell."""

from types import SimpleNamespace as Told

import pytest

from evalkit.harness.meter import Meter, Tap


def finished(tokens):
    seconds = {"queued_time": 0.1, "prefill_time": 0.2, "decode_time": 0.3 * (tokens - 1), "e2e_latency": 1.0}
    counted = {"num_prompt_tokens": 7, "num_cached_tokens": 4, "num_generation_tokens": tokens}
    return Told(**seconds, **counted, mean_time_per_output_token=0.3 if tokens > 1 else 0)


def step(*done, first=(0.3,)):
    return Told(finished_requests=list(done), time_to_first_tokens_iter=list(first), num_preempted_reqs=1)


def scheduled(usage, queries=0, hits=0):
    return Told(kv_cache_usage=usage, prefix_cache_stats=Told(queries=queries, hits=hits))


def test_requests_are_spread_and_tokens_summed():
    meter = Meter()
    meter.take(scheduled(0.5, 7, 4), step(finished(3)))
    meter.take(scheduled(0.2), step(finished(1), first=(0.5,)))
    told = meter.as_dict()
    assert (told["requests"], told["prompt_tokens"], told["cached_tokens"], told["generated_tokens"]) == (2, 14, 8, 4)
    assert (told["prefix_queries"], told["prefix_hits"], told["preemptions"], told["cache_usage_peak"]) == (7, 4, 2, 0.5)
    assert told["ttft"]["mean"] == pytest.approx(0.4) == told["ttft"]["p50"]
    assert told["tpot"] == pytest.approx({"mean": 0.3, "p50": 0.3, "p99": 0.3}), "a request of one token has none"
    assert told["decode_seconds"]["p99"] == pytest.approx(0.6)


def test_what_a_version_does_not_tell_is_missing():
    meter = Meter()
    meter.take(None, None)
    meter.take(Told(), Told(finished_requests=[Told(num_generation_tokens=5)]))
    assert meter.as_dict() == {"requests": 1, "generated_tokens": 5}


def test_a_tap_fills_the_meter_of_the_task_at_hand():
    tap = Tap()
    first = tap.meter
    tap.record(scheduler_stats=scheduled(0.5), iteration_stats=step(finished(2)), engine_idx=0)
    tap.meter = Meter()
    tap.record(scheduled(0.1), None, mm_cache_stats=None)
    assert (first.requests, first.usage, tap.meter.requests, tap.meter.usage) == (1, 0.5, 0, 0.1)
