"""Error rates of every decision rule on simulated sweeps whose truth is known.

    python experiments/error_rates.py > experiments/results/error_rates.json

A simulated run is 3 nats, plus what its seed does to every arm (sd 0.02), plus noise of its own (sd 0.005), plus its
arm's effect: pairing must remove the first. SIMULATIONS sweeps per line; the standard error of a rate of 5 % is 0.22
points.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

import numpy as np

from andrea_ablate.analysis import (
    equivalence,
    holm,
    paired_effect,
    ratio,
    sequential_level,
    stability,
    superiority,
)

SIMULATIONS = 10_000
SEEDS = (3, 5, 8)
SHARED, OWN = 0.02, 0.005
MARGIN = 0.01
LOOKS = (3, 5, 8)

Losses = Mapping[int, float]


def sweeps(n: int, effect: float, heavy: bool = False, arms: int = 2) -> list[list[Losses]]:
    """SIMULATIONS sweeps of `arms` arms and n seeds; all arms but the first have the effect."""
    rng = np.random.default_rng([n, arms, heavy])
    shape = (SIMULATIONS, arms, n)
    noise = rng.standard_t(5, shape) / np.sqrt(5 / 3) if heavy else rng.standard_normal(shape)
    losses = 3 + SHARED * rng.standard_normal((SIMULATIONS, 1, n)) + OWN * noise
    losses[:, 1:] += effect
    return [[dict(enumerate(arm)) for arm in sweep] for sweep in losses]


def rate(hits: Callable[[list[Losses]], bool], found: list[list[Losses]]) -> float:
    return float(np.mean([hits(sweep) for sweep in found]))


def decided(sweep: list[Losses]) -> bool:
    base, arm = sweep
    return superiority(arm, base, margin=MARGIN).verdict in ("supported", "contradicted")


def measure(n: int) -> dict[str, float]:
    """Rates at n seeds, each named after what it counts and, where there is one, its nominal value."""
    null, margin = sweeps(n, 0.0), sweeps(n, MARGIN)
    lines = {
        "interval covers the effect (nominal 0.95)": rate(
            lambda s: (e := paired_effect(s[1], s[0])).low <= MARGIN <= e.high, margin
        ),
        "interval covers the effect, noise with tails of t(5) (nominal 0.95)": rate(
            lambda s: (e := paired_effect(s[1], s[0])).low <= MARGIN <= e.high, sweeps(n, MARGIN, heavy=True)
        ),
        "t test below 0.05 without effect (nominal 0.05)": rate(lambda s: paired_effect(s[1], s[0]).p < 0.05, null),
        "sign flips below 0.05 without effect (at most 0.05)": rate(
            lambda s: paired_effect(s[1], s[0]).p_sign < 0.05, null
        ),
        "Holm over 3 arms below 0.05 without effect (at most 0.05)": rate(
            lambda s: min(holm([paired_effect(arm, s[0]).p for arm in s[1:]])) < 0.05, sweeps(n, 0.0, arms=4)
        ),
        "superiority decided without effect (nominal 0.05 from 5 seeds on)": rate(decided, null),
        f"superiority decided, effect {MARGIN}": rate(decided, margin),
        "no-effect said at an effect of the margin (at most 0.05)": rate(
            lambda s: superiority(s[1], s[0], margin=MARGIN).verdict == "no-effect", margin
        ),
        "equivalence supported at an effect of the margin (nominal 0.05)": rate(
            lambda s: equivalence(s[1], s[0], margin=MARGIN).verdict == "supported", margin
        ),
        "equivalence supported without effect": rate(
            lambda s: equivalence(s[1], s[0], margin=MARGIN).verdict == "supported", null
        ),
        "non-inferiority supported at an effect of the margin (nominal 0.05)": rate(
            lambda s: equivalence(s[1], s[0], margin=MARGIN, worse_only=True).verdict == "supported", margin
        ),
    }
    if n >= 8:
        rng = np.random.default_rng(0)
        logs = np.log(2) + 0.1 * rng.standard_normal((SIMULATIONS, n))
        lines["ratio decided at a ratio of the bound (nominal 0.05)"] = float(
            np.mean(
                [
                    ratio(dict(enumerate(np.exp(row))), dict.fromkeys(range(n), 1.0), bound=2.0).verdict
                    != "inconclusive"
                    for row in logs
                ]
            )
        )
    rng = np.random.default_rng(1)
    for name, mean in (("at the factor", 4.0), ("without difference", 2.0)):
        wild, calm = rng.poisson(mean, (2000, n)), rng.poisson(2.0, (2000, n))
        lines[f"stability supported {name}, 2,000 panels of spike counts (nominal 0.025)"] = float(
            np.mean([stability(c, w, draws=2000).verdict == "supported" for c, w in zip(calm, wild, strict=True)])
        )
    return lines


def looks() -> dict[str, object]:
    level = sequential_level(LOOKS)

    def stopped(sweep: list[Losses]) -> bool:
        base, arm = sweep
        return any(
            paired_effect({s: arm[s] for s in range(n)}, {s: base[s] for s in range(n)}).p < level for n in LOOKS
        )

    return {
        "looks": LOOKS,
        "level of each": level,
        "stopped without effect (nominal 0.05)": rate(stopped, sweeps(LOOKS[-1], 0.0)),
        f"stopped, effect {MARGIN}": rate(stopped, sweeps(LOOKS[-1], MARGIN)),
    }


def main() -> None:
    report = {
        "simulations": SIMULATIONS,
        "sd": {"of the seed, shared by the arms": SHARED, "of a run": OWN},
        "seeds": {n: measure(n) for n in SEEDS},
        "sequential": looks(),
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
