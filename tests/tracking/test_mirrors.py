"""Mirrors: what reaches CSV, TensorBoard and W&B, and that no failure of theirs reaches the run."""

from __future__ import annotations

import csv
import importlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import andrea_ablate
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking import LOGGERS, MirrorInfo, Store, check_logger, open_mirrors
from offline_wandb import offline_files, offline_run

KEY = "0123456789abcdef" * 2 + "01234567"


def info(folder: Path, run_id: str = "r", **changes: Any) -> MirrorInfo:
    fields: dict[str, Any] = {
        "run_id": run_id, "name": run_id, "group": "sweep", "job_type": "train", "tags": ["t"],
        "config": {"seed": 0}, "folder": folder, "resumed": False,
    }  # fmt: skip
    return MirrorInfo(**{**fields, **changes})


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "andrea_ablate" and r.levelno >= logging.WARNING]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(Path(andrea_ablate.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **paths, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


# --- the fan-out ---


class _Failing:
    def __init__(self, at: str) -> None:
        self.at, self.rows = at, 0

    def log(self, row: dict[str, Any]) -> None:
        self.rows += 1
        if self.at == "log" and self.rows >= 5:
            raise OSError(28, "No space left on device")

    def finish(self, summary: dict[str, Any], status: str) -> None:
        if self.at == "finish":
            raise BrokenPipeError(32, f"Broken pipe to host with {KEY}")


@pytest.fixture
def stub() -> Iterator[list[_Failing]]:
    made: list[_Failing] = []

    class Stub:
        secret = KEY

        def __init__(self, *, at: str) -> None:
            self.at = at

        def open(self, info: MirrorInfo, history: Iterable[dict[str, Any]]) -> _Failing:
            if self.at == "init":
                raise RuntimeError(f"server said no to {KEY}\nand more")
            made.append(_Failing(self.at))
            return made[-1]

    LOGGERS._items["stub"] = Stub
    yield made
    del LOGGERS._items["stub"]


@pytest.mark.parametrize(
    ("at", "state"),
    [
        ("init", "degraded: stub: server said no to ***"),
        ("log", "degraded: stub: [Errno 28] No space left on device"),
        ("finish", "degraded: stub: [Errno 32] Broken pipe to host with ***"),
        ("never", "ok"),
    ],
)
def test_a_failing_mirror_is_dropped_with_one_warning(
    tmp_path: Path, stub: list[_Failing], caplog: pytest.LogCaptureFixture, at: str, state: str
) -> None:
    store = Store(tmp_path / "runs")
    with caplog.at_level(logging.WARNING, "andrea_ablate"), store.open("r") as run:
        mirrors = open_mirrors({"type": "stub", "at": at}, info(run.folder))
        for step in range(1, 21):
            run.log({"step": step, "train/loss": 1 / step})
            mirrors.log({"step": step, "train/loss": 1 / step})
        mirrors.finish({}, "finished")
        mirrors.finish({}, "finished")
    assert mirrors.state == state
    assert store.metrics("r") == [{"step": step, "train/loss": 1 / step} for step in range(1, 21)]
    assert len(warned(caplog)) == (at != "never")
    assert KEY not in caplog.text
    assert [mirror.rows for mirror in stub] == {"init": [], "log": [5]}.get(at, [20])


def test_none_is_off_and_makes_nothing(tmp_path: Path) -> None:
    mirrors = open_mirrors({"type": "none"}, info(tmp_path / "r"))
    mirrors.log({"step": 1})
    mirrors.finish({}, "finished")
    assert mirrors.state == "off" and not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"type": "wandbb"}, "did you mean 'wandb'"),
        ({"type": "wandb", "mod": "offline"}, "'mod' is not an option .* did you mean 'mode'|did you mean 'mode'"),
        ({"type": "csv", "path": "x"}, "'path' is not an option of 'csv'"),
        ({"type": "wandb", "mode": "ofline"}, "mode='ofline' is not one of auto, online, offline; did you mean"),
        ({"type": "wandb", "project": "a/b"}, "project='a/b' must have 1 to 128 characters and none of"),
        ({"type": "wandb", "init_timeout_s": 0}, "init_timeout_s=0 must be more than 0"),
    ],
)
def test_what_a_person_gets_wrong_is_refused_at_the_start(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_logger(node)


# --- CSV ---


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_header_and_takes_later_columns(tmp_path: Path) -> None:
    mirrors = open_mirrors({"type": "csv"}, info(tmp_path))
    rows: list[dict[str, Any]] = [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": math.nan}]
    for row in [*rows, {"step": 2, "val/loss": np.float32(0.5)}, {"step": 3, "train/loss": torch.tensor(1.0)}]:
        mirrors.log(row)
    mirrors.finish({}, "finished")
    text = (tmp_path / "metrics.csv").read_text()
    assert text == "step,train/loss,val/loss\n1,2.5,\n2,nan,\n2,,0.5\n3,1.0,\n"


def test_csv_is_rebuilt_from_the_rows_on_resume(tmp_path: Path) -> None:
    history = [{"step": step, "train/loss": float(step)} for step in range(1, 11)]
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,1.0\n15,9.9\n16,")  # rows to redo, and a torn one
    mirrors = open_mirrors({"type": "csv"}, info(tmp_path, resumed=True), history)
    for step in range(11, 21):
        mirrors.log({"step": step, "train/loss": float(step)})
    mirrors.finish({}, "finished")
    rows = read_csv(tmp_path / "metrics.csv")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(str(s), str(float(s))) for s in range(1, 21)]


# --- TensorBoard ---


def test_tensorboard_scalars_and_purge_on_resume(tmp_path: Path) -> None:
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    first = open_mirrors({"type": "tensorboard"}, info(tmp_path))
    for step in range(1, 16):
        first.log({"step": step, "train/loss": float(step), "note": "x"})
    first.finish({}, "interrupted")
    history = [{"step": step, "train/loss": float(step)} for step in range(1, 11)]
    second = open_mirrors({"type": "tensorboard"}, info(tmp_path, resumed=True), history)
    for step in range(11, 21):
        second.log({"step": step, "train/loss": 100.0 + step if step < 20 else math.nan})
    second.finish({}, "finished")
    assert (first.state, second.state) == ("ok", "ok")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points[:-1] == [(s, float(s)) for s in range(1, 11)] + [(s, 100.0 + s) for s in range(11, 20)]
    assert points[-1][0] == 20 and math.isnan(points[-1][1])


def test_tensorboard_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        check_logger({"type": "tensorboard"})


# --- Weights & Biases ---


@pytest.mark.slow  # several runs
def test_three_offline_runs_of_one_process_stay_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for seed in range(3):
        began = time.perf_counter()
        config = {"seed": seed, "model": {"norm": {"type": "rmsnorm", "eps": 1e-5}}, "betas": [0.9, 0.95], "no": None}
        name, tags = f"a/b:c#{seed}", ["x" * 99, "", "y"]
        about = info(tmp_path / f"run{seed}", f"run{seed}", name=name, config=config, tags=tags)
        mirrors = open_mirrors({"type": "wandb", "mode": "offline"}, about)
        for step in range(1, 4 + seed):
            mirrors.log({"step": step, "train/loss": 10.0 * seed + step})
        mirrors.finish({"final/loss": 10.0 * seed}, "finished" if seed else "diverged")
        assert mirrors.state == "ok"
        seconds.append(time.perf_counter() - began)
    assert min(seconds[1:]) < 1.0
    assert capfd.readouterr() == ("", "")
    for seed in range(3):
        (file,) = offline_files(tmp_path / f"run{seed}")
        run = offline_run(file)
        assert run["id"] == f"run{seed}" and run["name"] == f"a/b:c#{seed}" and run["group"] == "sweep"
        assert run["tags"] == ["x" * 64, "y"] and run["job_type"] == "train" and run["project"] == "andrea_ablate"
        assert run["config"] == {
            "seed": seed, "model": {"norm": {"type": "rmsnorm", "eps": 1e-5}}, "betas": [0.9, 0.95], "no": None,
        }  # fmt: skip
        assert run["history"] == [{"step": s, "train/loss": 10.0 * seed + s} for s in range(1, 4 + seed)]
        assert run["summary"]["final/loss"] == 10.0 * seed
        assert run["summary"]["status"] == ("finished" if seed else "diverged") and run["exit"] == (not seed)
        assert run["host"] == ""


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_wandb_keeps_steps_done_again_after_a_resume_and_nonfinite_points(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    node = {"type": "wandb", "mode": "offline"}
    first = open_mirrors(node, info(tmp_path))
    values = [1.0, math.nan, np.float32("nan"), math.inf, 2.0]
    for step, value in enumerate(values, 1):
        first.log({"step": step, "train/loss": value})
    first.finish({"best": math.nan}, "interrupted")
    second = open_mirrors(node, info(tmp_path, resumed=True))
    for step in range(3, 7):
        second.log({"step": step, "train/loss": 3.0})
    second.finish({}, "finished")
    assert (first.state, second.state) == ("ok", "ok") and not warned(caplog)
    assert capfd.readouterr() == ("", "")
    old, new = map(offline_run, offline_files(tmp_path))
    assert old["x_axis"] == new["x_axis"] == ("*", "step") and old["id"] == new["id"] == "r"
    assert [row["step"] for row in old["history"]] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in new["history"]] == [3, 4, 5, 6]
    losses = [row["train/loss"] for row in old["history"]]
    assert losses[0] == 1.0 and math.isnan(losses[1]) and math.isnan(losses[2]) and losses[3:] == [math.inf, 2.0]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_mode_auto_is_offline_without_a_key_and_keeps_the_key_out_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors = open_mirrors({"type": "wandb"}, info(tmp_path / "a"))
    mirrors.finish({}, "finished")
    assert mirrors.state == "ok" and len(offline_files(tmp_path / "a")) == 1

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    mirrors = open_mirrors({"type": "wandb"}, info(tmp_path / "b"))
    mirrors.log({"step": 1})
    mirrors.finish({}, "finished")
    assert mirrors.state == "ok"
    (file,) = offline_files(tmp_path / "b")
    assert offline_run(file)["history"] == [{"step": 1}]
    files = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert file in files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]

    monkeypatch.setenv("WANDB_MODE", "disabled")
    mirrors = open_mirrors({"type": "wandb"}, info(tmp_path / "c"))
    mirrors.finish({}, "finished")
    assert mirrors.state == "off" and not (tmp_path / "c").exists()


def test_where_the_key_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(mode: str = "auto") -> tuple[str, str | None]:
        logger: Any = LOGGERS.build({"type": "wandb", "mode": mode})
        return logger.mode, logger.secret

    assert found() == ("offline", None)
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert found() == ("online", KEY) == found("online")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert found() == ("offline", None)
    monkeypatch.delenv("WANDB_BASE_URL")
    settings = tmp_path / "home" / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")  # `wandb login --host`
    assert found() == ("offline", None)
    (tmp_path / "netrc").write_text(f"machine wandb.example.org login user password {KEY[::-1]}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert found() == ("online", KEY[::-1])
    settings.write_text("[default]\nmode = offline\n")  # `wandb offline`
    monkeypatch.delenv("NETRC")
    assert found() == ("offline", KEY)
    assert found("online") == ("online", KEY)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert found()[0] == "offline"
    monkeypatch.setenv("WANDB_MODE", "run")
    assert found()[0] == "online"
    (tmp_path / "home" / ".netrc").unlink()
    with pytest.raises(ConfigError, match="WANDB_MODE=online needs a W&B API key"):
        found()
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "token")
    assert found() == ("online", None)


def test_wandb_is_given_the_key_and_a_limit_to_its_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it would ask at the terminal for a key that it does not find, and wait 90 s for a server."""
    import wandb

    given: dict[str, Any] = {}

    def init(**arguments: Any) -> None:
        given.update(arguments)
        raise RuntimeError("no server")

    monkeypatch.setattr(wandb, "init", init)
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    mirrors = open_mirrors({"type": "wandb", "mode": "online", "init_timeout_s": 7}, info(tmp_path))
    assert mirrors.state == "degraded: wandb: no server"
    assert (given["settings"].api_key, given["settings"].init_timeout) == (KEY, 7)


@pytest.mark.slow  # imports wandb
def test_the_servers_that_keys_are_looked_for_under_are_those_of_wandb() -> None:
    import wandb

    from andrea_ablate.tracking.wandb import _HOSTS

    assert urlsplit(wandb.Settings().base_url).netloc in _HOSTS


@pytest.mark.slow  # imports wandb
def test_a_run_goes_on_once_its_earlier_session_is_closed(tmp_path: Path) -> None:
    node = {"type": "wandb", "mode": "offline"}
    first = open_mirrors(node, info(tmp_path))
    closing = threading.Timer(1.0, first.finish, ({}, "interrupted"))
    closing.start()
    second = open_mirrors(node, info(tmp_path, resumed=True))
    second.finish({}, "finished")
    closing.join()
    assert (first.state, second.state) == ("ok", "ok")


@pytest.mark.slow  # three processes that import wandb
def test_a_run_goes_on_though_the_service_of_its_launcher_knows_its_killed_process(tmp_path: Path) -> None:
    """A service that is shared keeps the id of a run whose process is gone."""
    launcher = """
import os, signal, subprocess, sys
import wandb
wandb.setup()  # from here on the service is in the environment
assert "WANDB_SERVICE" in os.environ
begin = "import sys; from test_mirrors import info; from andrea_ablate.tracking import open_mirrors; "
begin += "from pathlib import Path; print('ready', flush=True); sys.stdin.readline(); "
begin += "m = open_mirrors({'type': 'wandb', 'mode': 'offline'}, info(Path('r'), resumed=%s)); "
begin += "print(m.state, flush=True); "
then = ("sys.stdin.readline()", "m.log({'step': 2}); m.finish({}, 'finished'); print(m.state)")
first, second = (
    subprocess.Popen([sys.executable, "-c", begin % resumed + end], stdin=-1, stdout=-1, text=True, bufsize=1)
    for resumed, end in zip((False, True), then)
)
assert first.stdout.readline() == second.stdout.readline() == "ready\\n"
print(file=first.stdin)
assert first.stdout.readline() == "ok\\n"
first.send_signal(signal.SIGKILL)
print(file=second.stdin)
print(second.communicate(timeout=120)[0])
"""
    done = run_python(launcher, PYTHONPATH=os.pathsep.join([*sys.path, str(Path(__file__).parent)]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ok", "ok"]


def test_online_without_a_key_stops_within_seconds_and_never_asks(tmp_path: Path) -> None:
    code = (
        "from andrea_ablate.tracking import check_logger\n"
        "check_logger({'type': 'wandb', 'mode': 'online', 'project': 'p', 'entity': None, 'init_timeout_s': 20})"
    )
    done = run_python(code)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "mode=online needs a W&B API key" in last and "logger.mode=offline" in last


@pytest.mark.slow  # several runs
def test_unreachable_server_degrades_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "from pathlib import Path\nfrom andrea_ablate.tracking import MirrorInfo, open_mirrors\n"
        "node = {'type': 'wandb', 'mode': 'online', 'init_timeout_s': 1}\n"
        "m = open_mirrors(node, MirrorInfo('r', 'r', 'g', 'train', [], {}, Path('r'), False))\n"
        "m.log({'step': 1}); m.finish({}, 'finished'); print(m.state)"
    )
    done = run_python(code, WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("degraded: wandb: ") and KEY not in done.stdout + done.stderr


def test_without_the_wandb_package_everything_else_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_logger({"type": "wandb", "mode": "offline"})
    for node in ({"type": "none"}, {"type": "csv"}):
        check_logger(node)
        mirrors = open_mirrors(node, info(tmp_path))
        mirrors.log({"step": 1, "x": 0.5})
        mirrors.finish({}, "finished")
    assert (tmp_path / "metrics.csv").read_text() == "step,x\n1,0.5\n"


def test_a_folder_called_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_logger({"type": "wandb"})


def test_a_hanging_wandb_neither_slows_nor_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    from andrea_ablate.tracking import wandb as module

    release = threading.Event()
    monkeypatch.setattr(wandb.Run, "log", lambda run, row: release.wait(30))
    monkeypatch.setattr(module, "_FINISH_S", 0.2)
    mirrors = open_mirrors({"type": "wandb", "mode": "offline"}, info(tmp_path, "hanging"))
    began = time.perf_counter()
    for step in range(100):
        mirrors.log({"step": step, "train/loss": 1.0})
    assert time.perf_counter() - began < 5
    mirrors.finish({}, "finished")
    assert time.perf_counter() - began < 10
    release.set()
    assert mirrors.state == "degraded: wandb: not finished within 0.2 s" and len(warned(caplog)) == 1


def test_an_error_inside_wandb_is_seen_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    def full(run: Any, row: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wandb.Run, "log", full)
    mirrors = open_mirrors({"type": "wandb", "mode": "offline"}, info(tmp_path))
    deadline = time.perf_counter() + 10
    while mirrors.state == "ok" and time.perf_counter() < deadline:
        mirrors.log({"step": 1})
        time.sleep(0.01)
    mirrors.finish({}, "finished")
    assert mirrors.state == "degraded: wandb: [Errno 28] No space left on device" and len(warned(caplog)) == 1
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name == "andrea_ablate-mirror":
            thread.join(10)
    again = open_mirrors({"type": "wandb", "mode": "offline"}, info(tmp_path, resumed=True))
    again.log({"step": 1})
    again.finish({}, "finished")
    assert again.state == "ok"  # W&B lets one process hold an id once: the failed run was closed


def test_a_row_costs_the_training_loop_little(tmp_path: Path) -> None:
    mirrors = open_mirrors({"type": "wandb", "mode": "offline"}, info(tmp_path))
    row = {"step": 1, **{f"k{i}": 0.1 * i for i in range(7)}}
    rounds = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(20):
            mirrors.log(row)
        rounds.append((time.perf_counter() - began) / 20)
    mirrors.finish({}, "finished")
    assert min(rounds) < 0.3e-3
