"""What this process runs on: versions, peak memory, allocator. Everything here ends up in the run record."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# To be told whether there is a GPU must not start its driver: from then on CUDA_VISIBLE_DEVICES would change nothing.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: writing 5 here sets VmHWM back to the memory in use


def versions() -> dict[str, str]:
    """Versions that can change a number."""
    packages = ("andrea-ablate", "torch", "lightning", "numpy", "hydra-core")
    found = {name: metadata.version(name) for name in packages if _installed(name)}
    return {"python": platform.python_version(), **found}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def device_type(accelerator: str) -> str:
    """``cpu`` or ``cuda`` for ``trainer.accelerator``; raises nothing for auto, see `training.run` for the refusals."""
    if accelerator != "auto":
        return accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; asks no driver to start."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def describe(device: str) -> dict[str, Any]:
    """Device, threads and host of this process."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    visible = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")} if device == "cuda" else {}
    return {"type": device, "name": name, "threads": torch.get_num_threads(), "cores": os.cpu_count(), **visible}


@cache
def settle() -> None:
    """Once per process, before the first run: two settings that make every step and every start of a run cheaper."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        # glibc keeps freed blocks instead of returning them: a step frees and takes the same big tensors every time.
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 1 << 30)
    # What the imports made lives as long as the process; the collector need not walk it again and again.
    gc.collect()
    gc.freeze()


def reset_peak_memory(device: str) -> None:
    """Start a new peak-memory measurement, so that a run does not report the peak of the run before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif os.access(_CLEAR_REFS, os.W_OK):
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        _CLEAR_REFS.write_text("5")


def peak_memory_gib(device: str) -> float | None:
    """Peak since `reset_peak_memory`: allocated GPU memory, or resident memory of the process; None where unknown."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    if os.access(_CLEAR_REFS, os.W_OK):  # without a reset, the peak would be that of the whole process
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**20
    return None
