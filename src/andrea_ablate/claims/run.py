"""Running claims: which of them fit the budget, measured one by one, each stored as it ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import active_children, get_context

from andrea_ablate.checkout import commit
from andrea_ablate.claims.claim import DECIDED, Claim
from andrea_ablate.claims.ledger import Measure, measures_of
from andrea_ablate.claims.results import Result, code_of, read, write
from andrea_ablate.tracking.store import Store

log = logging.getLogger("andrea_ablate")
# CPU seconds that a claim is planned with before it has ever run.
GUESS_S = {"CFG": 0.1, "C0": 5.0, "C1": 60.0, "G1": 300.0, "GD": 0.0}
RUN_S = 7.0  # and for each run that is not in the store: of size=toy, as 38 of them took in a row


@dataclass(frozen=True)
class Task:
    """One measurement that is due: `last` is the stored result, None before the first."""

    claim: Claim
    at: str
    measure: Measure
    code: str
    last: Result | None

    @property
    def runs(self) -> frozenset[str]:
        """What it rested on the last time."""
        return frozenset(self.last.measurement.run_ids if self.last else ())

    def seconds(self, trained: Collection[str] = ()) -> float:
        """What it takes where these runs are trained already; a stored time is that of a store that had some or all."""
        return RUN_S * len(self.runs.difference(trained)) + (self.last.cpu_s if self.last else GUESS_S[self.at])


@dataclass(frozen=True)
class Plan:
    """What is measured now, in about how long, and why the rest is not."""

    now: list[Task]
    current: list[str]  # have a result of this very code
    later: list[str]  # do not fit the budget
    unwritten: list[str]  # nobody wrote a measurement for a scale at hand
    beyond: list[str]  # no scale at hand
    seconds: float = 0.0


def plan(
    claims: Sequence[Claim], machine: str, budget_s: float, again: bool = False, store: Store | None = None
) -> Plan:
    """Choose what to measure: what was never measured first, then what is stale, then (with `again`) the rest.

    Args:
        store: of the runs; those that it has cost nothing, and one that several claims rest on costs once.
    """
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
    trained = {run_id for task in due for run_id in task.runs if store and store.record(run_id)}
    due.sort(
        key=lambda task: (task.last is not None, bool(task.last and task.last.code == task.code), task.seconds(trained))
    )
    total = 0.0
    for task in due:
        if total + (takes := task.seconds(trained)) > budget_s:
            made.later.append(task.claim.id)
            continue
        total += takes
        trained |= task.runs
        made.now.append(task)
    return replace(made, seconds=total)


def run(tasks: Sequence[Task], say: Callable[[str], None] = print, jobs: int = 1) -> list[str]:
    """Measure and store each task; one that fails leaves its result as it was and the others to be measured.

    Args:
        jobs: processes, each with its share of the cores. What is timed is measured alone, after the rest.
    Returns: a sentence for each that failed, and for each decided verdict that is now another decided one.
    """
    trouble, at_commit = [], commit() or ""
    for task, result in _results(tasks, at_commit, jobs):
        if isinstance(result, str):
            trouble.append(f"{task.claim.id}: {result}")
            say(f"{task.claim.id:<24} failed: {result}")
            continue
        write(task.claim, result)
        say(f"{result.claim:<24} {result.verdict:<16} {result.cpu_s:7.1f} s")
        before = task.last.verdict if task.last else None
        if before in DECIDED and result.verdict in DECIDED and before != result.verdict:
            trouble.append(f"{result.claim}: {before} before, {result.verdict} now")
    return trouble


def _results(tasks: Sequence[Task], at_commit: str, jobs: int) -> Iterator[tuple[Task, Result | str]]:
    """Each task with its result as it is there, or with why there is none."""
    apart = [task for task in tasks if jobs > 1 and "R-SYS" not in task.claim.rule]
    if apart:
        context, share = get_context("spawn"), max(1, (os.cpu_count() or 1) // jobs)
        with ProcessPoolExecutor(jobs, context, initializer=_take_threads, initargs=(share,)) as pool:
            # The longest first, so that no process ends long after the others.
            ordered = sorted(apart, key=lambda task: -task.seconds())
            waiting = {pool.submit(_measured, task, at_commit): task for task in ordered}
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in active_children():  # a run takes this as the wish to stop, and can be gone on with
                    process.terminate()
                raise
    for task in tasks:
        if task not in apart:
            yield task, _measured(task, at_commit)


def _take_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _measured(task: Task, at_commit: str) -> Result | str:
    from andrea_ablate.claims.probes.trained import at_scale
    from andrea_ablate.machine import versions

    started = time.process_time()
    try:
        with at_scale(task.at):
            measurement = task.measure(task.claim)
    except Exception as error:
        log.debug("%s", task.claim.id, exc_info=True)
        return f"{type(error).__name__}: {error}"
    return Result(
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
