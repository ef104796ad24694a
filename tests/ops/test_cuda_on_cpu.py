"""The CUDA kernels on a CPU: each op's own tests run on them, and planted errors show that they would be found.

An op is covered as soon as it has kernels/NAME_cuda.cu and tests/ops/test_NAME.py; see on_fibers.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from andrea_ablate.ops.library import sources
from ops.checks import needs_library
from ops.on_fibers import build

# Where that library can be built, this can; it takes a minute, and fibers are slow.
pytestmark = [needs_library, pytest.mark.slow]
HERE = Path(__file__).resolve().parent
OPS = sorted(path.name.removesuffix("_cuda.cu") for path in (sources() / "kernels").glob("*_cuda.cu"))
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.mark.parametrize("op", OPS)
def test_cuda_kernels_pass_the_tests_of_their_op(op: str) -> None:
    # What torch.library asks of an op says nothing about its kernels, nor does the memory of another process.
    command = [
        sys.executable,
        HERE / "on_fibers.py",
        HERE / f"test_{op}.py",
        "-q",
        "-x",
        "-k",
        "not contracts and not peak_memory",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def guarded(values: np.ndarray) -> np.ndarray:
    """A copy of values that ends where the next page can't be touched."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, (values.nbytes + page - 1) // page * page + page)
    start = len(memory) - page
    fence = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
    assert LIBC.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0, os.strerror(ctypes.get_errno())
    copy = np.frombuffer(memory, values.dtype, values.size, start - values.nbytes).reshape(values.shape)
    copy[...] = values
    return copy


@pytest.fixture(scope="module")
def run_planted() -> Callable[..., tuple[np.ndarray, np.ndarray, str]]:
    library = ctypes.CDLL(str(build() / "libandrea_planted.so"))
    library.planted.restype = ctypes.c_char_p

    def call(name: str, rows: int, n: int, seed: int = 1, skip: int = 0) -> tuple[np.ndarray, np.ndarray, str]:
        x = guarded(np.random.default_rng(seed).standard_normal(rows * n + skip).astype(np.float32))[skip:]
        out = guarded(np.full(rows * n, np.nan, np.float32))
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, out))
        failure = library.planted(name.encode(), *pointers, rows, n, ctypes.c_uint64(seed))
        return x.reshape(rows, n), out, (failure or b"").decode()

    return call


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_missing_barrier_gives_wrong_numbers(run_planted, seed: int) -> None:
    x, out, failure = run_planted("row_sum", 5, 1000, seed)
    assert not failure and np.abs(out[:5] - 1.5 * x.sum(1)).max() < 1e-3
    x, out, failure = run_planted("block_sums", 5, 1000, seed)
    assert not failure and np.abs(out[:5] - x.sum(1)).max() < 1e-3
    for name in ("row_sum without the first barrier", "row_sum without the second barrier"):
        x, out, failure = run_planted(name, 5, 1000, seed)
        assert not failure and np.abs(out[:5] - 1.5 * x.sum(1)).max() > 1e-3, name


def test_an_access_one_beyond_an_array_is_named(run_planted) -> None:
    for n in (1, 31, 32, 1000):
        x, out, failure = run_planted("copy", 1, n)
        assert not failure and (out == x[0]).all()
        for name in ("copy one too many", "read one too many"):
            assert "fiber: access out of bounds" in run_planted(name, 1, n)[2], name
    assert not run_planted("reverse", 1, 1000)[2]
    assert "out of bounds" in run_planted("reverse with too little shared memory", 1, 1000)[2]


def test_a_vector_access_that_is_not_aligned_is_named(run_planted) -> None:
    x, out, failure = run_planted("copy vectors", 1, 64)
    assert not failure and (out == x[0]).all()
    assert "misaligned" in run_planted("copy vectors", 1, 64 + 1, skip=1)[2]


def test_barriers_that_not_all_threads_reach_are_named(run_planted) -> None:
    assert "32 of 64 threads returned while the others wait" in run_planted("leave early", 1, 32)[2]
    assert "__shfl_down_sync waits for lane 0, which has returned" in run_planted("shuffle in a branch", 1, 32)[2]
    assert "a block has 1 to 1024 threads" in run_planted("too many threads", 1, 32)[2]


def test_collectives_of_a_warp(run_planted) -> None:
    x, out, failure = run_planted("exchange", 2, 32)
    t = np.arange(64)
    down = np.where(t % 32 < 31, t + 1, t)
    own, row = x.ravel()[t % 32], x.ravel()[:32]
    expected = own[t ^ 1] + 10 * row[down % 32] + 100 * row[7] + 1000
    assert not failure
    np.testing.assert_allclose(out, expected, rtol=1e-5)
