"""The command line: what it answers at once, refuses in one sentence, and trains."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from andrea_ablate.cli import help_text
from offline_wandb import offline_files, offline_run
from support import Cli

ROOT = Path(__file__).parents[1]
NO_DATA = ("data=text", "data.path=/no/such/file")
LETTERS = "the quick brown fox jumps over the lazy dog\n" * 400


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record in a folder of runs, by id."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/record.json"))}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "andrea_ablate", *arguments]


def surroundings(path: str = str(ROOT / "src")) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command line in a process and a folder of its own."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        python("size=tiny", "logger=none", *arguments),
        cwd=folder,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- at once


def test_help_lists_every_group_with_its_options() -> None:
    lines = help_text().replace(",\n" + " " * 15, ", ").splitlines()
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    folders = [folder for folder in (ROOT / "conf").iterdir() if folder.is_dir()] + [ROOT / "experiments"]
    for folder in folders:
        assert set(listed[folder.name].split(", ")) == {path.stem for path in folder.glob("*.yaml")}


def test_help_and_help_for_flags(cli: Cli) -> None:
    answer = cli("norm=post", "--help")
    assert answer.status == 0 and answer.out.rstrip("\n") == help_text() and not answer.err
    assert max(map(len, answer.out.splitlines())) <= 130


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which importing torch or lightning fails."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("torch", "lightning", "wandb", "scipy"):
        (folder / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')\n")
    return f"{folder}{os.pathsep}{ROOT / 'src'}"


AT_ONCE = """
import sys, time
from andrea_ablate.cli import main
for argument in sys.argv[1:]:
    began = time.process_time()
    try:
        main([argument])
    except SystemExit as end:
        print(f"{end.code} {time.process_time() - began}")
    print(flush=True)
"""


def test_help_and_typing_errors_answer_in_two_seconds_without_torch(tmp_path: Path, without_torch: str) -> None:
    expected = {
        "--help": (0, "Groups and their options"),
        "nrom=pre": (2, "did you mean 'norm'?"),
        "+model.norm.tpye=rmsnorm": (2, "did you mean 'model.norm.type'?"),
        "stability=[qk_nrom]": (2, "did you mean 'qk_norm'?"),
        "model.n_heads=3": (2, "must divide model.d_model"),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, *expected], env=surroundings(without_torch), cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Traceback" not in done.stdout and not list(tmp_path.iterdir())
    ended = re.findall(r"^(\d) (\d+\.\d+)$", done.stdout, re.M)
    assert [int(status) for status, _ in ended] == [status for status, _ in expected.values()]
    for _, said in expected.values():
        assert said in done.stdout
    # Processor time, because other tests share the cores: the start, and the slowest of the answers.
    answers = [float(seconds) for _, seconds in ended]
    start = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - sum(answers)
    assert start + max(answers) < 2


# --- refused in one sentence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # keys
        (["modle.norm.type=rms"], ["'modle.norm.type'", "did you mean 'model.norm.type'?"]),
        (["+model.norm.tpye=rms"], ["'model.norm.tpye'", "did you mean 'model.norm.type'?"]),
        (["norms=pre"], ["'norms'", "did you mean 'norm'?"]),
        (["optim.lrr=1"], ["'optim.lrr'", "did you mean 'optim.lr'?"]),
        (["model.stability.qk_norm.eps=1"], ["'model.stability.qk_norm.eps' belongs to stability=[qk_norm]"]),
        (["~nope"], ["'nope' is not a setting or group"]),
        (["hydra.foo=1"], ["'hydra.foo' is not a setting or group"]),
        (["+seed=1"], ["'seed' has a value already; write seed=… without the +"]),
        (["+norm=post"], ["'norm' has a value already; write norm=… without the +"]),
        (["norm@x=pre"], ["'norm@x'", "write norm=… without @x"]),
        # options
        (["norm=pst"], ["norm=pst: 'pst' is not one of deepnorm, ", ", output, post, pre; did you mean 'post'?"]),
        (["norm="], ["norm=: '' is not one of deepnorm, depth_scaled, double"]),
        (["stability=[qk_nrom]"], ["'qk_nrom' is not one of attn_softcap", "did you mean 'qk_norm'?"]),
        (["experiments=norm_fn"], ["did you mean 'norm_ffn'?"]),
        (
            ["hydra/launcher=submitit_slurm"],
            ["not one of basic", "pip install 'andrea-ablate[slurm]'"],
        ),
        (["hydra/sweeper=optuna"], ["pip install hydra-optuna-sweeper"]),
        (["norm=null"], ["'norm=null': norm takes the name of an option"]),
        (["stability=[1]"], ["'stability=[1]': stability takes the name of an option"]),
        (["norm={a: 1}"], ["'norm={a: 1}': norm takes the name of an option"]),
        (["norm=[pre,post]"], ["'norm=[pre,post]': norm takes one option", "-m norm=a,b"]),
        # values
        (["norm=pre,post"], ["'norm=pre,post' has several values: add -m"]),
        (["seed=range(0,3)"], ["'seed=range(0,3)' has several values: add -m"]),
        (["seed=-1"], ["seed=-1"]),
        (["seed=1.5"], ["seed=1.5 must be of type int"]),
        (["optim.lr="], ["optim.lr= must be a positive number, such as 1e-3"]),
        (["optim.lr=${nothing}"], ["optim.lr: Interpolation key 'nothing' not found"]),
        (["data=text"], ["data.path has no value yet; give data.path=…"]),
        (["data=text", "data.path=/no/such/file"], ["/no/such/file"]),
        (["trainer=fast"], ["'trainer' is a section with keys"]),
        (["model.max_seq_len=16", "pos=learned"], ["data.seq_len=32 is longer than", "or choose pos=rope"]),
        # sizes that do not fit, said before the data is looked for
        ([*NO_DATA, "model.d_model=520", "model.n_heads=8"], ["an even head width, not 65"]),
        ([*NO_DATA, "model.d_model=128", "model.n_heads=3"], ["model.n_heads=3 must divide model.d_model=128"]),
        ([*NO_DATA, "model.n_heads=8", "model.attn.n_kv_heads=3"], ["n_kv_heads=3 must divide model.n_heads=8"]),
        ([*NO_DATA, "model.ffn.ratio=0"], ["model.ffn.ratio=0 must be a positive number"]),
        ([*NO_DATA, "model.max_seq_len=16", "pos=learned"], ["data.seq_len=32 is longer than"]),
        (
            [*NO_DATA, "trainer.val_lengths=[32,64]", "pos=learned"],
            ["trainer.val_lengths=64 is longer than", "pos=rope"],
        ),
        ([*NO_DATA, "model.attn.causal=false"], ["model.attn.causal=false shows every token the one that it is to"]),
        ([*NO_DATA, "model.layer_pattern=[near]"], ["model.layer_pattern=['near'] must be a list of local and global"]),
        ([*NO_DATA, "pos=alibi", "scaling=yarn"], ["scaling=yarn changes the frequencies of rope", "choose pos=rope"]),
        ([*NO_DATA, "attn=mla", "model.attn.window=8"], ["'model.attn.window'", "attn=mha"]),
        # what is no override at all
        (["norm"], ["'norm' has no value; write norm=VALUE"]),
        (["=value"], ["a value without a key; write key=VALUE"]),
        (["name=a=b"], ["'name=a=b' cannot be read", "name='\"a=b\"'"]),
        (["name=日本"], ["'name=日本' cannot be read", "name='\"日本\"'"]),
        (["seed=0,"], ["'seed=0,' cannot be read"]),
        (["--mutlirun"], ["'--mutlirun' is not a flag; did you mean '--multirun'?"]),
        (["--cfg", "foo"], ["invalid choice: 'foo'", "job"]),
        (["--config-dir", "nope"], ["/nope' not found"]),
        (["--config-name", "nope"], ["'nope'; leave --config-name out"]),
        (["hydra.mode=FAST"], ["hydra.mode=FAST", "[RUN, MULTIRUN]"]),
        # folders of Hydra's, which are not used
        (["hydra.run.dir=out/fixed"], ["'hydra.run.dir=out/fixed'", "not used", "set paths.runs=FOLDER"]),
        (["hydra.sweep.dir=out"], ["'hydra.sweep.dir=out'", "set paths.runs=FOLDER"]),
        (["++hydra.sweep.subdir=x"], ["hydra.sweep.subdir is not used"]),
        (["hydra.output_subdir=.hydra"], ["hydra.output_subdir is not used"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_mistake_is_answered_by_one_sentence_before_anything_is_written(
    tmp_path: Path, cli: Cli, arguments: list[str], said: list[str]
) -> None:
    answer = cli(*arguments)
    assert answer.status == 2 and not answer.out
    assert answer.err.count("\n") == 1 and "hydra.cc" not in answer.err
    for part in said:
        assert part in answer.err, answer.err
    assert not list(tmp_path.iterdir())


def test_a_mistake_of_ours_is_not_dressed_up_as_theirs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("andrea_ablate.cli.single_run", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli("seed=0")


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(("key", "status"), [("paths.runs", 2), ("paths.cache", 2), ("paths.sweeps", 2)])
@pytest.mark.parametrize("where", ["a file", "below a file", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, cli: Cli, key: str, where: str, status: int) -> None:
    (tmp_path / "file").write_text("")
    folder = {"a file": f"{tmp_path}/file", "below a file": f"{tmp_path}/file/x"}.get(where, where)
    answer = cli(f"{key}={folder}", "trainer.tokens=128", "data=synthetic", "data.n_tokens=2000")
    assert answer.status == status and folder in answer.err and answer.err.count("\n") == 1
    assert "Traceback" not in answer.err + answer.out
    assert (tmp_path / "file").read_text() == ""


def test_a_full_disk_is_one_sentence(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("trainer.tokens=128", "data=synthetic", "data.n_tokens=2000")
    assert cli(*command, f"paths.runs={tmp_path}/before").status == 0  # the corpus is there

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    alone = cli(*command)
    assert alone.status == 2 and "No space left on device" in alone.err and alone.err.count("\n") == 1
    swept = cli("-m", "seed=0,1", *command)
    assert swept.status == 2 and swept.err.count("\n") == 1  # that the comparison could not be saved
    assert " ".join(swept.out.split()).count("No space left on device") == 2 and "n 0 of 2" in swept.out
    assert "Traceback" not in alone.out + alone.err + swept.out + swept.err


# --- arguments in any order


def test_flags_may_stand_anywhere(cli: Cli) -> None:
    answer = cli("norm=post", "--cfg", "job", "seed=3", "--package", "model.block")
    assert answer.status == 0 and yaml.safe_load(answer.out) == {"norm_position": "post", "type": "serial"}
    both = cli("-c", "job", "--resolve", "optim.lr=1e-4")
    assert yaml.safe_load(both.out)["data"]["seed"] == 0


def test_the_last_value_of_a_key_counts(tmp_path: Path, cli: Cli) -> None:
    assert cli("norm=pre", "seed=0", "norm=post", "seed=1", "trainer.tokens=128").status == 0
    (config,) = (yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/config.yaml"))
    assert (config["model"]["block"]["norm_position"], config["seed"]) == ("post", 1)


# --- numbers in YAML files


@contextmanager
def experiment(tmp_path: Path, text: str) -> Iterator[tuple[str, str, str]]:
    """Arguments that run ``experiments/mine.yaml`` of a configuration folder of one's own."""
    folder = tmp_path / "config" / "experiments"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    yield "--config-dir", str(tmp_path / "config"), "experiments=mine"


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_learning_rate_is_a_number_in_every_spelling(tmp_path: Path, cli: Cli) -> None:
    assert cli("trainer.tokens=128", "optim.lr=1e-4").status == 0
    for written in ("1e-4", "'1e-4'", "0.0001"):
        with experiment(tmp_path, f"optim:\n  lr: {written}") as arguments:
            answer = cli("trainer.tokens=128", *arguments)
        assert answer.status == 0 and "none to train" in answer.out  # the same run id
    (path,) = tmp_path.glob("runs/*/config.yaml")
    lr = yaml.safe_load(path.read_text())["optim"]["lr"]
    assert type(lr) is float and lr == 0.0001


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim:\n  lrr: 1e-4", "did you mean 'optim.lr'?"),
        ("modle:\n  d_model: 32", "'modle' is not a setting; did you mean 'model'?"),
        ("model:\n  norm:\n    tpye: rmsnorm", "did you mean 'model.norm.type'?"),
        ("model:\n  stability:\n    z_loss:\n      alfa: 1", "did you mean 'model.stability.z_loss.alpha'?"),
        ("defaults:\n  - override /norm: pst", "did you mean 'post'?"),
        ("defaults:\n  - override /nrom: post", "'nrom' is not a setting or group; did you mean 'norm'?"),
        ("hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      nrom: pre,post", "did you mean 'norm'?"),
        ("hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      norm: pre,pst", "did you mean 'post'?"),
        ("optim: {lr: 1e-4", "mine.yaml"),
        ("- a list", "mine"),
    ],
)
def test_a_mistake_in_an_experiment_file_is_one_sentence(tmp_path: Path, cli: Cli, text: str, said: str) -> None:
    with experiment(tmp_path, text) as arguments:
        answer = cli(*arguments)
    assert answer.status == 2 and said in answer.err and answer.err.count("\n") == 1, answer.err
    assert not list(tmp_path.glob("runs/*"))


# --- relative paths


@pytest.mark.slow  # several runs
def test_a_relative_data_path_begins_where_the_command_is_started(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(LETTERS)
    command = ("data=text", "data.path=./corpus.txt", "trainer.tokens=128")
    first = cli(*command, "hydra.job.chdir=true")
    assert first.status == 0
    for arguments in (
        ["hydra.job.chdir=false"],
        ["-m", "hydra.job.chdir=true"],
        ["-m"],
        [f"data.path={tmp_path}/corpus.txt"],
    ):
        again = cli(*command, *arguments)
        assert again.status == 0 and "none to train" in again.out
    ((run_id, record),) = stored(tmp_path / "runs").items()
    config = yaml.safe_load((tmp_path / "runs" / run_id / "config.yaml").read_text())
    assert config["data"]["path"] == str(tmp_path / "corpus.txt") and record["data"]["bytes"]["train"] > 10_000
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.txt", "runs", "sweeps"}


# --- one folder of runs


@pytest.mark.slow  # several runs
def test_runs_in_one_folder_leave_each_other_alone(tmp_path: Path, cli: Cli) -> None:
    assert cli("seed=0").status == 0
    before = contents(tmp_path / "runs")
    assert cli("seed=1").status == 0
    after = contents(tmp_path / "runs")
    assert {name: after[name] for name in before} == before and len(stored(tmp_path / "runs")) == 2
    refused = cli("seed=2", "hydra.run.dir=out/fixed")
    assert refused.status == 2 and "hydra.run.dir" in refused.err and contents(tmp_path / "runs") == after


# --- Weights & Biases


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nobody has logged in."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))


@pytest.mark.slow  # several runs
@pytest.mark.usefixtures("no_key")
def test_each_run_of_a_sweep_is_a_tracker_run_of_its_own(tmp_path: Path, cli: Cli) -> None:
    name = 'name="a/b:c#1"'
    answer = cli("-m", "seed=0,1", name, "logger=wandb", "logger.mode=offline")
    assert answer.status == 0 and "wandb" not in answer.err
    records = stored(tmp_path / "runs")
    runs = {}
    for run_id in records:
        (file,) = offline_files(tmp_path / "runs" / run_id)
        runs[run_id] = offline_run(file)
        assert re.fullmatch(r"[A-Za-z0-9._-]+", run_id) and runs[run_id]["id"] == run_id
    assert sorted(run["config"]["seed"] for run in runs.values()) == [0, 1]
    (group,) = {run["group"] for run in runs.values()}
    assert (tmp_path / "sweeps" / group).is_dir()
    for run_id, run in runs.items():
        assert run["name"] == "a/b:c#1" == records[run_id]["name"]
        assert run["config"]["model"]["norm"]["type"] == "layernorm"
        assert type(run["config"]["optim"]["lr"]) is float
        assert run["history"][-1]["step"] == 10 and run["summary"]["val/loss"] == records[run_id]["val/loss"]
        counts = ("params", "flops_per_token", "kv_cache_bytes", "tokens", "train_s")
        assert [run["summary"][key] for key in counts] == [records[run_id][key] for key in counts]
        assert records[run_id]["tracking"] == "ok"
    assert "none to train" in cli("-m", "seed=0,1", name, "logger=wandb", "logger.mode=offline").out


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize("mode", [[], ["-m", "seed=0,1"]])
def test_online_without_a_key_stops_before_training_and_says_what_to_do(
    tmp_path: Path, cli: Cli, mode: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at a prompt"))
    began = time.monotonic()
    answer = cli(*mode, "logger=wandb", "logger.mode=online")
    assert time.monotonic() - began < 20
    for way_out in ("wandb login", "WANDB_API_KEY", "logger.mode=offline"):
        assert way_out in answer.err
    assert answer.status == 2 and answer.err.count("\n") == 1 and not list(tmp_path.iterdir())


# --- processes of their own


@pytest.mark.slow  # starts Python with torch and lightning twice
def test_two_identical_commands_at_once_share_the_work(tmp_path: Path, cache: Path) -> None:
    command = ("-m", "seed=0,1", "norm=pre,post", "trainer.tokens=5120", f"paths.cache={cache}")
    both = [start(tmp_path, *command) for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {out[out.index("rank ") :] for out, _ in outputs} == {outputs[0][0][outputs[0][0].index("rank ") :]}
    assert not any(err for _, err in outputs)
    records = stored(tmp_path / "runs")
    assert len(records) == 4 and {record["status"] for record in records.values()} == {"finished"}
    for run_id in records:
        rows = [json.loads(line) for line in (tmp_path / "runs" / run_id / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 41))


@pytest.mark.slow  # starts Python with torch and lightning twice
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_goes_on_to_the_same_numbers(
    tmp_path: Path, cache: Path, cli: Cli, sent: signal.Signals
) -> None:
    command = (
        *("-m", "seed=0,1,2", "trainer.tokens=12800", "trainer.checkpoint_every=10", "model.dropout=0.1"),
        f"paths.cache={cache}",
    )
    process = start(tmp_path / "stopped", *command)

    def rows() -> list[int]:
        return sorted(path.read_bytes().count(b"\n") for path in tmp_path.glob("stopped/runs/*/metrics.jsonl"))

    while process.poll() is None and not (len(rows()) == 2 and rows()[0] > 15):  # the second run has a checkpoint
        time.sleep(0.005)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    statuses = sorted(record["status"] for record in stored(tmp_path / "stopped/runs").values())
    if sent == signal.SIGINT:
        assert process.returncode == 130 and statuses == ["finished", "interrupted"]
        assert "1 of 3 runs are finished and kept." in out
        assert re.search(r"Interrupted \(SIGINT after step \d+\)\. Repeat the same command to go on", err)
    else:
        assert process.returncode == -9 and statuses == ["finished", "running"]

    resumed = start(tmp_path / "stopped", *command)
    out, err = resumed.communicate(timeout=240)
    assert resumed.returncode == 0 and "3 runs, 2 to train" in out and not err
    (tmp_path / "undisturbed").mkdir()
    assert cli(*command, f"paths.runs={tmp_path}/undisturbed/runs").status == 0
    ended, reference = stored(tmp_path / "stopped/runs"), stored(tmp_path / "undisturbed/runs")
    assert ended.keys() == reference.keys() and any(record["resumed_from"] for record in ended.values())
    for run_id, record in ended.items():
        for key in ("status", "val/loss", "initial_loss", "token_hash"):
            assert record[key] == reference[run_id][key]
        for folder in ("stopped", "undisturbed"):
            path = tmp_path / folder / "runs" / run_id / "metrics.jsonl"
            steps = [row["step"] for row in map(json.loads, path.read_text().splitlines()) if "train/loss" in row]
            assert steps == list(range(1, 101))


@pytest.mark.slow  # builds and installs a wheel
def test_an_installed_wheel_finds_its_configuration_from_an_empty_folder(tmp_path: Path) -> None:
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *here, "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True, timeout=300,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()

    def run(*arguments: str) -> str:
        return subprocess.run(
            python(*arguments), cwd=tmp_path / "empty", env=surroundings(str(tmp_path / "site")),
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout  # fmt: skip

    assert run("--help").rstrip("\n") == help_text()
    assert yaml.safe_load(run("norm=post", "--cfg", "job"))["model"]["block"]["norm_position"] == "post"
    swept = yaml.safe_load(run("experiments=norm_ffn", "--cfg", "hydra"))["hydra"]["sweeper"]
    assert swept["params"]["norm"] == "pre,post" and swept["_target_"].endswith("AblateSweeper")
    assert not list((tmp_path / "empty").iterdir())
