"""Which job of a sweep gets which device, worked out from the plan alone: no GPU is needed to know it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from andrea_ablate.registry import ConfigError


class Place(NamedTuple):
    """Where and when one job trains: its devices by number, and the seconds from the start at which it is expected."""

    devices: tuple[int, ...]
    start: float
    end: float


def place(seconds: Sequence[float], wanted: Sequence[int], devices: int) -> list[Place]:
    """Jobs in their order, each to the devices that are free first; of those free at once, the lowest numbers.

    Args:
        seconds: the time that each job is expected to take. wanted: devices that each takes at once.
        devices: how many there are.
    Raises: ConfigError for a job that wants more than there are.
    """
    free = [(0.0, device) for device in range(devices)]
    placed = []
    for duration, number in zip(seconds, wanted, strict=True):
        if number > devices:
            raise ConfigError(f"trainer.devices={number}, but there are {devices}; lower it, or give machine.gpus")
        own = [heapq.heappop(free) for _ in range(number)]
        start = max(since for since, _ in own)
        placed.append(Place(tuple(sorted(device for _, device in own)), start, start + duration))
        for _, device in own:
            heapq.heappush(free, (start + duration, device))
    return placed
