"""A sweep from its plan to its comparison: which runs there are, which are left to train, and what they say."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from andrea_ablate.composition import declared_by, references, to_run_config, to_sweep_config
from andrea_ablate.config import KNOBS, SWEEP_KEYS, ModelConfig, RunConfig, SweepConfig, model_dims, to_plain
from andrea_ablate.confounds import COMPUTED, Difference, differences, flat, refuse_undeclared
from andrea_ablate.registry import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from andrea_ablate.report.compare import RunRow
    from andrea_ablate.tracking.store import Store

log = logging.getLogger("andrea_ablate")
# Sections that never change a number, so that they name no arm and make no second run.
_SHOWN_ONLY = ("name", "tags", "group", "logger", "paths", "hydra", *SWEEP_KEYS)
# Settings that tune a design and do not make another one of it.
_TUNING = ("optim.lr", "schedule.warmup_tokens")


@dataclass(frozen=True)
class Job:
    """One planned run: its overrides, the arm and seed it belongs to, its configuration and its id."""

    overrides: list[str]
    arm: str
    cfg: RunConfig
    run_id: str

    @property
    def design(self) -> str:
        """All choices but what tunes them: arms that share it are one design at several learning rates or warm-ups."""
        return arm_name([override for override in self.overrides if override.partition("=")[0] not in _TUNING])

    @property
    def label(self) -> str:
        return f"{self.arm} seed={self.cfg.seed}"


# Trains jobs as a group; returns, by run id, why those failed that could not even write a record.
Launch = Callable[[Sequence[Job], str], Mapping[str, str]]


@dataclass(frozen=True)
class Factors:
    """What a sweep varies and what follows from it: dotted key -> the swept choice that sets it, key -> its sources."""

    declared: Mapping[str, str]
    references: Mapping[str, Sequence[str]]
    settings: SweepConfig


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
        matched: dict[tuple[str, ...], tuple[ModelConfig, str | None]] = {}
        jobs: list[Job] = []
        for part in BasicSweeper.split_arguments(list(last.values()), None)[0]:
            # Composing takes 0.2 s, and between the seeds of an arm one number differs.
            design = tuple(override for override in part if not override.startswith("seed="))
            cfg = composed[design] = composed.get(design) or self._compose(list(part))
            if len(design) < len(part):
                cfg.seed = next(parser.parse_override(o).value() for o in part if o not in design)
            arm, settings = arm_name(part, swept), to_sweep_config(cfg)
            run_cfg = to_run_config(cfg, self.start_folder, part)
            if settings.match != "none":
                if design not in matched:
                    matched[design] = _match(run_cfg, jobs[0].cfg if jobs else run_cfg, settings, swept)
                model, override = matched[design]
                run_cfg = replace(run_cfg, model=model)
                if override:
                    part = [*(o for o in part if not o.startswith(f"{KNOBS[settings.match_knob]}=")), override]
            jobs.append(make_job(list(part), arm, run_cfg))
        factors = Factors(_declared(last, swept, settings), references(cfg), settings)
        conduct(jobs, sweep_name([key for key in swept if key != "seed"], jobs), self._launch, factors)

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


def _declared(overrides: Mapping[str, Any], swept: Sequence[str], settings: SweepConfig) -> dict[str, str]:
    """Dotted keys that the swept overrides set, by themselves or through the YAML files of the options they name."""
    found: dict[str, str] = {}
    if settings.match != "none":
        found[KNOBS[settings.match_knob]] = f"match={settings.match}"
    for key in swept:
        factor = key.lstrip("+")
        values = " ".join(map(str, overrides[key].sweep_string_iterator()))
        found |= dict.fromkeys(declared_by(factor, re.findall(r"\w+", values)), factor)
        found[factor] = factor
    return found


def _match(
    arm: RunConfig, baseline: RunConfig, settings: SweepConfig, swept: Collection[str]
) -> tuple[ModelConfig, str | None]:
    from andrea_ablate.matching import match_model

    key = KNOBS[settings.match_knob]
    if key in swept:
        others = " or ".join(f"match_knob={knob}" for knob in KNOBS if knob != settings.match_knob)
        raise ConfigError(
            f"match={settings.match} would set {key}, which is swept here; give way by {others}, or use match=none"
        )
    return match_model(arm, baseline, settings)


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


def conduct(jobs: Sequence[Job], name: str, launch: Launch, factors: Factors | None = None) -> None:
    """Print the plan, launch what is missing, print and save the comparison.

    Args:
        factors: what the sweep varies; None for a run on its own.
    Raises: ConfigError for arms that differ in what nothing swept declares; SystemExit(1) when a run did not finish;
        KeyboardInterrupt as it comes, after saying what is left.
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
    console.print(plan_table(list(unique.values()), missing, store, factors.settings if factors else None))
    if factors:
        _say_what_differs(list(unique.values()), missing, store, factors, console)
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
    comparison = compare(rows, margin=factors.settings.margin) if factors else compare(rows)
    console.print(comparison.render())
    folder = Path(jobs[0].cfg.paths.sweeps) / name
    save(comparison, folder)
    console.print(f"Saved in {folder}; records in {store.root}.", style="dim", soft_wrap=True, markup=False)
    page = shlex.join(["python", "-m", "andrea_ablate.report", str(folder), "--runs", str(store.root)])
    console.print(f"As a page: {page}", style="dim", soft_wrap=True, markup=False, highlight=False)
    if any(row.status != "finished" for row in comparison.rows):
        raise SystemExit(1)


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
            plain = {key: value for key, value in to_plain(job.cfg).items() if key not in (*_SHOWN_ONLY, "seed")}
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
        design=job.design,
        lr=job.cfg.optim["lr"],
        warmup_tokens=job.cfg.warmup_steps * job.cfg.tokens_per_step,
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
