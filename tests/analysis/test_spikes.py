"""The spike detector against planted spikes; the rate ratio against scipy and by simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from andrea_ablate.analysis import SpikeDetector, find_spikes, spike_rate_ratio
from andrea_ablate.analysis.spikes import LONGEST


def curve(steps=600, noise=0.03, seed=0):
    """A falling loss with noise, as of a real run."""
    rng = np.random.default_rng(seed)
    t = np.arange(1, steps + 1)
    return 2.0 + 3.5 * np.exp(-t / 80) + noise * rng.standard_normal(steps)


def spikes_of(losses):
    return find_spikes(enumerate(losses.tolist(), start=1))


@pytest.mark.parametrize("seed", range(10))
def test_a_falling_noisy_loss_has_no_spike(seed):
    assert spikes_of(curve(seed=seed)) == []


def test_a_planted_spike_is_found_with_its_height_length_and_loss():
    losses = curve(noise=0.0)
    losses += np.tile([0.01, -0.01], 300)
    losses[399:409] = losses[399:409].mean() + np.linspace(1.0, 0.5, 10)  # steps 400 to 409
    (spike,) = spikes_of(losses)
    assert (spike.start, spike.peak, spike.end, spike.recovery_steps) == (400, 400, 410, 10)
    assert spike.baseline == pytest.approx(np.median(losses[335:399]), abs=1e-12)
    assert spike.height == pytest.approx(losses[399] - spike.baseline)
    assert spike.lost == pytest.approx((losses[399:409] - spike.baseline).sum())


def test_flagged_steps_teach_nothing():
    losses = curve()
    losses[299::40] += 2.0  # would double the scale, were they learned
    assert [spike.start for spike in spikes_of(losses)] == list(range(300, 601, 40))


def test_a_long_spike_moves_neither_the_level_nor_the_limit_of_the_next():
    losses = np.tile([2.01, 1.99], 100)
    losses[99:139] += 1.0  # steps 100 to 139: most of a window
    losses[149] += 0.1  # below six scales of a window that had learned them, and of a level that had risen
    first, second = spikes_of(losses)
    assert (first.start, first.end, second.start, second.end) == (100, 140, 150, 151)
    assert second.baseline == pytest.approx(2.0)


def test_what_is_not_finite_is_a_spike_of_infinite_height():
    losses = curve()
    losses[199], losses[399:401] = math.nan, math.inf
    first, second = spikes_of(losses)
    assert (first.start, first.end, first.height, first.lost) == (200, 201, math.inf, 0.0)
    assert (second.start, second.end, second.height) == (400, 402, math.inf)
    assert spikes_of(np.array([math.nan] * 5))[0].height == math.inf


def test_a_new_level_is_one_spike_without_end_and_is_learned():
    losses = curve(800)
    losses[399:] += 1.0
    losses[700] += 2.0
    level, later = spikes_of(losses)
    assert (level.start, level.end) == (400, None)
    assert (later.start, later.end) == (701, 702)
    assert later.start > 400 + LONGEST


def test_the_detector_goes_on_from_its_state():
    losses = curve()
    losses[300:303] += 1.5
    for cut in (10, 200, 301, 302, 303, 500):
        detector, found = SpikeDetector(), []
        for step, loss in enumerate(losses.tolist(), start=1):
            if step == cut:
                state = json.loads(json.dumps(detector.state_dict()))
                detector = SpikeDetector()
                detector.load_state_dict(state)
            if (spike := detector.update(step, loss)) is not None:
                found.append(spike.start)
        assert found == [301]
        whole = SpikeDetector()
        for step, loss in enumerate(losses.tolist(), start=1):
            whole.update(step, loss)
        assert detector.state_dict() == whole.state_dict()


NOISE = 0.02 * np.random.default_rng(0).uniform(-1, 1, 120)  # losses of steps 1 to 120


def test_what_stands_out_is_a_spike_and_what_falls_or_rests_is_none():
    planted = 3 + NOISE
    planted[59] = 6.0
    (spike,) = spikes_of(planted)
    assert (spike.start, spike.peak, spike.end) == (60, 60, 61) and spike.height == pytest.approx(3, abs=0.03)
    fall = np.concatenate((np.linspace(10, 3, 50), np.full(70, 3.0)))
    assert spikes_of(fall) == spikes_of(np.full(120, 2.0)) == []
    assert all(spikes_of(3 + NOISE[first : first + 20]) == [] for first in range(100))  # shorter than the window


def test_two_spikes_are_two_where_the_loss_comes_back_between_them_and_one_where_it_does_not():
    twice = 3 + NOISE
    twice[[59, 62]] = 6.0
    assert [(spike.start, spike.end) for spike in spikes_of(twice)] == [(60, 61), (63, 64)]
    twice[60:62] = 4.0
    assert [(spike.start, spike.end) for spike in spikes_of(twice)] == [(60, 64)]


def test_a_step_up_that_stays_is_one_event_that_is_not_recovered():
    stays = 3 + NOISE
    stays[79:] += 2.0
    (event,) = spikes_of(stays)
    assert (event.start, event.end, event.recovery_steps) == (80, None, None)
    assert [(e.start, e.end) for e in spikes_of(np.concatenate((stays, np.tile(5 + NOISE, 4))))] == [(80, None)]


@pytest.mark.parametrize("jump, found", [(1e-7, 0), (0.0059, 0), (0.0061, 1)])
def test_the_last_digits_of_a_loss_that_rests_are_no_spike(jump, found):
    rests = np.full(120, 2.0)
    rests[59] += jump
    assert len(spikes_of(rests)) == found


@pytest.mark.parametrize("k, m", [(0, 5), (5, 0), (3, 7), (40, 12), (1, 1)])
def test_rate_ratio_agrees_with_the_exact_binomial_interval(k, m):
    found = spike_rate_ratio((k, 2000), (m, 1000))
    share = scipy_stats.binomtest(k, k + m).proportion_ci(0.95, method="exact")
    ratios = [(math.inf if p == 1 else p / (1 - p) / 2) for p in share]
    assert (found.low, found.high) == pytest.approx(tuple(ratios), rel=1e-6)
    assert found.ratio == (math.inf if m == 0 else pytest.approx(k / m / 2))


def test_rate_ratio_covers_the_truth():
    rng = np.random.default_rng(0)
    hits = [
        (r := spike_rate_ratio((int(k), 1500), (int(m), 1000))).low <= 2.0 <= r.high
        for k, m in zip(rng.poisson(0.02 * 1500, 4000), rng.poisson(0.01 * 1000, 4000), strict=True)
    ]
    assert 0.95 <= np.mean(hits) <= 0.98  # exact, hence never below nominal
    nothing = spike_rate_ratio((0, 10), (0, 10))
    assert (nothing.ratio, nothing.low, nothing.high) == (None, 0.0, math.inf)
    with pytest.raises(ValueError, match="spike_rate_ratio"):
        spike_rate_ratio((1, 0), (1, 10))
