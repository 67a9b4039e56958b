"""Times kv models beside lm-eval's hf on the same documents, in turn, each side at its best batch size; knows no policy."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from . import data as local
from .policies import build
from .rooms import room

SIX = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")
BUDGETS = ("2%", "4%", "10%", "20%", "30%", "50%", "100%")
CELLS = "fifteen cells"
HF_BATCHES = (1, 4, 8, 16, 32)
ROW_TOKENS = (256, 512, 1024, 2048)
MODELS = (("full", "100%", "prompt"), ("h2o", "0.1", "prompt"), ("h2o", "0.1", "stream"), ("infinigen", "0.1", "stream"))
TARGETS = {"hellaswag": 0.4, "openbookqa": 0.4, "piqa": 0.7, "copa": 0.7, "winogrande": 0.7, "boolq": 0.85}


def run(data: Path | None, limit: int, repeats: int, tasks: Sequence[str] | None, *, sweep_only: bool = False) -> None:
    """Print, for each task, how far both sides' results are apart, their seconds, and the ratios: median and range over `repeats`.

    With `sweep_only` results are not compared, and of evalkit's sides only the sweep is timed.
    """
    from .harness.tasks import Recorded, Tasks

    names = list(tasks or (SIX if data else [f"mini_{name}" for name in SIX]))
    with ExitStack() as stack:
        include = [str(room("tasks")), *([str(stack.enter_context(local.prepared(data)))] if data else [])]
        hf, kv = _models()
        for name in names:
            task, collector = Tasks([name], include, limit), Recorded()
            task.evaluate(collector)
            print(f"{name}: {len(collector.requests)} requests of {limit} documents")
            if not sweep_only:
                _agree(task, hf, kv, collector.requests)
            if repeats:
                _compare(name, hf, kv, collector.requests, repeats, () if sweep_only else MODELS)


def _agree(task: Any, hf: Any, kv: Any, requests: list[Any]) -> None:
    """Print how far full's log-likelihoods are from hf's, how many greedy flags differ, and both accuracies."""
    from .harness.tasks import Recorded

    theirs = _hf(hf, requests, 8)
    for rows in (64, 1024):
        ours = _kv(kv, requests, "full", "100%", "prompt", rows)
        furthest = max(abs(a - b) for (a, _), (b, _) in zip(theirs, ours, strict=True))
        flags = sum(a != b for (_, a), (_, b) in zip(theirs, ours, strict=True))
        accuracies = [task.evaluate(Recorded(side))["results"][task.names[0]]["acc,none"] for side in (theirs, ours)]
        print(f"  full against hf, row_tokens={rows}: furthest log-likelihood {furthest:.1e}, greedy flags differing {flags}, "
              f"accuracy {accuracies[0]:.4f} and {accuracies[1]:.4f}")  # fmt: skip


def _models() -> tuple[Any, Any]:
    from .fetch import DEFAULT, model_folder
    from .harness.model import PolicyLM, plain_hf

    folder = str(model_folder(DEFAULT))
    return plain_hf(folder, dtype="float32", device="cpu"), PolicyLM(folder, policy="full", dtype="float32", device="cpu")


def _compare(name: str, hf: Any, kv: Any, requests: list[Any], repeats: int, models: Sequence[tuple[str, str, str]]) -> None:
    """Time one task: hf, evalkit's models and a sweep's fifteen cells in one pass, each at the size that some requests go fastest with."""
    some = requests[: max(8, len(requests) // 3)]
    prompts = dict.fromkeys([("full", "100%"), *((policy, budget) for policy, budget, how in models if how == "prompt")])
    size, rows = _best(hf, some), {policy: _best_rows(kv, some, policy, budget) for policy, budget in prompts}
    sides: dict[str, Callable[[], object]] = {"hf": lambda: _hf(hf, requests, size)}
    for policy, budget, protocol in models:
        own = rows[policy if protocol == "prompt" else "full"]
        sides[f"{policy} {protocol}"] = partial(_kv, kv, requests, policy, budget, protocol, own)
    sides[CELLS] = partial(_sweep, kv, requests, rows["full"])
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, call in sides.items():
            seconds[side].append(_timed(call))
    target = TARGETS.get(name.removeprefix("mini_"))
    print(f"  best batch_size of hf {size}, best row_tokens of {', '.join(f'{policy} {own}' for policy, own in rows.items())}")
    for side, base, aim in (
        ("full prompt", "hf", target),
        ("h2o prompt", "full prompt", 1.15),
        ("h2o stream", "full prompt", 3),
        ("infinigen stream", "full prompt", 3),
        (CELLS, "hf", 3),
    ):
        if side not in seconds:
            continue
        ratios = sorted(a / b for a, b in zip(seconds[side], seconds[base], strict=True))
        middle, times = statistics.median(ratios), (statistics.median(seconds[side]), statistics.median(seconds[base]))
        told = f"{middle:.2f} [{ratios[0]:.2f} .. {ratios[-1]:.2f}] (target {aim}), {times[0]:.2f} s / {times[1]:.2f} s"
        print(f"  {side} / {base}: {told}")
    print(f"  {CELLS}: {_share_of_peak(kv, statistics.median(seconds[CELLS])):.0%} of the machine's matrix-product peak")
    sys.stdout.flush()


def _sweep(kv: Any, requests: list[Any], rows: int) -> None:
    """Score the cells of the plan `paper` in one pass."""
    from .counters import Counters
    from .requests import gathered

    documents, _ = gathered([kv.encoded(number, request) for number, request in enumerate(requests)])
    cells = [build("full"), *(build(policy, budget) for policy in ("h2o", "infinigen") for budget in BUDGETS)]
    kv.engine.counters, kv.engine.row_tokens = Counters(), rows
    kv.engine.score(documents, cells)


def _share_of_peak(kv: Any, seconds: float) -> float:
    """Return the share of the peak, measured now in the model's dtype, that the last sweep's matrix products reached in `seconds`.

    Counted are the products with weights, not those of attention.
    """
    model, tokens = kv.engine.model, kv.engine.counters.tokens
    head = model.get_output_embeddings().weight.numel()
    body = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name)
    body -= head if model.get_output_embeddings().weight is not model.get_input_embeddings().weight else 0
    work = 2 * (body * tokens["computed"] + head * tokens["predicted"])
    return work / seconds / _peak(kv.engine.device, model.dtype)


def _peak(device: Any, dtype: Any, size: int = 2048, times: int = 5) -> float:
    """Return the operations a second of the fastest of some products of square matrices."""
    import torch

    one = torch.randn(size, size, device=device, dtype=dtype)

    def product() -> None:
        torch.matmul(one, one)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size**3 / min(_timed(product) for _ in range(times))


def _best(hf: Any, requests: list[Any]) -> int:
    return min(HF_BATCHES, key=lambda size: _timed(lambda: _hf(hf, requests, size)))


def _best_rows(kv: Any, requests: list[Any], policy: str, budget: str) -> int:
    return min(ROW_TOKENS, key=lambda rows: _timed(lambda: _kv(kv, requests, policy, budget, "prompt", rows)))


def _hf(hf: Any, requests: list[Any], size: int) -> Any:
    hf.batch_size_per_gpu = size
    return hf.loglikelihood(requests, disable_tqdm=True)


def _kv(kv: Any, requests: list[Any], policy: str, budget: str, protocol: str, rows: int) -> Any:
    kv.policy, kv.settings.protocol, kv.engine.row_tokens = build(policy, budget), protocol, rows
    return kv.loglikelihood(requests, disable_tqdm=True)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
