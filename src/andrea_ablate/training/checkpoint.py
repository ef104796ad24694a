"""Checkpoints: what a resumed run needs to end in the same bits, in plain containers, written whole or not at all."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from andrea_ablate.tracking.store import write_atomic

KEEP_SPIKES = 4  # checkpoints of a run, each with the optimizer's state
KEEP = 2  # the newest, and the one before it in case the newest is damaged
log = logging.getLogger("andrea_ablate")


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``step-XXXXXXXX.ckpt`` into `folder` and drop all but the newest KEEP. Raises StoreError on a full disk."""
    buffer = io.BytesIO()
    torch.save({"step": step, "rng": rng_state(), **state}, buffer)
    path = folder / f"step-{step:08d}.ckpt"
    write_atomic(path, buffer.getbuffer())
    # One of a later step is damaged: the run has come back from before it.
    kept = [other for other in newest_first(folder) if other.name <= path.name][:KEEP]
    for other in set(newest_first(folder)) - set(kept):
        other.unlink()


def newest_first(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, newest step first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.stem.removeprefix("step-"))


def keep_for_replay(run_folder: Path, step: int) -> None:
    """Keep, in the folder ``spikes``, a checkpoint from which `step` can be done again; KEEP_SPIKES of them at most."""
    found = [path for path in newest_first(run_folder / "checkpoints") if step_of(path) < step]
    kept = run_folder / "spikes"
    if found and len(newest_first(kept)) < KEEP_SPIKES:
        # It is kept already, or the disk has no room or no links: a replay then starts at the first step.
        with contextlib.suppress(OSError):
            kept.mkdir(exist_ok=True)
            os.link(found[-1], kept / found[-1].name)  # the older one: it shows more of what came before


def load_newest(folder: Path, damaged: list[str] | None = None) -> dict[str, Any] | None:
    """The newest readable checkpoint, or None; a damaged one is named in the log and the one before it is used.

    Args:
        damaged: the names of those that cannot be read are added to it.
    """
    for path in newest_first(folder):
        try:
            with zipfile.ZipFile(path) as parts:
                spoilt = parts.testzip()  # torch writes checksums, and reads without looking at them
            if spoilt is not None:
                raise ValueError(f"checksum of {spoilt}")
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # zipfile and torch raise many types for a damaged file
            if damaged is not None:
                damaged.append(path.name)
            log.warning("checkpoint %s cannot be read (%s); going back to the one before it", path, error)
    return None


def rng_state() -> dict[str, Any]:
    """States of torch's generators: the CPU's and, where this process uses one, that of its GPU."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if used else None}


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`, in a process that uses the same kind of device."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
