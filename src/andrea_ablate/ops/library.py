"""The compiled library: which file it is, whether it loads, and which path each op takes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from andrea_ablate.registry import ConfigError

IMPLS = ("auto", "compiled", "reference")
BUILD_COMMAND = "python -m andrea_ablate.ops"
OLDEST_TORCH = (2, 10)  # csrc/CMakeLists.txt: TORCH_TARGET_VERSION


class Library(NamedTuple):
    """path: the loaded file, None without one; reason: why there is none; built: what build.json says about it."""

    path: Path | None
    reason: str
    built: dict[str, object]


def sources() -> Path:
    """The folder csrc, beside src in a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parents[1] / "csrc"


def folder() -> Path:
    """Where the library built from these very sources lies, in the user's cache."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources().rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(sources())}\0".encode() + path.read_bytes() + b"\0")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "andrea_ablate" / "ops" / digest.hexdigest()[:16]


_direct: dict[str, Any] = {}  # op -> its autograd function, outside torch.compile
_declared: list[tuple[str, Callable[..., Any], Callable[..., Any] | None, Callable[..., Any] | None]] = []


def declare(
    op: str,
    fake: Callable[..., Any],
    setup: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    kernel: Callable[..., Any] | None = None,
) -> None:
    """State the fake kernel and the gradient of an op, for when the library is loaded.

    Args:
        kernel: what the op runs, where that is Python; None for an op of csrc/bindings/library.cpp.
    """
    _declared.append((f"andrea_ablate::{op}", fake, setup, backward))
    if setup is not None and backward is not None:
        _direct[op] = _function(op, setup, backward, kernel)


def _function(
    op: str, setup: Callable[..., Any], backward: Callable[..., Any], kernel: Callable[..., Any] | None
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = (kernel or getattr(torch.ops.andrea_ablate, op).default)(*arguments)
        setup(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(op, (torch.autograd.Function,), methods)


def call(op: str, *arguments: Any) -> Any:
    """The compiled op with its gradient. A small model feels what torch.library puts around it."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.andrea_ablate, op)(*arguments)
    return _direct[op].apply(*arguments)


@cache
def loaded() -> Library:
    """Load the library once. Never raises: what is missing is said in `reason`."""
    home = folder()
    try:
        built = json.loads((home / "build.json").read_text())
    except (OSError, ValueError):
        return Library(None, f"not built for these sources; run {BUILD_COMMAND}", {})
    version, target = torch.__version__, str(built.get("torch"))
    # The stable ABI holds from OLDEST_TORCH on and within a major version.
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH or version[0] != target[0]:
        return Library(None, f"built for torch {target}, not {version}; run {BUILD_COMMAND}", built)
    try:
        torch.ops.load_library(home / "libandrea_ops.so")  # type: ignore[no-untyped-call]
    except OSError as error:
        return Library(None, f"stale or broken ({error}); run {BUILD_COMMAND}", built)
    for name, fake, setup, backward in _declared:
        torch.library.register_fake(name, fake)
        if backward is not None:
            torch.library.register_autograd(name, backward, setup_context=setup)
    return Library(home / "libandrea_ops.so", "", built)


_chosen: dict[str, str] = {}  # device type -> path; "" -> the choice it follows from
taken: dict[str, str] = {}  # op -> the path it took last, for the run record


def path(impl: str, device: str) -> str:
    """``compiled`` or ``reference``: what the choice `impl` means on a device of type ``cpu`` or ``cuda``.

    Raises: ConfigError for an unknown name, and for ``compiled`` without a library for that device.
    """
    if impl not in IMPLS:
        raise ConfigError(f"ops={impl} is not one of {', '.join(IMPLS)}")
    built = loaded()
    without_cuda = device != "cpu" and not built.built.get("cuda")
    why = built.reason or (f"without CUDA ({built.built['why_no_cuda']}); run {BUILD_COMMAND}" if without_cuda else "")
    if impl == "compiled" and why:
        raise ConfigError(f"ops=compiled, but the library is {why} or choose ops=auto")
    return "reference" if why or impl == "reference" else "compiled"


def choose(impl: str) -> str:
    """From now on the ops of this process follow `impl`, and `taken` starts empty; returns the choice before.

    Raises: ConfigError as `path` for the CPU.
    """
    before = _chosen.get("", "auto")
    taken.clear()
    _chosen.update({"": impl, "cpu": path(impl, "cpu")})
    _chosen["cuda"] = path(impl, "cuda") if loaded().built.get("cuda") else "reference"
    return before


@contextmanager
def using(impl: str) -> Iterator[dict[str, str]]:
    """Within the block the ops follow `impl`; yields `taken`. Raises: ConfigError as `choose`."""
    before = choose(impl)
    try:
        yield taken
    finally:
        choose(before)


def compiled(op: str, x: torch.Tensor) -> bool:
    """Whether `op` on a tensor like `x` takes the compiled path; notes the answer for the record."""
    if not _chosen:
        choose("auto")
    answer = _chosen.get(x.device.type, "reference")
    note(op, answer)
    return answer == "compiled"


def note(op: str, path: str) -> None:
    """For the record: the path that `op` takes."""
    if not torch.compiler.is_compiling():
        taken[op] = path
