"""Two ranks on the CPU against one process: the same losses, one record, one ending."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from outcome import Outcome, Straight
from torch import nn
from torch.utils.data import DataLoader, Dataset

import andrea_ablate
from andrea_ablate.config import RunConfig
from andrea_ablate.data.datamodule import DataModule
from andrea_ablate.tracking.store import Store
from andrea_ablate.training import run as run_module
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import run
from offline_wandb import offline_files, offline_run
from support import Compose

# Each rank is a new process that imports Lightning anew.
pytestmark = pytest.mark.slow

WHOLE = ("model.dropout=0.0", "trainer.grad_clip=0.5", "stability=[z_loss,skip_step]", "model.tie_embeddings=true")
WHOLE += ("model.stability.skip_step.window=4", "model.stability.skip_step.sigma=1.0")


class Masked(Dataset[dict[str, Any]]):
    """Row r of the global batch of step s predicts ``(s + 3 r) % 9`` tokens; in step 4 the odd rows predict none."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @staticmethod
    def kept(step: int, row: int) -> int:
        return 0 if step == 4 and row % 2 else (step + 3 * row) % 9

    def __getitem__(self, step: int) -> dict[str, Any]:
        item = dict(self.inner[step])
        rows = range(self.inner.rank, self.inner.batch_size, self.inner.world)
        for targets, row in zip(item["targets"], rows, strict=True):
            targets[self.kept(step, row) :] = -100
        item["n_tokens"] = sum(self.kept(step, row) for row in range(self.inner.batch_size))
        return item


class MaskedData(DataModule):
    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        loader = super().train_dataloader()
        return DataLoader(Masked(loader.dataset), batch_size=None, sampler=loader.sampler, collate_fn=loader.collate_fn)


class FailsOnTheSecondRank(LanguageModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if self.step == 12 and self.trainer.global_rank == 1:
            raise RuntimeError("lights out on rank 1")
        return super().training_step(batch, batch_idx)


class CompilesQuickly(LanguageModule):
    def setup(self, stage: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
            super().setup(stage)


class Slow(LanguageModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def step_of(store: Store, name: str) -> int:
    return int((store.last_row(name) or {}).get("step", 0))


def stop_at_step(cfg: RunConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until SIGTERM, which comes once the store has that step."""
    store, name = Store(Path(cfg.paths.runs)), Outcome(cfg).id

    def stop() -> None:
        while step_of(store, name) < step:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "LanguageModule", Slow)
        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt, match="SIGTERM after step"):
            run(cfg)
        thread.join()


def agree(one: Outcome, two: Outcome) -> None:
    assert two.record["status"] == one.record["status"] == "finished"
    assert (one.record["world_size"], two.record["world_size"]) == (1, 2)
    assert two.record["token_hash"] == one.record["token_hash"]
    assert [row["step"] for row in two.train] == list(range(1, 25))
    assert [row["step"] for row in two.val] == [row["step"] for row in one.val]
    for a, b in zip(one.train, two.train, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-7)
    assert 0 < sum(row["optim/skipped"] for row in one.train) < 12
    for a, b in zip(one.val, two.val, strict=True):
        assert (
            a["val/tokens"] == b["val/tokens"] == 35
        )  # each prediction once, though two ranks cannot share 5 windows evenly
        assert b["val/loss"] == pytest.approx(a["val/loss"], rel=1e-5)


def test_two_ranks_train_as_one_process_with_unequal_tokens_and_one_rank_without_any(
    epochs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "DataModule", MaskedData)
    one, two = epochs(*WHOLE), epochs(*WHOLE, "trainer.devices=2", "trainer.accumulate=2")
    run(one)
    run(two)
    agree(Outcome(one), Outcome(two))
    folder = Path(two.paths.runs)
    assert [path.name for path in folder.iterdir()] == [Outcome(two).id]
    assert {path.name for path in (folder / Outcome(two).id).iterdir()} <= {
        *("config.yaml", "record.json", "metrics.jsonl", "model.safetensors", "checkpoints", "lock")
    }
    assert "MASTER_PORT" not in os.environ


def test_ranks_stop_together_and_go_on_together(
    epochs: Compose, monkeypatch: pytest.MonkeyPatch, straight: Straight
) -> None:
    cfg = epochs(*WHOLE, "trainer.devices=2")
    stop_at_step(cfg, 7, monkeypatch)
    stopped = Outcome(cfg)
    assert stopped.record["status"] == "interrupted"
    at = stopped.train[-1]["step"]
    assert stopped.checkpoints()[-1] == at < 24
    run(cfg)
    assert Outcome(cfg).record["resumed_from"] == at
    agree(straight(*WHOLE), Outcome(cfg))


def test_ranks_share_one_tracker_run(epochs: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = epochs(*WHOLE, "trainer.devices=2", "logger=wandb", "logger.mode=offline")
    run(cfg)
    outcome = Outcome(cfg)
    assert outcome.record["tracking"] == "ok"
    (session,) = map(offline_run, offline_files(outcome.folder))  # of rank 0, none of rank 1
    assert session["id"] == outcome.id and session["config"]["trainer"]["devices"] == 2
    assert [row["step"] for row in session["history"] if "train/loss" in row] == list(range(1, 25))
    assert session["summary"]["val/loss"] == outcome.record["val/loss"]


def test_the_command_line_starts_ranks_that_make_no_folders(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "andrea_ablate", "size=tiny", "logger=none", "trainer.tokens=512"]
    command += ["data=synthetic", "data.n_tokens=2000", "trainer.accelerator=cpu", "trainer.devices=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(andrea_ablate.__file__).parents[1])}

    def start(*arguments: str) -> None:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    start("seed=0")
    (first,) = (tmp_path / "runs").iterdir()
    before = {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    start("-m", "seed=0,1")
    assert before == {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    assert {path.name for path in tmp_path.iterdir()} == {".cache", "runs", "sweeps"}
    store = Store(tmp_path / "runs")
    assert len(store.ids()) == len(list(store.root.iterdir())) - (store.root / ".index.parquet").exists() == 2
    for run_id in store.ids():
        assert (store.record(run_id) or {})["world_size"] == store.config(run_id)["trainer"]["devices"] == 2
        rows = map(json.loads, (store.root / run_id / "metrics.jsonl").read_text().splitlines())
        steps = [row["step"] for row in rows if "train/loss" in row]
        assert steps == list(range(1, len(steps) + 1))  # rank 0 alone writes
    assert sorted(store.config(run_id)["seed"] for run_id in store.ids()) == [0, 1]


def run_slowly(cfg: RunConfig) -> None:
    run_module.LanguageModule = Slow  # type: ignore[misc]
    run(cfg)


def test_ranks_of_a_killed_process_write_nothing_more(epochs: Compose, straight: Straight) -> None:
    cfg = epochs(*WHOLE, "trainer.devices=2")
    store, name = Store(Path(cfg.paths.runs)), Outcome(cfg).id
    process = multiprocessing.get_context("spawn").Process(target=run_slowly, args=(cfg,))
    process.start()
    while step_of(store, name) < 7:
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    at = step_of(store, name)
    time.sleep(1)  # time for twenty steps, if anybody took them
    killed = Outcome(cfg)
    assert killed.record["status"] == "running"
    assert killed.train[-1]["step"] <= at + 1 and killed.checkpoints() == [5]
    run(cfg)
    assert Outcome(cfg).record["resumed_from"] == 5
    agree(straight(*WHOLE), Outcome(cfg))


def test_failure_of_one_rank_is_named_in_the_record(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = epochs(*WHOLE, "trainer.devices=2")
    monkeypatch.setattr(run_module, "LanguageModule", FailsOnTheSecondRank)
    record = run(cfg)
    assert record["status"] == "failed"
    assert record["reason"] == "RuntimeError: lights out on rank 1"
    assert "lights out on rank 1" in (Outcome(cfg).folder / "error.txt").read_text()
    assert Outcome(cfg).checkpoints() == [5, 10]


def test_compiled_ranks_write_weights_that_a_plain_model_takes(
    epochs: Compose, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from andrea_ablate.model import TransformerLM

    monkeypatch.setattr(run_module, "LanguageModule", CompilesQuickly)
    cfg = epochs("model.dropout=0.0", "trainer.tokens=64", "trainer.devices=2", "trainer.compile=true")
    assert run(cfg)["status"] == "finished"
    weights = load_file(Outcome(cfg).folder / "model.safetensors")
    TransformerLM(cfg.model).load_state_dict(weights, strict=True)
    plain = straight("model.dropout=0.0", "trainer.tokens=64")
    assert [row["train/loss"] for row in Outcome(cfg).train] == pytest.approx(
        [row["train/loss"] for row in plain.train], rel=1e-5
    )
