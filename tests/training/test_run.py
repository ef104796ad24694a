"""A run as a guest in its process: what it leaves of memory and settings, and what failures become."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import logging
import os
import random
import signal
import time
import warnings
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from outcome import Outcome, Straight

from andrea_ablate import config, ops
from andrea_ablate.checkout import commit
from andrea_ablate.config import RunConfig
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import RunBusy, RunWriter, Store, StoreError, write_atomic
from andrea_ablate.training import callbacks, checkpoint
from andrea_ablate.training import run as run_module
from andrea_ablate.training.identity import check
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import run
from support import Cli, Compose, During


def globals_of_the_process() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "filters": list(warnings.filters),
        "levels": {
            name: logging.getLogger(name).level for name in ("", "andrea_ablate", "lightning.pytorch", "lightning")
        },
        "handlers": list(logging.getLogger().handlers),
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
    }


def fail() -> None:
    raise RuntimeError("lights out")


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_time_budget_ends_a_run_at_the_last_step_that_fits(tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tiny("trainer.tokens=640"))
    ticks = itertools.count()  # each look at the clock is a second later than the one before: a step takes one
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=time.time)
    monkeypatch.setattr(callbacks, "time", clock)
    cfg = tiny("trainer.tokens=1280", "trainer.seconds=4.5", "schedule=constant", "schedule.warmup_tokens=0")
    record = run(cfg)
    assert (record["status"], record["stopped_at"], record["tokens"], record["train_s"]) == ("finished", 4, 512, 4.0)
    store = Store(Path(cfg.paths.runs))
    rows = [row for row in store.metrics(record["run_id"]) if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and record["val/loss"] > 0
    assert (store.root / record["run_id"] / "model.safetensors").exists()
    assert "stopped_at" not in whole and whole["tokens"] == 640
    same = run(tiny("trainer.tokens=512", "schedule=constant", "schedule.warmup_tokens=0"))
    assert record["val/loss"] == same["val/loss"] and record["run_id"] != same["run_id"]


def test_a_time_budget_counts_what_was_spent_before_a_stop(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=time.time)
    monkeypatch.setattr(callbacks, "time", clock)
    budget = ("trainer.seconds=9.5", "trainer.checkpoint_every=4")
    whole = run(epochs(*budget))
    cfg, step = epochs(*budget), LanguageModule.training_step

    def disturbed(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if self.step == 2:  # two seconds are in its checkpoint
            os.kill(os.getpid(), 15)
        if self.step == 6:  # and four in this one; what came after it is lost, and costs nothing
            fail()
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "training_step", disturbed)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
        assert run(cfg)["status"] == "failed"
    record = run(cfg)
    assert record["resumed_from"] == 4
    assert (record["stopped_at"], record["train_s"]) == (whole["stopped_at"], whole["train_s"]) == (9, 9.0)
    assert record["val/loss"] == whole["val/loss"]


def test_no_time_budget_leaves_the_name_of_a_run_as_it_was(tiny: Compose) -> None:
    cfg, plain = tiny(), asdict(tiny())
    hashed: list[Any] = []
    real = json.dumps

    def watch(content: Any, **options: Any) -> str:
        hashed.append(content)
        return real(content, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.json, "dumps", watch)
        for seconds in (None, 5.0):
            config.run_id(replace(cfg, trainer=replace(cfg.trainer, seconds=seconds)), "", "cpu", "reference", {})
    without, limited = (content["config"]["trainer"] for content in hashed)
    assert "seconds" in plain["trainer"] and "seconds" not in without and limited["seconds"] == 5


@pytest.mark.parametrize("ending", ["finished", "failed", "interrupted"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_process_is_left_as_it_was_found(
    ending: str, deterministic: bool, epochs: Compose, during: During, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = epochs(f"trainer.deterministic={deterministic}", "trainer.tokens=320")
    monkeypatch.setenv("MASTER_PORT", "12321")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(5)
    try:
        before = globals_of_the_process()
        if ending == "failed":
            during(3, fail)
            assert run(cfg)["status"] == "failed"
        elif ending == "interrupted":
            during(3, lambda: os.kill(os.getpid(), 15))
            with pytest.raises(KeyboardInterrupt):
                run(cfg)
        else:
            assert run(cfg)["status"] == "finished"
        assert globals_of_the_process() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_callers_random_state_does_not_reach_the_run(epochs: Compose, straight: Straight) -> None:
    cfg = epochs()
    torch.manual_seed(123456)
    run(cfg)
    assert Outcome(cfg).final == straight().final


def resident_mib() -> float:
    gc.collect()
    torch.zeros(1)
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow  # many runs
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_from_job_to_job(epochs: Compose, during: During) -> None:
    resident, peaks = [], []
    for seed in range(6):
        # Three million parameters: weights, gradients and moments are 50 MiB a job.
        cfg = epochs(
            "model.d_model=256", "model.n_layers=4", "trainer.tokens=96", f"seed={seed}", "trainer.val_every=0"
        )
        if seed == 3:
            during(2, fail)
        record = run(cfg)
        assert record["status"] == ("failed" if seed == 3 else "finished")
        resident.append(resident_mib())
        peaks.append(record["peak_mem_gib"] * 1024)
    assert resident[5] < resident[1] + 20
    assert peaks[5] < peaks[1] + 20
    small = epochs("trainer.tokens=96")
    assert run(small)["peak_mem_gib"] * 1024 < peaks[5] - 25  # a job's peak is its own


@pytest.mark.parametrize("failing", [True, False])
def test_model_is_let_go_when_its_run_is_over(failing: bool, epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[LanguageModule]] = []

    class Watched(LanguageModule):
        def __init__(self, cfg: RunConfig) -> None:
            super().__init__(cfg)
            models.append(weakref.ref(self))

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
            if failing and self.step == 4:
                fail()
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(run_module, "LanguageModule", Watched)
    record = run(epochs())
    assert record["status"] == ("failed" if failing else "finished")
    gc.collect()
    assert len(models) == 1 and models[0]() is None


# --- failures ---


def test_failure_in_training_is_a_record_with_its_traceback(epochs: Compose, during: During) -> None:
    cfg = epochs()
    during(4, fail)
    record = run(cfg)
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: lights out")
    text = (Outcome(cfg).folder / "error.txt").read_text()
    assert "Traceback" in text and 'raise RuntimeError("lights out")' in text
    assert record["token_hash"] and record["initial_loss"] > 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
        (KeyError(), "KeyError: "),
    ],
)
def test_reason_is_one_line(error: Exception, reason: str, epochs: Compose, during: During) -> None:
    def raise_it() -> None:
        raise error

    during(1, raise_it)
    assert run(epochs())["reason"] == reason


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("part", ["module", "data", "mirrors", "weights"])
def test_failure_outside_the_steps_is_a_record_too(part: str, epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"no {part}")

    owner, name = {
        "module": (run_module, "LanguageModule"),
        "data": (run_module.DataModule, "train_dataloader"),
        "mirrors": (callbacks, "open_mirrors"),
        "weights": (callbacks.safetensors.torch, "save"),
    }[part]
    cfg = epochs()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        record = run(cfg)
    assert (record["status"], record["reason"]) == ("failed", f"RuntimeError: no {part}")
    assert f"no {part}" in (Outcome(cfg).folder / "error.txt").read_text()
    assert run(cfg)["status"] == "finished"


def test_full_disk_at_a_checkpoint_fails_the_run_and_keeps_the_one_before(
    epochs: Compose, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: Any) -> None:
        if path.name == "step-00000010.ckpt":
            raise StoreError(errno.ENOSPC, f"cannot write {path}: No space left on device; free space")
        write_atomic(path, data)

    cfg = epochs()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomic", full)
        record = run(cfg)
    assert record["status"] == "failed"
    assert "No space left on device" in record["reason"] and "step-00000010.ckpt" in record["reason"]
    outcome = Outcome(cfg)
    assert [path.name for path in (outcome.folder / "checkpoints").iterdir()] == ["step-00000005.ckpt"]
    assert [row["step"] for row in outcome.train] == list(range(1, 11))
    run(cfg)
    assert Outcome(cfg).record["resumed_from"] == 5
    assert Outcome(cfg).final == straight().final


def test_full_disk_at_a_row_fails_the_run(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RunWriter.log

    def log(self: RunWriter, row: dict[str, Any]) -> None:
        if row["step"] == 7:
            raise StoreError(errno.ENOSPC, "cannot write metrics.jsonl: No space left on device")
        original(self, row)

    monkeypatch.setattr(RunWriter, "log", log)
    record = run(epochs())
    assert record["status"] == "failed" and "No space left on device" in record["reason"]


def test_failing_tracker_costs_the_run_nothing_but_its_mirror(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def log(self: object, row: dict[str, Any]) -> None:
        if row["step"] >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken.append(row["step"])

    monkeypatch.setattr("andrea_ablate.tracking.mirrors._Csv.log", log)
    with caplog.at_level(logging.WARNING, "andrea_ablate"):
        answer = cli("logger=csv")
    assert answer.status == 0 and set(taken) == {1, 2, 3, 4}
    assert sum("logger csv is off" in line.getMessage() for line in caplog.records) == 1
    store = Store(tmp_path / "runs")
    (name,) = store.ids()
    record = store.record(name) or {}
    assert record["status"] == "finished"
    assert record["tracking"] == "degraded: csv: [Errno 28] No space left on device"
    assert [row["step"] for row in store.metrics(name) if "train/loss" in row] == list(range(1, 11))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["pos=learned", "model.max_seq_len=4"], "max_seq_len"),
        (["logger=wandb", "logger.project=a/b"], "project='a/b'"),
    ],
)
def test_mistake_in_the_configuration_leaves_nothing_behind(changes: list[str], words: str, epochs: Compose) -> None:
    cfg = epochs(*changes)
    with pytest.raises(ConfigError, match=words):
        run(cfg)
    assert not list(Path(cfg.paths.runs).iterdir())


# --- reuse ---


def test_finished_run_is_reused_without_training(epochs: Compose, digests: list[tuple[int, str]]) -> None:
    cfg = epochs()
    first = run(cfg)
    digests.clear()
    assert run(cfg) == first and not digests


def test_run_that_another_process_holds_is_refused_or_waited_for(epochs: Compose) -> None:
    cfg = epochs()
    name = Outcome(cfg).id
    with Store(Path(cfg.paths.runs)).open(name), pytest.raises(RunBusy):
        run(cfg)
    assert run(cfg, wait=True)["status"] == "finished"


def test_record_names_what_ran(epochs: Compose) -> None:
    record = run(epochs())
    assert record["world_size"] == 1 and record["device"]["type"] == "cpu" and record["precision"] == "32-true"
    taken = dict.fromkeys(("norm", "qk_rope", "activation", "linear_cross_entropy"), ops.path("auto", "cpu"))
    taken["attention"] = "compiled" if taken["norm"] == "compiled" else "sdpa"
    assert record["paths"] == {"optimizer": "fused", "compile": False, **taken}
    assert record["versions"]["torch"] == torch.__version__
    assert record["commit"] == commit()
    assert record["resumed_from"] == 0 and record["tracking"] == "off" and record["reason"] == ""
    assert record["total_steps"] == 24 and record["tokens"] == 768
    assert record["started"] <= record["ended"] and 0 < record["train_s"] < record["ended"] - record["started"] + 1


def test_a_schedulers_tasks_and_the_devices_must_agree(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = epochs("trainer.devices=2")
    for key, value in {"SLURM_JOB_ID": 1, "SLURM_JOB_NAME": "x", "SLURM_NTASKS": 1, "SLURM_PROCID": 0}.items():
        monkeypatch.setenv(key, str(value))
    check(cfg)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    with pytest.raises(
        ConfigError, match=r"SLURM_NTASKS_PER_NODE=2, but a run is one task and starts trainer.devices=2"
    ):
        check(cfg)


def test_a_launchers_requeue_comes_after_the_checkpoint(epochs: Compose, during: During) -> None:
    cfg, seen = epochs(), []

    def requeue(number: int, frame: object) -> None:
        found = Outcome(cfg)
        seen.append(
            (found.record["status"], found.checkpoints()[-1], Store(Path(cfg.paths.runs)).run_is_active(found.id))
        )
        raise SystemExit(-1)

    former = signal.signal(signal.SIGUSR2, requeue)
    try:
        during(7, lambda: os.kill(os.getpid(), signal.SIGUSR2))
        with pytest.raises(SystemExit):
            run(cfg)
        assert signal.getsignal(signal.SIGUSR2) is requeue
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert seen == [("interrupted", 7, False)]  # written and let go, before the job is in the queue again
