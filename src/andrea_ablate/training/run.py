"""One run from its configuration to its finished record; finished runs are reused, interrupted ones resumed."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from andrea_ablate import machine, ops
from andrea_ablate.accounting import account
from andrea_ablate.config import NUMERICS_VERSION, RunConfig, to_plain
from andrea_ablate.data import Corpus
from andrea_ablate.data.datamodule import DataModule
from andrea_ablate.tracking.mirrors import MirrorInfo
from andrea_ablate.tracking.store import FINAL, RunWriter, Store, StoreError
from andrea_ablate.training import checkpoint
from andrea_ablate.training.callbacks import (
    LIGHTNING_LOGS,
    Checkpointer,
    Recorder,
    quiet_lightning,
    reason_for,
    was_stopped,
)
from andrea_ablate.training.identity import check, code_hashes, identify
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.sharding import ShardedSpawn


def _strategy(cfg: RunConfig) -> str | ShardedSpawn:
    if cfg.trainer.devices == 1:
        return "auto"
    return ShardedSpawn(cfg.trainer.devices) if cfg.trainer.strategy == "fsdp" else "ddp_spawn"


def run(cfg: RunConfig, *, wait: bool = False) -> dict[str, Any]:
    """Train `cfg` unless its record says that it is done, and return the record.

    Args:
        wait: wait for another process that trains the same run (else RunBusy is raised).
    Raises: ConfigError before anything is written; RunBusy; KeyboardInterrupt after a signal (the record is complete).
        Every other failure becomes the record's status and reason.
    """
    check(cfg)
    machine.settle()
    name, corpus = identify(cfg)
    store = Store(Path(cfg.paths.runs))
    with store.open(name, blocking=wait) as writer:
        if writer.record.get("status") in FINAL:
            return writer.record
        if not (writer.folder / "config.yaml").exists():
            writer.write_config(to_plain(cfg))
        attempt = Attempt(cfg, name, corpus, writer)
        with isolated(attempt.device):
            attempt.execute()
    if attempt.received == signal.SIGUSR2 and callable(signal.getsignal(signal.SIGUSR2)):
        # A launcher's: now that the checkpoint is written, let it requeue the job and leave.
        signal.raise_signal(signal.SIGUSR2)
    if writer.record["status"] == "interrupted":
        raise KeyboardInterrupt(writer.record["reason"])
    if attempt.received:  # too late for this run, but meant for the whole command
        raise KeyboardInterrupt(f"{attempt.received.name} at the end of run {name}")
    return writer.record


class Attempt:
    """One try at a run, from the newest checkpoint on; `watchers` are further callbacks that change no number."""

    def __init__(
        self,
        cfg: RunConfig,
        name: str,
        corpus: Corpus,
        writer: RunWriter,
        watchers: Sequence[lightning.Callback] = (),
    ) -> None:
        self.cfg, self.name, self.corpus, self.writer, self.watchers = cfg, name, corpus, writer, watchers
        self.device = machine.device_type(cfg.trainer.accelerator)
        self.checkpoints = writer.folder / "checkpoints"
        self.recorder: Recorder | None = None
        self.damaged: list[str] = []  # checkpoints that this try and those before it could not read

    @property
    def received(self) -> signal.Signals | None:
        """The signal that asked for a stop, if one came."""
        return self.recorder.received if self.recorder else None

    def execute(self) -> None:
        """Train; whatever happens, the record ends with a status and a reason."""
        started = time.perf_counter()
        machine.reset_peak_memory(self.device)
        self.damaged = list(self.writer.record.get("damaged_checkpoints", []))
        self.writer.record.clear()  # results of an earlier try are not those of this one
        self.writer.update(**self._description(), status="running", reason="")
        (self.writer.folder / "error.txt").unlink(missing_ok=True)
        try:
            self._fit(started)
        except BaseException as error:
            self._settle(error)
        if self.writer.record["status"] == "finished":
            for path in checkpoint.newest_first(self.checkpoints):
                path.unlink()

    def _settle(self, error: BaseException) -> None:
        """The recorder has written the ending, unless the failure came before it or in another process."""
        self.writer.reload()
        if self.writer.record["status"] == "running":
            stopped = self.received or was_stopped(error)
            if not stopped:
                with suppress(StoreError):  # on a full disk the shorter record may still fit
                    self.writer.error("".join(traceback.format_exception(error)))
            self.writer.update(
                status="interrupted" if stopped else "failed", reason=reason_for(error), ended=time.time()
            )
        # A stored traceback would keep the failed model alive.
        traceback.clear_frames(error.__traceback__)

    def _fit(self, started: float) -> None:
        cfg = self.cfg
        state = checkpoint.load_newest(self.checkpoints, self.damaged)
        step = state["step"] if state else 0
        self.writer.rewind(step)
        torch.manual_seed(cfg.seed)
        module = LanguageModule(cfg)
        data = DataModule(self.corpus, cfg.data, cfg.trainer.batch_size, cfg.total_steps)
        data.start_step = step
        self.recorder = Recorder(cfg, self.writer, self._mirror_info(resumed=state is not None), self.device)
        checkpointer = Checkpointer(self.checkpoints, state, self.recorder)
        del state  # it is as large as the model and its optimizer: the checkpointer lets go of it once it is restored
        trainer = lightning.Trainer(
            accelerator="gpu" if self.device == "cuda" else "cpu",
            devices=cfg.trainer.devices,
            strategy=_strategy(cfg),
            plugins=[LightningEnvironment()],  # also inside a scheduler's job: a run starts its ranks itself
            precision=cfg.trainer.precision,  # type: ignore[arg-type]
            max_steps=cfg.total_steps,
            max_epochs=-1,
            callbacks=[*self.watchers, self.recorder, checkpointer],  # the recorder may end the run at this step
            deterministic=cfg.trainer.deterministic,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        paths = {"optimizer": "fused" if cfg.optim["type"] == "adamw" else "eager", "compile": cfg.trainer.compile}
        damaged = list(dict.fromkeys(self.damaged))
        setup_s = time.perf_counter() - started
        self.writer.update(paths=paths, resumed_from=step, damaged_checkpoints=damaged, setup_s=setup_s)
        checkpointer.launcher = trainer.strategy.launcher
        checkpointer.listen()
        try:
            trainer.fit(module, datamodule=data)
        finally:
            for process in getattr(trainer.strategy.launcher, "procs", ()):
                process.kill()  # none may write on when the lock is released
                process.join()
        self.writer.reload()

    def _description(self) -> dict[str, Any]:
        cfg = self.cfg
        counts = account(cfg.model, cfg.data.seq_len)
        return {
            "run_id": self.name,
            "name": cfg.name,
            "started": time.time(),
            "numerics": NUMERICS_VERSION,
            "code": code_hashes(cfg),
            "versions": machine.versions(),
            "device": machine.describe(self.device),
            "precision": cfg.trainer.precision,
            "params": counts.params,
            "non_embedding_params": counts.non_embedding_params,
            "flops_per_token": counts.flops_train,
            "kv_cache_bytes": counts.kv_cache_bytes(),
            "total_steps": cfg.total_steps,
            "tokens": cfg.total_steps * cfg.tokens_per_step,
            "data": {
                "fingerprint": self.corpus.fingerprint,
                "unigram_entropy": self.corpus.unigram_entropy,
                "entropy": self.corpus.entropy,
                **self.corpus.info,
            },
        }

    def _mirror_info(self, resumed: bool) -> MirrorInfo:
        cfg = self.cfg
        return MirrorInfo(
            run_id=self.name,
            name=cfg.name or self.name,
            group=cfg.group or "",
            job_type="train",
            tags=cfg.tags,
            config=to_plain(cfg),
            folder=self.writer.folder,
            resumed=resumed,
        )


@contextmanager
def isolated(device: str) -> Iterator[None]:
    """Nothing global that a run sets outlives it: random states, determinism, warnings, logs, signals, variables."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    environment = {key: os.environ.get(key) for key in ("MASTER_ADDR", "MASTER_PORT", "CUBLAS_WORKSPACE_CONFIG")}
    chosen = ops.choose("auto")
    handlers = {number: signal.getsignal(number) for number in Checkpointer.SIGNALS}
    levels = {name: logging.getLogger(name).level for name in LIGHTNING_LOGS}
    try:
        devices = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            quiet_lightning()
            yield
    finally:
        ops.choose(chosen)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for key, value in environment.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: not set from Python, so not by a run either
                    signal.signal(number, handler)
