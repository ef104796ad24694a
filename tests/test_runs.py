"""``python -m andrea_ablate.runs``: what it says of a store, what it deletes and never deletes, what SQL sees."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from andrea_ablate.registry import ConfigError
from andrea_ablate.runs import index
from andrea_ablate.runs.__main__ import main
from andrea_ablate.runs.garbage import delete, garbage
from andrea_ablate.runs.index import INDEX, export_metrics, export_runs, open_runs
from andrea_ablate.runs.status import states
from andrea_ablate.tracking.plans import Plan, find_plan, load_plan
from andrea_ablate.tracking.store import KILLED, Store, StoreError
from support import Answer, Cli

CONFIG: dict[str, Any] = {"seed": 0, "name": None, "model": {"d_head": None, "ffn": {"ratio": 4}}, "optim": {"lr": 0.1}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def add(store: Store, run_id: str, status: str, config: dict[str, Any] | None = None, **fields: Any) -> Path:
    with store.open(run_id) as run:
        run.write_config(config or CONFIG)
        run.update(run_id=run_id, status=status, reason="", tokens=100, **fields)
        run.log({"step": 1, "tokens": 40, "train/loss": math.nan})
        run.log({"step": 2, "tokens": 60, "train/loss": 3})
        return run.folder


@pytest.fixture
def runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """``runs("status")``: the command over the folders of this test, and what it printed."""

    def call(*arguments: str) -> Answer:
        places = [f"--runs={tmp_path}/runs", f"--sweeps={tmp_path}/sweeps"]
        status = main([*arguments, *places])
        out, err = capsys.readouterr()
        return Answer(status, out, err)

    return call


def plan(tmp_path: Path, name: str, *run_ids: str) -> Plan:
    named = {run_id: {"arm": f"norm={run_id}", "seed": 0, "tokens": 100} for run_id in run_ids}
    made = Plan(name, ["-m", "norm=pre,post"], str(tmp_path), str(tmp_path / "runs"), named)
    made.save(tmp_path / "sweeps")
    return made


# --- the state of a run


def test_a_status_is_that_of_now(store: Store) -> None:
    add(store, "done", "finished")
    add(store, "killed", "running")
    assert store.current("done")["status"] == "finished"
    assert (store.current("killed")["status"], store.current("killed")["reason"]) == ("interrupted", KILLED)
    assert store.current("absent")["status"] == "missing"
    with store.open("killed"), store.open("done"):
        assert store.current("killed")["status"] == "running"
        assert store.current("done")["status"] == "finished"


def test_a_damaged_record_is_a_line_and_no_end(store: Store) -> None:
    add(store, "good", "finished")
    (add(store, "bad", "finished") / "record.json").write_text('{"status": "fin')
    found = states(store, store.ids())
    assert found["bad"]["status"] == "damaged" and "record.json is damaged" in found["bad"]["reason"]
    assert found["good"]["tokens_done"] == 100


def test_a_lock_whose_folder_was_deleted_is_no_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between the opening of the lock file and the locking, gc deletes the folder.
    opened: list[int] = []
    original = os.open

    def open_then_delete(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = original(path, *args, **kwargs)
        if str(path).endswith("lock") and not opened:
            opened.append(fd)
            shutil.rmtree(Path(path).parent)
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_then_delete)
        run = store.open("run")
    with run:
        assert opened and store.run_is_active("run")
        run.update(status="running")
    assert store.record("run") == {"status": "running"}


# --- status


def test_status_counts_sweeps_and_lists_what_is_not_finished(tmp_path: Path, store: Store, runs: Cli) -> None:
    add(store, "aa", "finished", name="a", **{"val/loss": 2.5})
    add(store, "bb", "failed", name="b")
    with store.open("bb") as run:
        run.update(reason="RuntimeError: planted")
    add(store, "cc", "running")
    add(store, "alone", "diverged")
    plan(tmp_path, "norm-1", "aa", "bb", "cc", "dd")
    with store.open("cc"):
        said = runs("status")
    lines = [line.replace("│", " ").split() for line in said.out.splitlines()]
    assert said.status == 0
    assert ["norm-1", "4", "1", "1", "-", "1", "1", "220", "of", "400"] in lines
    assert ["(in", "no", "sweep)", "1", "-", "-", "1", "-", "-", "60", "of", "100"] in lines
    assert ["bb", "norm=bb", "seed=0", "failed", "60", "of", "100", "-", "RuntimeError:", "planted"] in lines
    assert any(line[:4] == ["cc", "norm=cc", "seed=0", "running"] for line in lines)
    assert any(line[:4] == ["dd", "norm=dd", "seed=0", "missing"] for line in lines)
    assert not any(line[:1] == ["aa"] for line in lines)  # finished, and nobody asked for it
    assert any("2.5000" in line for line in runs("status", "norm").out.splitlines())


def test_an_empty_place_is_a_mistake(runs: Cli) -> None:
    for command in (["status"], ["query", "SELECT 1"]):
        answer = runs(*command)
        assert answer.status == 2 and "--runs" in answer.err and answer.err.count("\n") == 1


# --- plans and resume


def test_a_plan_is_kept_as_it_was_and_found_by_its_beginning(tmp_path: Path) -> None:
    first, second = plan(tmp_path, "norm-1", "a"), plan(tmp_path, "ffn-2", "b")
    before = (tmp_path / "sweeps/norm-1/plan.json").stat().st_ino
    first.save(tmp_path / "sweeps")
    assert (tmp_path / "sweeps/norm-1/plan.json").stat().st_ino == before
    assert find_plan(tmp_path / "sweeps", "no") == first and find_plan(tmp_path / "sweeps", "ffn-2") == second
    for name, said in (("x", "names no sweep"), (None, "holds 2 sweeps"), ("", "several sweeps")):
        with pytest.raises(ConfigError, match=said):
            find_plan(tmp_path / "sweeps", name)
    (tmp_path / "sweeps/norm-1/plan.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        load_plan(tmp_path / "sweeps/norm-1")


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_resume_repeats_the_stored_command_where_it_was_given(
    tmp_path: Path, cli: Cli, runs: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("andrea_ablate.sweep.AblateSweeper._launch", lambda *_: {})
    asked = ["norm=pre,post", "stability=[],[qk_norm]", "hydra.job.chdir=false"]
    assert cli("-m", *asked).status == 1
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    here = Path.cwd()
    try:
        answer = runs("resume")
        assert Path.cwd() == here
    finally:
        os.chdir(here)
    assert answer.status == 0 and "4 of 4 runs left" in answer.out
    (command,) = started
    assert command[1:4] == ["-m", "andrea_ablate", "-m"] and {*asked} <= {*command}
    assert shlex.join(["python", *command[1:]]) in answer.out
    # The stored command names the same sweep: nothing of it was lost on the way.
    (folder,) = (tmp_path / "sweeps").iterdir()
    before = (folder / "plan.json").read_bytes()
    assert cli(*command[3:]).status == 1
    assert [path.name for path in (tmp_path / "sweeps").iterdir()] == [folder.name]
    assert json.loads((folder / "plan.json").read_bytes())["runs"] == json.loads(before)["runs"]


# --- gc


def test_gc_lists_and_with_yes_deletes_what_nothing_refers_to(tmp_path: Path, store: Store, runs: Cli) -> None:
    kept = []
    for run_id, status in (("aa", "finished"), ("bb", "interrupted"), ("cc", "diverged"), ("dd", "finished")):
        folder = add(store, run_id, status)
        (folder / "checkpoints").mkdir()
        (folder / "spikes").mkdir()
        for name in ("checkpoints/step-00000005.ckpt", "spikes/step-00000005.ckpt", "model.safetensors"):
            (folder / name).write_bytes(b"x" * 2**20)
            kept.append(folder / name)
    kept.remove(store.path("aa") / "checkpoints/step-00000005.ckpt")
    temp = store.path("bb") / ".record.json.1.2.tmp"
    temp.write_text("")
    (store.root / "empty").mkdir()
    (store.root / "empty" / "lock").write_text("")
    old, new = (tmp_path / f"sweeps/s/.{name}.tmp" for name in ("old", "new"))
    old.parent.mkdir(parents=True)
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))
    with store.open("dd"):
        listed = runs("gc")
        assert "4 to delete, 1.0 MiB; --yes deletes them." in listed.out and temp.exists()
        done = runs("gc", "--yes")
    assert "Deleted: 4, 1.0 MiB." in done.out and "dd" not in done.out.replace("deleted", "")
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in (temp, old, store.root / "empty"))
    assert new.exists() and not list((store.path("aa") / "checkpoints").iterdir())
    assert "1 to delete" in runs("gc").out  # dd is nobody's now


def test_gc_takes_whole_runs_only_where_no_sweep_names_them_and_nobody_wrote_lately(
    tmp_path: Path, store: Store
) -> None:
    for run_id in ("planned", "compared", "old", "young", "tomorrow", "held"):
        folder = add(store, run_id, "finished")
        age = {"young": 0.0, "tomorrow": -30.0}.get(run_id, 30.0)
        then = time.time() - 86400 * age
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (then, then))
    plan(tmp_path, "norm-1", "planned")
    (tmp_path / "sweeps/other").mkdir()
    (tmp_path / "sweeps/other/comparison.json").write_text('{"runs": [{"run_id": "compared"}]}')
    assert list(garbage(store, tmp_path / "sweeps")) == []
    with store.open("held"):
        items = list(garbage(store, tmp_path / "sweeps", unnamed_days=7))
    assert [item.run_id for item in items] == ["old"]
    with store.open("old"):  # taken up again meanwhile
        assert list(delete(store, items)) == [] and store.path("old").is_dir()
    assert list(delete(store, items)) == items and not store.path("old").exists()


# --- the index


@pytest.fixture
def _with_duckdb() -> None:
    pytest.importorskip("duckdb", reason="duckdb is not installed (extra: analysis)")


def test_without_duckdb_the_extra_is_named(store: Store, runs: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "aa", "finished")
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    answer = runs("query", "SELECT 1")
    assert answer.status == 2 and "pip install 'andrea-ablate[analysis]'" in answer.err


@pytest.mark.usefixtures("_with_duckdb")
def test_sql_sees_settings_numbers_and_the_status_of_now(store: Store, runs: Cli) -> None:
    add(store, "aa", "finished", **{"val/loss": math.nan})
    add(store, "bb", "finished", **{"val/loss": math.inf})
    add(store, "cc", "running", {**CONFIG, "optim": {"lr": 1}}, data={"fingerprint": "it's"})
    rows = open_runs(store).sql(
        'SELECT run_id, status, "val/loss", "optim.lr", "corpus.fingerprint" FROM runs ORDER BY 1'
    )
    (a, b, c) = rows.fetchall()
    assert a[:2] == ("aa", "finished") and math.isnan(a[2]) and b[2] == math.inf and a[3] == 0.1
    assert c == ("cc", "interrupted", None, 1.0, "it's")
    with store.open("cc"):
        assert open_runs(store).sql("SELECT status FROM runs WHERE run_id = 'cc'").fetchall() == [("running",)]
    answer = runs("query", 'SELECT "optim.lr" AS lr, count(*) AS n FROM runs GROUP BY ALL ORDER BY lr')
    assert list(csv.reader(io.StringIO(answer.out))) == [["lr", "n"], ["0.1", "2"], ["1.0", "1"]]
    wrong = runs("query", "SELECT lr FROM runs")
    assert wrong.status == 2 and '"lr"' in wrong.err and wrong.err.count("\n") == 1


@pytest.mark.usefixtures("_with_duckdb")
def test_the_index_follows_what_is_added_changed_removed_and_spoilt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = index._row
    monkeypatch.setattr(index, "_row", lambda store, run_id: read.append(run_id) or original(store, run_id))

    def seen() -> dict[str, Any]:
        read.clear()
        columns = 'run_id, status, "model.ffn.ratio", "model.d_head"'
        return {row[0]: row[1:] for row in open_runs(store).sql(f"SELECT {columns} FROM runs").fetchall()}

    add(store, "aa", "failed")
    add(store, "bb", "finished")
    assert seen() == {"aa": ("failed", 4, None), "bb": ("finished", 4, None)} and sorted(read) == ["aa", "bb"]
    assert seen() == {"aa": ("failed", 4, None), "bb": ("finished", 4, None)} and read == []
    with store.open("aa") as run:
        run.update(status="finished")
    # A column that was empty so far gets a number, one of numbers a text.
    add(store, "cc", "finished", {**CONFIG, "model": {"d_head": 16, "ffn": {"ratio": "8/3"}}})
    assert seen() == {"aa": ("finished", "4", None), "bb": ("finished", "4", None), "cc": ("finished", "8/3", 16)}
    assert sorted(read) == ["aa", "cc"]
    shutil.rmtree(store.path("bb"))
    assert sorted(seen()) == ["aa", "cc"] and read == []
    (store.root / INDEX).write_bytes(b"spoilt")
    assert sorted(seen()) == ["aa", "cc"] and sorted(read) == ["aa", "cc"]
    (store.root / INDEX).unlink()
    assert sorted(seen()) == ["aa", "cc"] and store.ids() == ["aa", "cc"]
    assert [path.name for path in store.root.glob(".*")] == [INDEX]


@pytest.mark.usefixtures("_with_duckdb")
def test_exports_hold_every_row_with_nan_and_infinity(tmp_path: Path, store: Store, runs: Cli) -> None:
    add(store, "aa", "finished", **{"val/loss": math.inf})
    add(store, "bb", "finished")
    assert export_metrics(store, tmp_path / "m.csv") == 4
    rows = list(csv.DictReader((tmp_path / "m.csv").open()))
    assert [(row["run_id"], row["step"], row["train/loss"]) for row in rows] == [
        ("aa", "1", "nan"), ("aa", "2", "3.0"), ("bb", "1", "nan"), ("bb", "2", "3.0"),
    ]  # fmt: skip
    assert export_metrics(store, tmp_path / "m.parquet", ["bb"]) == 2
    assert export_runs(store, tmp_path / "r.csv") == 2
    first, second = csv.DictReader((tmp_path / "r.csv").open())
    assert (first["val/loss"], second["val/loss"], first["optim.lr"]) == ("inf", "", "0.1")
    plan(tmp_path, "norm-1", "bb")
    answer = runs("export", f"{tmp_path}/r.parquet", "norm-1")
    assert answer.status == 0 and "1 rows" in answer.out
    database = index.connect()
    assert database.sql(f"SELECT run_id FROM '{tmp_path}/r.parquet'").fetchall() == [("bb",)]
    (loss,) = database.sql(f"SELECT isnan(\"train/loss\") FROM '{tmp_path}/m.parquet' WHERE step = 1").fetchall()
    assert loss == (True,)
    assert "ends in .parquet or .csv" in runs("export", f"{tmp_path}/r.xlsx").err


@pytest.mark.slow  # ten thousand runs
@pytest.mark.usefixtures("_with_duckdb")
def test_ten_thousand_runs_answer_in_a_second(store: Store) -> None:
    folder = add(store, "a0", "finished", **{"val/loss": 2.0}, **{f"field{n}": n / 7 for n in range(100)})
    config, record = (folder / "config.yaml").read_bytes(), (folder / "record.json").read_bytes()
    for n in range(1, 10_000):
        run = store.root / f"a{n}"
        run.mkdir()
        (run / "config.yaml").write_bytes(config)
        (run / "record.json").write_bytes(record.replace(b'"a0"', b'"a%d"' % n).replace(b" 2.0", b" %d.5" % (n % 9)))
    open_runs(store)
    began = time.process_time()
    (answer,) = open_runs(store).sql('SELECT count(*), avg("val/loss"), count(DISTINCT run_id) FROM runs').fetchall()
    assert time.process_time() - began < 3  # it takes well under one: the bound leaves room for a busy machine
    assert answer[0] == answer[2] == 10_000 and 4 < answer[1] < 5
