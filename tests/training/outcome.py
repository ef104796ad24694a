"""What a run left behind, for tests that compare runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from andrea_ablate.config import RunConfig
from andrea_ablate.tracking.store import Store
from andrea_ablate.training.identity import identify


class Outcome:
    """A run's record, rows and weights, without what depends on the clock."""

    def __init__(self, cfg: RunConfig) -> None:
        store = Store(Path(cfg.paths.runs))
        self.id = identify(cfg)[0]
        self.folder = store.path(self.id)
        self.record: dict[str, Any] = store.record(self.id) or {}
        rows = store.metrics(self.id)
        self.train = [{k: v for k, v in row.items() if k != "wall_s"} for row in rows if "train/loss" in row]
        self.val = [row for row in rows if "val/loss" in row]
        weights = self.folder / "model.safetensors"
        self.weights = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None

    @property
    def final(self) -> tuple[Any, ...]:
        """Everything that an undisturbed run and a resumed one must share, to the last bit."""
        return (
            self.record["status"],
            self.record["token_hash"],
            self.record["initial_loss"],
            self.record["val/loss"],
            self.train,
            self.val,
            self.weights,
        )

    def checkpoints(self) -> list[int]:
        return sorted(int(path.stem[5:]) for path in (self.folder / "checkpoints").glob("*.ckpt"))


Spoil = Callable[..., None]  # what steps report instead of their own numbers: the fixture of that name
Straight = Callable[..., Outcome]  # overrides -> the outcome of the undisturbed run: the fixture of that name


def fresh(cfg: RunConfig, folder: Path) -> RunConfig:
    """The same run with its records in another folder."""
    return replace(cfg, paths=replace(cfg.paths, runs=str(folder)))


def digest_of(batch: dict[str, Any]) -> str:
    """Hash of the tokens of a batch."""
    return hashlib.sha256(torch.stack((batch["inputs"], batch["targets"])).numpy().tobytes()).hexdigest()
