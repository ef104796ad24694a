"""``bench ops``: each fused operation, forward and backward, against every other way to compute the same.

eager is the formula in torch's operations, torch its own fused function, compile eager through torch.compile, liger
liger-kernel's where it is installed. They take turns within a round, so that a machine whose speed drifts slows all
alike; medians are reported, and ratios are rival / ours: above 1 ours is faster. Losing shapes stay in the table, and
what a rival cannot do here is in it as the reason.
"""

# Shapes: N rows, D width
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andrea_ablate import machine, ops
from andrea_ablate.bench.cases import CASES, Case
from andrea_ablate.registry import ConfigError

Outputs = Tensor | tuple[Tensor, ...]


class Times(NamedTuple):
    """Seconds of one call."""

    forward: float
    backward: float


def bench_ops(
    names: Iterable[str],
    device: str,
    dtypes: Iterable[str],
    widths: Iterable[int],
    rows: int,
    rounds: int,
    *,
    without: Iterable[str] = (),
) -> dict[str, Any]:
    """Median seconds and peak memory of every op and rival but those in `without` at every width and dtype.

    Raises: ConfigError for an unknown op, and where the compiled library or the device is missing.
    """
    machine.settle()
    chosen = list(names) or list(CASES)
    for name in chosen:
        if name not in CASES:
            raise ConfigError(f"bench ops: '{name}' is not one of {', '.join(CASES)}")
    ops.path("compiled", device)
    table = [
        {"op": name, "dtype": dtype, "rows": rows, "width": width, **_case(case, device, rounds, set(without))}
        for name in chosen
        for dtype in dtypes
        for width in widths
        if (case := CASES[name](rows, width, getattr(torch, dtype), device)) is not None
    ]
    return {"device": machine.describe(device), "versions": machine.versions(), "table": table}


def _case(case: Case, device: str, rounds: int, without: set[str]) -> dict[str, Any]:
    torch.compiler.reset()  # it gives up on a function that it has compiled for eight shapes
    rivals = {"ours": case.ours, "eager": case.eager, **case.rivals}
    rivals["compile"] = torch.compile(case.eager, dynamic=False)
    rivals = {name: rival for name, rival in rivals.items() if name not in without}
    times: dict[str, list[Times]] = {name: [] for name in rivals}
    memory, failed = {}, {}
    with ops.using("compiled"):
        for name, rival in rivals.items():
            try:
                for _ in range(3):
                    _call(rival, case, device)
                memory[name] = _peak(rival, case, device)
            except Exception as error:  # what this machine or release lacks; ours has no excuse
                if name == "ours":
                    raise
                failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
        names = list(memory)
        for turn in range(rounds):
            first = turn % len(names)  # what ran before leaves the caches as it likes
            for name in names[first:] + names[:first]:
                times[name].append(_call(rivals[name], case, device))
    median = {
        name: {
            "forward": statistics.median(t.forward for t in times[name]),
            "backward": statistics.median(t.backward for t in times[name]),
            "both": statistics.median(t.forward + t.backward for t in times[name]),
        }
        for name in memory
    }
    ours = median["ours"]
    return {
        "seconds": median,
        "peak_extra_mib": memory,
        "ratio": {n: {part: m[part] / ours[part] for part in m} for n, m in median.items() if n != "ours"},
        **({"failed": failed} if failed else {}),
    }


def _call(rival: Callable[..., Outputs], case: Case, device: str) -> Times:
    start = _now(device)
    out = rival(*case.inputs)
    middle = _now(device)
    outputs = (out,) if isinstance(out, Tensor) else out
    torch.autograd.grad(outputs, case.wanted, case.grads[: len(outputs)])
    return Times(middle - start, _now(device) - middle)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak(rival: Callable[..., Outputs], case: Case, device: str) -> float | None:
    """MiB at the peak of one call above what was in use before it."""
    machine.reset_peak_memory(device)
    before = machine.peak_memory_gib(device)
    _call(rival, case, device)
    after = machine.peak_memory_gib(device)
    return None if before is None or after is None else round((after - before) * 1024, 1)
