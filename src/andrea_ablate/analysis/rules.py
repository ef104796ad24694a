"""Decision rules: paired values in, a verdict with its interval and the seeds that would settle it out.

A rule is stated before the run. All effects are treatment minus baseline, in the unit of the metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import combinations

import numpy as np

from andrea_ablate.analysis.stats import Effect, paired_effect

FEWEST_SEEDS = 5  # for a claim of superiority; three do for an effect above STRONG standard deviations
STRONG = 5.0
FEWEST_RATIOS = 8
FEWEST_SCORES = 5  # for the bootstrap, which covers too little over three runs
POWER = 0.8
MOST_SEEDS = 1000  # beyond this, "more seeds" is no advice


class Verdict(StrEnum):
    """What a rule says. INCONCLUSIVE never means that there is no effect: that is NO_EFFECT."""

    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    NO_EFFECT = "no-effect"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Decision:
    """A verdict and what it rests on."""

    verdict: Verdict
    effect: Effect  # with the 95 % interval
    why: str  # one clause: which interval lies where
    seeds: int | None = None  # in all, that would settle an inconclusive one with 80 % power; None where unknown


def superiority(
    treatment: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    delta: float = 0.0,
    margin: float,
    larger: bool = False,
) -> Decision:
    """Is the treatment better by more than `delta`?

    supported: the 95 % interval of the paired difference lies beyond delta on the better side · contradicted: it lies
    beyond 0 on the worse side · no-effect: the 90 % interval lies within the margin (two one-sided tests at 5 %).

    Args:
        treatment, baseline: metric by seed.
        delta: smallest improvement that counts, >= 0. margin: differences inside it do not matter, > 0.
        larger: whether larger values are better; losses are not.
    Raises: ValueError for a negative delta or a margin that is not positive.
    """
    if not (delta >= 0 and margin > 0):
        raise ValueError(f"superiority: delta={delta} must be >= 0 and margin={margin} must be > 0")
    effect = paired_effect(treatment, baseline)
    if effect.mean is None or effect.low is None or effect.high is None or effect.sd is None:
        return Decision(Verdict.INCONCLUSIVE, effect, _too_few(effect))
    sign = 1.0 if larger else -1.0
    worst, best = sorted((sign * effect.low, sign * effect.high))
    if not enough_seeds(effect):
        return Decision(
            Verdict.INCONCLUSIVE, effect, f"{effect.n} seeds, of which a verdict takes {FEWEST_SEEDS}", FEWEST_SEEDS
        )
    if worst > delta:
        return Decision(Verdict.SUPPORTED, effect, f"the 95 % interval lies beyond {delta:g}")
    if best < 0:
        return Decision(Verdict.CONTRADICTED, effect, "the 95 % interval lies on the other side of 0")
    narrow = paired_effect(treatment, baseline, confidence=0.9)
    if _within(narrow, -margin, margin):
        return Decision(Verdict.NO_EFFECT, effect, f"the 90 % interval lies within ±{margin:g}")
    gain = sign * effect.mean
    where = "lies short of" if best < delta else "includes"
    why = f"the interval {where} {delta:g} and reaches beyond the margin"
    needed = []
    if not 0 <= gain <= delta:
        needed.append(seeds_for_power(gain - delta if gain > 0 else gain, effect.sd))
    if abs(gain) < margin:
        needed.append(seeds_for_equivalence(margin - abs(gain), effect.sd))
    if not needed:
        why += f"; an effect from {margin:g} to {delta:g} stays so with any number of seeds"
        return Decision(Verdict.INCONCLUSIVE, effect, why)
    fewest = min((n for n in needed if n is not None), default=None)
    return _undecided(effect, why, fewest and max(fewest, effect.n + 1))


def enough_seeds(effect: Effect) -> bool:
    """Whether a verdict may rest on a paired difference: FEWEST_SEEDS, or three if it is above STRONG deviations."""
    if effect.mean is None or effect.sd is None:
        return False
    return effect.n >= FEWEST_SEEDS or (effect.n >= 3 and abs(effect.mean) > STRONG * effect.sd)


def equivalence(
    treatment: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    margin: float,
    worse_only: bool = False,
    larger: bool = False,
) -> Decision:
    """Do the two differ by less than the margin?

    supported: the 90 % interval lies within ±margin (two one-sided tests at 5 %), or with `worse_only` (the treatment
    is not inferior) its worse end does · contradicted: the 95 % interval lies wholly outside.

    Args:
        margin: > 0. larger: whether larger values are better; matters with `worse_only` only.
    Raises: ValueError for a margin that is not positive.
    Source: Schuirmann 1987, Journal of Pharmacokinetics and Biopharmaceutics 15.
    """
    if not margin > 0:
        raise ValueError(f"equivalence: margin={margin} must be > 0")
    effect = paired_effect(treatment, baseline)
    if effect.mean is None or effect.low is None or effect.high is None or effect.sd is None:
        return Decision(Verdict.INCONCLUSIVE, effect, _too_few(effect))
    low, high = -margin, margin
    if worse_only:
        low, high = (-margin, math.inf) if larger else (-math.inf, margin)
    bounds = f"within ±{margin:g}" if not worse_only else f"short of {margin:g} worse"
    if _within(paired_effect(treatment, baseline, confidence=0.9), low, high):
        return Decision(Verdict.SUPPORTED, effect, f"the 90 % interval lies {bounds}")
    if effect.low > high or effect.high < low:
        return Decision(Verdict.CONTRADICTED, effect, f"the 95 % interval lies wholly outside {margin:g}")
    room = min(high - effect.mean, effect.mean - low)
    needed = seeds_for_equivalence(room, effect.sd) if room > 0 else seeds_for_power(-room, effect.sd)
    return _undecided(effect, "the interval crosses the margin", needed)


def ratio(
    treatment: Mapping[int, float], baseline: Mapping[int, float], *, bound: float, above: bool = True
) -> Decision:
    """Is treatment / baseline above (or below) `bound`? By the t interval of the paired log-ratios, 95 %.

    The effect is in natural logarithms. Under FEWEST_RATIOS seeds the answer is inconclusive.

    Args:
        treatment, baseline: positive numbers by seed; pairs with others are left out. bound: > 0.
    Raises: ValueError for a bound that is not positive.
    """
    if not bound > 0:
        raise ValueError(f"ratio: bound={bound} must be > 0")
    positive = [{s: math.log(v) for s, v in values.items() if v > 0} for values in (treatment, baseline)]
    effect = paired_effect(positive[0], positive[1])
    if effect.mean is None or effect.low is None or effect.high is None or effect.sd is None:
        return Decision(Verdict.INCONCLUSIVE, effect, _too_few(effect))
    if effect.n < FEWEST_RATIOS:
        why = f"{effect.n} seeds, of which a ratio takes {FEWEST_RATIOS}"
        return Decision(Verdict.INCONCLUSIVE, effect, why, FEWEST_RATIOS)
    beyond, short = effect.low > math.log(bound), effect.high < math.log(bound)
    if beyond or short:
        verdict = Verdict.SUPPORTED if beyond == above else Verdict.CONTRADICTED
        return Decision(verdict, effect, f"the 95 % interval lies {'above' if beyond else 'below'} {bound:g}")
    needed = seeds_for_power(abs(effect.mean - math.log(bound)), effect.sd)
    return _undecided(effect, f"the 95 % interval includes {bound:g}", needed)


def stability(
    treatment: Sequence[float], baseline: Sequence[float], *, factor: float = 2.0, draws: int = 10_000
) -> Decision:
    """Is a score of instability (spikes, diverged share, learning-rate sensitivity) `factor` times lower?

    By the expanded percentile bootstrap over runs, 95 %, of the ratio baseline / treatment of the mean scores; 0 / 0
    counts as 1. The effect holds that ratio and its interval. Expanded: the plain one is too narrow for few runs; under
    FEWEST_SCORES runs on a side this one is too, so there the answer is inconclusive and without an interval.

    `seeds` counts runs on a side: the interval's width in logarithms shrinks with the root of their number.

    Args:
        treatment, baseline: one score per run, >= 0.
    Raises: ValueError for a score below 0 or without one.
    Source: Hesterberg 2015, The American Statistician 69(4), section 4.
    """
    t, b = (np.asarray(list(scores), dtype=float) for scores in (treatment, baseline))
    if not len(t) or not len(b) or min(t.min(), b.min()) < 0:
        raise ValueError("stability: each side needs at least one score, and scores are >= 0")
    rng = np.random.default_rng(0)
    means_t, means_b = (rng.choice(x, (draws, len(x))).mean(1) for x in (t, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where((means_t == 0) & (means_b == 0), 1.0, means_b / means_t)
        seen = 1.0 if t.mean() == b.mean() == 0 else float(b.mean() / t.mean())
    n = min(len(t), len(b))
    if n < FEWEST_SCORES:
        effect = Effect(seen, None, None, None, n, None, None)
        why = f"{n} run{'s' * (n != 1)}, of which an interval takes {FEWEST_SCORES}"
        return Decision(Verdict.INCONCLUSIVE, effect, why, FEWEST_SCORES)
    from scipy.special import ndtr, stdtrit

    tail = float(ndtr(math.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.025)))
    low, high = (float(np.quantile(ratios, q, method="nearest")) for q in (tail, 1 - tail))
    effect = Effect(seen, None, low, high, n, None, None)
    if low > factor:
        return Decision(Verdict.SUPPORTED, effect, f"the 95 % interval of the ratio lies above {factor:g}")
    if high < 1:
        return Decision(Verdict.CONTRADICTED, effect, "the 95 % interval of the ratio lies below 1")
    why = f"the 95 % interval of the ratio includes 1 or {factor:g}"
    if 1 <= seen <= factor:
        why += f"; one from 1 to {factor:g} stays so with any number of runs"
        return Decision(Verdict.INCONCLUSIVE, effect, why)
    far, near = (seen / factor, seen / low if low else math.inf) if seen > factor else (1 / seen, high / seen)
    return _undecided(effect, why, _runs_for_ratio(n, math.log(near), math.log(far)))


def _runs_for_ratio(n: int, half_width: float, distance: float) -> int | None:
    """Runs whose interval of a log-ratio stays `distance` short of its bound with POWER; None above MOST_SEEDS."""
    from scipy.special import ndtri

    needed = n * ((1 + ndtri(POWER) / ndtri(0.975)) * half_width / distance) ** 2
    return math.ceil(needed) if needed <= MOST_SEEDS else None


def seeds_for_power(effect: float, sd: float, power: float = POWER, confidence: float = 0.95) -> int | None:
    """Smallest n whose two-sided paired t test finds a true `effect` with this probability; None above MOST_SEEDS.

    Args:
        effect: difference to the bound that is tested, same unit as `sd`, the sd of the paired difference.
    """
    if effect == 0:
        return None
    if sd == 0:
        return 2
    from scipy.special import nctdtr, stdtrit

    def found(n: int) -> float:
        critical, shift = float(stdtrit(n - 1, (1 + confidence) / 2)), abs(effect) / sd * math.sqrt(n)
        return 1.0 - float(nctdtr(n - 1, shift, critical))

    return next((n for n in range(2, MOST_SEEDS + 1) if found(n) >= power), None)


def seeds_for_equivalence(room: float, sd: float, power: float = POWER) -> int | None:
    """Smallest n whose 90 % interval stays `room` short on each side with this probability; None above MOST_SEEDS.

    By the normal approximation ``n = ((z(0.95) + z((1 + power) / 2)) sd / room)^2``, exact enough for advice.
    """
    if room <= 0:
        return None
    from scipy.special import ndtri

    needed = max(2, math.ceil((float(ndtri(0.95) + ndtri((1 + power) / 2)) * sd / room) ** 2))
    return needed if needed <= MOST_SEEDS else None


@lru_cache
def sequential_level(looks: tuple[int, ...], confidence: float = 0.95, paths: int = 200_000) -> float:
    """The level of each of several looks at growing data, so that all of them together err with 1 - confidence.

    A sweep that stops at the first look with a paired t test below this level keeps its error rate: under no effect
    the t statistics of the looks have one joint distribution, whatever the sd, and it is simulated here.

    Args:
        looks: seed counts at which the test is made, increasing, the first >= 2.
    Raises: ValueError for other looks.
    """
    if not looks or looks[0] < 2 or any(a >= b for a, b in zip(looks, looks[1:], strict=False)):
        raise ValueError(f"sequential_level: looks={looks} must be increasing seed counts from 2 on, such as (3, 5, 8)")
    from scipy.special import stdtr

    draws = np.random.default_rng(0).standard_normal((paths, looks[-1]))
    smallest = np.ones(paths)
    for n in looks:
        seen = draws[:, :n]
        t = seen.mean(1) / (seen.std(1, ddof=1) / math.sqrt(n))
        smallest = np.minimum(smallest, 2 * stdtr(n - 1, -np.abs(t)))
    return float(np.quantile(smallest, 1 - confidence))


@dataclass(frozen=True)
class Sensitivity:
    """How much an arm's loss depends on the learning rate, over one grid."""

    best_lr: float
    best: float  # loss at best_lr
    mean_excess: float  # mean over the grid of min(loss, initial loss) - best
    at_edge: bool  # best_lr is the lowest or the highest of the grid: the optimum may lie outside


def lr_sensitivity(losses: Mapping[float, float], initial: float) -> Sensitivity:
    """Sensitivity of the final loss to the learning rate; a loss that is not finite counts as the initial one.

    Args:
        losses: final loss by learning rate, at least one finite. initial: loss before the first step.
    Raises: ValueError without a finite loss.
    Source: Wortsman et al. 2023, arXiv:2309.14322, section 2.
    """
    capped = {lr: min(loss, initial) if math.isfinite(loss) else initial for lr, loss in sorted(losses.items())}
    finite = {lr: capped[lr] for lr, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        raise ValueError("lr_sensitivity: no learning rate gave a finite loss")
    best_lr = min(finite, key=lambda lr: (finite[lr], lr))
    best = finite[best_lr]
    excess = math.fsum(loss - best for loss in capped.values()) / len(capped)
    return Sensitivity(best_lr, best, excess, best_lr in (min(capped), max(capped)))


def factorial_effects(
    losses: Mapping[tuple[str, ...], Mapping[int, float]], factors: Sequence[str]
) -> dict[str, Effect]:
    """Main effects and two-way interactions of two-level factors, with the seed as a random effect.

    Each effect is a contrast taken within a seed, so that what a seed does to all arms cancels, and its interval is
    the t interval of the contrast over seeds. Main effect of a factor: second level minus first, averaged over the
    other factors. Interaction of two: half the change of one's effect between the levels of the other.

    Args:
        losses: metric by seed, by the levels of an arm in the order of `factors`; levels sort as they first appear.
    Returns: by factor name, and by ``a x b`` for the interactions.
    Raises: ValueError unless every factor has two levels and every combination an arm.
    """
    levels = [list(dict.fromkeys(arm[i] for arm in losses)) for i in range(len(factors))]
    if any(len(found) != 2 for found in levels) or len(losses) != 2 ** len(factors):
        shape = {name: found for name, found in zip(factors, levels, strict=True)}
        raise ValueError(f"factorial_effects: {len(losses)} arms of {shape} are not a full design of two levels each")
    signs = {arm: [2 * levels[i].index(level) - 1 for i, level in enumerate(arm)] for arm in losses}
    seeds = set.intersection(*(set(by_seed) for by_seed in losses.values()))

    def contrast(*which: int) -> Effect:
        weight = {arm: math.prod(signs[arm][i] for i in which) for arm in losses}
        high, low = (
            {seed: math.fsum(losses[arm][seed] for arm in losses if weight[arm] == side) for seed in seeds}
            for side in (1, -1)
        )
        half = len(losses) / 2
        return paired_effect({s: v / half for s, v in high.items()}, {s: v / half for s, v in low.items()})

    effects = {name: contrast(i) for i, name in enumerate(factors)}
    pairs = combinations(range(len(factors)), 2)
    return effects | {f"{factors[i]} x {factors[j]}": contrast(i, j) for i, j in pairs}


def _within(effect: Effect, low: float, high: float) -> bool:
    return effect.low is not None and effect.high is not None and low < effect.low and effect.high < high


def _undecided(effect: Effect, why: str, seeds: int | None) -> Decision:
    """By the interval itself; says so where more seeds are no way out."""
    why += "" if seeds else f", which {MOST_SEEDS:,} would not settle either"
    return Decision(Verdict.INCONCLUSIVE, effect, why, seeds)


def _too_few(effect: Effect) -> str:
    return "one paired seed gives no interval" if effect.n == 1 else f"{effect.n} paired seeds give no interval"
