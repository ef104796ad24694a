"""Which steps are outliers, and that a run leaves them out and nothing else."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from outcome import Outcome

from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.outliers import OutlierGuard
from andrea_ablate.training.run import run
from support import Compose


def test_the_limit_is_worked_out_by_hand() -> None:
    """Losses 1, 2, 3, 4: mean 2.5, standard deviation sqrt(5/3) = 1.29099; two deviations above is 5.08199."""
    for loss, ordinary in ((5.08, True), (5.083, False), (-100.0, True)):
        guard = OutlierGuard(window=8, sigma=2.0)
        assert all(guard.accepts(value, 1.0) for value in (1.0, 2.0, 3.0, 4.0))
        assert guard.accepts(loss, 1.0) == ordinary
    guard = OutlierGuard(window=8, sigma=2.0)
    assert all(guard.accepts(1.0, value) for value in (1.0, 2.0, 3.0, 4.0))
    assert not guard.accepts(1.0, 5.083)  # the gradient norm alone is enough


def test_only_the_window_counts_and_outliers_are_in_it() -> None:
    guard, past = OutlierGuard(window=8, sigma=3.0), []
    generator = torch.Generator().manual_seed(0)
    answers = []
    for loss in [*(5 + torch.randn(40, generator=generator)).tolist(), *[30.0] * 6]:
        window = past[-8:]
        limit = statistics.mean(window) + 3 * statistics.stdev(window) if len(window) >= 4 else math.inf
        answers.append(guard.accepts(loss, 1.0))
        assert answers[-1] == (loss <= limit)
        past.append(loss)
    assert answers[40:43] == [False, True, True]  # one leap is an outlier, a lasting one the new level


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_skipped_at_once_and_forgotten(value: float) -> None:
    guard = OutlierGuard(window=4, sigma=2.0)
    assert not guard.accepts(value, 1.0) and not guard.accepts(1.0, value)
    assert guard.past == []


def test_a_skipped_step_changes_neither_weights_nor_moments(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 5 is called an outlier: the run goes on as if it had not been taken, and counts it."""
    seen: list[dict[str, Any]] = []
    original = LanguageModule.training_step

    def watch(self: LanguageModule, batch: Any, batch_idx: int) -> Any:
        row = original(self, batch, batch_idx)
        moments = self.trainer.optimizers[0].state_dict()["state"].values()
        weights = [p.detach().clone() for p in self.weights]
        seen.append({"weights": weights, "steps": {float(state["step"]) for state in moments}})
        return row

    monkeypatch.setattr(LanguageModule, "training_step", watch)
    monkeypatch.setattr(OutlierGuard, "accepts", lambda self, loss, grad_norm: len(seen) != 4)
    cfg = epochs("stability=[skip_step]", "trainer.tokens=320")
    run(cfg)
    rows = Outcome(cfg).train
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["optim/skipped"] for row in rows] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    changed = [
        any(not torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True))
        for before, after in zip(seen, seen[1:], strict=False)
    ]
    assert changed == [True, True, True, False, True, True, True, True, True]
    assert [moments["steps"] for moments in seen[3:6]] == [{4.0}, {4.0}, {5.0}]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_without_outliers_a_guarded_run_is_the_unguarded_one(epochs: Compose) -> None:
    plain, guarded = epochs("trainer.tokens=320"), epochs("trainer.tokens=320", "stability=[skip_step]")
    for cfg in (plain, guarded):
        run(cfg)
    assert [row["train/loss"] for row in Outcome(plain).train] == [row["train/loss"] for row in Outcome(guarded).train]
