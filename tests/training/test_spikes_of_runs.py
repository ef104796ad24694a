"""Spikes of a run: in its rows and its record, also when the run stops within one and goes on."""

from __future__ import annotations

import json
import math

import pytest
from outcome import Outcome, Spoil, fresh

from andrea_ablate.training.run import run
from support import Compose, During


def test_spikes_are_counted_in_the_rows_and_kept_in_the_record(epochs: Compose, spoil: Spoil) -> None:
    cfg = epochs("trainer.diverged_factor=10")
    spoil({19: ("nll", 6.0 * 32), 20: ("nll", math.nan)})
    (spike,) = run(cfg)["spikes"]
    outcome = Outcome(cfg)
    assert [row["spike/count"] for row in outcome.train] == [0] * 18 + [1] * 6
    before = sorted(row["train/loss"] for row in outcome.train[2:18])
    assert (spike["start"], spike["peak"], spike["end"], spike["height"]) == (19, 20, 21, math.inf)
    assert min(before) < spike["baseline"] < max(before)
    assert spike["lost"] == pytest.approx(6.0 - spike["baseline"])


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_run_stopped_within_a_spike_ends_in_the_same_record(
    epochs: Compose, spoil: Spoil, during: During, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cfg = epochs("trainer.diverged_factor=10", "trainer.checkpoint_every=1")
    spoil({step: ("nll", 6.0 * 32) for step in (18, 19, 20)})
    whole = run(cfg)
    stopped = fresh(cfg, tmp_path_factory.mktemp("stopped"))
    during(19, lambda: (_ for _ in ()).throw(OSError("disk")))
    assert run(stopped)["status"] == "failed"
    again = run(stopped)
    assert again["status"] == "finished" and again["resumed_from"] == 18
    assert json.dumps(again["spikes"]) == json.dumps(whole["spikes"])
    assert Outcome(stopped).train == Outcome(cfg).train
    assert [(s["start"], s["end"]) for s in whole["spikes"]] == [(18, 21)]
