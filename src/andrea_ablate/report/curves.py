"""Loss curves for drawing: the seeds of an arm put together, and fewer points without losing an extreme."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKETS = 300  # an arm's curve is drawn with at most six points in each


@dataclass(frozen=True)
class Curve:
    """An arm over its steps: mean, lowest and highest of the seeds that have a finite value there, else NaN."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, indices: np.ndarray) -> Curve:
        return Curve(self.steps[indices], self.mean[indices], self.low[indices], self.high[indices])


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of every row that has the metric `key`, values that are not finite included."""
    return [(row["step"], row[key]) for row in rows if key in row and "step" in row]


def over_seeds(runs: Sequence[Sequence[tuple[int, float]]]) -> Curve:
    """The curve of an arm.

    Args:
        runs: (step, value) pairs of each seed; a seed that broke off counts up to its last step.
    """
    steps = np.array(sorted({step for run in runs for step, _ in run}), dtype=np.int64)
    values_RS = np.full((len(runs), len(steps)), np.nan)
    for row, run in zip(values_RS, runs, strict=True):
        if run:
            own, losses = zip(*run, strict=True)
            row[np.searchsorted(steps, own)] = losses
    finite_RS = np.isfinite(values_RS)
    count = finite_RS.sum(0)
    total = np.where(finite_RS, values_RS, 0.0).sum(0)
    some = count > 0
    mean = np.divide(total, count, out=np.full(len(steps), np.nan), where=some)
    low = np.where(some, np.where(finite_RS, values_RS, np.inf).min(0, initial=np.inf), np.nan)
    high = np.where(some, np.where(finite_RS, values_RS, -np.inf).max(0, initial=-np.inf), np.nan)
    return Curve(steps, mean, low, high)


def thin(curve: Curve, buckets: int = BUCKETS) -> Curve:
    """Keep of every bucket of steps the lowest and highest point of mean, low and high, and a gap where there is one.

    A curve of at most ``2 * buckets`` steps stays as it is.
    """
    n = len(curve.steps)
    if n <= 2 * buckets:
        return curve
    kept = {0, n - 1}
    for start, stop in itertools.pairwise(np.linspace(0, n, buckets + 1).astype(int)):
        for values in (curve.mean[start:stop], curve.low[start:stop], curve.high[start:stop]):
            finite = np.flatnonzero(np.isfinite(values))
            if len(finite) < len(values):
                kept.add(int(start + np.flatnonzero(~np.isfinite(values))[0]))
            if len(finite):
                ordered = values[finite]
                kept |= {int(start + finite[ordered.argmin()]), int(start + finite[ordered.argmax()])}
    return curve.at(np.array(sorted(kept)))


def not_finite(run: Sequence[tuple[int, float]]) -> list[tuple[int, int]]:
    """(first, last) step of every stretch of values that are not finite."""
    stretches: list[tuple[int, int]] = []
    before = True
    for step, value in run:
        finite = bool(np.isfinite(value))
        if not finite:
            stretches = [*stretches, (step, step)] if before else [*stretches[:-1], (stretches[-1][0], step)]
        before = finite
    return stretches
