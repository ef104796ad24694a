"""What a sweep plans: jobs, their names, and what they are told that another machine could not know."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from andrea_ablate.config import SWEEP_KEYS, RunConfig, SweepConfig

if TYPE_CHECKING:
    from andrea_ablate.report.compare import Tuned

# Sections that never change a number, so that they name no arm and make no second run.
SHOWN_ONLY = ("name", "tags", "group", "logger", "paths", "hydra", "launcher", *SWEEP_KEYS)
# Settings that tune a design and do not make another one of it.
_TUNING = ("optim.lr", "schedule.warmup_tokens")


@dataclass(frozen=True)
class Job:
    """One planned run: its overrides, the arm and seed it belongs to, its configuration and its id."""

    overrides: list[str]
    arm: str
    cfg: RunConfig
    run_id: str
    point: str = ""  # what else sets it apart from the arm's other runs

    @property
    def design(self) -> str:
        """All choices but what tunes them: arms that share it are one design at several learning rates or warm-ups."""
        return arm_name([override for override in self.overrides if override.partition("=")[0] not in _TUNING])

    @property
    def label(self) -> str:
        return f"{self.arm}{' ' * bool(self.point)}{self.point} seed={self.cfg.seed}"


# Trains jobs as a group; returns, by run id, why those failed that could not even write a record.
Launch = Callable[[Sequence[Job], str], Mapping[str, str]]


@dataclass(frozen=True)
class Factors:
    """What a sweep varies and what follows from it: dotted key -> the swept choice that sets it, key -> its sources.

    ``launcher`` is Hydra's name of what starts the jobs, for the plan.
    """

    declared: Mapping[str, str]
    references: Mapping[str, Sequence[str]]
    settings: SweepConfig
    tuned: Sequence[Tuned] = ()  # the learning rates of the arms, where ``lr_grid`` chose them
    launcher: str = "basic"
    command: Sequence[str] = ()  # the arguments that ask for the sweep


def section(override: str) -> str:
    return re.split(r"[.=/@]", override.lstrip("+~"), maxsplit=1)[0]


def arm_name(overrides: Sequence[str], swept: Collection[str] = ()) -> str:
    """What sets an arm apart: its values of the swept keys, or without any all of its choices; never the seed."""
    from andrea_ablate.report.compare import arm_key

    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[key] = value
    apart = [key for key in swept if key != "seed"]
    shown = apart or [key for key in values if section(key) not in (*SHOWN_ONLY, "seed")]
    return arm_key({key: values[key] for key in shown}) or "default"


def make_job(overrides: list[str], arm: str, cfg: RunConfig) -> Job:
    """Prepare the job's data (once per corpus) and name its run."""
    from andrea_ablate.training.identity import identify

    return Job(overrides, arm, cfg, identify(cfg)[0])


def sweep_name(swept: Sequence[str], jobs: Sequence[Job]) -> str:
    """A folder name for the sweep: what it varies, and a hash of its runs."""
    content = json.dumps(sorted({job.run_id for job in jobs}))
    words = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(swept)).strip("-.")[:60] or "run"
    return f"{words}-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"


def travelling(job: Job, group: str) -> list[str]:
    """Overrides for what the planning process knows: a launcher composes each job anew, on another machine perhaps.

    The device and the path of the operations are those that the plan was made for: a run that found a GPU where the
    plan was made without one would be another run, which the comparison does not look for.
    """
    from andrea_ablate import machine, ops

    device = machine.device_type(job.cfg.trainer.accelerator)
    known = {"trainer.accelerator": device, "ops": ops.path(job.cfg.ops, device)}
    known |= {"name": display_name(job.cfg, job.overrides), "group": job.cfg.group or group}
    quoted = {key: re.sub(r"(\\*)'", r"\1\1\'", value) for key, value in known.items()}
    return [f"{key}='{value}'" for key, value in quoted.items()]


def display_name(cfg: RunConfig, overrides: Sequence[str]) -> str:
    """The run's own name, or its choices."""
    shown = [part for part in overrides if section(part) not in SHOWN_ONLY]
    return cfg.name or " ".join(shown) or "default"
