"""Describes the machine that seconds were measured on; knows nothing of what is measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def machine(device: str) -> dict[str, Any]:
    """Return the processor, its cores, the threads and memory in use, and on CUDA the device."""
    import torch

    found = {
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {"gpu": about.name, "gpu_memory_bytes": about.total_memory, "cuda": torch.version.cuda}
    return found


def _cpu() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()
