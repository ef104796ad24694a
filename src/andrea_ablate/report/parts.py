"""What a report is made of: figures and tables as plain values, which the page, Markdown, images and trackers show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from andrea_ablate.analysis.spikes import Spike

LOSS = "nats per token"


@dataclass(frozen=True)
class StoredRun:
    """What the store has of one run; empty where it has nothing."""

    record: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # metric -> (step, value)
    capsules: Sequence[Mapping[str, Any]] = ()  # of `replay`, by step

    @property
    def spikes(self) -> list[Spike]:
        return [Spike(**spike) for spike in self.record.get("spikes", ())]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        kind: ``xy``, ``forest`` or ``heat``: how draw.js draws a view.
        views: what draw.js takes, one or several to choose from; each has a ``name``.
        arms: those that it is made from; runs: ids of the runs, where they are not all of these arms'.
    """

    id: str
    title: str
    caption: str
    kind: str
    views: Sequence[Mapping[str, Any]]
    arms: tuple[str, ...]
    runs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Table:
    """One table; `code` are the columns that hold ids and commands. `note` stands below its title."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    code: tuple[int, ...] = ()
    note: str = ""


def number(value: float | None) -> float | None:
    """Six digits, as many as a figure can show; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def numbers(values: Iterable[float | None]) -> list[float | None]:
    return [number(value) for value in values]
