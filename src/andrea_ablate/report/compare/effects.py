"""What a whole sweep says beyond its pairs: the noise floor, and main effects and interactions of a full factorial."""

from __future__ import annotations

import math
from collections.abc import Mapping

from andrea_ablate.analysis.rules import factorial_effects
from andrea_ablate.analysis.stats import Effect, Estimate, mean_interval
from andrea_ablate.report.compare.rows import CONFIDENCE
from andrea_ablate.report.compare.text import with_interval

FACTORIAL_TITLE = (
    "Main effects, averaged over the other choices, and interactions, half of what one choice changes another's effect "
    "by; nats, paired within seeds:"
)


def noise_floor(losses: Mapping[int, float]) -> Estimate | None:
    """The baseline against itself: the difference of two means over all its seeds, had they been other seeds.

    Its mean is 0, its sd that of two runs that differ in their seed alone, and its interval that of an unpaired
    difference, ``±t(2 n - 2) sd(run) sqrt(2 / n)``. None for fewer than two seeds.
    """
    seen = mean_interval(losses.values(), CONFIDENCE)
    if seen.sd is None:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(2 * seen.n - 2, (1 + CONFIDENCE) / 2)) * seen.sd * math.sqrt(2 / seen.n)
    return Estimate(0.0, seen.sd * math.sqrt(2), -half, half, seen.n)


def noise_sentence(noise: Estimate | None) -> str:
    """What the noise floor means, or an empty string without one."""
    if noise is None or noise.sd is None or noise.high is None:
        return ""
    return (
        f"Noise floor, the baseline against itself: two of its runs are typically {noise.sd:.4f} nats apart (rms) by "
        f"their seeds alone; between arms of {noise.n} seeds that are not paired, differences within "
        f"±{noise.high:.4f} are noise at 95 %."
    )


def factorial(losses: Mapping[str, Mapping[int, float]]) -> dict[str, Effect]:
    """Main effects and interactions over the seeds that all arms finished; empty where the arms are no full factorial.

    Args:
        losses: metric by seed, by arm name, ``norm=pre ffn=swiglu``; the first level of a factor is the one that comes
            first. Factors with more than two levels have no single effect, so there is none then.
    Returns: by sentence, ``norm: post instead of pre`` or ``norm x ffn``.
    """
    arms = {tuple(name.split()): by_seed for name, by_seed in losses.items()}
    keys = {tuple(part.partition("=")[0] for part in parts) for parts in arms}
    if len(keys) != 1 or len(factors := keys.pop()) < 2:
        return {}
    levels = [list(dict.fromkeys(parts[i].partition("=")[2] for parts in arms)) for i in range(len(factors))]
    if any(len(found) != 2 for found in levels) or len(arms) != 2 ** len(factors):
        return {}
    named = {
        factor: f"{factor}: {found[1]} instead of {found[0]}" for factor, found in zip(factors, levels, strict=True)
    }
    return {named.get(name, name): effect for name, effect in factorial_effects(arms, factors).items()}


def factorial_sentences(effects: Mapping[str, Effect]) -> list[str]:
    """One line per effect."""
    return [
        f"{name}: {with_interval(effect)} over {effect.n} seed{'s' * (effect.n != 1)}"
        for name, effect in effects.items()
    ]
