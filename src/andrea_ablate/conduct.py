"""From planned jobs to their comparison: what is left to train, trained, and what it says."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andrea_ablate.config import NO_LIMIT, MachineConfig, PathsConfig, RunConfig, SweepConfig, model_dims, to_plain
from andrea_ablate.confounds import COMPUTED, Difference, differences, flat, refuse_undeclared
from andrea_ablate.jobs import SHOWN_ONLY, Factors, Job, Launch, arm_name, display_name, make_job, sweep_name
from andrea_ablate.registry import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from andrea_ablate.report.compare import Comparison, RunRow
    from andrea_ablate.tracking.plans import Plan
    from andrea_ablate.tracking.store import Store


def single_run(cfg: RunConfig, overrides: Sequence[str], settings: SweepConfig | None = None) -> float | None:
    """A run on its own: planned, shown and summed up like a sweep of one."""
    model_dims(cfg.model)  # before torch is imported: sizes that do not fit are refused at once
    from andrea_ablate.training.identity import check

    check(cfg)
    job = make_job(list(overrides), arm_name(overrides), cfg)
    losses: list[float | None] = [None]

    def launch(jobs: Sequence[Job], group: str) -> dict[str, str]:
        for job in jobs:
            cfg = replace(job.cfg, group=job.cfg.group or group)
            losses.append(run_job(cfg, overrides, budget=settings.machine if settings else NO_LIMIT))
        return {}

    factors = Factors({}, {}, settings, command=overrides) if settings else None
    end({"none": conduct([job], sweep_name([], [job]), launch, factors)}, Path(cfg.paths.sweeps))
    return losses[-1]


def conduct(jobs: Sequence[Job], name: str, launch: Launch, factors: Factors | None = None) -> Comparison:
    """Print the plan, launch what is missing, print, save and return the comparison.

    Args:
        factors: what the sweep varies, and what else was asked for.
    Raises: ConfigError for arms that differ in what nothing swept declares; KeyboardInterrupt as it comes, after saying
        what is left; SystemExit(0) where only the plan was asked for.
    """
    from andrea_ablate.report.compare import compare, save

    console, store = make_console(), store_of(jobs)
    rows = list(train_missing(jobs, name, launch, factors, console).values())
    comparison = compare(rows, margin=factors.settings.margin, tuned=factors.tuned) if factors else compare(rows)
    console.print(comparison.render())
    folder = Path(jobs[0].cfg.paths.sweeps) / name
    save(comparison, folder)
    console.print(f"Saved in {folder}; records in {store.root}.", style="dim", soft_wrap=True, markup=False)
    page = shlex.join(["python", "-m", "andrea_ablate.report", str(folder), "--runs", str(store.root)])
    console.print(f"As a page: {page}", style="dim", soft_wrap=True, markup=False, highlight=False)
    return comparison


def end(found: Mapping[str, Comparison], folder: Path) -> None:
    """Print and save, in `folder`, what the second of two rules changes.

    Args:
        found: the comparison under each rule of matching.
    Raises: SystemExit(1) when a run did not finish; of those that choose a learning rate some may diverge.
    """
    from andrea_ablate.report.compare import rules_table, save_rules

    if len(found) > 1:
        make_console().print(rules_table(found))
        save_rules(found, folder)
    ended = [row.status for comparison in found.values() for row in comparison.rows]
    chosen_by = [status for comparison in found.values() for one in comparison.tuned for status in one.ended]
    if {*ended} - {"finished"} or {*chosen_by} - {"finished", "diverged"}:
        raise SystemExit(1)


def train_missing(
    jobs: Sequence[Job],
    name: str,
    launch: Launch,
    factors: Factors | None,
    console: Console,
    *,
    check: bool = True,
) -> dict[str, RunRow]:
    """Print the plan, train what is missing of the jobs, and return the rows of all by run id.

    Args:
        check: say what the arms differ in, and refuse what nothing declares.
    """
    from andrea_ablate.ops import library
    from andrea_ablate.progress import Progress, device_lines, plan_table
    from andrea_ablate.tracking import FINAL, check_logger

    store = store_of(jobs)
    unique: dict[str, Job] = {}
    for job in jobs:
        unique.setdefault(job.run_id, job)

    def is_final(job: Job) -> bool:
        return (store.record(job.run_id) or {}).get("status") in FINAL

    missing = [job for job in unique.values() if not is_final(job)]
    if missing:
        check_logger(missing[0].cfg.logger)
    console.print(plan_table(list(unique.values()), missing, store, factors.settings if factors else None))
    if factors and check and len({job.arm for job in jobs}) > 1:
        _say_what_differs(list(unique.values()), missing, store, factors, console)
    without = library.loaded().reason
    if without and any(job.cfg.ops == "auto" for job in missing):
        console.print(f"ops=auto: torch's own operations run, the compiled library is {without}", markup=False)
    if len(unique) < len(jobs):
        console.print(f"{len(jobs) - len(unique)} of {len(jobs)} points are the same runs as others and train once.")
    if factors and factors.settings.plan:
        lines = device_lines(missing, factors.launcher, factors.settings.machine.gpus, store)
        told = lines if missing else "No run is left to train, so none needs a device."
        console.print(told, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(0)
    folder = Path(jobs[0].cfg.paths.sweeps) / name
    stop = _stop_file(jobs[0].cfg.paths, jobs[0].cfg.group or name)
    with suppress(OSError):  # the same folder refuses the comparison, which is then printed all the same
        _plan(unique.values(), name, store, factors.command if factors else ()).save(folder.parent)
        stop.unlink(missing_ok=True)
    failed: Mapping[str, str] = {}
    try:
        if missing:
            with Progress(console, store, missing):
                failed = launch(missing, name)
                if not stop.exists():
                    budget = factors.settings.machine if factors else NO_LIMIT
                    _wait_for_others(missing, name, store, console, budget)
    except KeyboardInterrupt:
        console.print(f"{sum(map(is_final, unique.values()))} of {len(unique)} runs are finished and kept.")
        raise
    if stop.exists():
        console.print("fail_fast=true: a run failed, so no other was started after it.", style="yellow")
        stop.unlink()
    return {job.run_id: row_of(job, store, failed.get(job.run_id, "")) for job in unique.values()}


def _plan(jobs: Iterable[Job], name: str, store: Store, command: Sequence[str]) -> Plan:
    from andrea_ablate.tracking import Plan

    runs = {
        job.run_id: {"arm": job.arm, "seed": job.cfg.seed, "tokens": job.cfg.total_steps * job.cfg.tokens_per_step}
        for job in jobs
    }
    return Plan(name, list(command), os.getcwd(), str(store.root), runs)


def _say_what_differs(
    jobs: Sequence[Job], missing: Sequence[Job], store: Store, factors: Factors, console: Console
) -> None:
    """The lines below the plan. Raises: ConfigError for what nothing that is swept declares, unless it is allowed."""
    from andrea_ablate.matching import unmatched
    from andrea_ablate.report.compare import BUDGET_TOLERANCE

    settings = factors.settings
    arms = {job.arm: job.cfg for job in jobs}
    if settings.match != "none" and (far := unmatched(arms, settings, BUDGET_TOLERANCE)):
        console.print(far, markup=False, highlight=False, style="yellow")
    found = arm_differences(jobs, missing, store, factors)
    if found:
        console.print("The arms differ in what they sweep, and with it in:")
    for item in found:
        origin = f"from {', '.join(item.factors)}" if item.factors else "not declared"
        console.print(f"  {item} ({origin})", markup=False, highlight=False, soft_wrap=True)
    refuse_undeclared(found, settings.allow_confounds)


def arm_differences(jobs: Sequence[Job], missing: Sequence[Job], store: Store, factors: Factors) -> list[Difference]:
    """What the arms differ in: settings, what those come to, and the versions that trained or will train each arm."""
    from andrea_ablate import machine
    from andrea_ablate.training.facts import facts

    settings: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    # All that an arm was or will be trained with: an upgrade between two seeds leaves the seeds paired.
    trained_with: dict[tuple[str, str], dict[str, None]] = {}
    here, waiting = machine.versions(), {job.run_id for job in missing}
    for job in jobs:
        if job.arm not in settings:
            plain = {key: value for key, value in to_plain(job.cfg).items() if key not in (*SHOWN_ONLY, "seed")}
            settings[job.arm] = dict(flat(plain))
            known[job.arm] = {}
            with suppress(ConfigError):  # it cannot be built, and becomes a failed run that says why
                known[job.arm] = facts(job.cfg)
        versions = here if job.run_id in waiting else (store.record(job.run_id) or {}).get("versions", {})
        for name, version in versions.items():
            trained_with.setdefault((job.arm, name), {})[version] = None
    for (arm, name), seen in trained_with.items():
        known[arm][f"versions.{name}"] = " and ".join(seen)
    return differences(settings, known, factors.declared, {**COMPUTED, **factors.references})


def _wait_for_others(jobs: Sequence[Job], group: str, store: Store, console: Console, budget: MachineConfig) -> None:
    """Runs that another process was training meanwhile; should it stop, this one goes on with them."""
    for job in jobs:
        if store.run_is_active(job.run_id):
            said = f"{job.label} is being trained by another process; waiting for it."
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            run_job(replace(job.cfg, group=job.cfg.group or group), job.overrides, wait=True, budget=budget)


def row_of(job: Job, store: Store, failure: str = "") -> RunRow:
    """The comparison's row of one planned run; `failure` is what its launcher said, for a run without an ending."""
    from andrea_ablate.report.compare import row_from_record
    from andrea_ablate.tracking.store import KILLED

    record = store.current(job.run_id)
    if failure and (record["status"] in ("running", "missing") or record.get("reason") == KILLED):
        record = {**record, "status": "failed", "reason": failure}
    return row_from_record(
        record,
        arm=job.arm,
        seed=job.cfg.seed,
        run_id=job.run_id,
        design=job.design,
        lr=job.cfg.optim["lr"],
        warmup_tokens=job.cfg.warmup_steps * job.cfg.tokens_per_step,
    )


def run_job(
    cfg: RunConfig,
    overrides: Sequence[str],
    *,
    wait: bool = False,
    fail_fast: bool = False,
    budget: MachineConfig = NO_LIMIT,
) -> float | None:
    """Train one job of a sweep. A configuration that cannot train is recorded as failed, like any other failure.

    Args:
        wait: see `training.run.run`. fail_fast: do nothing once a run of the group has failed; say so if this one does.
        budget: what the runs of this machine share, see turns.py.
    """
    stop = _stop_file(cfg.paths, cfg.group)
    if fail_fast and stop.exists():
        return None
    try:
        record = _train(cfg, overrides, wait, budget)
    except Exception:
        if fail_fast:
            _touch(stop)
        raise
    if record is None:
        return None  # another process trains it; `conduct` waits for it at the end
    if fail_fast and record["status"] == "failed":
        _touch(stop)
    return record.get("val/loss") if record["status"] == "finished" else None


def _stop_file(paths: PathsConfig, group: str | None) -> Path:
    """It appears when a run fails under fail_fast: jobs of any launcher see it, on whichever machine they are."""
    digest = hashlib.blake2b(str(group).encode(), digest_size=8).hexdigest()  # a group's name may hold any character
    return Path(paths.sweeps) / f".{digest}.failed"


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _train(cfg: RunConfig, overrides: Sequence[str], wait: bool, budget: MachineConfig) -> dict[str, Any] | None:
    """The record of the run, None where another process is at it."""
    from andrea_ablate.tracking.store import RunBusy, Store
    from andrea_ablate.training.identity import identify
    from andrea_ablate.training.run import run
    from andrea_ablate.turns import its_turn

    cfg = replace(cfg, name=display_name(cfg, overrides))
    try:
        with its_turn(cfg, budget):
            return run(cfg, wait=wait)
    except RunBusy:
        return None
    except ConfigError as error:
        run_id, _ = identify(cfg)
        with Store(Path(cfg.paths.runs)).open(run_id) as writer:
            if not (writer.folder / "config.yaml").exists():
                writer.write_config(to_plain(cfg))
            writer.update(run_id=run_id, status="failed", reason=str(error), name=cfg.name)
            writer.error(str(error))
            return writer.record


def make_console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=100)  # a file or a pipe has no width of its own


def store_of(jobs: Sequence[Job]) -> Store:
    from andrea_ablate.tracking import Store

    return Store(Path(jobs[0].cfg.paths.runs))
