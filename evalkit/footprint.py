"""What memory a stretch of work takes: the process's, sampled by a thread, and a CUDA device's; knows nothing of the work."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

import psutil
import torch

from .counters import peak_memory

EVERY = 0.02  # seconds between samples


class Footprint:
    """Memory while a `with` block runs. The peaks are the block's own where the system lets them be set back, else sampled ones."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.resident, self.on_gpu = device, list[int](), list[int]()
        self.process, self.gpu, self.ended = psutil.Process(), _gpu(device), Event()
        self.thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Footprint:
        release()
        self.exact = _forget_peaks(self.device)
        self.start = self.process.memory_info().rss
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ended.set()
        self.thread.join()
        self._look()
        self.peaks = peak_memory(self.device)

    def as_dict(self) -> dict[str, int]:
        """Return bytes: the process's at the start, its mean and peak, and on CUDA those of the device."""
        found = {"host_start_bytes": self.start, "host_mean_bytes": _mean(self.resident), **self.peaks}
        if not self.exact:
            found["host_peak_bytes"] = max(self.resident)
        if self.on_gpu:
            found |= {"nvml_mean_bytes": _mean(self.on_gpu), "nvml_peak_bytes": max(self.on_gpu)}
        return found

    def _sample(self) -> None:
        while not self.ended.wait(EVERY):
            self._look()

    def _look(self) -> None:
        self.resident.append(self.process.memory_info().rss)
        if self.gpu is not None:
            nvml, handle = self.gpu
            self.on_gpu.append(int(nvml.nvmlDeviceGetMemoryInfo(handle).used))


def release() -> None:
    """Give back to the system what is free, so that no stretch of work is counted what an earlier one left."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _forget_peaks(device: torch.device) -> bool:
    """Set the peaks back to what is in use now; whether the process's could be."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _gpu(device: torch.device) -> tuple[Any, Any] | None:
    """NVML and its handle of the device, where pynvml is installed and knows it."""
    if device.type != "cuda":
        return None
    try:
        pynvml = import_module("pynvml")
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # whatever NVML raises: what cannot be counted is left out
        return None


def _mean(samples: list[int]) -> int:
    return round(sum(samples) / len(samples))
