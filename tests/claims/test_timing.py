"""Timings have the form that R-SYS asks for; what they say depends on the machine, so nothing here judges them."""

from __future__ import annotations

import pytest

from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.decide import timing
from andrea_ablate.claims.ledger import claim_of, measures_of
from andrea_ablate.claims.probes import timing as module


def test_calls_take_turns_and_the_first_is_its_own_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_UP", 1)
    monkeypatch.setattr(module, "REPEATS", 2)
    called: list[str] = []
    times = module.interleaved({"a": lambda: called.append("a"), "b": lambda: called.append("b")})
    assert called == ["a", "b", "a"] * 3
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2, "again": 2}


def test_each_call_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> None:
        now[0] += seconds

    times = module.interleaved({"short": lambda: takes(1), "long": lambda: takes(3)})
    found = timing("t", times["long"], times["short"], times["again"])
    assert (found.value, found.low, found.high, found.n) == (3, 3, 3, 40)
    assert found.verdict is Verdict.SUPPORTED


@pytest.mark.slow  # builds a model of 96 layers
@pytest.mark.parametrize("claim_id", ["norm-memory-bound", "rms-faster", "depth-latency"])
def test_each_timed_claim_is_measured_whole(claim_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_UP", 1)
    monkeypatch.setattr(module, "REPEATS", 2)
    claim = claim_of(claim_id)
    made = measures_of(claim)["C1"](claim)
    assert made.worded
    timed = [finding for finding in made.worded if finding.unit == "x"]
    assert timed and all(finding.verdict is Verdict.INCONCLUSIVE and finding.n == 2 for finding in timed)
