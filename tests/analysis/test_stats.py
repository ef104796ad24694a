"""Oracles: numbers worked by hand, scipy.stats, and simulation with known answers."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

import andrea_ablate
from andrea_ablate.analysis import holm, mean_interval, paired_effect, seeds_needed


def by_seed(values):
    return dict(enumerate(values))


def test_mean_interval_by_hand():
    estimate = mean_interval([2.0, 2.2, 2.4])
    # t(0.975, 2) = 4.302653; 4.302653 * 0.2 / sqrt(3) = 0.496828
    assert estimate.mean == pytest.approx(2.2, abs=1e-12)
    assert estimate.sd == pytest.approx(0.2, abs=1e-12)
    assert (estimate.low, estimate.high) == pytest.approx((2.2 - 0.496828, 2.2 + 0.496828), abs=1e-6)
    assert estimate.half_width == pytest.approx(0.496828, abs=1e-6)
    assert estimate.n == 3


@pytest.mark.parametrize("values, mean, n", [([], None, 0), ([2.1], 2.1, 1), ([2.1, math.nan, -math.inf], 2.1, 1)])
def test_fewer_than_two_values_have_no_spread(values, mean, n):
    estimate = mean_interval(values)
    assert (estimate.mean, estimate.n) == (mean, n)
    assert estimate.sd is estimate.low is estimate.high is estimate.half_width is None


@pytest.mark.parametrize("n", [2, 3, 7, 41])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_mean_interval_agrees_with_scipy(n, confidence):
    values = np.random.default_rng(n).normal(3.0, 0.01, n)
    estimate = mean_interval(values, confidence)
    expected = scipy_stats.t.interval(confidence, n - 1, loc=values.mean(), scale=scipy_stats.sem(values))
    assert (estimate.low, estimate.high) == pytest.approx(expected, rel=1e-12)


def test_equal_values_have_zero_spread():
    estimate = mean_interval([0.1] * 3)
    assert (estimate.sd, estimate.low, estimate.high) == (0.0, 0.1, 0.1)


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_paired_effect_agrees_with_scipy(n):
    rng = np.random.default_rng(n)
    base = rng.normal(2.3, 0.01, n)
    treatment = base - 0.01 + rng.normal(0, 0.005, n)
    effect = paired_effect(by_seed(treatment), by_seed(base))
    expected = scipy_stats.ttest_rel(treatment, base)
    interval = expected.confidence_interval(0.95)
    assert effect.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert effect.mean == pytest.approx(np.mean(treatment - base), rel=1e-12)
    assert effect.excludes_zero == (expected.pvalue < 0.05)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_sign_flip_agrees_with_scipy_permutation_test(n):
    differences = np.random.default_rng(10 + n).normal(0.5, 1, n)
    expected = scipy_stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert paired_effect(by_seed(differences), by_seed([0.0] * n)).p_sign == pytest.approx(expected.pvalue)


def test_sign_flip_by_hand():
    # Sums of ±1 ±2 ±4 reach |7| twice in 8; of 1 2 -4 (|1|) always; ties in exact arithmetic count: 0.1 + 0.2 = 0.3.
    assert paired_effect(by_seed([1, 2, 4]), by_seed([0, 0, 0])).p_sign == 2 / 8
    assert paired_effect(by_seed([1, 2, -4]), by_seed([0, 0, 0])).p_sign == 1.0
    assert paired_effect(by_seed([0.1, 0.2, -0.3, 0.6]), by_seed([0] * 4)).p_sign == np.mean(
        [abs(a + 2 * b + 3 * c + 6 * d) >= 6 for a, b, c, d in itertools.product([-1, 1], repeat=4)]
    )


def test_sign_flip_of_many_pairs_is_sampled_and_repeatable():
    differences = np.random.default_rng(5).normal(0.35, 1, 17)
    signs = 1.0 - 2.0 * (np.arange(2**17)[:, None] >> np.arange(17) & 1)
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12)
    first, second = (paired_effect(by_seed(differences), by_seed([0] * 17)).p_sign for _ in range(2))
    assert first == second
    assert first == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 100_000))


def test_only_shared_finite_seeds_are_paired():
    effect = paired_effect({0: 2.0, 1: math.nan, 2: 2.2, 3: 9.0, 5: 2.5}, {2: 2.1, 1: 2.0, 0: 2.1, 4: 1.0, 5: math.inf})
    assert effect.n == 2
    assert effect.mean == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("n", [0, 1])
def test_one_pair_gives_no_claim(n):
    effect = paired_effect(by_seed([2.0] * n), by_seed([2.5] * n))
    assert effect.mean == (-0.5 if n else None)
    assert effect.sd is effect.low is effect.high is effect.p is effect.p_sign is None
    assert not effect.excludes_zero


@pytest.mark.parametrize("shift, p, p_sign", [(0.0, 1.0, 1.0), (0.1, 0.0, 0.25)])
def test_equal_differences_have_a_defined_answer(shift, p, p_sign):
    base = [2.0, 2.3, 2.7]  # adding 0.1 rounds differently at each, so the spread is 1e-16 rather than 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        effect = paired_effect(by_seed([b + shift for b in base]), by_seed(base))
    assert (effect.sd, effect.p, effect.p_sign) == (0.0, p, p_sign)
    assert effect.low == effect.high == effect.mean == pytest.approx(shift, abs=1e-12)
    assert effect.excludes_zero == (shift > 0)


def test_holm_by_hand():
    # sorted .01 .02 .03 .04: times 4 3 2 1 = .04 .06 .06 .04, then never below the one before
    assert holm([0.04, 0.01, None, 0.03, 0.02]) == pytest.approx([0.06, 0.04, None, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([None, None]) == [None, None]
    assert holm([]) == []


@pytest.mark.parametrize("sd, half_width", [(0.01, 0.01), (0.01, 0.005), (0.003, 0.02), (1.0, 0.1), (0.02, 0.0401)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_seeds_needed_is_the_smallest(sd, half_width, confidence):
    def reached(n):
        return scipy_stats.t.ppf((1 + confidence) / 2, n - 1) * sd / math.sqrt(n)

    expected = next(n for n in itertools.count(2) if reached(n) <= half_width)
    assert seeds_needed(sd, half_width, confidence) == expected


def test_seeds_needed_at_the_edges():
    assert seeds_needed(0.0, 1e-9) == 2
    assert seeds_needed(1.0, 1e-4) == pytest.approx((1.959964 / 1e-4) ** 2, rel=1e-4)
    for sd, half_width in [(1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0)]:
        with pytest.raises(ValueError, match="seeds_needed"):
            seeds_needed(sd, half_width)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("n", [3, 5])
def test_simulated_coverage_and_false_positives_are_nominal(n):
    simulations, shift = 4000, -0.01
    rng = np.random.default_rng(n)
    seed_effect = rng.normal(2.3, 0.05, (simulations, n))  # common to both arms, so pairing must remove it
    base = seed_effect + rng.normal(0, 0.004, (simulations, n))
    treatment = seed_effect + shift + rng.normal(0, 0.004, (simulations, n))
    covered = false_positive = 0
    for b, t in zip(base, treatment, strict=True):
        effect = paired_effect(by_seed(t), by_seed(b))
        covered += effect.low <= shift <= effect.high
        false_positive += paired_effect(by_seed(t - shift), by_seed(b)).p < 0.05
    assert covered / simulations == pytest.approx(0.95, abs=0.01)
    assert false_positive / simulations == pytest.approx(0.05, abs=0.01)


def test_holm_keeps_the_family_error_under_the_null():
    rng = np.random.default_rng(0)
    simulations = 1000
    base = rng.normal(0, 1, (simulations, 5))
    arms = rng.normal(0, 1, (3, simulations, 5))
    wrong = 0
    for i in range(simulations):
        p_values = [paired_effect(by_seed(arm[i]), by_seed(base[i])).p for arm in arms]
        wrong += min(holm(p_values)) < 0.05
    assert wrong / simulations <= 0.06  # Holm bounds it by 0.05; the shared baseline keeps it below


def test_importing_analysis_does_not_import_scipy():
    code = "import sys, andrea_ablate.analysis; print('scipy' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(andrea_ablate.__file__).parents[1])}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == "False"
