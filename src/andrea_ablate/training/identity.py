"""What is known of a run before it trains: its name, and what is refused; without Lightning, a slow import."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from andrea_ablate import machine, ops
from andrea_ablate.codehash import code_hash
from andrea_ablate.config import RunConfig, run_id
from andrea_ablate.data import Corpus, prepare
from andrea_ablate.model import TransformerLM, choices
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.mirrors import check_logger
from andrea_ablate.training.optim import OPTIMIZERS, check_optimizer
from andrea_ablate.training.schedules import SCHEDULES, schedule

BY_ELEMENT = ("adamw", "lion", "sgd")  # an update of one weight looks at no other


def identify(cfg: RunConfig) -> tuple[str, Corpus]:
    """Prepare the data and name the run. Raises ConfigError for data that cannot be read."""
    corpus = prepare(cfg.data, Path(cfg.paths.cache))
    device = machine.device_type(cfg.trainer.accelerator)
    return run_id(cfg, corpus.fingerprint, device, ops.path(cfg.ops, device), code_hashes(cfg)), corpus


def code_hashes(cfg: RunConfig) -> dict[str, str]:
    """The hash of each choice's code, by its group. Raises ConfigError for code that no file holds."""
    optim, shape = OPTIMIZERS.get(cfg.optim["type"]), SCHEDULES.get(cfg.schedule["type"])
    chosen = {**choices(cfg.model), "optim": optim, "schedule": shape}
    return {group: code_hash(item) for group, item in chosen.items()}


def check(cfg: RunConfig) -> None:
    """Refuse, before data is opened, what cannot train. Raises ConfigError."""
    with torch.device("meta"):
        model = TransformerLM(cfg.model)
    limit: int | None = model.pos.max_len  # type: ignore[assignment]
    for key, longest in (
        ("data.seq_len", cfg.data.seq_len),
        ("trainer.val_lengths", max([0, *cfg.trainer.val_lengths])),
    ):
        if limit is not None and longest > limit:
            raise ConfigError(
                f"{key}={longest} is longer than the position table, model.max_seq_len={limit}; "
                "raise model.max_seq_len or choose pos=rope"
            )
    if not cfg.model.attn.get("causal", True):
        raise ConfigError(
            "model.attn.causal=false shows every token the one that it is to predict, so training would learn to copy; "
            "train with model.attn.causal=true"
        )
    schedule(cfg.schedule, cfg.warmup_steps, cfg.total_steps)
    check_optimizer(cfg.optim, model)
    check_logger(cfg.logger)
    check_sharding(cfg)
    check_tasks(cfg)
    if cfg.trainer.accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator=cuda but torch sees no GPU; use trainer.accelerator=cpu or auto")
    ops.path(cfg.ops, machine.device_type(cfg.trainer.accelerator))


def check_tasks(cfg: RunConfig) -> None:
    """Refuse a scheduler's job of several tasks: each would be a rank of nothing. Raises ConfigError."""
    for variable in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        tasks = os.environ.get(variable, "1")
        if tasks.isdigit() and int(tasks) > 1:
            raise ConfigError(
                f"{variable}={tasks}, but a run is one task and starts trainer.devices={cfg.trainer.devices} processes "
                "itself; give it --ntasks-per-node=1 (hydra.launcher.tasks_per_node=1)"
            )


def check_sharding(cfg: RunConfig) -> None:
    """Refuse what a rank with a part of each matrix cannot do. Raises ConfigError."""
    if cfg.trainer.strategy != "fsdp":
        return
    if cfg.optim["type"] not in BY_ELEMENT:
        raise ConfigError(
            f"trainer.strategy=fsdp with optim={cfg.optim['type']}, whose update needs whole matrices; use "
            f"optim={' or '.join(BY_ELEMENT)}, or trainer.strategy=ddp"
        )
    if cfg.trainer.compile:
        raise ConfigError("trainer.strategy=fsdp with trainer.compile=true is not tested; use one of the two")
