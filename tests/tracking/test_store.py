"""The local record: what survives kills, rewinds, full disks and second writers."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import andrea_ablate
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking import RunBusy, Store, StoreError, config_payload, write_atomic

ENV = {**os.environ, "PYTHONPATH": str(Path(andrea_ablate.__file__).parents[1])}


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def start(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


# --- rows ---


def test_rows_come_back_in_order_with_their_types(store: Store) -> None:
    rows = [
        {"step": 1, "train/loss": 2.5, "note": "ü", "done": False, "none": None},
        {"step": 2, "train/loss": 1e-5, "betas": [0.9, 0.95], "hist": {"lo": 0.0}},
    ]
    with store.open("a") as run:
        for row in rows:
            run.log(row)
    assert store.metrics("a") == rows
    assert [type(value) for value in store.metrics("a")[0].values()] == [int, float, str, bool, type(None)]


def test_scalars_of_numpy_and_torch_become_numbers(store: Store) -> None:
    with store.open("a") as run:
        run.log({"step": np.int64(3), "a": np.float32(0.5), "b": torch.tensor(0.25), "c": torch.tensor(7)})
        run.log({"step": 4, "a": torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), "b": np.bool_(True)})
    assert store.metrics("a") == [{"step": 3, "a": 0.5, "b": 0.25, "c": 7}, {"step": 4, "a": 1.5, "b": True}]


def test_nonfinite_values_are_kept_counted_and_strictly_valid(store: Store) -> None:
    values = [1.0, float("nan"), np.float32("nan"), float("inf"), 2.0]
    with store.open("a") as run:
        for step, value in enumerate(values):
            run.log({"step": step, "train/loss": value})
        assert run.nonfinite == 3
        run.log({"step": 5, "grad/histogram": torch.full((3,), float("nan")), "low": -math.inf})
        assert run.nonfinite == 7
    for line in (store.path("a") / "metrics.jsonl").read_text().splitlines():
        strict(line)
    read = [row["train/loss"] for row in store.metrics("a")[:5]]
    assert read[0] == 1.0 and math.isnan(read[1]) and math.isnan(read[2]) and read[3:] == [math.inf, 2.0]
    last = store.metrics("a")[5]
    assert all(map(math.isnan, last["grad/histogram"])) and last["low"] == -math.inf
    with store.open("a") as run:
        assert run.nonfinite == 7  # read back from the rows
        run.rewind(1)
        assert run.nonfinite == 1


def test_a_value_that_no_record_takes_is_named(store: Store) -> None:
    with store.open("a") as run:
        with pytest.raises(TypeError, match=r"train/model=.* is a Linear"):
            run.log({"step": 1, "train/model": torch.nn.Linear(1, 1)})
        run.log({"step": 1})
    assert store.metrics("a") == [{"step": 1}]


def test_a_row_is_cheap(store: Store) -> None:
    row = {"step": 1, "train/loss": 2.123456, **{f"k{i}": 0.1 * i for i in range(6)}}
    with store.open("a") as run:
        rounds = []
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(100):
                run.log(row)
            rounds.append((time.perf_counter() - began) / 100)
    assert min(rounds) < 50e-6


# --- kills and resumes ---

WRITE_FOREVER = """
import sys
from pathlib import Path
from andrea_ablate.tracking import Store
with Store(Path(sys.argv[1])).open("a") as run:
    run.update(status="running")
    step = 0
    while True:
        step += 1
        run.log({"step": step, "train/loss": 1 / step, "pad": "x" * 300})
        if step == 200:
            print("go", flush=True)
"""


def test_kill_during_writing_loses_at_most_the_last_row(store: Store) -> None:
    writer = start(WRITE_FOREVER, store.root)
    assert hear(writer) == "go"
    assert store.run_is_active("a")
    with pytest.raises(RunBusy) as busy:
        store.open("a")
    assert busy.value.pid == writer.pid and busy.value.host == os.uname().nodename
    assert str(writer.pid) in str(busy.value)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not store.run_is_active("a")

    raw = (store.path("a") / "metrics.jsonl").read_bytes()
    steps = [row["step"] for row in store.metrics("a")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 200
    assert raw.count(b"\n") == len(steps)
    assert store.record("a") == {"status": "running"}

    with store.open("a") as run:
        run.rewind(150)
        for step in range(151, 161):
            run.log({"step": step, "train/loss": 0.0})
    assert [row["step"] for row in store.metrics("a")] == list(range(1, 161))


def test_torn_tail_is_ignored_by_readers_and_repaired_by_the_next_writer(store: Store) -> None:
    with store.open("a") as run:
        for step in (1, 2, 3):
            run.log({"step": step})
    path = store.path("a") / "metrics.jsonl"
    whole = path.read_bytes()
    for tail in (b'{"step": 4, "tra', b'{"step":4}', b"\0\0\0"):
        path.write_bytes(whole + tail)
        assert [row["step"] for row in store.metrics("a")] == [1, 2, 3]
    with store.open("a") as run:
        run.log({"step": 4})
    assert path.read_bytes() == whole + b'{"step":4}\n'


def test_rewind_keeps_rows_up_to_the_step_and_repairs(store: Store) -> None:
    with store.open("a") as run:
        for step in range(1, 16):
            run.log({"step": step, "train/loss": 1.0})
        run.log({"step": 15, "val/loss": 2.0})
    path = store.path("a") / "metrics.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + b'{"st')
    with store.open("a") as run:
        run.rewind(10)
        assert path.read_bytes() == b"".join(before[:10])
        for step in range(11, 21):
            run.log({"step": step, "train/loss": 3.0})
    rows = store.metrics("a")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["train/loss"] for row in rows] == [1.0] * 10 + [3.0] * 10


def test_damage_before_the_last_line_is_an_error_not_a_gap(store: Store) -> None:
    with store.open("a") as run:
        for step in (1, 2, 3):
            run.log({"step": step})
    path = store.path("a") / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl is damaged: line 2"):
        store.metrics("a")


def test_leftover_temporary_files_go_when_the_run_is_opened(store: Store) -> None:
    folder = store.path("a")
    (folder / "checkpoints").mkdir(parents=True)
    for name in (".record.json.1.ab.tmp", "checkpoints/.last.ckpt.1.ab.tmp", "checkpoints/last.ckpt"):
        (folder / name).touch()
    store.open("a").close()
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoints", "last.ckpt", "lock", "metrics.jsonl"]


# --- one writer ---

HOLD = """
import sys
from pathlib import Path
from andrea_ablate.tracking import RunBusy, Store
print("ready", flush=True)
sys.stdin.readline()
try:
    with Store(Path(sys.argv[1])).open("a") as run:
        run.log({"step": 1})
        print("won", flush=True)
        sys.stdin.readline()
except RunBusy:
    print("busy", flush=True)
"""


def test_of_two_processes_at_once_one_wins_and_one_is_refused(store: Store) -> None:
    both = [start(HOLD, store.root) for _ in range(2)]
    assert [hear(process) for process in both] == ["ready", "ready"]
    for process in both:
        say(process)
    assert sorted(hear(process) for process in both) == ["busy", "won"]
    for process in both:
        process.communicate("\n")
    assert store.metrics("a") == [{"step": 1}]


def test_blocking_open_waits_for_the_holder(store: Store) -> None:
    holder = start(HOLD, store.root)
    assert hear(holder) == "ready"
    say(holder)
    assert hear(holder) == "won"
    threading.Timer(0.3, say, [holder]).start()
    with store.open("a", blocking=True) as run:
        assert holder.wait(10) == 0  # it ends only after its release
        assert store.metrics(run.id) == [{"step": 1}]
    holder.communicate()


def test_second_writer_in_the_same_process_is_refused_until_the_first_closes(store: Store) -> None:
    with store.open("a"), pytest.raises(RunBusy) as busy:
        store.open("a")
    assert busy.value.pid == os.getpid()
    assert not store.run_is_active("a")
    store.open("a").close()


def test_a_forked_child_does_not_keep_the_lock(store: Store) -> None:
    run = store.open("a")
    ready, tell = os.pipe()
    wait, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"1")
        os.read(wait, 1)
        run.close()  # harmless here
        os._exit(0)
    os.read(ready, 1)
    assert store.run_is_active("a")  # the child closing its copy leaves the parent's lock alone
    run.close()
    assert not store.run_is_active("a")
    os.write(release, b"1")
    assert os.waitpid(child, 0)[1] == 0
    for fd in (ready, tell, wait, release):
        os.close(fd)


def test_looking_at_a_lock_never_makes_a_writer_fail(store: Store) -> None:
    store.open("a").close()
    code = (
        "import sys; from pathlib import Path; from andrea_ablate.tracking import Store\n"
        "s = Store(Path(sys.argv[1])); print('go', flush=True)\n"
        "while True: s.run_is_active('a')"
    )
    looker = start(code, store.root)
    assert hear(looker) == "go"
    try:
        for _ in range(50):
            store.open("a").close()
    finally:
        looker.kill()
        looker.communicate()


# --- record, config, ids ---


def test_update_merges_and_record_is_strict_json(store: Store) -> None:
    with store.open("a") as run:
        run.update(status="running", versions={"torch": "2"}, tokens=0)
        run.update(status="diverged", final=math.nan, best=-math.inf, tokens=np.int64(5), where=Path("x/y"))
        assert run.record["tokens"] == 5
    text = (store.path("a") / "record.json").read_text()
    assert strict(text)["final"] == "NaN"
    record = store.record("a")
    assert record is not None and math.isnan(record.pop("final"))
    assert record == {
        "status": "diverged", "versions": {"torch": "2"}, "tokens": 5, "best": -math.inf, "where": "x/y",
    }  # fmt: skip
    with store.open("a") as run:
        run.update(status="finished")
        assert run.record["tokens"] == 5
    assert store.record("b") is None


def test_status_is_one_of_five(store: Store) -> None:
    with store.open("a") as run, pytest.raises(AssertionError, match="done"):
        run.update(status="done")


def test_error_text_is_kept(store: Store) -> None:
    with store.open("a") as run:
        run.error("Traceback …\nOutOfMemoryError")
    assert (store.path("a") / "error.txt").read_text() == "Traceback …\nOutOfMemoryError"


def test_floats_of_the_config_are_floats_for_every_yaml_version(store: Store) -> None:
    # YAML 1.1 reads a float only with a point and a signed exponent.
    yaml11 = re.compile(r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|[-+]?\.(inf|Inf)")
    floats = [1e-4, 1e-5, 1.5e-5, 3e-3, 1e16, 1e22, 123456789012345680.0, 5e-324, -0.0, 2.0, math.inf, 1e-8]
    for index, value in enumerate(floats):
        with store.open(f"f{index}") as run:
            run.write_config({"optim": {"lr": value}})
        text = (run.folder / "config.yaml").read_text()
        assert yaml11.fullmatch(text.split("lr: ")[1].strip()), text
        read = yaml.safe_load(text)["optim"]["lr"]
        assert type(read) is float and read == value
        assert store.config(run.id) == {"optim": {"lr": value}}


@pytest.mark.parametrize("text", ["1e-4", "12e5", "1E5", "nan", "on", "null", "0x1f", "1:30", "a: b", "", "ü"])
def test_texts_of_the_config_stay_texts_for_every_yaml_version(store: Store, text: str) -> None:
    from omegaconf import OmegaConf

    with store.open("a") as run:
        run.write_config({"x": text})
    assert store.config("a") == {"x": text}
    assert OmegaConf.to_container(OmegaConf.load(run.folder / "config.yaml")) == {"x": text}


def test_a_folder_belongs_to_one_config(store: Store) -> None:
    config = {"seed": 0, "optim": {"lr": 1e-4, "betas": (0.9, 0.95)}, "nan": math.nan}
    with store.open("a") as run:
        run.write_config(config)
        before = (run.folder / "config.yaml").stat()
        run.write_config(config)
        other = {**config, "optim": {"lr": 3e-4, "betas": [0.9, 0.95]}}
        with pytest.raises(ConfigError, match=r"optim\.lr is 0\.0001 there, 0\.0003 here.*resume.*delete"):
            run.write_config(other)
        with pytest.raises(ConfigError, match=r"extra is 'absent' there, 1 here"):
            run.write_config({**config, "extra": 1})
        after = (run.folder / "config.yaml").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_config_payload_is_plain_and_keeps_types() -> None:
    from omegaconf import OmegaConf

    source = {
        "path": Path("a/b"), "betas": (0.9, np.float32(0.5)), "n": np.int64(3), "flag": True, "none": None,
        "lr": 1e-4, "model": {"norm": {"type": "rmsnorm", 1: np.bool_(False)}}, "empty": {}, "list": [],
    }  # fmt: skip
    payload = config_payload(source)
    assert payload == {
        "path": "a/b", "betas": [0.9, 0.5], "n": 3, "flag": True, "none": None,
        "lr": 1e-4, "model": {"norm": {"type": "rmsnorm", "1": False}}, "empty": {}, "list": [],
    }  # fmt: skip
    assert [type(payload[key]) for key in ("betas", "n", "flag", "lr")] == [list, int, bool, float]
    assert type(payload["betas"][1]) is float
    assert payload["model"] is not source["model"]
    resolved = config_payload(OmegaConf.create({"d": 64, "ff": {"width": "${d}", "l": [1, "${d}"]}}))
    assert resolved == {"d": 64, "ff": {"width": 64, "l": [1, 64]}} and type(resolved["ff"]) is dict


@pytest.mark.parametrize(
    ("config", "message"),
    [({"data": {"files": ["a", "???"]}}, r"data\.files\[1\] has no value yet"), ({"m": {"f": print}}, r"m\.f=")],
)
def test_config_payload_refuses_missing_and_foreign_values(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_payload(config)


@pytest.mark.parametrize("run_id", ["a/b:c#1", "", ".", "..", ".hidden", "a b", "ü", "x" * 129, "a\n"])
def test_unsafe_ids_are_refused(store: Store, run_id: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        store.open(run_id)
    assert not store.root.exists()


def test_ids_lists_runs_only(store: Store) -> None:
    assert store.ids() == []
    for run_id in ("b-2", "a.1"):
        store.open(run_id).close()
    (store.root / "comparison").mkdir()
    (store.root / "notes.txt").touch()
    assert store.ids() == ["a.1", "b-2"]
    assert store.metrics("nothing") == [] and not store.run_is_active("nothing")


# --- a disk that refuses ---


def test_full_disk_leaves_the_old_file_and_no_temporary(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "deep" / "file"
    write_atomic(path, "old")
    with store.open("a") as run:
        run.update(status="running")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="cannot write .*deep/file: No space left on device") as refused:
            write_atomic(path, b"new")
        assert refused.value.errno == errno.ENOSPC
        with pytest.raises(StoreError, match="No space"):
            run.update(status="finished")
        with pytest.raises(StoreError, match=r"error\.txt"):
            run.error("x")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]
    assert store.record("a") == {"status": "running"} and run.record == {"status": "running"}
    assert sorted(entry.name for entry in run.folder.iterdir()) == ["lock", "metrics.jsonl", "record.json"]


def test_full_disk_in_the_middle_of_a_row_leaves_whole_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.open("a") as run:
        run.log({"step": 1})
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
            with pytest.raises(StoreError, match=r"metrics\.jsonl: No space left"):
                run.log({"step": 2, "train/loss": math.nan})
        assert run.nonfinite == 0
        run.log({"step": 2, "train/loss": 1.0})
    assert store.metrics("a") == [{"step": 1}, {"step": 2, "train/loss": 1.0}]


def test_a_disk_that_fills_up_at_any_byte_of_a_row_leaves_whole_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, write = {"step": 2, "train/loss": 1.0}, os.write
    size = len(json.dumps(row, separators=(",", ":"))) + 1
    left = 0  # bytes of room on the disk

    def fill(fd: int, data: bytes) -> int:
        """What is asked for, as far as there is room, and a refusal where there is none."""
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[:left])
        left -= written
        return written

    with store.open("a") as run:
        run.log({"step": 1})
        for room in range(size):
            left = room
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", fill)
                with pytest.raises(StoreError, match=r"metrics\.jsonl: No space left"):
                    run.log(row)
            assert (run.folder / "metrics.jsonl").read_bytes().endswith(b'{"step":1}\n')
        run.log(row)
    assert store.metrics("a") == [{"step": 1}, row]


def test_a_root_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*file/runs/a: Not a directory; .*another folder") as refused:
        Store(tmp_path / "file" / "runs").open("a")
    assert "\n" not in str(refused.value)


def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []
