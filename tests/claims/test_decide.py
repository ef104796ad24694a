"""Every rule, by planted data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from andrea_ablate.claims.claim import Finding, Verdict
from andrea_ablate.claims.decide import (
    equivalent,
    exact,
    linear_fit,
    ratio,
    shares,
    slope,
    steadier,
    superior,
    timing,
    told,
    within,
)

V = Verdict


def noisy(mean: float, sd: float, n: int = 8, seed: int = 0) -> dict[int, float]:
    return {i: float(x) for i, x in enumerate(np.random.default_rng(seed).normal(mean, sd, n))}


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"equals": 84_934_656}, V.SUPPORTED),
        ({"equals": 85e6, "digits": 2}, V.SUPPORTED),
        ({"equals": 84e6, "digits": 2}, V.CONTRADICTED),
        ({"low": 80e6, "high": 90e6}, V.SUPPORTED),
        ({"low": 90e6}, V.CONTRADICTED),
        ({"high": 80e6}, V.CONTRADICTED),
    ],
)
def test_exact(given: dict[str, float], verdict: Verdict) -> None:
    assert exact("trunk", 84_934_656, **given).verdict is verdict  # type: ignore[arg-type]


def test_exact_is_not_passed_by_a_number_that_is_none() -> None:
    assert exact("x", math.nan, low=0).verdict is V.CONTRADICTED
    assert exact("x", math.nan, equals=0).verdict is V.CONTRADICTED


def test_within() -> None:
    assert within("error", 1e-11, 1e-10).verdict is V.SUPPORTED
    assert within("error", 1e-9, 1e-10).verdict is V.CONTRADICTED
    assert within("error", math.nan, 1e-10).verdict is V.CONTRADICTED


@pytest.mark.parametrize(
    ("factor", "above", "verdict"),
    [(2.0, True, V.SUPPORTED), (2.0, False, V.CONTRADICTED), (0.5, False, V.SUPPORTED), (1.001, True, V.INCONCLUSIVE)],
)
def test_ratio(factor: float, above: bool, verdict: Verdict) -> None:
    base = noisy(10, 1)
    top = {
        seed: value * factor * math.exp(e)
        for (seed, value), e in zip(base.items(), noisy(0, 0.05).values(), strict=True)
    }
    found = ratio("r", top, base, bound=1, above=above)
    assert found.verdict is verdict
    assert isinstance(found.value, float) and found.low is not None and found.high is not None
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(factor, rel=0.1)


def test_ratio_takes_eight_seeds() -> None:
    base = noisy(10, 0.1, 7)
    assert ratio("r", {s: 3 * v for s, v in base.items()}, base, bound=1).verdict is V.INCONCLUSIVE


def test_ratio_of_nothing_to_something() -> None:
    base, zero = noisy(10, 0.1), dict.fromkeys(range(8), 0.0)
    assert ratio("r", zero, base, bound=0.01, above=False).verdict is V.SUPPORTED
    assert ratio("r", zero, base, bound=0.01).verdict is V.CONTRADICTED
    assert ratio("r", {**zero, 3: 1.0}, base, bound=0.01).verdict is V.INCONCLUSIVE


def test_shares() -> None:
    assert shares("cosine", noisy(0.99, 0.001), bound=0.95).verdict is V.SUPPORTED
    assert shares("cosine", noisy(0.4, 0.01), bound=0.95).verdict is V.CONTRADICTED
    assert shares("cosine", noisy(0.95, 0.01), bound=0.95).verdict is V.INCONCLUSIVE
    assert shares("cosine", noisy(0.99, 0.001, 3), bound=0.95).verdict is V.INCONCLUSIVE


@pytest.mark.parametrize(("power", "verdict"), [(0.5, V.SUPPORTED), (1.0, V.CONTRADICTED), (0.3, V.INCONCLUSIVE)])
def test_slope(power: float, verdict: Verdict) -> None:
    x = [6, 12, 24, 48]
    rng = np.random.default_rng(1)
    y = {seed: [v**power * math.exp(e) for v, e in zip(x, rng.normal(0, 0.05, 4), strict=True)] for seed in range(8)}
    found = slope("s", x, y, low=0.3, high=0.7)
    assert found.verdict is verdict
    assert found.value == pytest.approx(power, abs=0.05)


def test_linear_fit_tells_a_line_from_a_parabola() -> None:
    x = list(range(13))
    assert (
        linear_fit("r2", x, {s: [1 + 0.7 * v + 0.01 * s for v in x] for s in range(8)}, bound=0.98).verdict
        is V.SUPPORTED
    )
    assert linear_fit("r2", x, {s: [v**2 + s for v in x] for s in range(8)}, bound=0.98).verdict is V.CONTRADICTED


def test_superior_and_equivalent() -> None:
    base = noisy(2.0, 0.005)
    better = {s: v - 0.04 for s, v in base.items()}
    same = {s: v + e for (s, v), e in zip(base.items(), noisy(0, 0.002, seed=3).values(), strict=True)}
    assert (
        superior(
            "loss",
            {s: v + e for (s, v), e in zip(better.items(), noisy(0, 0.002).values(), strict=True)},
            base,
            delta=0.01,
            margin=0.01,
        ).verdict
        is V.SUPPORTED
    )
    assert superior("loss", base, better, delta=0.01, margin=0.01).verdict is V.CONTRADICTED
    assert superior("loss", same, base, delta=0.01, margin=0.01).verdict is V.NO_EFFECT
    wide = {s: v + e for (s, v), e in zip(base.items(), noisy(0, 0.1).values(), strict=True)}
    found = superior("loss", wide, base, margin=0.01)
    assert found.verdict is V.INCONCLUSIVE  # not significant is not no effect
    assert equivalent("loss", same, base, margin=0.01).verdict is V.SUPPORTED
    assert equivalent("loss", wide, base, margin=0.01).verdict is V.INCONCLUSIVE
    assert equivalent("loss", better, base, margin=0.01).verdict is V.CONTRADICTED
    assert equivalent("loss", better, base, margin=0.01, worse_only=True).verdict is V.SUPPORTED


def test_steadier() -> None:
    rng = np.random.default_rng(0)
    calm, wild = rng.uniform(0.9, 1.1, 12), rng.uniform(4, 5, 12)
    assert steadier("spikes", list(calm), list(wild)).verdict is V.SUPPORTED
    assert steadier("spikes", list(wild), list(calm)).verdict is V.CONTRADICTED
    assert steadier("spikes", list(calm), list(calm)).verdict is V.INCONCLUSIVE


def test_timing_needs_a_quiet_machine() -> None:
    base, again, fast = (list(noisy(mean, 0.01, 40, seed).values()) for mean, seed in ((1, 0), (1, 1), (0.8, 2)))
    assert timing("t", fast, base, again, above=False).verdict is V.SUPPORTED
    assert timing("t", fast, base, again).verdict is V.CONTRADICTED
    assert timing("t", fast, base, [1.1 * t for t in again], above=False).verdict is V.INCONCLUSIVE
    assert timing("t", fast[:20], base, again, above=False).verdict is V.INCONCLUSIVE


def test_a_number_that_is_told_decides_nothing() -> None:
    assert told("x", 3.0, "s") == Finding("x", 3.0, "s")
