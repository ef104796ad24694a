"""When training is over: bad steps, what is kept of them, and what the command says."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outcome import Outcome, Spoil, Straight

from andrea_ablate.config import RunConfig
from andrea_ablate.tracking.store import Store
from andrea_ablate.training import checkpoint
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import run
from support import Cli, Compose


def test_learning_rate_of_a_million_ends_as_diverged(epochs: Compose) -> None:
    cfg = epochs("optim.lr=1e6", "trainer.tokens=6400", "trainer.checkpoint_every=1")
    assert cfg.total_steps == 200
    record = run(cfg)
    outcome = Outcome(cfg)
    assert record["status"] == "diverged"
    losses = [row["train/loss"] for row in outcome.train]
    good = [step for step, loss in enumerate(losses, 1) if math.isfinite(loss) and loss <= 3 * losses[0]]
    first_bad = max(good) + 1
    assert len(losses) == first_bad + 2 < 200  # stopped within diverged_after = 3 bad steps
    assert f"from step {first_bad} on" in record["reason"]
    assert outcome.checkpoints() and max(outcome.checkpoints()) < first_bad
    for path in (outcome.folder / "checkpoints").glob("*.ckpt"):
        weights = torch.load(path, weights_only=True)["model"]
        assert all(bool(value.isfinite().all()) for value in weights.values())
    assert outcome.weights is None


def test_diverged_run_is_a_result_and_is_not_trained_again(
    epochs: Compose, spoil: Spoil, digests: list[tuple[int, str]]
) -> None:
    cfg = epochs()
    spoil({step: ("nll", math.nan) for step in (7, 8, 9)})
    record = run(cfg)
    digests.clear()
    assert run(cfg) == record and not digests


@pytest.mark.parametrize(("key", "value"), [("nll", math.nan), ("nll", math.inf), ("grad_norm", math.nan)])
def test_nonfinite_steps_end_a_run_after_three(key: str, value: float, epochs: Compose, spoil: Spoil) -> None:
    cfg = epochs("trainer.checkpoint_every=1")
    spoil({step: (key, value) for step in (7, 8, 9, 10)})
    record = run(cfg)
    assert record["status"] == "diverged"
    assert record["reason"] == "loss or its gradient not finite from step 7 on"
    assert [row["step"] for row in Outcome(cfg).train] == list(range(1, 10))
    assert Outcome(cfg).checkpoints() == [5, 6]
    assert record["nonfinite_values"] == 3


def test_loss_far_above_the_first_one_ends_a_run(epochs: Compose, spoil: Spoil) -> None:
    cfg = epochs("trainer.diverged_after=2", "trainer.diverged_factor=2.5")
    first = first_loss(cfg)
    spoil({4: ("nll", 2.6 * first * 32), 6: ("nll", 2.4 * first * 32), 7: ("nll", 2.6 * first * 32)})
    spoil({8: ("nll", 2.6 * first * 32)})
    record = run(cfg)
    assert record["status"] == "diverged"
    assert record["reason"] == f"loss above {2.5 * first:.2f}, 2.5 times the initial loss, from step 7 on"


def first_loss(cfg: RunConfig) -> float:
    once = replace(cfg, trainer=replace(cfg.trainer, tokens=cfg.tokens_per_step))
    run(once)
    return float(Outcome(once).train[0]["train/loss"])


def test_two_bad_steps_are_survived_and_no_checkpoint_is_written_in_them(epochs: Compose, spoil: Spoil) -> None:
    cfg = epochs("trainer.checkpoint_every=1")
    spoil({step: ("nll", math.nan) for step in (7, 8, 10, 11, 13)})
    written: list[int] = []
    original = checkpoint.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint,
            "save",
            lambda folder, step, state: (written.append(step), original(folder, step, state)),
        )
        record = run(cfg)
    assert record["status"] == "finished"
    assert written == [step for step in range(1, 24) if step not in (7, 8, 10, 11, 13)]


@pytest.mark.parametrize("key", ["nll", "grad_norm"])
def test_run_that_ends_on_a_bad_step_has_not_finished(key: str, epochs: Compose, spoil: Spoil) -> None:
    cfg = epochs()
    spoil({23: (key, math.nan), 24: (key, math.nan)})
    record = run(cfg)
    assert (record["status"], record["reason"]) == ("diverged", "loss or its gradient not finite from step 23 on")
    assert Outcome(cfg).weights is None


def test_run_whose_last_validation_is_not_finite_has_not_finished(
    epochs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModule, "evaluate", lambda self, batches: {"val/loss": math.nan, "val/tokens": 35.0})
    record = run(epochs())
    assert (record["status"], record["reason"]) == ("diverged", "validation loss not finite after step 24")


@pytest.mark.slow  # several runs
def test_signal_in_a_bad_step_goes_back_to_before_it(
    epochs: Compose, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = epochs()
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        outputs = original(self, batch, batch_idx)
        if self.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            outputs["nll"] = torch.tensor(math.nan)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
    assert Outcome(cfg).checkpoints() == [5]
    run(cfg)
    assert Outcome(cfg).record["resumed_from"] == 5
    assert Outcome(cfg).final == straight().final


@pytest.mark.slow  # several runs
def test_sweep_goes_on_past_a_diverged_arm_and_the_exit_status_says_so(cli: Cli, tmp_path: Path) -> None:
    answer = cli("-m", "optim.lr=1e6,1e-3", "trainer.tokens=2560")
    assert answer.status == 1
    assert "diverged" in answer.out
    store = Store(tmp_path / "runs")
    found = {store.config(name)["optim"]["lr"]: (store.record(name) or {})["status"] for name in store.ids()}
    assert found == {1e6: "diverged", 1e-3: "finished"}
