"""Hydra's multirun as a sweep: which runs the swept values come to, at which learning rates, under which rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from andrea_ablate.arms import Arms, values_of
from andrea_ablate.composition import declared_by, to_run_config
from andrea_ablate.conduct import arm_differences, conduct, end, make_console, store_of, train_missing
from andrea_ablate.config import (
    KNOBS,
    ModelConfig,
    RunConfig,
    SweepConfig,
    sweep_config,
    with_seeds,
)
from andrea_ablate.confounds import refuse_undeclared
from andrea_ablate.jobs import SHOWN_ONLY, Factors, Job, arm_name, make_job, section, sweep_name, travelling
from andrea_ablate.registry import ConfigError

if TYPE_CHECKING:
    from andrea_ablate.report.compare import Comparison, RunRow

log = logging.getLogger("andrea_ablate")


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
        self.launcher_name: str = config.hydra.runtime.choices["hydra/launcher"]
        if config.hydra.launcher.get("n_jobs") == -1:  # joblib's word for as many as there are cores
            _limit_to_gpus(config)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from andrea_ablate.tuning import LR, check_tuning, rates

        assert self.hydra_context is not None and self.config is not None
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
            if section(key) in (*SHOWN_ONLY, "experiments"):
                raise ConfigError(f"'{last[key].input_line}': {key} takes one value; sweep over a setting of the runs")
        choices = {key: values_of(override) for key, override in last.items()}
        arms = Arms(choices, self._compose)
        first = arms.at({})[1]
        settings, points = sweep_config(first), arms.points()
        if settings.lr_grid:
            check_tuning(settings, choices)
            grid, seeds = ([f"{LR}={lr!r}" for lr in rates(settings)], [f"seed={seed}" for seed in settings.lr_seeds])
            arms = Arms(
                {**choices, LR: grid, "seed": [*choices.get("seed", [f"seed={first['seed']}"]), *seeds]}, self._compose
            )
        planner = Planner(arms, swept, self.start_folder)
        command = ["-m", *_without_mode(self.config.hydra.overrides.hydra), *arguments]
        rules = dict.fromkeys((settings.match, *([settings.match_also] * (settings.match_also != "none"))))
        under = {rule: replace(settings, match=rule) for rule in rules}
        # All of them before anything trains: what cannot be planned is refused now.
        plans = {rule: [planner.job(point, under[rule]) for point in points] for rule in rules}
        results: dict[str, Comparison] = {}
        for rule, jobs in plans.items():
            declared = _declared(last, swept, under[rule])
            factors = Factors(declared, arms.references, under[rule], launcher=self.launcher_name, command=command)
            if settings.lr_grid:
                jobs, factors = self._tuned(jobs, planner, points, factors)
            results[rule] = conduct(jobs, sweep_name(_apart(swept), jobs), self._launch, factors)
        end(results, Path(jobs[0].cfg.paths.sweeps) / sweep_name(_apart(swept), jobs))

    def _tuned(
        self,
        planned: Sequence[Job],
        planner: Planner,
        points: Sequence[Mapping[str, str]],
        factors: Factors,
    ) -> tuple[list[Job], Factors]:
        """The planned jobs, each at the learning rate that its arm was found best at; trains what that takes."""
        from andrea_ablate.tuning import LR, check_seeds, select

        settings, console = factors.settings, make_console()
        check_seeds(settings, (job.cfg.seed for job in planned))
        refuse_undeclared(arm_differences(planned, planned, store_of(planned), factors), settings.allow_confounds)
        arms = {job.arm: point for job, point in zip(planned, points, strict=True)}  # any point: its seed is replaced
        seeds = ", ".join(map(str, settings.lr_seeds))
        told = f"First the learning rates, on seeds {seeds}; then {len(planned)} runs at those chosen."
        console.print(told, markup=False, highlight=False)

        def make(arm: str, lr: float, seed: int) -> Job:
            job = planner.job({**arms[arm], LR: f"{LR}={lr!r}", "seed": f"seed={seed}"}, settings)
            return replace(job, point=f"{LR}={lr:g}")

        def train(jobs: Sequence[Job]) -> Mapping[str, RunRow]:
            name = sweep_name([*_apart(planner.swept), "lr_grid"], jobs)
            return train_missing(jobs, name, self._launch, factors, console, check=False)

        tuned = select({arm: partial(make, arm) for arm in arms}, settings, train)
        best = {one.arm: f"{LR}={one.lr!r}" for one in tuned}
        jobs = [planner.job({**point, LR: best[job.arm]}, settings) for job, point in zip(planned, points, strict=True)]
        return jobs, replace(factors, declared={**factors.declared, LR: "lr_grid"}, tuned=tuned)

    def _compose(self, overrides: list[str]) -> DictConfig:
        assert self.hydra_context is not None and self.config is not None
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg

    def _launch(self, jobs: Sequence[Job], group: str) -> dict[str, str]:
        assert self.launcher is not None
        planned = [[*job.overrides, *travelling(job, group)] for job in jobs]
        try:
            returns = self.launcher.launch(planned, initial_job_idx=0)
        except Exception as error:  # a killed worker, a cluster that refuses: what was trained is still compared
            return {job.run_id: _reason(error) for job in jobs}
        failed = {job.run_id: back._return_value for job, back in zip(jobs, returns, strict=True)}
        return {run_id: _reason(error) for run_id, error in failed.items() if isinstance(error, Exception)}


class Planner:
    """From one point of a sweep to its job; the first one is the baseline that the others are matched to.

    Args:
        swept: the keys that set an arm apart.
    """

    def __init__(self, arms: Arms, swept: Sequence[str], start_folder: str) -> None:
        self.arms, self.swept, self.start_folder = arms, swept, start_folder
        self.matched: dict[tuple[str, ...], tuple[ModelConfig, str | None]] = {}
        self.baseline: RunConfig | None = None
        self.checked: dict[str, RunConfig] = {}

    def job(self, point: Mapping[str, str], settings: SweepConfig) -> Job:
        """The job of a point, see `Arms.at`."""
        from andrea_ablate.tuning import LR

        part, plain = self.arms.at(point)
        cfg = self._run_config(part, plain)
        self.baseline = self.baseline or cfg
        if settings.match != "none":
            design = (settings.match, *(o for o in part if not o.startswith(("seed=", f"{LR}="))))
            if design not in self.matched:
                self.matched[design] = _match(cfg, self.baseline, settings, self.swept)
            model, override = self.matched[design]
            cfg = replace(cfg, model=model)
            if override:
                part = [*(o for o in part if not o.startswith(f"{KNOBS[settings.match_knob]}=")), override]
        return make_job(part, arm_name(part, self.swept), cfg)

    def _run_config(self, part: Sequence[str], plain: dict[str, Any]) -> RunConfig:
        """As `composition.to_run_config`, once for points that differ in their seeds alone."""
        data = plain["data"] if isinstance(plain["data"], dict) else {}
        seeds = plain.get("seed"), data.get("seed")
        key = repr(([o for o in part if not o.startswith("seed=")], {**plain, "seed": 0, "data": {**data, "seed": 0}}))
        if key not in self.checked:
            self.checked[key] = to_run_config(plain, self.start_folder, part)
        return with_seeds(self.checked[key], *seeds)


def _apart(swept: Sequence[str]) -> list[str]:
    """The swept keys that set arms apart."""
    return [key for key in swept if key != "seed"]


def _without_mode(overrides: Iterable[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("hydra.mode=")]  # -m says it


def _limit_to_gpus(config: DictConfig) -> None:
    """Jobs that train on GPUs: as many at once as there are GPUs for."""
    from andrea_ablate import machine

    if machine.device_type(config.trainer.accelerator) == "cuda":
        config.hydra.launcher.n_jobs = max(1, len(machine.gpus()) // config.trainer.devices)


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
