"""Means, paired effects and their uncertainty over a handful of seeds."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EXACT_SIGN_FLIPS = 16  # up to this many pairs all 2^n sign patterns are counted
SIGN_FLIP_DRAWS = 100_000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its t interval; what n values cannot give is None."""

    mean: float | None  # None for n = 0
    sd: float | None  # n - 1 in the denominator; None for n < 2, as are low and high
    low: float | None
    high: float | None
    n: int

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval, None for n < 2."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class Effect(Estimate):
    """A paired difference, treatment minus baseline, in the unit of the metric."""

    p: float | None  # two-sided paired t test; None for n < 2
    p_sign: float | None  # two-sided sign-flip permutation test; None for n < 2; never below 2 / 2^n

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval and zero lies outside it."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean_interval(values: Iterable[float], confidence: float = 0.95) -> Estimate:
    """Mean with its exact t interval: ``mean ± t(1 - (1 - confidence) / 2, n - 1) * sd / sqrt(n)``.

    Args:
        values: one per seed; those that are not finite are left out, and `n` counts the others.
        confidence: coverage of the interval, in (0, 1).
    """
    return _estimate([float(value) for value in values if math.isfinite(value)], confidence, resolution=0.0)


def paired_effect(treatment: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95) -> Effect:
    """Mean over seeds of ``d = treatment[seed] - baseline[seed]``, with t interval, paired t and sign-flip tests.

    Differences that agree to rounding have sd 0: the interval is then [mean, mean] and p is the limit of the t test,
    1 for a mean of 0 and 0 otherwise. Such a p says that the seed had no effect, not that the evidence is endless;
    p_sign stays at 2 / 2^n.

    Args:
        treatment, baseline: metric by seed; only seeds that are present and finite in both are used.
        confidence: coverage of the interval, in (0, 1).
    """
    seeds = sorted(s for s in treatment.keys() & baseline.keys() if math.isfinite(treatment[s] - baseline[s]))
    differences = [float(treatment[s]) - float(baseline[s]) for s in seeds]
    # One rounding in the inputs, one in the subtraction: a spread below this is not in the data.
    largest = max((abs(metric[s]) for s in seeds for metric in (treatment, baseline)), default=0.0)
    resolution = 4 * sys.float_info.epsilon * largest
    estimate = _estimate(differences, confidence, resolution)
    mean, sd, n = estimate.mean, estimate.sd, estimate.n
    if mean is None or sd is None:
        p = p_sign = None
    else:
        p = _t_test(mean, sd, n, resolution)
        p_sign = _sign_flip(np.asarray(differences), resolution)
    return Effect(mean, sd, estimate.low, estimate.high, n, p, p_sign)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment: ``max over j <= i of min(1, (m - j) p_(j))``, j from 0, over the m values given.

    Args:
        p_values: one per comparison; None (no test possible) stays None and does not count in m.
    Source: Holm 1979, Scandinavian Journal of Statistics 6.
    """
    adjusted: list[float | None] = [None] * len(p_values)
    ordered = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    running = 0.0
    for j, (p, i) in enumerate(ordered):
        running = max(running, min(1.0, (len(ordered) - j) * p))
        adjusted[i] = running
    return adjusted


def seeds_needed(sd: float, half_width: float, confidence: float = 0.95) -> int:
    """Smallest n >= 2 with ``t(1 - (1 - confidence) / 2, n - 1) * sd / sqrt(n) <= half_width``.

    Args:
        sd: standard deviation of the paired difference, same unit as `half_width`, finite and >= 0.
        half_width: wanted half-width of the interval, > 0.
    Raises: ValueError for any other sd or half_width.
    """
    if not (math.isfinite(sd) and sd >= 0 and half_width > 0):
        raise ValueError(f"seeds_needed: sd={sd} must be finite and >= 0 and half_width={half_width} must be > 0")

    def enough(n: int) -> bool:
        return _t_quantile(n - 1, confidence) * sd / math.sqrt(n) <= half_width

    high = 2
    while not enough(high):
        high *= 2
    low = high // 2  # too few, or 1 when two seeds do: both t and 1 / sqrt(n) fall with n, so bisection is safe
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _estimate(values: Sequence[float], confidence: float, resolution: float) -> Estimate:
    n = len(values)
    mean = statistics.mean(values) if n else None  # summed exactly: the order of seeds cannot change a digit
    if mean is None or n < 2:
        return Estimate(mean, None, None, None, n)
    sd = statistics.stdev(values)
    sd = 0.0 if sd <= resolution else sd
    half = _t_quantile(n - 1, confidence) * sd / math.sqrt(n)
    return Estimate(mean, sd, mean - half, mean + half, n)


# scipy.special has the t distribution and loads in a third of the time of scipy.stats; still only when needed.
def _t_quantile(df: int, confidence: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + confidence) / 2))


def _t_test(mean: float, sd: float, n: int, resolution: float) -> float:
    from scipy.special import stdtr

    if sd == 0:
        return 1.0 if abs(mean) <= resolution else 0.0
    return float(2 * stdtr(n - 1, -abs(mean) / (sd / math.sqrt(n))))


def _sign_flip(differences: np.ndarray, resolution: float) -> float:
    """Share of sign patterns whose sum is at least as far from zero as the one seen (that one counts)."""
    n = len(differences)
    reach = abs(differences.sum()) - n * resolution  # patterns that tie in exact arithmetic must tie here
    if n <= EXACT_SIGN_FLIPS:
        signs = 1.0 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        return float(np.mean(np.abs(signs @ differences) >= reach))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(SIGN_FLIP_DRAWS, n))
    hits = int(np.sum(np.abs(signs @ differences) >= reach))
    return (hits + 1) / (SIGN_FLIP_DRAWS + 1)
