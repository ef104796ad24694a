"""A run that was stopped, killed or failed goes on to the bits of the undisturbed run."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outcome import Outcome, Straight, digest_of, fresh

from andrea_ablate.config import RunConfig
from andrea_ablate.data import prepare
from andrea_ablate.data.datamodule import DataModule
from andrea_ablate.data.windows import Windows
from andrea_ablate.tracking.store import RunWriter, Store
from andrea_ablate.training import callbacks, checkpoint
from andrea_ablate.training.identity import identify
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import run
from support import Cli, Compose, During


def send(number: int = signal.SIGTERM) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def stop(cfg: RunConfig) -> Outcome:
    """Run until a signal stops it."""
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    return Outcome(cfg)


def go_on(cfg: RunConfig) -> Outcome:
    run(cfg)
    return Outcome(cfg)


# --- signals ---


@pytest.mark.slow  # several runs
@pytest.mark.parametrize("at", [8, 10, 17])
@pytest.mark.parametrize(
    "overrides", [(), ("optim=muon", "trainer.accumulate=2", "model.tie_embeddings=true")], ids=["adamw", "muon"]
)
def test_stopped_run_goes_on_at_the_next_step_to_the_same_bits(
    at: int,
    overrides: tuple[str, ...],
    epochs: Compose,
    straight: Straight,
    during: During,
    digests: list[tuple[int, str]],
) -> None:
    cfg = epochs(*overrides)
    undisturbed = straight(*overrides)
    digests.clear()
    during(at, send())
    stopped = stop(cfg)
    assert stopped.checkpoints()[-1] == at
    assert [row["step"] for row in stopped.train] == list(range(1, at + 1))

    resumed = go_on(cfg)
    assert resumed.record["resumed_from"] == at
    batches = DataModule(identify(cfg)[1], cfg.data, 4, 24).train_dataloader()
    assert digests == [(step, digest_of(batch)) for step, batch in enumerate(batches, 1)]
    assert len(dict(digests)) == 24
    assert [row["step"] for row in resumed.train] == list(range(1, 25))
    assert resumed.final == undisturbed.final
    assert resumed.checkpoints() == []


def test_epochs_read_the_same_tokens_at_other_phases(epochs: Compose) -> None:
    # What the stops above rely on: three epochs of eight steps, none of which repeats a batch of another.
    cfg = epochs()
    corpus = prepare(cfg.data, Path(cfg.paths.cache))
    windows = Windows(len(corpus.train), 8)
    starts = [set(windows.starts(cfg.data.seed, step, 4)) for step in range(24)]
    for epoch in range(3):
        within = set().union(*starts[8 * epoch : 8 * epoch + 8])
        assert len(within) == 32 and len({start % 8 for start in within}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_is_named_in_the_record_and_leaves_a_checkpoint(number: int, epochs: Compose, during: During) -> None:
    cfg = epochs()
    during(7, send(number))
    stopped = stop(cfg)
    assert stopped.record["status"] == "interrupted"
    assert stopped.record["reason"] == f"{signal.Signals(number).name} after step 7"
    assert stopped.checkpoints() == [5, 7]
    assert not (stopped.folder / "error.txt").exists()


def test_second_run_continues_the_folder_and_the_id(epochs: Compose, during: During) -> None:
    cfg = epochs("logger=csv")
    during(15, send())
    first = stop(cfg)
    second = go_on(cfg)
    assert (second.id, second.folder) == (first.id, first.folder)
    assert [path.name for path in Path(cfg.paths.runs).iterdir()] == [first.id]
    lines = (second.folder / "metrics.csv").read_text().splitlines()
    assert sum(line.startswith("step,") for line in lines) == 1
    trained = [line.split(",")[0] for line in lines[1:] if line.split(",")[2]]
    assert trained == [str(step) for step in range(1, 25)]


def test_every_session_of_a_run_is_the_same_tracker_run(
    epochs: Compose, during: During, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    asked: list[dict[str, Any]] = []
    steps: list[list[int]] = []

    def init(**options: Any) -> Any:
        asked.append(options)
        steps.append([])
        session = steps[-1]
        return SimpleNamespace(
            log=lambda row: session.append(row["step"]) if "train/loss" in row else None,
            define_metric=lambda *_, **__: None,
            finish=lambda **_: None,
            id=options["id"],
            summary={},
        )

    monkeypatch.setattr(wandb, "init", init)
    cfg = epochs("logger=wandb", "logger.mode=offline")
    during(7, send(signal.SIGTERM))
    stop(cfg)
    during(12, send(signal.SIGUSR1))
    stop(cfg)
    during(19, fail)  # after the checkpoint of step 15
    run(cfg)
    done = go_on(cfg)
    assert [(one["id"], one["resume"]) for one in asked] == [(done.id, None)] + 3 * [(done.id, "allow")]
    assert {one["dir"] for one in asked} == {str(done.folder)} and {one["group"] for one in asked} == {""}
    assert [(session[0], session[-1]) for session in steps] == [(1, 7), (8, 12), (13, 18), (16, 24)]
    assert done.record["tracking"] == "ok"


@pytest.mark.slow  # several runs
def test_run_stopped_again_and_again_ends_in_the_same_bits(epochs: Compose, straight: Straight, during: During) -> None:
    cfg = epochs()
    for at in (1, 8, 9, 23):
        during(at, send())
        assert stop(cfg).record["reason"] == f"SIGTERM after step {at}"
    assert go_on(cfg).final == straight().final


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_signal_during_validation_stops_after_it(
    epochs: Compose, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = epochs()
    original = LanguageModule.evaluate

    def evaluate(self: LanguageModule, batches: Any) -> dict[str, float]:
        if self.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "evaluate", evaluate)
        stopped = stop(cfg)
    assert stopped.record["reason"] == "SIGTERM after step 12"
    assert [row["step"] for row in stopped.val] == [6, 12]
    assert go_on(cfg).final == straight().final


def test_signal_in_the_last_step_lets_the_run_finish_and_stops_the_command(
    epochs: Compose, straight: Straight, during: During
) -> None:
    cfg = epochs()
    during(24, send())
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run(cfg)
    assert Outcome(cfg).final == straight().final
    assert run(cfg) == Outcome(cfg).record  # reused


def test_signal_while_mirrors_finish_does_not_undo_a_finished_run(
    epochs: Compose, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = epochs()
    original = callbacks.Mirrors.finish

    def finish(self: callbacks.Mirrors, summary: dict[str, Any], status: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        original(self, summary, status)

    monkeypatch.setattr(callbacks.Mirrors, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    assert Outcome(cfg).final == straight().final


def test_second_interrupt_stops_at_once_and_keeps_the_last_checkpoint(
    epochs: Compose, straight: Straight, during: During
) -> None:
    cfg = epochs()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    during(8, twice)
    stopped = stop(cfg)
    assert stopped.record["status"] == "interrupted"
    assert stopped.record["reason"] == "stopped at once, without a new checkpoint"
    assert stopped.checkpoints() == [5]
    resumed = go_on(cfg)
    assert resumed.record["resumed_from"] == 5
    assert resumed.final == straight().final


def test_exit_from_a_launchers_handler_counts_as_a_stop(epochs: Compose, straight: Straight, during: During) -> None:
    cfg = epochs()

    def leave() -> None:
        raise SystemExit(-1)

    during(8, leave)
    assert stop(cfg).record["status"] == "interrupted"
    assert go_on(cfg).final == straight().final


def test_error_that_a_signal_caused_counts_as_a_stop(epochs: Compose, straight: Straight, during: During) -> None:
    cfg = epochs()

    def lose_a_worker() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    during(8, lose_a_worker)
    assert stop(cfg).record["status"] == "interrupted"
    assert go_on(cfg).final == straight().final


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_handlers_of_the_caller_come_back(epochs: Compose, during: During) -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("the caller's handler must not run while a run notes signals")

    former = {number: signal.signal(number, own) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        cfg = epochs()
        for at, number in enumerate(former, 3):
            during(at, send(number))
            stop(cfg)
            assert all(signal.getsignal(number) is own for number in former)
        run(cfg)
        assert all(signal.getsignal(number) is own for number in former)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_run_in_a_thread_trains_without_signal_handlers(epochs: Compose, straight: Straight) -> None:
    cfg = epochs()
    thread = threading.Thread(target=run, args=(cfg,))
    thread.start()
    thread.join()
    assert Outcome(cfg).final == straight().final


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_command_line_says_130_and_then_goes_on(cli: Cli, tmp_path: Path, during: During) -> None:
    during(4, send())
    answer = cli()
    assert answer.status == 130
    assert "SIGTERM after step 4" in answer.err and "go on" in answer.err
    assert cli().status == 0
    store = Store(tmp_path / "runs")
    (name,) = store.ids()
    assert [row["step"] for row in store.metrics(name) if "train/loss" in row] == list(range(1, 11))


# --- the state that crosses ---


@pytest.mark.slow  # several runs
@pytest.mark.parametrize("choice", ["optim=adamw", "optim=muon", "optim=lion", "optim=sgd", "stability=[skip_step]"])
def test_state_at_the_seam_is_that_of_the_undisturbed_run(
    choice: str, epochs: Compose, during: During, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if self.step == 11:
            recorder = next(c for c in self.trainer.callbacks if isinstance(c, callbacks.Recorder))
            seen.append(
                copy.deepcopy(
                    {
                        "optimizer": self.trainer.optimizers[0].state_dict(),
                        "groups": [
                            {key: value for key, value in group.items() if key != "params"}
                            for group in self.trainer.optimizers[0].param_groups
                        ],
                        "model": self.model.state_dict(),
                        "guard": self.guard and self.guard.state_dict(),
                        "rng": torch.get_rng_state(),
                        "steps": self.trainer.global_step,
                        "recorder": {k: v for k, v in recorder.state_dict().items() if k != "wall_s"},
                        "batch": batch,
                    }
                )
            )
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    run(epochs(choice))
    cfg = epochs(choice)
    during(11, send())
    stop(cfg)
    run(cfg)
    before, after = seen
    assert_equal(before, after)
    assert (before["guard"] is not None) == ("skip_step" in choice)
    assert before["guard"] is None or len(before["guard"]["past"]) == 11
    recorder = before["recorder"]
    assert (
        before["steps"] == 11 and recorder["bad_steps"] == 0 and recorder["token_hash"] and recorder["initial_loss"] > 0
    )
    parts = before["optimizer"].get("parts", [before["optimizer"]])
    moments = [state for part in parts for state in part["state"].values()]
    assert len(moments) == len(before["model"])
    assert all(any(torch.is_tensor(v) and v.abs().sum() > 0 for v in state.values()) for state in moments)
    assert not torch.equal(before["rng"], torch.get_rng_state())


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if torch.is_tensor(a):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_last_validation_is_remembered_over_a_stop(epochs: Compose, during: During) -> None:
    cfg = epochs()
    during(13, send())
    first = stop(cfg)
    during(14, send())
    second = stop(cfg)
    assert second.record["resumed_from"] == 13
    assert [row["step"] for row in second.val] == [6, 12]
    assert second.record["val/loss"] == first.record["val/loss"] == second.val[1]["val/loss"]


def test_results_of_steps_that_are_undone_are_forgotten(epochs: Compose, during: During) -> None:
    cfg = epochs()
    during(13, fail)
    assert run(cfg)["val/loss"] == Outcome(cfg).val[1]["val/loss"]  # of step 12
    during(11, fail)
    record = run(cfg)
    assert record["resumed_from"] == 10
    assert record["val/loss"] == Outcome(cfg).val[0]["val/loss"]  # of step 6
    shutil.rmtree(Outcome(cfg).folder / "checkpoints")
    during(3, fail)
    assert "val/loss" not in run(cfg)


def test_time_adds_up_over_sessions(epochs: Compose, during: During) -> None:
    cfg = epochs()
    during(9, send())
    stop(cfg)
    run(cfg)
    times = [row["wall_s"] for row in Store(Path(cfg.paths.runs)).metrics(Outcome(cfg).id) if "wall_s" in row]
    assert times == sorted(times) and times[0] > 0
    assert Outcome(cfg).record["train_s"] == pytest.approx(times[-1], abs=1e-3)


def test_checkpoint_interval_changes_nothing_but_where_to_go_on(
    epochs: Compose, straight: Straight, during: During
) -> None:
    cfg = epochs("trainer.checkpoint_every=0")
    assert Outcome(cfg).id == straight().id
    during(9, send())
    assert stop(cfg).checkpoints() == [9]  # a signal writes one all the same
    often = replace(cfg, trainer=replace(cfg.trainer, checkpoint_every=1))
    assert go_on(often).final == straight().final


# --- failures ---


def fail() -> None:
    raise RuntimeError("lights out")


def test_failed_run_is_tried_again_from_its_checkpoint(epochs: Compose, straight: Straight, during: During) -> None:
    cfg = epochs()
    during(14, fail)
    record = run(cfg)
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: lights out")
    failed = Outcome(cfg)
    assert [row["step"] for row in failed.train] == list(range(1, 14))
    assert "lights out" in (failed.folder / "error.txt").read_text()
    again = go_on(cfg)
    assert again.record["resumed_from"] == 10
    assert again.record["reason"] == ""
    assert not (again.folder / "error.txt").exists()
    assert [row["step"] for row in again.train] == list(range(1, 25))
    assert again.final == straight().final


def test_rows_of_steps_done_again_hold_the_later_value(epochs: Compose, during: During) -> None:
    cfg = epochs("trainer.checkpoint_every=10")
    during(16, fail)
    run(cfg)
    store, name = Store(Path(cfg.paths.runs)), Outcome(cfg).id
    first = {row["step"]: row["wall_s"] for row in store.metrics(name) if "wall_s" in row}
    run(cfg)
    rows = [row for row in store.metrics(name) if "wall_s" in row]
    assert [row["step"] for row in rows] == list(range(1, 25))
    second = {row["step"]: row["wall_s"] for row in rows}
    assert all(second[step] == first[step] for step in range(1, 11))
    assert any(second[step] != first[step] for step in range(11, 16))


def test_without_checkpoints_the_rows_are_rewound_to_the_start(
    epochs: Compose, straight: Straight, during: During
) -> None:
    cfg = epochs()
    during(17, send())
    shutil.rmtree(stop(cfg).folder / "checkpoints")
    again = go_on(cfg)
    assert again.record["resumed_from"] == 0
    assert again.final == straight().final


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scribble(path: Path) -> None:
    path.write_bytes(b"\x00" * path.stat().st_size)


def flip_a_bit_of_a_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["model"]["embedding"].numpy().tobytes()
    content[bytes(content).index(weight[:64]) + 33] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def interrupted(epochs: Compose) -> RunConfig:
    """A run that was stopped after step 17, with checkpoints at 15 and 17."""
    cfg = epochs()
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if self.step == 16:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModule, "training_step", training_step)
        assert stop(cfg).checkpoints() == [15, 17]
    return cfg


@pytest.mark.parametrize("damage", [truncate, empty, scribble, flip_a_bit_of_a_weight])
def test_damaged_checkpoint_falls_back_to_the_one_before(
    damage: Callable[[Path], None],
    interrupted: RunConfig,
    straight: Straight,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = fresh(interrupted, tmp_path / "runs")
    shutil.copytree(interrupted.paths.runs, cfg.paths.runs)
    newest = checkpoint.newest_first(Outcome(cfg).folder / "checkpoints")[0]
    damage(newest)
    with caplog.at_level(logging.WARNING, "andrea_ablate"):
        resumed = go_on(cfg)
    assert newest.name in caplog.text
    assert resumed.record["resumed_from"] == 15 and resumed.record["damaged_checkpoints"] == [newest.name]
    assert resumed.final == straight().final


def test_when_every_checkpoint_is_damaged_the_run_starts_over(
    interrupted: RunConfig, straight: Straight, tmp_path: Path
) -> None:
    cfg = fresh(interrupted, tmp_path / "runs")
    shutil.copytree(interrupted.paths.runs, cfg.paths.runs)
    for path in (Outcome(cfg).folder / "checkpoints").glob("*.ckpt"):
        truncate(path)
    resumed = go_on(cfg)
    assert resumed.record["resumed_from"] == 0
    assert resumed.final == straight().final


# --- kill -9 ---


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_any_checkpoint() -> None:
    _kill_when(LanguageModule, "training_step", lambda self, *_: self.step == 2)


def between_a_row_and_its_validation() -> None:
    _kill_when(LanguageModule, "evaluate", lambda self, _: self.step == 12)


def between_two_rows() -> None:
    _kill_when(RunWriter, "log", lambda self, row: row["step"] == 13)


def while_a_checkpoint_is_written() -> None:
    _kill_when(os, "replace", lambda source, target: "step-00000015" in str(target))


def after_a_checkpoint_before_the_old_one_goes() -> None:
    _kill_when(Path, "unlink", lambda self, **_: self.name == "step-00000005.ckpt")


def while_the_weights_are_written() -> None:
    _kill_when(os, "replace", lambda source, target: "model.safetensors" in str(target))


def before_the_record_says_finished() -> None:
    _kill_when(RunWriter, "update", lambda self, **fields: fields.get("status") == "finished")


POINTS = [
    before_any_checkpoint,
    between_a_row_and_its_validation,
    between_two_rows,
    while_a_checkpoint_is_written,
    after_a_checkpoint_before_the_old_one_goes,
    while_the_weights_are_written,
    before_the_record_says_finished,
]


def _kill_when(owner: Any, name: str, condition: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if condition(*args, **kwargs):
            die()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def run_and_die(prepare: Callable[[], None], cfg: RunConfig) -> None:
    torch.set_num_threads(1)
    prepare()
    run(cfg)


@pytest.fixture(scope="module")
def server() -> multiprocessing.context.ForkServerContext:
    """Processes that start in no time: the imports are made once, in a process that computes nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["andrea_ablate.training.run"])
    return context


@pytest.mark.slow  # several runs
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_killed_run_goes_on_to_the_same_bits(
    point: Callable[[], None],
    epochs: Compose,
    straight: Straight,
    server: multiprocessing.context.ForkServerContext,
) -> None:
    cfg = epochs()
    process = server.Process(target=run_and_die, args=(point, cfg))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    killed = Outcome(cfg)
    assert killed.record["status"] == "running"
    resumed = go_on(cfg)
    assert resumed.record["resumed_from"] in (0, 10, 15, 20)
    assert [row["step"] for row in resumed.train] == list(range(1, 25))
    assert resumed.final == straight().final
    assert not list(resumed.folder.rglob("*.tmp"))
