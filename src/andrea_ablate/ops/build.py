"""Build the compiled library from csrc: CMake and ninja, one shared file for CPU and, where it can be used, CUDA."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from andrea_ablate.ops.library import folder, sources
from andrea_ablate.registry import ConfigError


def build(force: bool = False, cuda: bool = False) -> dict[str, Any]:
    """Build unless these sources are built already; return what build.json holds.

    Args:
        force: build in any case. cuda: build the CUDA half also for a torch without CUDA, which cannot use it.
    Raises: ConfigError when a tool is missing or the build fails; nothing half-built is left.
    """
    home, nvcc = folder(), find_nvcc()
    why_not = None
    if not (cuda or torch.version.cuda):
        why_not = f"torch {torch.__version__} has no CUDA"
    elif nvcc is None:
        why_not = "nvcc not found on PATH, in CUDA_HOME or among the installed packages"
    if cuda and why_not:
        raise ConfigError(f"{why_not}; install the CUDA toolkit, or leave --cuda out")
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = home / "build.json"
        if not force and record.exists():
            found: dict[str, Any] = json.loads(record.read_text())
            if found["torch"] == torch.__version__ and (found["cuda"] or why_not):
                return found
        with tempfile.TemporaryDirectory(prefix="build-", dir=home) as work:
            started = time.perf_counter()
            log = compile_in(Path(work), *(_cuda_options(nvcc) if nvcc and not why_not else []))
            built = {
                "torch": torch.__version__,
                "cuda": why_not is None,
                "why_no_cuda": why_not,
                "seconds": round(time.perf_counter() - started, 1),
                "kernels": _registers(log),
            }
            os.replace(Path(work) / "libandrea_ops.so", home / "libandrea_ops.so")
        partial = record.with_suffix(".part")
        partial.write_text(json.dumps(built, indent=1))
        os.replace(partial, record)
    return built


def find_nvcc() -> Path | None:
    """nvcc from CUDA_HOME, PATH, or pip.

    From pip it takes nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-cccl and nvidia-cuda-runtime, all
    of one release (13.0.*): pip alone mixes them.
    """
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    packaged = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvcc"))
    for candidate in (Path(home) / "bin" / "nvcc" if home else None, on_path and Path(on_path), *packaged):
        if candidate and candidate.exists():
            return candidate
    return None


def _cuda_options(nvcc: Path) -> list[str]:
    # The pip packages keep the static runtime in lib, where their own nvcc does not look.
    lib = nvcc.resolve().parents[1] / "lib"
    found = [f"-DCMAKE_CUDA_FLAGS=-L{lib}"] if (lib / "libcudart_static.a").exists() else []
    return [f"-DCMAKE_CUDA_COMPILER={nvcc}", *found]


def _tool(name: str) -> str:
    """A build tool beside the running Python (its pip package), else on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise ConfigError(f"{name} is not installed; pip install {name}")
    return found


def compile_in(work: Path, *options: str) -> str:
    """Configure and build csrc in the folder `work` with these options of CMake; return what the tools printed."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        raise ConfigError("no C++ compiler (c++, g++ or CXX) is installed; install g++, or go on with ops=reference")
    root = Path(torch.__file__).parent
    configure = [
        *(_tool("cmake"), "-S", str(sources()), "-B", str(work), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        "-DCMAKE_BUILD_TYPE=None",
        f"-DTORCH_INCLUDE={root / 'include'}",
        f"-DTORCH_LIB={root / 'lib'}",
        *options,
    ]
    log = ""
    for command in (configure, [_tool("ninja"), "-v", "-C", str(work)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log += done.stdout
        if done.returncode:
            kept = folder() / "build.log"
            kept.write_text(log)
            tail = " | ".join(line for line in log.splitlines() if "error" in line.lower())[:400]
            raise ConfigError(f"building the ops failed: {tail or 'see the log'}; the whole log is {kept}")
    return log


def _registers(log: str) -> dict[str, dict[str, int]]:
    """Registers and spilled bytes of each CUDA kernel and architecture, from what ptxas printed."""
    kernels: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name = f"{match[2]} {match[1]}"
            kernels[name] = {"registers": 0, "spilled_bytes": 0}
        elif match := re.search(r"(\d+) bytes spill stores", line):
            kernels[name]["spilled_bytes"] = int(match[1])
        elif match := re.search(r"Used (\d+) registers", line):
            kernels[name]["registers"] = int(match[1])
    return kernels
