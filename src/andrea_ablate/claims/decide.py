"""The rules of the ledger: numbers in, a Finding with its verdict out. The statistics are those of `analysis`.

`told` reports a number without a verdict. R-CONV is in facts.py, because it reads the fact table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from andrea_ablate import analysis
from andrea_ablate.analysis import Decision, mean_interval
from andrea_ablate.claims.claim import Finding, Verdict

FEWEST_SEEDS = 8  # for a ratio or a scaling law at the first step
CONTROL = 0.02  # an A/A timing control further from 1 makes a timing inconclusive
FEWEST_REPEATS = 30
_WORDS = {found: Verdict(found.value.upper()) for found in analysis.Verdict}


def told(name: str, value: float | str, unit: str = "") -> Finding:
    """A number that is reported and decides nothing."""
    return Finding(name, value, unit)


def exact(
    name: str,
    value: float,
    *,
    equals: float | None = None,
    digits: int | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    unit: str = "",
) -> Finding:
    """R-EXACT: `value` equals `equals` (rounded to `digits` significant ones where given), or lies in [low, high]."""
    if equals is not None:
        shown = value if digits is None else float(f"{value:.{digits}g}")
        return Finding(
            name, value, unit, verdict=_holds(shown == equals), why=f"claimed {equals:,.12g}".replace(",", " ")
        )
    band = f"above {low:g}" if high == math.inf else f"below {high:g}" if low == -math.inf else f"{low:g} to {high:g}"
    return Finding(name, value, unit, verdict=_holds(low <= value <= high), why=f"claimed {band}")


def within(name: str, error: float, tolerance: float, unit: str = "") -> Finding:
    """R-TOL: an error of at most `tolerance`; one that is not finite fails."""
    return Finding(name, error, unit, verdict=_holds(error <= tolerance), why=f"tolerance {tolerance:g}")


def ratio(
    name: str,
    treatment: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    bound: float,
    above: bool = True,
    unit: str = "x",
) -> Finding:
    """R-RATIO: treatment / baseline by seed lies above (or below) `bound`. The value is the geometric mean.

    A side that is exactly 0 at every seed has no logarithm: it lies below every bound.
    """
    if treatment and len(treatment) >= FEWEST_SEEDS and not any(treatment.values()) and all(baseline.values()):
        found = _holds(not above)
        return Finding(name, 0.0, unit, 0.0, 0.0, len(treatment), found, f"0 at every seed; bound {bound:g}")
    return _decided(name, analysis.ratio(treatment, baseline, bound=bound, above=above), unit, log=True)


def shares(name: str, values: Mapping[int, float], *, bound: float, above: bool = True, unit: str = "") -> Finding:
    """R-RATIO on a quantity that is its own ratio, such as a cosine or R2: its t interval against `bound`."""
    estimate = mean_interval(values.values())
    return _interval(name, estimate.mean, estimate.low, estimate.high, estimate.n, bound, above, unit)


def slope(
    name: str, x: Sequence[float], y: Mapping[int, Sequence[float]], *, low: float, high: float, log: bool = True
) -> Finding:
    """R-INIT: the slope of y over x, fitted seed by seed on log-log axes (or linear ones), lies in [low, high]."""
    axis = np.log if log else np.asarray
    slopes = [float(np.polyfit(axis(np.asarray(x, float)), axis(np.asarray(ys, float)), 1)[0]) for ys in y.values()]
    estimate = mean_interval(slopes)
    range_ = f"the 95 % interval against {low:g} to {high:g}"
    if estimate.mean is None or estimate.low is None or estimate.high is None or estimate.n < FEWEST_SEEDS:
        why = f"{estimate.n} seeds, of which a slope takes {FEWEST_SEEDS}"
        return Finding(name, estimate.mean, "", n=estimate.n, verdict=Verdict.INCONCLUSIVE, why=why)
    if low <= estimate.low and estimate.high <= high:
        verdict = Verdict.SUPPORTED
    elif estimate.high < low or high < estimate.low:
        verdict = Verdict.CONTRADICTED
    else:
        verdict = Verdict.INCONCLUSIVE
    return Finding(name, estimate.mean, "", estimate.low, estimate.high, estimate.n, verdict, range_)


def linear_fit(name: str, x: Sequence[float], y: Mapping[int, Sequence[float]], *, bound: float) -> Finding:
    """R-INIT for a linear law: R2 of a straight line through y over x, by seed, lies above `bound`."""
    r2 = {seed: float(np.corrcoef(np.asarray(x, float), np.asarray(ys, float))[0, 1] ** 2) for seed, ys in y.items()}
    return shares(name, r2, bound=bound)


def superior(
    name: str,
    treatment: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    delta: float = 0.0,
    margin: float,
    larger: bool = False,
    unit: str = "nats",
) -> Finding:
    """R-SUP: treatment is better than baseline by more than `delta`; NO-EFFECT within `margin`."""
    decision = analysis.superiority(treatment, baseline, delta=delta, margin=margin, larger=larger)
    return _decided(name, decision, unit)


def equivalent(
    name: str,
    treatment: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    margin: float,
    worse_only: bool = False,
    unit: str = "nats",
) -> Finding:
    """R-EQ: the difference lies within `margin`; with `worse_only` the treatment is not worse by more than it."""
    return _decided(name, analysis.equivalence(treatment, baseline, margin=margin, worse_only=worse_only), unit)


def steadier(name: str, treatment: Sequence[float], baseline: Sequence[float], *, factor: float = 2.0) -> Finding:
    """R-STAB: the score of instability of the baseline is `factor` times that of the treatment or more."""
    return _decided(name, analysis.stability(treatment, baseline, factor=factor), "x")


def timing(
    name: str,
    treatment: Sequence[float],
    baseline: Sequence[float],
    again: Sequence[float],
    *,
    bound: float = 1.0,
    above: bool = True,
) -> Finding:
    """R-SYS: median time of treatment / baseline lies above (or below) `bound`, by bootstrap.

    Args:
        treatment, baseline: times of interleaved repeats. again: the baseline once more, interleaved with them.
    """
    n = min(len(treatment), len(baseline), len(again))
    value, low, high = _median_ratio(treatment, baseline)
    drift = abs(_median_ratio(again, baseline)[0] - 1)
    if n < FEWEST_REPEATS or drift > CONTROL:
        why = f"{n} repeats; the A/A control is off by {100 * drift:.1f} %, of which {100 * CONTROL:g} % is allowed"
        return Finding(name, value, "x", low, high, n, Verdict.INCONCLUSIVE, why)
    return _interval(name, value, low, high, n, bound, above, "x")


def _median_ratio(a: Sequence[float], b: Sequence[float], draws: int = 10_000) -> tuple[float, float, float]:
    rng = np.random.default_rng(0)
    x, y = np.asarray(a, float), np.asarray(b, float)
    ratios = np.median(rng.choice(x, (draws, len(x))), 1) / np.median(rng.choice(y, (draws, len(y))), 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(x) / np.median(y)), float(low), float(high)


def _interval(
    name: str,
    value: float | None,
    low: float | None,
    high: float | None,
    n: int,
    bound: float,
    above: bool,
    unit: str,
) -> Finding:
    if low is None or high is None or n < FEWEST_SEEDS:
        why = f"{n} seeds, of which a verdict takes {FEWEST_SEEDS}"
        return Finding(name, value, unit, low, high, n, Verdict.INCONCLUSIVE, why, FEWEST_SEEDS)
    side = "above" if low > bound else "below" if high < bound else "on both sides of"
    verdict = Verdict.INCONCLUSIVE if "both" in side else _holds((side == "above") == above)
    return Finding(name, value, unit, low, high, n, verdict, f"the 95 % interval lies {side} {bound:g}")


def _decided(name: str, decision: Decision, unit: str, log: bool = False) -> Finding:
    effect = decision.effect
    value, low, high = (
        None if x is None else math.exp(x) if log else x for x in (effect.mean, effect.low, effect.high)
    )
    return Finding(name, value, unit, low, high, effect.n, _WORDS[decision.verdict], decision.why, decision.seeds)


def _holds(it: bool) -> Verdict:
    return Verdict.SUPPORTED if it else Verdict.CONTRADICTED
