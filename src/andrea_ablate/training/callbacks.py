"""What happens between optimizer steps, in this order: rows, divergence, validation, checkpoints, signals."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import signal
import threading
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import safetensors.torch
import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from andrea_ablate import machine
from andrea_ablate.analysis import Spike, SpikeDetector
from andrea_ablate.checkout import commit
from andrea_ablate.config import RunConfig
from andrea_ablate.ops import library
from andrea_ablate.tracking.mirrors import MirrorInfo, Mirrors, open_mirrors
from andrea_ablate.tracking.store import RunWriter, Store, write_atomic
from andrea_ablate.training import checkpoint
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.sharding import load_model, load_optimizer, whole

# What of the record's beginning the mirrors are told with the results.
COUNTS = ("params", "non_embedding_params", "flops_per_token", "kv_cache_bytes", "tokens", "total_steps")


class Diverged(Exception):  # noqa: N818 (a result, not an error)
    """The loss became non-finite or left the range that is called training."""


class Interrupted(Exception):  # noqa: N818 (likewise)
    """A signal asked the run to stop; a checkpoint has been written."""


class Recorder(lightning.Callback):
    """A row per optimizer step in the run's record and its mirrors, validation rows, and how the run ended.

    Every rank counts and decides alike; only rank 0 writes.

    Args:
        writer: of the run's record. info: what the mirrors are told of the run. device: ``cpu`` or ``cuda``.
    """

    def __init__(self, cfg: RunConfig, writer: RunWriter, info: MirrorInfo, device: str) -> None:
        self.cfg, self.writer, self.info, self.device = cfg, writer, info, device
        self.mirrors = Mirrors()
        # Reading a loss back makes a GPU wait, so there it happens once in ten steps.
        self.flush_every = 1 if device == "cpu" else 10
        self.token_hash = ""
        self.initial_loss: float | None = None
        self.bad_steps = 0
        self.wall_s = 0.0
        self.last_val: dict[str, float] = {}
        self.detector = SpikeDetector()
        self.spikes: list[Spike] = []
        self.stopped_at: int | None = None  # the step at which the time was up
        self.received: signal.Signals | None = None  # the signal that asked the run to stop
        self._pending: list[tuple[int, int, float, bool, Tensor]] = []
        self._clock = 0.0
        self._world_size = 0
        self._writes = False

    def state_dict(self) -> dict[str, Any]:
        kept = ("token_hash", "initial_loss", "bad_steps", "wall_s", "last_val")
        spikes = {"detector": self.detector.state_dict(), "spikes": [asdict(spike) for spike in self.spikes]}
        return {key: getattr(self, key) for key in kept} | spikes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.detector.load_state_dict(state.pop("detector"))
        self.spikes = [Spike(**spike) for spike in state.pop("spikes")]
        if self.detector.current is not None:
            self.spikes[-1] = self.detector.current  # one object again: it changes until it closes
        vars(self).update(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        quiet_lightning()  # this is another process, where it talks again

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._writes, self._world_size = trainer.is_global_zero, trainer.world_size
        if self._writes:
            self.writer.update(commit=commit())
            history = Store(self.writer.folder.parent).metrics(self.writer.id) if self.info.resumed else ()
            self.mirrors = open_mirrors(self.cfg.logger, self.info, history)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._clock = time.perf_counter()

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, pl_module: LanguageModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        chained = self.token_hash.encode() + batch["digest"]
        self.token_hash = hashlib.blake2b(chained, digest_size=16).hexdigest()
        sums = torch.stack((outputs["nll"], outputs["penalty"], outputs["grad_norm"]))
        self._pending.append((pl_module.step, batch["n_tokens"], outputs["lr"], outputs["skipped"], sums))
        last = pl_module.step == self.cfg.total_steps
        validate = last or (self.cfg.trainer.val_every and pl_module.step % self.cfg.trainer.val_every == 0)
        if validate or len(self._pending) >= self.flush_every:
            self.flush(pl_module)
        if not last and self._out_of_time(pl_module):
            last = validate = True
            self.stopped_at, trainer.should_stop = pl_module.step, True
        if validate:
            self.last_val = pl_module.evaluate(trainer.datamodule.val_dataloader())  # type: ignore[attr-defined]
            for length in self.cfg.trainer.val_lengths if last else ():
                batches = trainer.datamodule.val_dataloader(length)  # type: ignore[attr-defined]
                self.last_val |= pl_module.evaluate_at(length, batches)
            self._row({"step": pl_module.step, **self.last_val})
            self._clock = time.perf_counter()  # wall_s is training time, without validation
            if last and not math.isfinite(self.last_val["val/loss"]):
                raise Diverged(f"validation loss not finite after step {pl_module.step}")

    def _out_of_time(self, module: LanguageModule) -> bool:
        """Whether the steps until losses are read again would, at the mean so far, go beyond the time budget.

        A resumed run has spent what its checkpoint says, so steps that were lost are not counted twice.
        """
        seconds = self.cfg.trainer.seconds
        if seconds is None or self._pending:
            return False
        out = self.wall_s * (1 + self.flush_every / module.step) > seconds
        if module.trainer.world_size == 1:
            return out
        return bool(module.reduce_sum(torch.tensor(float(out), device=module.device)))

    def flush(self, module: LanguageModule) -> None:
        """Read pending losses back, write their rows, and raise Diverged after too many bad ones in a row."""
        if not self._pending:
            return
        now = time.perf_counter()
        self.wall_s += now - self._clock
        self._clock = now
        steps = torch.stack([sums for *_, sums in self._pending])
        if module.trainer.world_size > 1:
            steps = torch.cat((module.reduce_sum(steps[:, :2].contiguous()), steps[:, 2:]), dim=1)
        pending, self._pending = self._pending, []
        for (step, n_tokens, lr, skipped, _), (nll, penalty, grad_norm) in zip(pending, steps.tolist(), strict=True):
            loss = nll / max(1, n_tokens)
            row = {"step": step, "tokens": step * self.cfg.tokens_per_step, "train/loss": loss}
            if self.cfg.model.stability:
                row["train/penalty"] = penalty / max(1, n_tokens)
            if module.guard is not None:
                row["optim/skipped"] = int(skipped)
            # A step that predicts nothing says nothing of the loss.
            if n_tokens and (spike := self.detector.update(step, loss)) is not None:
                self.spikes.append(spike)
                if self._writes:
                    checkpoint.keep_for_replay(self.writer.folder, step)
            row["spike/count"] = len(self.spikes)
            self._row({**row, "train/grad_norm": grad_norm, "optim/lr": lr, "wall_s": round(self.wall_s, 4)})
            if n_tokens:
                self._check(step, loss, grad_norm)

    def _check(self, step: int, loss: float, grad_norm: float) -> None:
        if self.initial_loss is None:
            self.initial_loss = loss
        limit = self.cfg.trainer.diverged_factor * self.initial_loss
        finite = math.isfinite(loss) and math.isfinite(grad_norm)  # else this step has ruined the weights
        if finite and loss <= limit:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        # After the last step there is none left to recover in.
        if self.bad_steps >= self.cfg.trainer.diverged_after or step == self.cfg.total_steps:
            above = f"above {limit:.2f}, {self.cfg.trainer.diverged_factor:g} times the initial loss,"
            first = step - self.bad_steps + 1
            raise Diverged(f"loss {above if finite else 'or its gradient not finite'} from step {first} on")

    def _row(self, row: dict[str, Any]) -> None:
        if self._writes:
            self.writer.log(row)
            self.mirrors.log(row)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._end("finished", "")  # after on_train_end, so a run that says finished has its weights

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, Diverged):
            self._end("diverged", str(exception))
        elif self.received or was_stopped(exception):  # a signal to the whole job may break what the run uses first
            self._end("interrupted", reason_for(exception))
        else:
            if self._writes:
                self.writer.error("".join(traceback.format_exception(exception)))
            self._end("failed", reason_for(exception))

    def _end(self, status: str, reason: str) -> None:
        if not self._writes or self.writer.record["status"] != "running":
            return  # a run ends once: a signal while its mirrors finish does not undo "finished"
        result = {
            "world_size": self._world_size,  # of the processes that are here, whatever was asked for
            "initial_loss": self.initial_loss,
            "token_hash": self.token_hash,
            "train_s": self.wall_s,
            "peak_mem_gib": machine.peak_memory_gib(self.device),
            "nonfinite_values": self.writer.nonfinite,
            "spikes": [asdict(spike) for spike in self.spikes],
            "paths": {**self.writer.record["paths"], **library.taken},
            **self.last_val,
        }
        if self.stopped_at is not None:
            tokens = self.stopped_at * self.cfg.tokens_per_step
            result |= {"stopped_at": self.stopped_at, "tokens": tokens}
        tracking = self.mirrors.state
        self.writer.update(status=status, reason=reason, tracking=tracking, ended=time.time(), **result)
        counts = {key: self.writer.record[key] for key in COUNTS}
        self.mirrors.finish({**counts, **result}, status)  # may wait for a service, so the record comes first
        if self.mirrors.state != tracking:
            self.writer.update(tracking=self.mirrors.state)


LIGHTNING_LOGS = ("lightning.pytorch", "lightning.fabric")


def quiet_lightning() -> None:
    """No tips and no advice from Lightning; what goes wrong is in the record."""
    for name in LIGHTNING_LOGS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def was_stopped(error: BaseException) -> bool:
    """Whether somebody asked for this end: by a signal, or by what turns one into an exit (Lightning, a launcher)."""
    return isinstance(error, Interrupted) or not isinstance(error, Exception)


def reason_for(error: BaseException) -> str:
    """One line on why a run did not finish, for its record."""
    if isinstance(error, Interrupted):
        return str(error)
    if was_stopped(error):
        return "stopped at once, without a new checkpoint"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    if isinstance(error, ProcessRaisedException):
        return str(error).strip().splitlines()[-1]  # what the process that failed first printed last
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _is_ending(pid: int) -> bool:
    """Whether a process has begun to die. It does so thread by thread: its children are told before it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:  # no such process, or no Linux
        return Path("/proc/self/stat").exists()


class Checkpointer(lightning.Callback):
    """Writes a checkpoint every so many steps and when a signal asks the run to stop; restores one at the start.

    Args:
        folder: the run's checkpoint folder; state: what `checkpoint.load_newest` gave, or None for a fresh start.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self, folder: Path, state: dict[str, Any] | None, recorder: Recorder) -> None:
        self.folder, self.state, self.recorder = folder, state, recorder
        self.launcher: Any = None  # Lightning's, where other processes train for this one
        self.owner = os.getpid()  # the process that holds the run's lock

    def listen(self) -> None:
        """Note signals instead of dying of them; the caller of the run puts the former handlers back."""
        if threading.current_thread() is threading.main_thread():  # no other thread may, or gets any
            for number in self.SIGNALS:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._leave_if_orphaned()
        if self.recorder.received and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: stop at once, the last checkpoint stays
        self.recorder.received = signal.Signals(number)
        if self.launcher is not None:
            self.launcher.kill(signal.SIGTERM)  # not SIGINT: a terminal has sent one, and two of them mean at once

    def _leave_if_orphaned(self) -> None:
        if self.owner != os.getpid() and (self.owner != os.getppid() or _is_ending(self.owner)):
            os._exit(1)  # it is gone, and with it the right to write: another process may have taken the run over

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModule) -> None:  # type: ignore[override]
        self.listen()  # again: Lightning has put handlers of its own in between
        if self.state is None:
            return
        load_model(pl_module.model, self.state["model"])
        # An optimizer keeps the tensors it is given, and processes that were sent this state share its memory.
        load_optimizer(trainer.optimizers[0], copy.deepcopy(self.state["optimizer"]))
        if pl_module.guard is not None:
            pl_module.guard.load_state_dict(self.state["guard"])
        pl_module.step = self.state["step"]
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.total.ready = progress.total.completed = pl_module.step  # trainer.global_step goes on from here
        self.recorder.load_state_dict(self.state["recorder"])
        checkpoint.set_rng_state(self.state["rng"])
        self.state = None

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, pl_module: LanguageModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = pl_module.step, self.recorder.cfg.trainer.checkpoint_every
        if step == self.recorder.cfg.total_steps:
            return
        stop = self._stop_asked(pl_module)
        if stop:
            self._leave_if_orphaned()  # before anything is written
        if stop or (every and step % every == 0):
            self.recorder.flush(pl_module)
            # A checkpoint is a place to go back to, so none is written while the loss is bad.
            if self.recorder.bad_steps == 0 and (trainer.is_global_zero or pl_module.sharded):
                self._save(trainer, pl_module)
        if stop:
            trainer.strategy.barrier()  # the end of one rank ends them all
            name = self.recorder.received.name if self.recorder.received else "signal to another rank"
            raise Interrupted(f"{name} after step {step}")

    def _save(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        state = {"model": whole(module.model.state_dict()), "optimizer": whole(trainer.optimizers[0].state_dict())}
        if not trainer.is_global_zero:
            return
        self.recorder.writer.update()  # the rows up to here reach the disk first
        if module.guard is not None:
            state["guard"] = module.guard.state_dict()
        checkpoint.save(self.folder, module.step, {**state, "recorder": self.recorder.state_dict()})

    def _stop_asked(self, module: LanguageModule) -> bool:
        """Whether a signal came, to whichever rank; ranks ask one another at the steps whose losses they exchange."""
        if module.trainer.world_size == 1:
            return self.recorder.received is not None
        if module.step % self.recorder.flush_every:
            return False
        return bool(module.reduce_sum(torch.tensor(float(self.recorder.received is not None), device=module.device)))

    def on_train_end(self, trainer: lightning.Trainer, pl_module: LanguageModule) -> None:  # type: ignore[override]
        if trainer.is_global_zero or pl_module.sharded:
            state = whole(dict(pl_module.model.state_dict()))
        if trainer.is_global_zero:
            weights = {key: value.contiguous() for key, value in state.items()}
            write_atomic(self.folder.parent / "model.safetensors", safetensors.torch.save(weights))
