"""Learning rates against formulas written out by hand, as functions and as a run records them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from outcome import Outcome

from andrea_ablate.registry import ConfigError
from andrea_ablate.training.identity import check
from andrea_ablate.training.run import run
from andrea_ablate.training.schedules import SCHEDULES, schedule
from support import Compose

# Twenty steps, five of them warm-up: after it come steps 5 … 20, at u = 0/15 … 15/15.
HAND: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "cosine": (
        {"min_ratio": 0.1},
        {1: 0.2, 4: 0.8, 5: 1.0, 10: 0.1 + 0.45 * 1.5, 15: 0.1 + 0.45 * 0.5, 20: 0.1},  # cos 60°, cos 120°, cos 180°
    ),
    "linear": ({"min_ratio": 0.25}, {1: 0.2, 5: 1.0, 9: 0.8, 13: 0.6, 17: 0.4, 20: 0.25}),
    "inverse_sqrt": ({}, {1: 0.2, 5: 1.0, 20: 0.5, 10: 0.5**0.5, 6: (5 / 6) ** 0.5}),
    "constant": ({}, {1: 0.2, 2: 0.4, 5: 1.0, 6: 1.0, 13: 1.0, 20: 1.0}),
    # The decay is the last fifth of fifteen steps: from step 17 to step 20.
    "wsd": (
        {"decay_fraction": 0.2, "min_ratio": 0.1},
        {1: 0.2, 5: 1.0, 16: 1.0, 17: 1.0, 18: 0.7, 19: 0.4, 20: 0.1},
    ),
}


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_factors_are_those_worked_out_by_hand(name: str) -> None:
    options, expected = HAND[name]  # a schedule without hand-worked values fails here
    factor = schedule({"type": name, "warmup_tokens": None, **options}, warmup=5, total=20)
    assert {step: factor(step) for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES.names())
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (1, 1), (1, 2), (6, 7)])
def test_peak_ends_the_warm_up_and_the_minimum_ends_the_run(name: str, warmup: int, total: int) -> None:
    options = HAND[name][0]
    factors = [schedule({"type": name, **options}, warmup, total)(step) for step in range(1, total + 1)]
    assert max(factors) <= 1.0 and min(factors) > 0
    if warmup:
        assert factors[warmup - 1] == 1.0
        assert factors[:warmup] == [pytest.approx(step / warmup) for step in range(1, warmup + 1)]
    if total > warmup:
        last = {"inverse_sqrt": math.sqrt(max(1, warmup) / total)}.get(name, options.get("min_ratio", 1.0))
        assert factors[-1] == pytest.approx(last)
    after = factors[max(0, warmup - 1) :]
    assert after == sorted(after, reverse=True)


@pytest.mark.slow  # several runs
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_run_records_the_rate_of_each_update(accumulate: int, epochs: Compose) -> None:
    cfg = epochs(
        "trainer.tokens=640", "schedule.warmup_tokens=160", "optim.lr=4e-3", f"trainer.accumulate={accumulate}"
    )
    assert (cfg.total_steps, cfg.warmup_steps) == (20, 5)
    run(cfg)
    rates = [row["optim/lr"] for row in Outcome(cfg).train]
    warm = [4e-3 * step / 5 for step in range(1, 5)]
    cosine = [4e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * k / 15))) for k in range(16)]
    assert rates == pytest.approx([*warm, *cosine], rel=1e-12)
    assert rates[4] == max(rates) == pytest.approx(4e-3) and rates[-1] == pytest.approx(4e-4)


def test_the_optimizer_is_given_the_rate_that_is_recorded(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    used: list[set[float]] = []
    original = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        used.append({group["lr"] for group in self.param_groups})
        return original(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    cfg = epochs("schedule=wsd")
    run(cfg)
    assert used == [{row["optim/lr"]} for row in Outcome(cfg).train]


def test_warm_up_is_a_tenth_of_the_budget_unless_given(epochs: Compose) -> None:
    assert epochs("trainer.tokens=640").warmup_steps == 2
    assert epochs("trainer.tokens=640", "schedule.warmup_tokens=0").warmup_steps == 0
    assert epochs("trainer.tokens=640", "schedule.warmup_tokens=33").warmup_steps == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule=cosine", "schedule.min_ratio=1.5"),
        ("schedule=linear", "schedule.min_ratio=-0.1"),
        ("schedule=wsd", "schedule.decay_fraction=0.0"),
        ("schedule=wsd", "schedule.decay_fraction=2.0"),
        ("schedule=wsd", "schedule.min_ratio=2.0"),
    ],
)
def test_shapes_that_make_no_sense_are_refused_before_data_is_read(overrides: tuple[str, ...], epochs: Compose) -> None:
    key = overrides[1].partition("=")[0].partition(".")[2]
    with pytest.raises(ConfigError, match=key):
        check(epochs(*overrides))
