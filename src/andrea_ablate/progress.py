"""What a person sees before and while runs train: the plan, then one live display that reads the run store."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import rich.progress
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from andrea_ablate import machine
from andrea_ablate.accounting import account
from andrea_ablate.config import SweepConfig, model_dims
from andrea_ablate.matching import mismatch
from andrea_ablate.placement import Place, place
from andrea_ablate.registry import ConfigError
from andrea_ablate.report.cells import ArmName
from andrea_ablate.tracking.store import Store

if TYPE_CHECKING:
    from andrea_ablate.jobs import Job

log = logging.getLogger("andrea_ablate")
SCHEDULERS = {"submitit_slurm": "SLURM", "ray": "Ray"}  # launchers that leave it to them which device a job gets


def plan_table(jobs: Sequence[Job], missing: Sequence[Job], store: Store, settings: SweepConfig | None = None) -> Table:
    """Arms, parameters, cost and what is left to do, with the time that it should take on this machine.

    Where the sweep matches its arms, also the size that gave way and what is left of the mismatch to the first arm.
    """
    match = settings.match if settings else "none"
    arms: dict[str, list[Job]] = {}
    for job in jobs:
        arms.setdefault(job.arm, []).append(job)
    waiting = {job.run_id for job in missing}
    left = "none to train"
    if missing:
        tokens = sum(job.cfg.total_steps * job.cfg.tokens_per_step for job in missing)
        seconds = format_seconds(expected_seconds(missing, store))
        left = f"{len(missing)} to train ({tokens:,} tokens, {seconds} plus start-up)"
    table = Table(
        title=f"Plan: {_counted(len(arms), 'arm')}, {_counted(len(jobs), 'run')}, {left}", title_justify="left"
    )
    shown = (f"{match} to first",) if match != "none" else ()
    for column in ("arm", "parameters", "MFLOP/token", *shown, "tokens/run", "runs", "to train"):
        table.add_column(column, justify="left" if column == "arm" else "right", overflow="fold")
    for arm, members in arms.items():
        cfg = members[0].cfg
        name: RenderableType = ArmName(arm)
        try:
            counts = account(cfg.model, cfg.data.seq_len)
            cells = [f"{counts.params:,}", f"{counts.flops_train / 1e6:.2f}"]
            if settings and match != "none":
                size = getattr(model_dims(cfg.model), settings.match_knob)
                cells.append(f"{100 * mismatch(cfg, jobs[0].cfg, match):+.2f} %, {settings.match_knob} {size}")
        except ConfigError as error:
            name = Group(name, Text(str(error), style="red"))
            cells = ["-"] * (2 + len(shown))
        todo = sum(job.run_id in waiting for job in members)
        table.add_row(name, *cells, f"{cfg.total_steps * cfg.tokens_per_step:,}", str(len(members)), str(todo))
    return table


def device_lines(jobs: Sequence[Job], launcher: str, gpus: int | None, store: Store) -> str:
    """A line per job: the device that it gets, and after how long it is expected to get it.

    A job takes the device that is free first, so times that come out otherwise than expected move those after it.
    They are plain text: a thousand rows of a rich table take a second to draw.

    Args:
        launcher: Hydra's name of it. gpus: how many to plan for, None for those of this machine.
    Raises: ConfigError for a job that wants more GPUs than there are.
    """
    rows = [("job", "arm", "seed", "device", "starts")]
    number = len(machine.gpus()) if gpus is None else gpus
    on_cpu = number == 0 or all(job.cfg.trainer.accelerator == "cpu" for job in jobs)
    one_by_one = launcher == "basic"
    places: list[Place | None] = [None] * len(jobs)
    if launcher not in SCHEDULERS:
        wanted = [1 if on_cpu else job.cfg.trainer.devices for job in jobs]
        there = (os.cpu_count() or 1) if on_cpu else number
        places = list(place(seconds_of(jobs, store), wanted, max(wanted, default=1) if one_by_one else there))
    for index, (job, own) in enumerate(zip(jobs, places, strict=True)):
        if own is None:
            device, start = f"{job.cfg.trainer.devices} that {SCHEDULERS[launcher]} gives", "when it does"
        else:
            device = "cpu" if on_cpu else f"cuda:{','.join(map(str, own.devices))}"
            start = f"after {format_seconds(own.start)}" if own.start else "at once"
        rows.append((str(index), job.arm, str(job.cfg.seed), device, start))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"Devices, with hydra/launcher={launcher}", *lines])


def _counted(n: int, word: str) -> str:
    return f"{n} {word}{'s' * (n != 1)}"


def expected_seconds(jobs: Sequence[Job], store: Store) -> float:
    """Training time of `jobs` one after the other."""
    return sum(seconds_of(jobs, store))


def seconds_of(jobs: Sequence[Job], store: Store) -> list[float]:
    """Training time of each job: FLOPs over the median speed of stored runs, or of a short test; 0 if it cannot be."""
    speeds = []
    for run_id in store.ids()[-50:]:
        record = store.record(run_id) or {}
        if record.get("status") == "finished" and record.get("train_s"):
            speeds.append(record["tokens"] * record["flops_per_token"] / record["train_s"])
    speed = statistics.median(speeds) if speeds else 0.5 * _matmul_speed()
    arms = {job.arm: job.cfg for job in jobs}
    flops = dict.fromkeys(arms, 0)
    for arm, cfg in arms.items():
        with suppress(ConfigError):  # it cannot be built, and costs nothing
            flops[arm] = account(cfg.model, cfg.data.seq_len).flops_train
    seconds = [flops[job.arm] * job.cfg.total_steps * job.cfg.tokens_per_step / speed for job in jobs]
    return [min(taken, job.cfg.trainer.seconds or taken) for taken, job in zip(seconds, jobs, strict=True)]


def _matmul_speed() -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 512
    a = torch.rand(size, size, device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def format_seconds(seconds: float) -> str:
    """An estimate as people say it: ``under 1 s``, ``about 45 s``, ``about 3 min``, ``about 2.5 h``."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


class Progress:
    """A live display of the runs in `jobs`, read from the store by a thread, so it works for every launcher.

    On a terminal: one bar for the sweep and one for each run under way. Elsewhere: a line when a run ends.
    """

    PERIOD_S = 0.5

    def __init__(self, console: Console, store: Store, jobs: Sequence[Job]) -> None:
        self.console, self.store, self.jobs = console, store, jobs
        self._stop = threading.Event()
        self._interrupted: dict[str, tuple[Job, Mapping[str, Any]]] = {}
        self._left = {job.run_id: job for job in jobs}
        self._seen: dict[str, tuple[int, int, int]] = {}  # inode, size and time of each file when it was read last
        for job in jobs:
            if not store.run_is_active(job.run_id):  # what an earlier command left is no news
                self._if_changed(job, "record.json", lambda job: None)
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn(
                "{task.description}", markup=False, table_column=Column(max_width=48, no_wrap=True, overflow="ellipsis")
            ),
            rich.progress.BarColumn(bar_width=16),
            rich.progress.TextColumn("{task.fields[note]}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=1 / self.PERIOD_S,
        )
        self._steps = dict.fromkeys(self._left, 0)
        self._total = self._bars.add_task("all", total=sum(job.cfg.total_steps for job in jobs), note=self._ended)
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._thread = threading.Thread(target=self._watch, name="andrea_ablate-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._bars.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        for job, record in self._interrupted.values():
            self._end(job, record)
        if self.console.is_terminal:
            self._bars.stop()

    def _watch(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            self._look()

    def _look(self) -> None:
        for job in list(self._left.values()):
            try:
                self._if_changed(job, "record.json", self._read_record)
                if job.run_id in self._tasks:
                    self._if_changed(job, "metrics.jsonl", self._read_rows)
            except Exception as error:  # nothing that goes wrong with a display may end the training that it shows
                log.debug("progress display: %s: %s", job.label, error, exc_info=True)

    def _if_changed(self, job: Job, name: str, read: Callable[[Job], object]) -> None:
        """Read one file of the run, unless it is as it was when it was read last."""
        path = f"{self.store.root}/{job.run_id}/{name}"
        try:
            found = os.stat(path)
        except OSError:
            return
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._seen.get(path) != state:
            read(job)
            self._seen[path] = state

    def _read_record(self, job: Job) -> None:
        record = self.store.record(job.run_id)
        if record is None:
            return
        self._interrupted.pop(job.run_id, None)
        if record["status"] == "interrupted":
            self._interrupted[job.run_id] = job, record  # until the end: a launcher may requeue it, and then it goes on
        elif record["status"] != "running":
            self._end(job, record)
        elif job.run_id not in self._tasks:
            self._tasks[job.run_id] = self._bars.add_task(job.label, total=job.cfg.total_steps, note="")

    def _read_rows(self, job: Job) -> None:
        row = self.store.last_row(job.run_id)
        if row is None or "train/loss" not in row:
            return
        task = self._tasks[job.run_id]
        note = f"step {row['step']}/{job.cfg.total_steps} loss {row['train/loss']:.3f}"
        self._bars.update(task, completed=row["step"], note=note)
        self._advance(job, row["step"])

    def _advance(self, job: Job, step: int) -> None:
        self._steps[job.run_id] = step
        self._bars.update(self._total, completed=sum(self._steps.values()), note=self._ended)

    @property
    def _ended(self) -> str:
        return f"{len(self.jobs) - len(self._left)}/{len(self.jobs)} runs"

    def _end(self, job: Job, record: Mapping[str, Any]) -> None:
        del self._left[job.run_id]
        if job.run_id in self._tasks:
            self._bars.remove_task(self._tasks.pop(job.run_id))
        self._advance(job, job.cfg.total_steps)
        finished = record["status"] == "finished" and "val/loss" in record
        told = f"validation loss {record['val/loss']:.4f}" if finished else record["reason"]
        line = f"[{self._ended}] {job.label}: {record['status']}, {told}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
