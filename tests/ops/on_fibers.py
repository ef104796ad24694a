"""Run the tests of an op on its CUDA kernels, on a CPU: ``python tests/ops/on_fibers.py tests/ops/test_norm.py``.

Builds, once for these sources, a library whose ops run kernels/*_cuda.cu on the fibers of csrc/testing/fiber.h, and
puts it in the place of the compiled one; arguments are pytest's. Every tensor then lies between pages that can't be
touched, so a kernel that reads or writes outside its arguments fails by name. ANDREA_FIBER_SEED chooses the order of
blocks, warps and lanes. A new op needs nothing here: its binding says on_gpu, ANDREA_RUN and ANDREA_REGISTER.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from andrea_ablate.ops import library
from andrea_ablate.ops.build import compile_in

LIBRARIES = ("libandrea_ops.so", "libandrea_guard.so", "libandrea_planted.so")


def build() -> Path:
    """The folder of the libraries for tests, built unless these sources are built already."""
    home = library.folder().with_name(library.folder().name + "-fibers")
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = home / "build.json"
        if not record.exists() or json.loads(record.read_text())["torch"] != torch.__version__:
            with tempfile.TemporaryDirectory(prefix="build-", dir=home) as work:
                compile_in(Path(work), "-DANDREA_FIBER=ON")
                for name in LIBRARIES:
                    shutil.move(Path(work) / name, home / name)
            record.write_text(json.dumps({"torch": torch.__version__, "cuda": False}))
    return home


def main(arguments: list[str]) -> int:
    home = build()
    library.folder = lambda: home
    guard = ctypes.CDLL(str(home / "libandrea_guard.so"))
    guard.guard_on()
    torch.set_num_threads(1)
    code = int(pytest.main(["-n", "0", "-p", "no:cacheprovider", *arguments]))
    if guard.guard_overwritten():
        print(f"{guard.guard_overwritten()} bytes beside tensors were overwritten", file=sys.stderr)
        code = code or 1
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the allocator goes before the tensors that Python frees at its end
