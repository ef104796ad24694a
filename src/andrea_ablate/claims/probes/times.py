"""Times of calls that take turns, so that a machine whose speed drifts slows all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

WARM_UP = 10


def taking_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times, after the warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn >= WARM_UP:
                taken[name].append(time.perf_counter() - started)
    return taken
