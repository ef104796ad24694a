"""Runs on one machine take turns: each claims its cores, memory and GPUs, and waits while they are not free.

The folder of claims belongs to the machine and the user, so that sweeps of any folder see one another. A claim is a
file that its process holds locked: it ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from andrea_ablate.config import MachineConfig, RunConfig, model_dims
from andrea_ablate.registry import ConfigError

PERIOD_S = 0.5  # how often a waiting run looks again
SCHEDULERS = ("SLURM_JOB_ID", "RAY_JOB_ID")  # whoever starts a job there has given it devices of its own
log = logging.getLogger("andrea_ablate")


@dataclass(frozen=True)
class Need:
    """What one run takes of the machine while it trains; `gpus` of those in ``CUDA_VISIBLE_DEVICES``."""

    cores: int
    memory_gib: float
    gpus: int = 0


def need_of(cfg: RunConfig, threads: int, device: str) -> Need:
    """The need of one run: its processes with `threads` each, the memory it is expected to hold, its GPUs.

    Memory is 0.6 GiB for a process with torch, 16 bytes a parameter (weight, gradient, two moments) and the activations
    that the backward pass reads, as in a block with attention that keeps no scores; nano runs peak at 0.6 to 0.8 GiB.
    """
    from andrea_ablate.accounting import account

    model, ranks = cfg.model, cfg.trainer.devices
    dims = model_dims(model)
    per_token = model.n_layers * (8 * dims.d_model + 3 * dims.d_ff) + 2 * dims.padded_vocab
    tokens = cfg.tokens_per_step / cfg.trainer.accumulate
    held = 16 * account(model, cfg.data.seq_len).params * ranks + 4 * per_token * tokens
    on_gpu = device == "cuda"
    gib = 0.6 * ranks + (0.0 if on_gpu else held / 2**30)
    return Need(ranks if on_gpu else ranks * threads, gib, ranks if on_gpu else 0)


@contextmanager
def its_turn(cfg: RunConfig, budget: MachineConfig) -> Iterator[None]:
    """Wait for room for one run; its GPUs become the visible devices of this process, for it and those after it."""
    import torch

    from andrea_ablate import machine

    device = machine.device_type(cfg.trainer.accelerator)
    need, gpus = need_of(cfg, torch.get_num_threads(), device), machine.gpus()
    if any(name in os.environ for name in SCHEDULERS):
        need = replace(need, gpus=0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpus = gpus[: cfg.trainer.devices]  # too late for others
    with turn(cfg.name or "a run", need, budget, gpus) as own:
        if own:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        yield


def claims_folder() -> Path:
    """Where this user's runs on this machine say what they take."""
    return Path(tempfile.gettempdir()) / f"andrea_ablate-{os.getuid()}"


@contextmanager
def turn(label: str, need: Need, budget: MachineConfig, gpus: Sequence[str] = ()) -> Iterator[list[str]]:
    """Wait until `need` fits beside the runs under way, in the order of asking; yield the GPUs that are this run's.

    Args:
        label: the run, for whoever waits for it.
        budget: what all runs together may take; None for no limit. Runs without a limit are counted by those with one.
        gpus: names of the GPUs to choose from.
    Raises: ConfigError for a need that fits in no case.
    """
    for key, wanted, limit in (
        ("cores", need.cores, budget.cores),
        ("memory_gib", need.memory_gib, budget.memory_gib),
        ("gpus", need.gpus, len(gpus)),
    ):
        if limit is not None and wanted > limit:
            way_out = f"raise machine.{key}" if key != "gpus" else "lower trainer.devices"
            raise ConfigError(f"{label} takes {key}={wanted:.3g} and {limit:.3g} are allowed here; {way_out}")
    folder = claims_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    with _head_of_the_line(folder, label):
        said = ""
        while waits_for := _in_the_way(need, budget, gpus, claims := _claims(folder)):
            if waits_for != said:
                log.warning("%s waits for %s", label, waits_for)
                said = waits_for
            time.sleep(PERIOD_S)
        taken = {gpu for claim in claims for gpu in claim["gpus"]}
        own = [gpu for gpu in gpus if gpu not in taken][: need.gpus]
        path = folder / f"{uuid.uuid4().hex}.claim"
        file = _locked(path)
        file.write(json.dumps({"label": label, "pid": os.getpid(), **asdict(need), "gpus": own}))
        file.flush()
    try:
        yield own
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path, wait: bool = True) -> IO[str]:
    """The open file, held as long as it is open. Locks of this kind stay with the process: a fork has none."""
    file = open(path, "a+")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def _head_of_the_line(folder: Path, label: str) -> Iterator[None]:
    """One process at a time looks for room, so that a large run is not overtaken by small ones for ever."""
    try:
        file = _locked(folder / "line", wait=False)
    except OSError:
        log.warning("%s waits behind another run that waits", label)
        file = _locked(folder / "line")
    with file:
        yield


def _claims(folder: Path) -> list[dict[str, Any]]:
    """The claims in force; those of processes that are gone are cleared away."""
    found = []
    for path in sorted(folder.glob("*.claim")):
        with contextlib.suppress(FileNotFoundError):
            try:
                file = _locked(path, wait=False)
            except OSError:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(path.read_text()))
            else:
                path.unlink(missing_ok=True)
                file.close()
    return found


def _in_the_way(need: Need, budget: MachineConfig, gpus: Sequence[str], claims: Sequence[Mapping[str, Any]]) -> str:
    """What the run has to wait for, as a phrase; empty when there is room."""
    cores, memory = (sum(claim[key] for claim in claims) for key in ("cores", "memory_gib"))
    taken = {gpu for claim in claims for gpu in claim["gpus"]}
    short = []
    if budget.cores is not None and cores + need.cores > budget.cores:
        short.append(f"{need.cores} of machine.cores={budget.cores}, of which {cores} are taken")
    if budget.memory_gib is not None and memory + need.memory_gib > budget.memory_gib:
        short.append(
            f"{need.memory_gib:.2g} of machine.memory_gib={budget.memory_gib:g}, of which {memory:.2g} are taken"
        )
    if sum(gpu not in taken for gpu in gpus) < need.gpus:
        short.append(f"{need.gpus} of {len(gpus)} GPUs, of which {len(taken & {*gpus})} are taken")
    names = ", ".join(f"{claim['label']} (process {claim['pid']})" for claim in claims)
    return f"{' and '.join(short)}, by {names}" if short else ""
