"""Times for R-SYS: interleaved, so that a machine whose speed drifts slows all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

WARM_UP, REPEATS = 10, 40


def interleaved(functions: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each function on the CPU, one call of each in every repeat, without gradients.

    The first one is called once more at the end of a repeat, under the name ``again``: the A/A control.
    """
    calls = [*functions.items(), ("again", next(iter(functions.values())))]
    times: dict[str, list[float]] = {name: [] for name, _ in calls}
    with torch.no_grad():
        for repeat in range(WARM_UP + REPEATS):
            for name, call in calls:
                started = time.perf_counter()
                call()
                if repeat >= WARM_UP:
                    times[name].append(time.perf_counter() - started)
    return times
