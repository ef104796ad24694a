"""Decision rules: intervals worked by hand, scipy's power, planted effects, and error rates by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from andrea_ablate.analysis import (
    Verdict,
    equivalence,
    factorial_effects,
    lr_sensitivity,
    ratio,
    seeds_for_equivalence,
    seeds_for_power,
    sequential_level,
    stability,
    superiority,
)


def by_seed(values):
    return dict(enumerate(values))


def around(mean, sd, n):
    """n values with exactly this mean and sample sd."""
    z = scipy_stats.norm.ppf((np.arange(n) + 0.5) / n)
    z = (z - z.mean()) / z.std(ddof=1)
    return by_seed(mean + sd * z)


ZERO = by_seed([0.0] * 40)


@pytest.mark.parametrize(
    "mean, sd, n, delta, verdict",
    [
        (-0.04, 0.01, 5, 0.0, "supported"),  # interval -0.04 ± 2.776 * 0.01 / sqrt(5) = ± 0.0124
        (-0.04, 0.01, 5, 0.03, "inconclusive"),  # ends at -0.0276, short of the 0.03 asked for
        (-0.05, 0.01, 5, 0.03, "supported"),
        (0.04, 0.01, 5, 0.0, "contradicted"),
        (0.0, 0.01, 5, 0.0, "no-effect"),  # 90 %: ± 2.132 * 0.01 / sqrt(5) = ± 0.0095, within 0.03
        (-0.005, 0.06, 5, 0.0, "inconclusive"),
        (-0.04, 0.01, 3, 0.0, "inconclusive"),  # three seeds take an effect above five sd
        (-0.06, 0.01, 3, 0.0, "supported"),
        (-0.04, 0.01, 2, 0.0, "inconclusive"),
    ],
)
def test_superiority_by_hand(mean, sd, n, delta, verdict):
    decision = superiority(around(mean, sd, n), ZERO, delta=delta, margin=0.03)
    assert decision.verdict == verdict
    flipped = superiority(around(-mean, sd, n), ZERO, delta=delta, margin=0.03, larger=True)
    assert flipped.verdict == verdict


def test_superiority_says_how_many_seeds_would_settle_it():
    decision = superiority(around(-0.01, 0.012, 6), ZERO, margin=0.011)
    # interval -0.01 ± 2.571 * 0.012 / sqrt(6) = ± 0.0126; equivalence has 0.001 of room and takes far more
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert decision.seeds == seeds_for_power(0.01, 0.012) == 14
    assert superiority(around(-0.04, 0.01, 4), ZERO, margin=0.03).seeds == 5
    assert superiority({}, ZERO, margin=0.03).verdict is Verdict.INCONCLUSIVE


def test_superiority_says_where_seeds_are_no_way_out():
    # A gain of 0.05 is no gain of 0.1, not worse, and not within 0.03: no interval around it is any verdict.
    between = superiority(around(-0.05, 0.1, 8), ZERO, delta=0.1, margin=0.03)
    assert (between.verdict, between.seeds) == ("inconclusive", None)
    assert between.why.endswith("an effect from 0.03 to 0.1 stays so with any number of seeds")
    assert superiority(around(-0.05, 0.1, 8), ZERO, delta=0.1, margin=0.06).seeds == seeds_for_equivalence(0.01, 0.1)
    # -0.08 ± 2.365 * 0.02 / sqrt(8) = ± 0.0167: from 0.063 to 0.097
    short = superiority(around(-0.08, 0.02, 8), ZERO, delta=0.1, margin=0.03)
    assert short.why.startswith("the interval lies short of 0.1 and reaches beyond the margin; an effect from 0.03")
    assert between.why.startswith("the interval includes 0.1 and reaches")
    worse = superiority(around(0.05, 0.1, 8), ZERO, delta=0.1, margin=0.03)
    assert worse.seeds == seeds_for_power(0.05, 0.1)
    tiny = superiority(around(-0.101, 0.1, 8), ZERO, delta=0.1, margin=0.03)
    assert tiny.seeds is None and tiny.why.endswith(", which 1,000 would not settle either")


@pytest.mark.parametrize(
    "mean, options, verdict",
    [
        (0.0, {}, "supported"),  # 90 %: ± 1.895 * 0.01 / sqrt(8) = ± 0.0067
        (0.015, {}, "inconclusive"),
        (0.05, {}, "contradicted"),
        (-0.05, {}, "contradicted"),
        (-0.05, {"worse_only": True}, "supported"),
        (0.05, {"worse_only": True}, "contradicted"),
        (0.05, {"worse_only": True, "larger": True}, "supported"),
        (-0.05, {"worse_only": True, "larger": True}, "contradicted"),
    ],
)
def test_equivalence_by_hand(mean, options, verdict):
    assert equivalence(around(mean, 0.01, 8), ZERO, margin=0.02, **options).verdict == verdict


def test_ratio_by_hand():
    base = {s: 10.0 for s in range(8)}
    twice = {s: 10 * math.exp(v) for s, v in around(math.log(2), 0.05, 8).items()}
    # the log interval is 0.693 ± 2.365 * 0.05 / sqrt(8) = ± 0.042: from 1.92 to 2.09
    assert ratio(twice, base, bound=1.9).verdict is Verdict.SUPPORTED
    assert ratio(twice, base, bound=2.1).verdict is Verdict.CONTRADICTED
    assert ratio(twice, base, bound=2.1, above=False).verdict is Verdict.SUPPORTED
    assert ratio(twice, base, bound=2.0).verdict is Verdict.INCONCLUSIVE
    fewer = {s: twice[s] for s in range(7)}
    assert (ratio(fewer, base, bound=1.0).verdict, ratio(fewer, base, bound=1.0).seeds) == ("inconclusive", 8)
    assert ratio({**twice, 0: 0.0}, base, bound=1.0).effect.n == 7


def test_stability_by_planted_scores():
    rng = np.random.default_rng(0)
    calm, wild = rng.poisson(1, 30), rng.poisson(9, 30)
    assert stability(calm, wild).verdict is Verdict.SUPPORTED
    assert stability(wild, calm).verdict is Verdict.CONTRADICTED
    assert stability(calm, calm).verdict is Verdict.INCONCLUSIVE
    nothing = stability([0] * 5, [0] * 5)
    assert (nothing.effect.mean, nothing.effect.low, nothing.effect.high) == (1.0, 1.0, 1.0)
    assert stability([0] * 5, [5, 6, 7, 5, 6]).verdict is Verdict.SUPPORTED
    few = stability([0] * 4, [5, 6, 7, 5, 6])
    assert (few.verdict, few.effect.low, few.seeds) == (Verdict.INCONCLUSIVE, None, 5) and few.why.startswith("4 runs,")


def test_stability_says_how_many_runs_would_settle_it():
    calm, wild = [1.0, 2.0, 3.0, 2.0, 2.0, 1.0, 3.0], [5.0, 1.0, 9.0, 3.0, 6.0, 2.0, 9.0]
    found = stability(calm, wild, factor=2.0)
    assert found.verdict is Verdict.INCONCLUSIVE and found.effect.mean == pytest.approx(2.5)
    near, far = math.log(found.effect.mean / found.effect.low), math.log(found.effect.mean / 2)
    # The interval has to shrink from `near` to under `far`, and 2.8 / 1.96 further for four chances in five.
    assert found.seeds == pytest.approx(7 * (near / far * 2.8016 / 1.96) ** 2, abs=1)
    back = stability(wild, [4.0, 1.0, 7.0, 2.0, 5.0, 1.0, 8.0], factor=2.0)
    assert back.verdict is Verdict.INCONCLUSIVE and back.effect.mean == pytest.approx(0.8)
    near, far = math.log(back.effect.high / back.effect.mean), math.log(1 / back.effect.mean)
    assert back.seeds == pytest.approx(7 * (near / far * 2.8016 / 1.96) ** 2, abs=1)
    between = stability(calm, [1.5 * score for score in calm])
    assert between.seeds is None and between.why.endswith("one from 1 to 2 stays so with any number of runs")
    assert stability(calm, calm).seeds is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: superiority(ZERO, ZERO, margin=0.0),
        lambda: superiority(ZERO, ZERO, delta=-1.0, margin=0.1),
        lambda: equivalence(ZERO, ZERO, margin=-0.1),
        lambda: ratio(ZERO, ZERO, bound=0.0),
        lambda: stability([], [1.0]),
        lambda: stability([-1.0], [1.0]),
        lambda: sequential_level((1, 3)),
        lambda: sequential_level((3, 3)),
        lambda: lr_sensitivity({1e-3: math.nan}, 5.0),
        lambda: factorial_effects({("a",): ZERO}, ["x"]),
    ],
)
def test_what_makes_no_sense_is_refused(call):
    with pytest.raises(ValueError):
        call()


@pytest.mark.parametrize("effect, sd", [(0.01, 0.01), (0.01, 0.02), (0.05, 0.01)])
def test_seeds_for_power_find_the_effect_that_often(effect, sd):
    n = seeds_for_power(effect, sd)
    rng = np.random.default_rng(1)

    def share(n):
        draws = rng.normal(effect, sd, (20_000, n))
        return np.mean(scipy_stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05)

    assert share(n) >= 0.79
    if n > 2:
        assert share(n - 1) < 0.81
    assert seeds_for_power(0.0, 1.0) is None
    assert seeds_for_power(1e-4, 1.0) is None
    assert seeds_for_power(1.0, 0.0) == 2


def test_seeds_for_equivalence_reach_their_power():
    n = seeds_for_equivalence(0.01, 0.012)
    rng = np.random.default_rng(2)
    hits = [equivalence(by_seed(rng.normal(0, 0.012, n)), ZERO, margin=0.01).verdict == "supported" for _ in range(500)]
    assert np.mean(hits) == pytest.approx(0.8, abs=0.05)
    assert seeds_for_equivalence(0.0, 1.0) is None


def test_looking_several_times_keeps_the_error_rate():
    looks = (3, 5, 8)
    level = sequential_level(looks)
    assert 0.05 / 3 < level < 0.05
    draws = np.random.default_rng(7).normal(2.0, 3.0, (20_000, 8)) - 2.0
    stopped = np.zeros(len(draws), bool)
    for n in looks:
        stopped |= scipy_stats.ttest_1samp(draws[:, :n], 0, axis=1).pvalue < level
    assert stopped.mean() == pytest.approx(0.05, abs=0.005)
    assert sequential_level((5,)) == pytest.approx(0.05, abs=0.002)


def test_lr_sensitivity_by_hand():
    found = lr_sensitivity({1e-3: 2.2, 3e-3: 2.0, 1e-2: 2.6, 3e-2: math.nan}, initial=5.0)
    assert (found.best_lr, found.best, found.at_edge) == (3e-3, 2.0, False)
    assert found.mean_excess == pytest.approx((0.2 + 0 + 0.6 + 3.0) / 4)
    assert lr_sensitivity({1e-3: 2.2, 3e-3: 9.0}, initial=5.0).mean_excess == pytest.approx(2.8 / 2)
    assert lr_sensitivity({1e-3: 2.2, 3e-3: 2.0}, initial=5.0).at_edge


def test_factorial_effects_are_those_that_were_planted():
    rng = np.random.default_rng(3)
    seeds = range(6)
    seed_effect = rng.normal(0, 1.0, 6)  # large, and common to all arms of a seed
    losses = {
        (a, b, c): {
            s: 3
            + seed_effect[s]
            - 0.2 * (a == "post")
            + 0.1 * (b == "swiglu")
            + 0.08 * (a == "post") * (b == "swiglu")
            + rng.normal(0, 0.005)
            for s in seeds
        }
        for a, b, c in itertools.product(("pre", "post"), ("gelu", "swiglu"), ("mha", "mqa"))
    }
    found = factorial_effects(losses, ["norm", "ffn", "attn"])
    expected = {"norm": -0.16, "ffn": 0.14, "attn": 0.0, "norm x ffn": 0.04, "norm x attn": 0.0, "ffn x attn": 0.0}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].mean == pytest.approx(value, abs=0.006), name
        assert found[name].half_width < 0.02
    # by hand for one: the mean over the other factors of post minus pre, seed by seed
    by_hand = [
        np.mean([losses["post", b, c][s] - losses["pre", b, c][s] for b in ("gelu", "swiglu") for c in ("mha", "mqa")])
        for s in seeds
    ]
    interval = scipy_stats.t.interval(0.95, 5, np.mean(by_hand), scipy_stats.sem(by_hand))
    assert (found["norm"].low, found["norm"].high) == pytest.approx(interval)
