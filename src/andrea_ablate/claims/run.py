"""Running claims: which of them fit the budget, measured one by one, each stored as it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from andrea_ablate.claims.claim import DECIDED, Claim
from andrea_ablate.claims.ledger import Measure, measures_of
from andrea_ablate.claims.results import Result, code_of, commit, read, write

log = logging.getLogger("andrea_ablate")
# CPU seconds that a claim is planned with before it has ever run.
GUESS_S = {"CFG": 0.1, "C0": 5.0, "C1": 60.0, "G1": 300.0, "GD": 0.0}


@dataclass(frozen=True)
class Task:
    """One measurement that is due: `last` is the stored result, None before the first."""

    claim: Claim
    at: str
    measure: Measure
    code: str
    last: Result | None

    @property
    def seconds(self) -> float:
        return self.last.cpu_s if self.last else GUESS_S[self.at]


@dataclass(frozen=True)
class Plan:
    """What is measured now, and why the rest is not."""

    now: list[Task]
    current: list[str]  # have a result of this very code
    later: list[str]  # do not fit the budget
    unwritten: list[str]  # nobody wrote a measurement for a scale at hand
    beyond: list[str]  # no scale at hand


def plan(claims: Sequence[Claim], machine: str, budget_s: float, again: bool = False) -> Plan:
    """Choose what to measure: what was never measured first, then what is stale, then (with `again`) the rest."""
    due: list[Task] = []
    made = Plan([], [], [], [], [])
    for claim in claims:
        if not (at_hand := claim.at_hand(machine)):
            made.beyond.append(claim.id)
            continue
        written = {at: measure for at, measure in measures_of(claim).items() if at in at_hand}
        if not written:
            made.unwritten.append(claim.id)
        for at, measure in written.items():
            task = Task(claim, at, measure, code_of(claim, measure), read(claim, at))
            if task.last and task.last.code == task.code and not again:
                made.current.append(claim.id)
            else:
                due.append(task)
    due.sort(key=lambda task: (task.last is not None, bool(task.last and task.last.code == task.code), task.seconds))
    left = budget_s
    for task in due:
        if task.seconds <= left:
            left -= task.seconds
            made.now.append(task)
        else:
            made.later.append(task.claim.id)
    return made


def run(tasks: Sequence[Task], say: Callable[[str], None] = print) -> list[str]:
    """Measure and store each task; one that fails leaves its result as it was and the others to be measured.

    Returns: a sentence for each that failed, and for each decided verdict that is now another decided one.
    """
    from andrea_ablate.machine import versions

    trouble, at_commit = [], commit()
    for task in tasks:
        started = time.process_time()
        try:
            measurement = task.measure(task.claim)
        except Exception as error:
            log.debug("%s", task.claim.id, exc_info=True)
            trouble.append(f"{task.claim.id}: {type(error).__name__}: {error}")
            say(f"{task.claim.id:<24} failed: {error}")
            continue
        result = Result(
            claim=task.claim.id,
            at=task.at,
            verdict=measurement.verdict,
            measurement=measurement,
            code=task.code,
            cpu_s=time.process_time() - started,
            date=date.today().isoformat(),
            commit=at_commit,
            versions=versions(),
        )
        write(task.claim, result)
        say(f"{result.claim:<24} {result.verdict:<16} {result.cpu_s:7.1f} s")
        before = task.last.verdict if task.last else None
        if before in DECIDED and result.verdict in DECIDED and before != result.verdict:
            trouble.append(f"{result.claim}: {before} before, {result.verdict} now")
    return trouble
