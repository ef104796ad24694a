"""Planning, storing and reporting, with planted measurements in a folder of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from andrea_ablate.claims import __main__ as command
from andrea_ablate.claims import ledger as ledger_module
from andrea_ablate.claims import results
from andrea_ablate.claims import run as run_module
from andrea_ablate.claims.claim import Claim, Finding, Measurement, Verdict
from andrea_ablate.claims.decide import exact, told
from andrea_ablate.claims.report import PAGE, markdown, number, sentence
from andrea_ablate.claims.results import Result, code_of, firmest, read, write
from andrea_ablate.claims.run import Task, plan, run
from andrea_ablate.composition import resource_root
from andrea_ablate.tracking.store import Store

CLAIM = Claim("a", "L1", "ffn", "identity", "it is four", "", "", ("R-EXACT",), ("C0",))
GPU = Claim("g", "L1", "ffn", "systems", "", "", "", ("R-SYS",), ("G1",))


def four(claim: Claim) -> Measurement:
    return Measurement(worded=(exact("it", 4, equals=4),), seeds=(0, 1))


def five(claim: Claim) -> Measurement:
    return Measurement(worded=(exact("it", 5, equals=4),))


def process(claim: Claim) -> Measurement:
    return Measurement(worded=(exact("it", 4, equals=4),), reported=(told("process", os.getpid()),))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    monkeypatch.setattr(results, "folder", lambda: tmp_path)

    def by(function: object) -> None:
        monkeypatch.setattr(run_module, "measures_of", lambda claim: {"C0": function} if claim is CLAIM else {})

    by(four)
    return by


def test_a_result_is_read_as_it_was_written(measured: object, tmp_path: Path) -> None:
    odd = Measurement((exact("it", float("nan"), low=0),), controls=(Finding("c", "post", why="x"),), run_ids=("r",))
    write(CLAIM, Result("a", "C0", odd.verdict, odd, "hash", 1.5, "2026-01-01", "abc", {"torch": "2"}))
    again = read(CLAIM, "C0")
    assert again is not None
    assert repr(again.measurement) == repr(odd)  # NaN is not equal to itself
    assert again.verdict is Verdict.INCONCLUSIVE
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_was_measured_by_this_code_is_not_measured_again(measured: Callable[[object], None]) -> None:
    first = plan([CLAIM, GPU], "cpu", 60)
    assert [task.claim.id for task in first.now] == ["a"]
    assert first.beyond == ["g"]
    assert run(first.now, lambda line: None) == []
    assert plan([CLAIM], "cpu", 60).current == ["a"]
    assert [task.claim.id for task in plan([CLAIM], "cpu", 60, again=True).now] == ["a"]
    measured(five)
    assert [task.claim.id for task in plan([CLAIM], "cpu", 60).now] == ["a"]


def test_another_verdict_is_said(measured: Callable[[object], None]) -> None:
    run(plan([CLAIM], "cpu", 60).now, lambda line: None)
    measured(five)
    assert run(plan([CLAIM], "cpu", 60).now, lambda line: None) == ["a: SUPPORTED before, CONTRADICTED now"]


@pytest.mark.slow  # starts two processes
def test_processes_measure_what_one_does_and_what_is_timed_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "folder", lambda: tmp_path)
    claims = [ledger_module.claim_of(name) for name in ("ln-moments", "gelu-regimes", "head-product-free")]
    lines: list[str] = []
    for jobs in (1, 2):
        assert run(plan(claims, "cpu", 1e9, again=True).now, lines.append, jobs) == []
    first, second = ({line.split()[0]: line.split()[1] for line in part} for part in (lines[:3], lines[3:]))
    assert first == second and len(first) == 3
    timed = Task(replace(CLAIM, rule=("R-SYS",)), "C0", process, "hash", None)
    ((_, here),) = run_module._results([timed], "", 2)
    ((_, there),) = run_module._results([replace(timed, claim=CLAIM)], "", 2)
    assert isinstance(here, Result) and isinstance(there, Result)
    own, other = (made.measurement.reported[0].value for made in (here, there))
    assert own == os.getpid() != other


def test_a_measurement_that_fails_is_said_and_keeps_the_result(measured: Callable[[object], None]) -> None:
    def broken(claim: Claim) -> Measurement:
        raise ValueError("no such layer")

    run(plan([CLAIM], "cpu", 60).now, lambda line: None)
    measured(broken)
    assert run(plan([CLAIM], "cpu", 60).now, lambda line: None) == ["a: ValueError: no such layer"]
    assert command.verdict_of(CLAIM, firmest(CLAIM)) is Verdict.SUPPORTED


def test_what_does_not_fit_the_budget_is_left(measured: object) -> None:
    assert plan([CLAIM], "cpu", 1).later == ["a"]


def test_a_budget_counts_each_run_that_is_still_to_be_trained_once(
    measured: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "measures_of", lambda claim: {"C0": four})
    claims = [replace(CLAIM, id=name) for name in "ab"]
    for claim, run_ids in zip(claims, (("r0", "r1", "r2"), ("r1", "r2", "r3")), strict=True):
        made = Measurement(worded=(exact("it", 4, equals=4),), run_ids=run_ids)
        write(claim, Result(claim.id, "C0", Verdict.SUPPORTED, made, "stale", 1.0, "2026-01-01", "", {}))
    store = Store(tmp_path / "runs")
    tasks = [Task(claim, "C0", four, "new", read(claim, "C0")) for claim in claims]

    def planned(budget_s: float) -> run_module.Plan:
        return plan(claims, "cpu", budget_s, store=store)

    one = run_module.RUN_S
    assert [task.seconds() for task in tasks] == [1 + 3 * one, 1 + 3 * one]
    assert planned(1e6).seconds == 2 + 4 * one
    assert (len(planned(1 + 3 * one).now), planned(1 + 3 * one).later) == (1, ["b"])
    for run_id in ("r0", "r1", "r2"):
        with store.open(run_id) as writer:
            writer.update(run_id=run_id, status="finished")
    assert planned(1e6).seconds == 2 + one


def test_make_claims_leaves_none_out_for_want_of_time(measured: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a claim took is another machine's time, so no sum of such times may cut one off."""
    (line,) = (line for line in (resource_root() / "Makefile").read_text().splitlines() if "claims run" in line)
    words = line.split(";")[0].split("andrea_ablate.claims ")[1].split()
    planned: list[run_module.Plan] = []
    monkeypatch.setattr(run_module, "run", lambda tasks, say, jobs: [])
    monkeypatch.setattr(run_module, "plan", lambda *given: planned.append(plan(*given)) or planned[-1])
    slow = Result("a", "C0", Verdict.SUPPORTED, four(CLAIM), "hash", 1e6, "2026-01-01", "", {})
    write(CLAIM, slow)
    monkeypatch.setattr(command, "_chosen", lambda given: [CLAIM, GPU])
    assert command.main(words) == 0
    assert ([task.claim.id for task in planned[0].now], planned[0].later) == (["a"], [])


def test_a_claim_without_measurement_is_a_gap_unless_it_needs_a_gpu(measured: object) -> None:
    assert command.verdict_of(CLAIM, firmest(CLAIM)) is Verdict.NOT_MEASURED
    assert command.verdict_of(GPU, firmest(GPU)) is Verdict.OUT_OF_SCALE


def test_the_code_of_a_measurement_holds_the_probes_it_uses() -> None:
    from andrea_ablate.claims.probes import stream
    from andrea_ablate.claims.topics import residual

    used = {f"{item.__module__}.{item.__qualname__}" for item in results.uses(residual.delta_sum)}
    assert {f"{stream.__name__}.{name}" for name in ("sum_error", "sublayers", "_Watched", "cut_residual")} <= used
    assert "andrea_ablate.claims.decide.within" in used
    assert code_of(CLAIM, four) != code_of(CLAIM, five)


def test_numbers_are_told_with_interval_and_doubt() -> None:
    made = Finding("loss", 0.01234, "nats", -0.01, 0.034, 5, Verdict.INCONCLUSIVE, "the interval includes 0", 12)
    assert number(made) == (
        "loss 0.0123 nats [-0.01, 0.034] (n 5): INCONCLUSIVE (the interval includes 0; 12 seeds would settle it)"
    )
    blind = Measurement((exact("it", 4, equals=4),), controls=(exact("broken", 4, equals=4),))
    result = Result("a", "C0", blind.verdict, blind, "", 0, "", "", {})
    assert "the control did not fail" in sentence(CLAIM, result)


def test_the_page_has_every_claim_with_a_verdict() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == 150
    words = {str(word) for word in Verdict}
    assert all(row.split(" | ")[2] in words for row in rows)
    made = {row.split("`")[1]: row.split(" | ")[-1] for row in rows}
    for claim in ledger_module.ledger().values():
        if result := firmest(claim):
            count = len(result.measurement.run_ids)
            assert made[claim.id] == f"`{result.commit}`{f', {count} runs' if count else ''} |"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--kind", "init"]) == 0
    assert capsys.readouterr().out.endswith("7 of 150 claims\n")
    assert command.main(["show", "res-delta-sum"]) == 0
    assert "the lesson, sections L1 and L7" in capsys.readouterr().out
    assert command.main(["show", "res-delta"]) == 2
    assert "did you mean 'res-delta-sum'" in capsys.readouterr().err
    assert command.main(["run", "ln-moments", "--budget", "ten"]) == 2
    assert command.main(["run", "ln-moments", "--jobs", "0"]) == 2


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_every_claim_is_planned_or_says_why_not(scale: str) -> None:
    claims = list(ledger_module.ledger().values())
    made = plan(claims, scale, 1e9, again=True)
    named = {task.claim.id for task in made.now} | {*made.current, *made.later, *made.unwritten, *made.beyond}
    assert named == {claim.id for claim in claims}


def test_the_committed_page_is_the_one_of_the_results() -> None:
    assert (resource_root() / PAGE).read_text(encoding="utf-8") == markdown()


def test_results_are_of_this_code() -> None:
    for claim in ledger_module.ledger().values():
        for at, measure in ledger_module.measures_of(claim).items():
            if result := read(claim, at):
                assert result.code == code_of(claim, measure), f"stale: python -m andrea_ablate.claims run {claim.id}"
