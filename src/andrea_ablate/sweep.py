"""A sweep from its plan to its comparison: which runs there are, which are left to train, and what they say."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from andrea_ablate.composition import to_run_config
from andrea_ablate.config import RunConfig, model_dims, to_plain
from andrea_ablate.registry import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from andrea_ablate.report.compare import RunRow
    from andrea_ablate.tracking.store import Store

log = logging.getLogger("andrea_ablate")
# Sections that never change a number, so that they name no arm and make no second run.
_SHOWN_ONLY = ("name", "tags", "group", "logger", "paths", "hydra")


@dataclass(frozen=True)
class Job:
    """One planned run: its overrides, the arm and seed it belongs to, its configuration and its id."""

    overrides: list[str]
    arm: str
    cfg: RunConfig
    run_id: str

    @property
    def label(self) -> str:
        return f"{self.arm} seed={self.cfg.seed}"


# Trains jobs as a group; returns, by run id, why those failed that could not even write a record.
Launch = Callable[[Sequence[Job], str], Mapping[str, str]]


class AblateSweeper(Sweeper):
    """Every combination of the swept values, as Hydra's basic sweeper, with a plan before and a comparison after.

    Runs whose record is final are not launched again; equal points are launched once; a job that fails is a row.

    Args:
        params: swept values from a configuration file, ``{norm: "pre,post"}``; the command line comes after them.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.start_folder: str = config.hydra.runtime.cwd
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        # As in a single run, the last value given for a key counts.
        last = {override.get_key_element(): override for override in overrides}
        swept = [key for key, override in last.items() if override.is_sweep_override()]
        for key in swept:
            if not last[key].is_discrete_sweep():
                raise ConfigError(f"'{last[key].input_line}': give the values, or range(start,stop,step)")
            if not list(last[key].sweep_iterator()):
                raise ConfigError(f"'{last[key].input_line}' has no values")
            if _section(key) in (*_SHOWN_ONLY, "experiments"):
                raise ConfigError(f"'{last[key].input_line}': {key} takes one value; sweep over a setting of the runs")
        composed: dict[tuple[str, ...], DictConfig] = {}
        jobs = []
        for part in BasicSweeper.split_arguments(list(last.values()), None)[0]:
            # Composing takes 0.2 s, and between the seeds of an arm one number differs.
            design = tuple(override for override in part if not override.startswith("seed="))
            cfg = composed[design] = composed.get(design) or self._compose(list(part))
            if len(design) < len(part):
                cfg.seed = next(parser.parse_override(o).value() for o in part if o not in design)
            jobs.append(make_job(list(part), arm_name(part, swept), to_run_config(cfg, self.start_folder)))
        conduct(jobs, sweep_name([key for key in swept if key != "seed"], jobs), self._launch)

    def _compose(self, overrides: list[str]) -> DictConfig:
        assert self.hydra_context is not None and self.config is not None
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg

    def _launch(self, jobs: Sequence[Job], group: str) -> dict[str, str]:
        assert self.launcher is not None
        # The launcher composes each job anew, in another process perhaps: what this one knows travels as overrides.
        planned = [[*job.overrides, *([f"group={group}"] if job.cfg.group is None else [])] for job in jobs]
        try:
            returns = self.launcher.launch(planned, initial_job_idx=0)
        except Exception as error:  # a killed worker, a cluster that refuses: what was trained is still compared
            return {job.run_id: _reason(error) for job in jobs}
        failed = {job.run_id: back._return_value for job, back in zip(jobs, returns, strict=True)}
        return {run_id: _reason(error) for run_id, error in failed.items() if isinstance(error, Exception)}


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _section(override: str) -> str:
    return re.split(r"[.=/@]", override.lstrip("+~"), maxsplit=1)[0]


def arm_name(overrides: Sequence[str], swept: Collection[str] = ()) -> str:
    """What sets an arm apart: its values of the swept keys, or without any all of its choices; never the seed."""
    from andrea_ablate.report.compare import arm_key

    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[key] = value
    apart = [key for key in swept if key != "seed"]
    shown = apart or [key for key in values if _section(key) not in (*_SHOWN_ONLY, "seed")]
    return arm_key({key: values[key] for key in shown}) or "default"


def make_job(overrides: list[str], arm: str, cfg: RunConfig) -> Job:
    """Prepare the job's data (once per corpus) and name its run."""
    from andrea_ablate.training.run import identify

    return Job(overrides, arm, cfg, identify(cfg)[0])


def sweep_name(swept: Sequence[str], jobs: Sequence[Job]) -> str:
    """A folder name for the sweep: what it varies, and a hash of its runs."""
    content = json.dumps(sorted({job.run_id for job in jobs}))
    words = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(swept)).strip("-.")[:60] or "run"
    return f"{words}-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"


def run_job(cfg: RunConfig, overrides: Sequence[str], *, wait: bool = False) -> float | None:
    """Train one job of a sweep. A configuration that cannot train is recorded as failed, like any other failure."""
    from andrea_ablate.tracking.store import RunBusy, Store
    from andrea_ablate.training.run import identify, run

    if cfg.name is None:
        shown = [part for part in overrides if _section(part) not in _SHOWN_ONLY]
        cfg = replace(cfg, name=" ".join(shown) or "default")
    try:
        record = run(cfg, wait=wait)
    except RunBusy:
        return None  # another process trains it; `conduct` waits for it at the end
    except ConfigError as error:
        run_id, _ = identify(cfg)
        with Store(Path(cfg.paths.runs)).open(run_id) as writer:
            if not (writer.folder / "config.yaml").exists():
                writer.write_config(to_plain(cfg))
            writer.update(run_id=run_id, status="failed", reason=str(error), name=cfg.name)
            writer.error(str(error))
        return None
    return record.get("val/loss") if record["status"] == "finished" else None


def single_run(cfg: RunConfig, overrides: Sequence[str]) -> float | None:
    """A run on its own: planned, shown and summed up like a sweep of one."""
    model_dims(cfg.model)  # before torch is imported: sizes that do not fit are refused at once
    from andrea_ablate.training.run import check

    check(cfg)
    job = make_job(list(overrides), arm_name(overrides), cfg)
    losses: list[float | None] = [None]

    def launch(jobs: Sequence[Job], group: str) -> dict[str, str]:
        for job in jobs:
            losses.append(run_job(replace(job.cfg, group=job.cfg.group or group), overrides))
        return {}

    conduct([job], sweep_name([], [job]), launch)
    return losses[-1]


def conduct(jobs: Sequence[Job], name: str, launch: Launch) -> None:
    """Print the plan, launch what is missing, print and save the comparison.

    Raises: SystemExit(1) when a run did not finish; KeyboardInterrupt as it comes, after saying what is left.
    """
    from rich.console import Console

    from andrea_ablate.ops import library
    from andrea_ablate.progress import Progress, plan_table
    from andrea_ablate.report.compare import compare, save
    from andrea_ablate.tracking import Store, check_logger
    from andrea_ablate.training.run import FINAL

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)  # a file or a pipe has no width of its own
    store = Store(Path(jobs[0].cfg.paths.runs))
    unique: dict[str, Job] = {}
    for job in jobs:
        unique.setdefault(job.run_id, job)

    def is_final(job: Job) -> bool:
        return (store.record(job.run_id) or {}).get("status") in FINAL

    missing = [job for job in unique.values() if not is_final(job)]
    if missing:
        check_logger(missing[0].cfg.logger)
    console.print(plan_table(list(unique.values()), missing, store))
    without = library.loaded().reason
    if without and any(job.cfg.ops == "auto" for job in missing):
        console.print(f"ops=auto: torch's own operations run, the compiled library is {without}", markup=False)
    if len(unique) < len(jobs):
        console.print(f"{len(jobs) - len(unique)} of {len(jobs)} points are the same runs as others and train once.")
    failed: Mapping[str, str] = {}
    try:
        if missing:
            with Progress(console, store, missing):
                failed = launch(missing, name)
                _wait_for_others(missing, name, store, console)
    except KeyboardInterrupt:
        console.print(f"{sum(map(is_final, unique.values()))} of {len(unique)} runs are finished and kept.")
        raise
    rows = [row_of(job, store, failed.get(job.run_id, "")) for job in unique.values()]
    comparison = compare(rows)
    console.print(comparison.render())
    folder = Path(jobs[0].cfg.paths.sweeps) / name
    save(comparison, folder)
    console.print(f"Saved in {folder}; records in {store.root}.", style="dim", soft_wrap=True, markup=False)
    if any(row.status != "finished" for row in comparison.rows):
        raise SystemExit(1)


def _wait_for_others(jobs: Sequence[Job], group: str, store: Store, console: Console) -> None:
    """Runs that another process was training meanwhile; should it stop, this one goes on with them."""
    for job in jobs:
        if store.run_is_active(job.run_id):
            said = f"{job.label} is being trained by another process; waiting for it."
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            run_job(replace(job.cfg, group=job.cfg.group or group), job.overrides, wait=True)


def row_of(job: Job, store: Store, failure: str = "") -> RunRow:
    """The comparison's row of one planned run; `failure` is what its launcher said, for a run without an ending."""
    from andrea_ablate.report.compare import RunRow

    record = store.record(job.run_id) or {}
    status, reason = record.get("status", "missing"), record.get("reason", "")
    if status in ("running", "missing") and failure:
        status, reason = "failed", failure
    elif status == "running" and not store.run_is_active(job.run_id):
        status, reason = "interrupted", "its process ended without a word, as when it is killed"
    loss = record.get("val/loss")
    seconds = record.get("train_s")
    return RunRow(
        arm=job.arm,
        seed=job.cfg.seed,
        status=status,
        reason=reason,
        run_id=job.run_id,
        val_loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
        val_bpb=record.get("val/bpb"),
        params=record.get("params"),
        non_embedding=record.get("non_embedding_params"),
        flops_per_token=record.get("flops_per_token"),
        tokens=record.get("tokens"),
        tokens_per_s=record["tokens"] / seconds if seconds else None,
        train_s=seconds,
        token_hash=record.get("token_hash"),
        initial_loss=record.get("initial_loss"),
        unigram_entropy=(record.get("data") or {}).get("unigram_entropy"),
        paths=record.get("paths") or {},
    )
