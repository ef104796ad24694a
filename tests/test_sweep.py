"""Sweeps from the plan to the comparison: what trains, what is reused, what fails, what is said about it."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher

from andrea_ablate import conduct as conducting
from andrea_ablate import sweep
from andrea_ablate.conduct import conduct, end, row_of, single_run
from andrea_ablate.config import RunConfig
from andrea_ablate.jobs import Job, arm_name, sweep_name
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking import Store
from support import Answer, Cli, Compose

SAFE = re.compile(r"[A-Za-z0-9._-]{1,255}")


def records(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Every stored record by the name that says its choices."""
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/record.json"))]
    by_name = {re.sub(r" ?(size|trainer\.\w+|model\.dropout)=\S*", "", record["name"]): record for record in found}
    assert len(by_name) == len(found)
    return by_name


def comparison(tmp_path: Path) -> dict[str, Any]:
    """The one saved comparison, as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (path,) = tmp_path.glob("sweeps/*/comparison.json")
    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return content


def steps_of(tmp_path: Path, record: Mapping[str, Any]) -> list[int]:
    """Steps of the rows with a training loss, in file order."""
    lines = (tmp_path / "runs" / record["run_id"] / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def table(answer: Answer) -> str:
    """What is printed after the runs, which a repeated command must print again."""
    return answer.out[answer.out.index("validation loss, nats per token, lower is better") :]


# --- what trains


def test_a_sweep_trains_compares_and_is_not_trained_again(tmp_path: Path, cli: Cli) -> None:
    first = cli("norm=pre,post", "-m", "seed=0")
    assert first.status == 0, first
    assert "Plan: 2 arms, 2 runs, 2 to train (2,560 tokens, " in first.out
    assert sorted(records(tmp_path)) == ["norm=post seed=0", "norm=pre seed=0"]
    losses = {name.split()[0]: record["val/loss"] for name, record in records(tmp_path).items()}
    assert (
        len(re.findall(r"^\[[12]/2 runs\] norm=\w+ seed=0: finished, validation loss \d\.\d{4}$", first.out, re.M)) == 2
    )
    for arm, loss in losses.items():
        assert f"{loss:.4f}" in table(first) and arm in table(first)
    assert "gives no interval, so their order is not settled: add seed=0,1,2." in " ".join(first.out.split())

    saved = comparison(tmp_path)
    assert {arm["arm"]: arm["loss"]["mean"] for arm in saved["arms"]} == losses and saved["baseline"] == "norm=pre"
    assert {run["arm"]: run["run_id"] for run in saved["runs"]} == {
        name.split()[0]: record["run_id"] for name, record in records(tmp_path).items()
    }
    (folder,) = (tmp_path / "sweeps").iterdir()
    names = ["comparison.csv", "comparison.json", "comparison.md", "plan.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    planned = json.loads((folder / "plan.json").read_bytes())
    assert planned["margin"] == saved["margin"]
    keys = ("arm", "seed", "design", "lr", "warmup_tokens")
    kept = {run["run_id"]: [run[key] for key in keys] for run in saved["runs"]}
    assert {run_id: [run[key] for key in keys] for run_id, run in planned["runs"].items()} == kept

    before = snapshot(tmp_path)
    again = cli("norm=pre,post", "-m", "seed=0")
    assert again.status == 0 and "Plan: 2 arms, 2 runs, none to train" in again.out and "/2 runs]" not in again.out
    assert table(again) == table(first) and snapshot(tmp_path) == before

    more = cli("norm=pre,post", "-m", "seed=0,1")
    assert more.status == 0 and "Plan: 2 arms, 4 runs, 2 to train (2,560 tokens, " in more.out
    kept = {name: content for name, content in snapshot(tmp_path).items() if name in before}
    assert kept == before and len(records(tmp_path)) == 4
    assert "n 2 of 2" in more.out and "nats over 2 seeds" in " ".join(more.out.split())


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_equal_points_train_once_and_the_plan_says_so(tmp_path: Path, cli: Cli) -> None:
    answer = cli("-m", "seed=1,1", "optim.lr=0.0001,1e-4,'1e-4'")
    assert answer.status == 0 and "Plan: 1 arm, 1 run, 1 to train" in answer.out
    assert "5 of 6 points are the same runs as others and train once." in answer.out
    assert len(records(tmp_path)) == 1
    assert [arm["arm"] for arm in comparison(tmp_path)["arms"]] == ["optim.lr=0.0001"]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_single_run_is_a_sweep_of_one_and_shares_its_store(tmp_path: Path, cli: Cli) -> None:
    alone = cli("norm=post", "seed=1")
    assert alone.status == 0 and "Plan: 1 arm, 1 run, 1 to train" in alone.out
    assert "One seed gives no interval: add seed=0,1,2." in " ".join(alone.out.split())
    both = cli("-m", "norm=post", "seed=0,1")
    assert "Plan: 1 arm, 2 runs, 1 to train" in both.out and "norm=post size=tiny" in both.out


def planned(monkeypatch: pytest.MonkeyPatch, cli: Cli, *arguments: str) -> tuple[list[Job], str]:
    """The jobs that a command plans, and the sweep's name, without training them."""
    found: list[tuple[list[Job], str]] = []
    monkeypatch.setattr(sweep, "conduct", lambda jobs, name, *_: found.append((list(jobs), name)))
    monkeypatch.setattr(sweep, "end", lambda found, folder: None)
    assert cli(*arguments).status == 0
    return found[-1]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_an_experiment_file_is_a_sweep_and_the_command_line_overrides_it(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    jobs, name = planned(monkeypatch, cli, "experiments=norm_ffn")
    assert [(job.arm, job.cfg.seed) for job in jobs] == [
        (f"norm={norm} ffn={ffn}", seed)
        for norm in ("pre", "post")
        for ffn in ("gelu4x", "swiglu")
        for seed in range(3)
    ]
    for job in jobs:
        choices = dict(part.split("=") for part in job.arm.split())
        assert job.cfg.model.block["norm_position"] == choices["norm"] and job.cfg.data.seed == job.cfg.seed
        assert job.cfg.model.ffn["type"] == {"gelu4x": "dense", "swiglu": "gated"}[choices["ffn"]]
    assert name.startswith("norm-ffn-") and len({job.run_id for job in jobs}) == 12

    jobs, _ = planned(monkeypatch, cli, "experiments=norm_ffn", "norm=output,double", "ffn=relu4x", "seed=7")
    assert [(job.arm, job.cfg.seed) for job in jobs] == [("norm=output", 7), ("norm=double", 7)]
    assert {job.cfg.model.ffn["activation"] for job in jobs} == {"relu"}


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    ("swept", "arms"),
    [
        (["seed=range(0,2)"], ["size=tiny"] * 2),
        (["seed=choice(0,1)", "norm=post"], ["norm=post size=tiny"] * 2),
        (["norm=glob(po*)"], ["norm=post"]),
        (["model.attn.n_kv_heads=1,2"], ["model.attn.n_kv_heads=1", "model.attn.n_kv_heads=2"]),
        (["model.attn.n_kv_heads=null,2.0"], ["model.attn.n_kv_heads=null", "model.attn.n_kv_heads=2"]),
        (["optim.betas=[0.9,0.95],[0.9,0.99]"], ["optim.betas=[0.9,0.95]", "optim.betas=[0.9,0.99]"]),
        (["stability=[],[qk_norm]"], ["stability=[]", "stability=[qk_norm]"]),
        (["norm=pre,post", "ffn=swiglu", "trainer.tokens=1e3"], ["norm=pre", "norm=post"]),
        (["norm=pre,post", "norm=output,double"], ["norm=output", "norm=double"]),
    ],
)
def test_arms_are_named_by_what_is_swept(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, swept: list[str], arms: list[str]
) -> None:
    jobs, _ = planned(monkeypatch, cli, "-m", *swept)
    assert [job.arm for job in jobs] == arms


def test_each_planned_configuration_is_its_own(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    # Seeds of an arm are composed once: neither a seed nor an arm may leak into the next job.
    jobs, _ = planned(monkeypatch, cli, "-m", "norm=pre,post", "seed=5,3", "optim.lr=1e-3,1e-4")
    found = [
        (job.cfg.model.block["norm_position"], job.cfg.seed, job.cfg.data.seed, job.cfg.optim["lr"]) for job in jobs
    ]
    assert found == [(norm, s, s, lr) for norm in ("pre", "post") for s in (5, 3) for lr in (1e-3, 1e-4)]


def test_arms_that_differ_in_what_tunes_them_alone_are_one_design(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    jobs, _ = planned(monkeypatch, cli, "-m", "norm=pre,post", "optim.lr=1e-3,1e-4", "schedule.warmup_tokens=256")
    assert len({job.arm for job in jobs}) == 4
    assert {job.design for job in jobs} == {"norm=pre size=tiny", "norm=post size=tiny"}
    row = row_of(jobs[-1], Store(Path(jobs[-1].cfg.paths.runs)))
    assert (row.design, row.lr, row.warmup_tokens) == ("norm=post size=tiny", 1e-4, 256)


def test_names_of_arms_and_sweeps(tiny: Compose) -> None:
    assert arm_name(["norm=post", "seed=3", "optim.lr=1e-4", "paths.runs=x", "name=y", "logger=none"]) == (
        "norm=post optim.lr=0.0001"
    )
    assert arm_name(["seed=3", "tags=[a]", "hydra.verbose=true"]) == "default"
    assert arm_name(["norm=post", "optim.lr=30.0", "seed=1"], ["optim.lr", "seed"]) == "optim.lr=30"
    assert arm_name(["+model.stability.z_loss.alpha=null", "~norm"]) == "+model.stability.z_loss.alpha=null ~norm="
    jobs = [Job([], "a", tiny(), run_id) for run_id in ("x", "y", "x")]
    assert sweep_name(["norm"], jobs) == sweep_name(["norm"], jobs[::-1]) == sweep_name(["norm"], jobs[:2])
    assert sweep_name(["norm"], jobs) != sweep_name(["norm"], jobs[:1])
    for keys in (["a" * 300], ["schlüssel/…", "..", "a=b,c[d]"], [], ["../../etc"], ["😀"]):
        assert SAFE.fullmatch(sweep_name(keys, jobs)) and not sweep_name(keys, jobs).startswith(".")


# --- values that make no folder names


@pytest.mark.slow  # several runs
def test_folders_are_flat_and_safe_whatever_the_values_are(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deep = "/".join(["long" * 25] * 3)  # 302 characters
    for folder, text in ((f"{deep}a", "abc\n" * 3000), (f"{deep}b", "xyz\n" * 3000)):
        Path(folder).mkdir(parents=True)
        Path(folder, "x.txt").write_text(text)
    answer = cli("-m", "data=text", f"data.path={deep}a/x.txt,{deep}b/x.txt", "optim.betas=[0.9,0.95],[0.9,0.99]")
    assert answer.status == 0
    runs, sweeps = list((tmp_path / "runs").iterdir()), list((tmp_path / "sweeps").iterdir())
    assert len(runs) == 4 and len(sweeps) == 1
    for folder in (*runs, *sweeps):
        assert folder.is_dir() and SAFE.fullmatch(folder.name)
    asked = set()
    for folder in runs:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        asked.add((config["data"]["path"], json.loads((folder / "record.json").read_text())["name"]))
    assert {path for path, _ in asked} == {f"{tmp_path}/{deep}{end}/x.txt" for end in "ab"}
    for path, name in asked:
        assert f"data.path={path.removeprefix(f'{tmp_path}/')}" in name and "optim.betas=[0.9,0.9" in name
    assert len(comparison(tmp_path)["arms"]) == 4


# --- what fails


@pytest.mark.slow  # several runs
def test_a_job_that_cannot_train_is_a_row_and_the_others_finish(tmp_path: Path, cli: Cli) -> None:
    answer = cli("-m", "model.n_heads=4,3,8")
    assert answer.status == 1
    found = records(tmp_path)
    assert {name: record["status"] for name, record in found.items()} == {
        "model.n_heads=4": "finished", "model.n_heads=3": "failed", "model.n_heads=8": "finished",
    }  # fmt: skip
    failed = found["model.n_heads=3"]
    folder = tmp_path / "runs" / failed["run_id"]
    assert "model.n_heads=3 must divide model.d_model=32" in failed["reason"]
    assert (folder / "error.txt").read_text() and yaml.safe_load((folder / "config.yaml").read_text())["model"][
        "n_heads"
    ] == 3
    said = " ".join(answer.out.split())
    assert f"'model.n_heads=3' seed 0 (run {failed['run_id']}) failed: model.n_heads=3 must divide" in said
    assert [(arm["arm"], arm["loss"]["n"]) for arm in comparison(tmp_path)["arms"]] == [
        ("model.n_heads=4", 1), ("model.n_heads=3", 0), ("model.n_heads=8", 1),
    ]  # fmt: skip
    again = cli("-m", "model.n_heads=4,3,8")
    assert again.status == 1 and "3 runs, 1 to train" in again.out


@pytest.mark.slow  # several runs
def test_a_sequence_longer_than_a_position_table_costs_only_the_arm_that_has_one(tmp_path: Path, cli: Cli) -> None:
    answer = cli("-m", "pos=learned,rope", "model.max_seq_len=16", "data.seq_len=32")
    assert answer.status == 1
    found = {name.split()[0]: record for name, record in records(tmp_path).items()}
    assert found["pos=rope"]["status"] == "finished" and found["pos=learned"]["status"] == "failed"
    assert "data.seq_len=32 is longer than the position table, model.max_seq_len=16" in found["pos=learned"]["reason"]
    assert not (tmp_path / "runs" / found["pos=learned"]["run_id"] / "metrics.jsonl").read_text()


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_an_error_in_the_middle_costs_one_run_and_leaves_nothing_behind(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from andrea_ablate.training.module import LanguageModule

    alone = cli("seed=2", f"paths.runs={tmp_path}/alone")
    assert alone.status == 0
    modules: list[weakref.ref[LanguageModule]] = []
    step = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            gc.collect()
            assert not any(module() for module in modules), "an earlier job's model is still held"
            modules.append(weakref.ref(self))
        if self.cfg.seed == 1 and batch_idx == 3:
            raise RuntimeError("planted\nsecond line")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    answer = cli("-m", "seed=0,1,2")
    assert answer.status == 1 and len(modules) == 3
    found = records(tmp_path)
    assert [found[f"seed={seed}"]["status"] for seed in range(3)] == ["finished", "failed", "finished"]
    assert found["seed=1"]["reason"] == "RuntimeError: planted"
    assert "second line" in (tmp_path / "runs" / found["seed=1"]["run_id"] / "error.txt").read_text()
    assert "n 2 of 3" in answer.out and "1 failed" in answer.out
    (reference,) = [json.loads(path.read_text()) for path in (tmp_path / "alone").glob("*/record.json")]
    for key in ("run_id", "val/loss", "initial_loss", "token_hash"):
        assert found["seed=2"][key] == reference[key]


@pytest.mark.slow  # several runs
def test_a_diverged_job_is_a_result_and_no_objective(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[float | None] = []

    def run_job(*args: Any, **kwargs: Any) -> float | None:
        returned.append(conducting.run_job(*args, **kwargs))
        return returned[-1]

    monkeypatch.setattr("andrea_ablate.cli.run_job", run_job)
    answer = cli("-m", "optim.lr=1e6,1e-3")
    found = records(tmp_path)
    assert answer.status == 1 and found["optim.lr=1000000.0"]["status"] == "diverged"
    assert returned == [None, found["optim.lr=0.001"]["val/loss"]]
    assert "1 diverged" in answer.out and "(run " in answer.out
    first, second = comparison(tmp_path)["arms"]
    assert first["loss"]["mean"] is None and first["rank"] is None and second["rank"] == 1
    assert "none to train" in cli("-m", "optim.lr=1e6,1e-3").out  # a result, so it is not tried again


def test_what_did_not_finish_is_never_an_objective(tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, objective in (("finished", 0.1), ("diverged", None), ("failed", None)):
        monkeypatch.setattr("andrea_ablate.training.run.run", lambda *_, **__: {"status": status, "val/loss": 0.1})  # noqa: B023
        assert conducting.run_job(tiny(), []) == objective


@pytest.mark.slow  # several runs
def test_a_launcher_that_gives_up_leaves_what_it_trained(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    launch = launcher.launch

    def give_up(self: Launcher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> None:
        launch(self, job_overrides[:1], initial_job_idx)
        raise RuntimeError("A worker was killed.\nMore about it.")

    monkeypatch.setattr(launcher, "launch", give_up)
    answer = cli("-m", "seed=0,1", "trainer.tokens=128")
    assert answer.status == 1 and "n 1 of 2" in answer.out and "Traceback" not in answer.out + answer.err
    assert [(run["status"], run["reason"]) for run in comparison(tmp_path)["runs"]] == [
        ("finished", ""), ("failed", "A worker was killed"),
    ]  # fmt: skip


def test_a_launcher_that_breaks_down_leaves_rows(
    tmp_path: Path, tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    done, lost = (Job([], "a", tiny(f"seed={seed}"), f"run{seed}") for seed in (0, 1))
    store = Store(tmp_path / "runs")

    def launch(jobs: Sequence[Job], group: str) -> Mapping[str, str]:
        with store.open(done.run_id) as run:
            run.update(status="finished", tokens=10, train_s=1.0, reason="", **{"val/loss": 2.5})
        return {lost.run_id: "a worker was killed"}

    with pytest.raises(SystemExit) as exit_info:
        end({"none": conduct([done, lost], "name", launch)}, tmp_path)
    assert exit_info.value.code == 1
    out = capsys.readouterr().out
    assert "[1/2 runs] a seed=0: finished, validation loss 2.5000" in out
    assert "'a' seed 1 (run run1) failed: a worker was killed." in out


def test_a_run_whose_process_was_killed_is_interrupted_and_not_running(tmp_path: Path, tiny: Compose) -> None:
    job = Job([], "a", tiny(), "run0")
    store = Store(tmp_path / "runs")
    assert (row_of(job, store).status, row_of(job, store, "why").reason) == ("missing", "why")
    with store.open(job.run_id) as run:
        run.update(status="running", reason="")
        assert row_of(job, store).status == "running"
    row = row_of(job, store)
    assert row.status == "interrupted" and "killed" in row.reason
    assert (row_of(job, store, "why").status, row_of(job, store, "why").reason) == ("failed", "why")


def test_the_comparison_is_printed_even_where_it_cannot_be_saved(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").write_text("")
    answer = cli(f"paths.sweeps={tmp_path}/file", "trainer.tokens=256")
    assert answer.status == 2 and "nats per token, lower is better" in answer.out
    assert answer.err.count("\n") == 1 and f"cannot write {tmp_path}/file/" in answer.err


@pytest.mark.parametrize("fail_fast", [True, False])
def test_fail_fast_starts_nothing_after_a_failure_and_is_over_with_the_command(
    fail_fast: bool, tmp_path: Path, tiny: Compose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def train(cfg: RunConfig, overrides: Sequence[str], *_: object) -> dict[str, Any]:
        asked.append(cfg.seed)
        with Store(tmp_path / "runs").open(f"run{cfg.seed}") as run:
            run.update(status="failed" if cfg.seed == 1 else "finished", tokens=1, reason="", **{"val/loss": 2.0})
            return run.record

    def launch(jobs: Sequence[Job], group: str) -> Mapping[str, str]:
        for job in jobs:
            conducting.run_job(replace(job.cfg, group=group), [], fail_fast=fail_fast)
        return {}

    monkeypatch.setattr(conducting, "_train", train)
    cfg = tiny()
    jobs = [Job([], "a", replace(cfg, seed=seed), f"run{seed}") for seed in range(4)]
    for tried in ([0, 1], [1]) if fail_fast else ([0, 1, 2, 3], [1]):
        asked.clear()
        with pytest.raises(SystemExit):
            end({"none": conduct(jobs, "name", launch)}, tmp_path)
        assert asked == tried
        said = "fail_fast=true: a run failed, so no other was started after it." in capsys.readouterr().out
        assert said == fail_fast and not list(tmp_path.glob("sweeps/.*"))


def test_an_error_without_a_record_stops_others_under_fail_fast_too(
    tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, asked = replace(tiny(), group="any: name/at all"), []

    def train(*_: Any) -> None:
        asked.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conducting, "_train", train)
    with pytest.raises(OSError, match="No space"):
        conducting.run_job(cfg, [], fail_fast=True)
    assert conducting.run_job(cfg, [], fail_fast=True) is None and asked == [1]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_another_sweeper_says_what_it_leaves_undone_and_refuses_to_match(
    tmp_path: Path, cli: Cli, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Hydra's own sweeper leaves a multirun.yaml
    refused = cli("-m", "hydra/sweeper=basic", "attn=mha,mqa", "match=params")
    assert refused.status == 2 and "hydra/sweeper=basic chooses its arms one by one, so match=params" in refused.err
    assert not (tmp_path / "runs").exists()
    assert cli("-m", "hydra/sweeper=basic", "attn=mha,mqa", "trainer.tokens=128").status == 0
    assert caplog.text.count("nothing checks in what the arms differ") == 1 and len(records(tmp_path)) == 2


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["name=a,b"], "'name=a,b': name takes one value"),
        (["paths.runs=a,b"], "'paths.runs=a,b': paths.runs takes one value"),
        (["logger=none,csv"], "'logger=none,csv': logger takes one value"),
        (["experiments=norm_ffn,norm_ffn"], "experiments takes one value"),
        (["optim.lr=interval(0,1)"], "'optim.lr=interval(0,1)': give the values"),
        (["seed=range(3,0)"], "'seed=range(3,0)' has no values"),
        (["hydra/launcher=basic,joblib"], "Sweeping over Hydra's configuration is not supported"),
        (["seed=0,abc"], "seed='abc' must be of type int"),
        (["stability=[],[qk_nrom]"], "did you mean 'qk_norm'?"),
        (["optim.lr=1e-3,0"], "optim.lr=0 must be a positive number"),
        (["data=stdlib,text"], "data.path has no value yet; give data.path=…"),
        (["~norm", "seed=0,1"], "'model.block.norm_position' is missing"),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused_before_anything_trains(
    tmp_path: Path, cli: Cli, arguments: list[str], said: str
) -> None:
    answer = cli("-m", *arguments)
    assert answer.status == 2 and said in answer.err and answer.err.count("\n") == 1 and not answer.out
    assert not list(tmp_path.glob("runs/*/record.json"))


# --- warnings


@pytest.mark.slow  # several runs
def test_arms_of_different_size_are_said_to_be(tmp_path: Path, cli: Cli) -> None:
    answer = cli("-m", "ffn=gelu4x,relu4x", "model.ffn.ratio=4,5", "trainer.tokens=256")
    said = " ".join(answer.out.split())
    small, large = (record["params"] for name, record in sorted(records(tmp_path).items()) if "gelu4x" in name)
    assert large > 1.02 * small
    percent = f"{100 * (large / small - 1):+.1f} %"
    assert f"parameters differ from the baseline's {small / 1e3:.1f}k by more than 2 % in 2 of 3 arms: " in said
    assert f"'ffn=gelu4x model.ffn.ratio=5' {percent} ({large / 1e3:.1f}k)" in said
    assert "'ffn=relu4x model.ffn.ratio=4'" not in said.split("parameters differ")[1].split(".")[0]


# --- groups and trackers


@pytest.mark.slow  # several runs
def test_the_sweep_groups_its_runs_unless_a_group_is_given(tmp_path: Path, cli: Cli) -> None:
    short = "trainer.tokens=256"
    assert cli("-m", "seed=0,1", short).status == 0 and cli("seed=2", short).status == 0
    assert cli("-m", "seed=3", short, "group=mine").status == 0 and cli("seed=4", short, "group=mine").status == 0
    groups = {}
    for path in tmp_path.glob("runs/*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        groups[config["seed"]] = config["group"]
    sweeps = {path.name for path in (tmp_path / "sweeps").iterdir()}
    assert groups[0] == groups[1] != groups[2] and {groups[0], groups[2]} < sweeps
    assert groups[3] == groups[4] == "mine"


# --- two at once, and what is broken off


@pytest.mark.slow  # several runs
def test_a_run_that_another_process_trains_is_waited_for(
    tmp_path: Path, cli: Cli, tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    from andrea_ablate.training.identity import identify

    store = Store(tmp_path / "runs")
    other = store.open(identify(tiny("seed=0"))[0])
    train, waited = conducting.run_job, []

    def run_job(*args: Any, wait: bool = False, **kwargs: Any) -> float | None:
        if wait:
            waited.append(args[0].seed)
            other.close()
        return train(*args, wait=wait, **kwargs)

    monkeypatch.setattr(conducting, "run_job", run_job)
    answer = cli("-m", "seed=0,1")
    assert answer.status == 0 and waited == [0]
    assert "size=tiny seed=0 is being trained by another process; waiting for it." in answer.out
    assert "n 2 of 2" in answer.out
    for record in records(tmp_path).values():
        assert steps_of(tmp_path, record) == list(range(1, 11))


@pytest.mark.slow  # several runs
def test_a_single_run_waits_as_well(tmp_path: Path, cli: Cli, tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    from andrea_ablate.training.identity import identify

    other = Store(tmp_path / "runs").open(identify(tiny("seed=0"))[0])
    wait_for_others = conducting._wait_for_others

    def release(*args: Any) -> None:
        threading.Timer(0.05, other.close).start()
        wait_for_others(*args)

    monkeypatch.setattr(conducting, "_wait_for_others", release)
    answer = cli("seed=0")
    assert answer.status == 0 and "waiting for it" in answer.out and "n 1 of 1" in answer.out


def test_what_the_plan_knows_travels_with_the_jobs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    sent: list[list[str]] = []

    def launch(self: Launcher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> None:
        sent.extend(map(list, job_overrides))
        raise RuntimeError("no cluster today")

    monkeypatch.setattr(launcher, "launch", launch)
    cli("-m", "seed=0,1", "tags=[a]", "trainer.tokens=128")
    cli("-m", "seed=2,3", 'name="it\'s"', "group=mine", "ops=reference")
    plan = [{key: value for key, _, value in (part.partition("=") for part in job)} for job in sent]
    assert [job["trainer.accelerator"] for job in plan] == ["'cpu'"] * 4
    assert plan[0]["ops"] in ("'compiled'", "'reference'") and plan[2]["ops"] == "'reference'"
    assert plan[1]["name"] == "'seed=1 trainer.tokens=128 size=tiny'"
    assert re.fullmatch(r"'run-[0-9a-f]{8}'", plan[0]["group"])
    assert plan[3]["name"] == r"'it\'s'" and plan[3]["group"] == "'mine'"


def test_a_plan_trains_nothing(tmp_path: Path, cli: Cli) -> None:
    answer = cli("-m", "seed=0,1", "plan=true")
    assert answer.status == 0 and "Devices, with hydra/launcher=basic" in answer.out
    assert cli("seed=0", "plan=true").status == 0
    assert records(tmp_path) == {} and not (tmp_path / "sweeps").exists()


@pytest.mark.slow  # several runs
def test_a_budget_that_no_run_fits_is_a_row_and_one_that_fits_trains(tmp_path: Path, cli: Cli) -> None:
    refused = cli("-m", "seed=0,1", "machine.memory_gib=0.1")
    assert refused.status == 1
    assert {run["status"] for run in comparison(tmp_path)["runs"]} == {"failed"}
    assert all(
        "0.1 are allowed here; raise machine.memory_gib" in run["reason"] for run in comparison(tmp_path)["runs"]
    )
    assert cli("-m", "seed=0,1", "machine.memory_gib=2", "machine.cores=2").status == 0


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Send this process Ctrl-C as soon as `condition` holds."""

    def watch() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if condition():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow  # several runs
def test_an_interrupted_sweep_keeps_what_it_has_and_ends_in_the_same_numbers(tmp_path: Path, cli: Cli) -> None:
    command = ("-m", "seed=0,1,2", "trainer.tokens=5120", "trainer.checkpoint_every=10", "model.dropout=0.1")

    def second_run_is_under_way() -> bool:
        rows = {path.parent: path.read_bytes().count(b"\n") for path in tmp_path.glob("runs/*/metrics.jsonl")}
        return len(rows) == 2 and min(rows.values()) >= 12

    thread = interrupt_when(second_run_is_under_way)
    answer = cli(*command)
    thread.join()
    assert answer.status == 130
    assert "1 of 3 runs are finished and kept." in answer.out
    said = r"Interrupted \(SIGINT after step \d+\)\. Repeat the same command to go on from here\.\n"
    assert re.fullmatch(said, answer.err)
    finished, interrupted = (records(tmp_path)[f"seed={seed}"] for seed in (0, 1))
    assert (finished["status"], interrupted["status"]) == ("finished", "interrupted") and len(records(tmp_path)) == 2
    before = snapshot(tmp_path / "runs" / finished["run_id"])

    resumed = cli(*command)
    assert resumed.status == 0 and "3 runs, 2 to train" in resumed.out
    assert snapshot(tmp_path / "runs" / finished["run_id"]) == before
    ended = records(tmp_path)
    assert ended["seed=1"]["resumed_from"] > 0
    for record in ended.values():
        assert steps_of(tmp_path, record) == list(range(1, 41))
    undisturbed = cli(*command, "seed=1", f"paths.runs={tmp_path}/undisturbed")
    assert undisturbed.status == 0
    record = ended["seed=1"]
    reference = json.loads((tmp_path / "undisturbed" / record["run_id"] / "record.json").read_text())
    for key in ("val/loss", "val/bpb", "initial_loss", "token_hash"):
        assert record[key] == reference[key]


def test_ctrl_c_between_runs_ends_the_sweep_as_well(
    tmp_path: Path, tiny: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job([], "a", tiny(f"seed={seed}"), f"run{seed}") for seed in (0, 1)]

    def launch(jobs: Sequence[Job], group: str) -> Mapping[str, str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct(jobs, "name", launch)
    assert "0 of 2 runs are finished and kept." in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("sweeps/name/*")] == ["plan.json"]


def test_single_run_returns_its_validation_loss(tmp_path: Path, tiny: Compose) -> None:
    loss = single_run(tiny("trainer.tokens=256"), ["trainer.tokens=256"])
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/record.json"))
    assert loss == record["val/loss"] and record["name"] == "trainer.tokens=256"
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(ConfigError, match="must divide"):
        cfg = tiny()
        single_run(replace(cfg, model=replace(cfg.model, n_heads=3)), [])
    assert not (tmp_path / "runs").exists()


# --- other launchers


@pytest.mark.slow  # each worker process imports torch and lightning
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_worker_processes_train_the_same_numbers(launcher: str, tmp_path: Path, cli: Cli) -> None:
    plugin = f"hydra_{launcher.partition('_')[0]}_launcher"
    pytest.importorskip(f"hydra_plugins.{plugin}", reason=f"{plugin.replace('_', '-')} is not installed")
    command = ("-m", "seed=0,1", "model.n_heads=4,3", "trainer.deterministic=true")
    answer = cli(*command, f"launcher={launcher}", *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []))
    assert answer.status == 1 and "[4/4 runs]" in answer.out
    found = records(tmp_path)
    here = cli(*command, f"paths.runs={tmp_path}/here")
    assert here.status == 1 and len(found) == 4
    for record in found.values():
        reference = json.loads((tmp_path / "here" / record["run_id"] / "record.json").read_text())
        for key in ("status", "reason", "token_hash"):
            assert record.get(key) == reference.get(key)
        assert record.get("val/loss") == pytest.approx(reference.get("val/loss"), abs=1e-6)  # threads may differ
    assert sum(record["status"] == "finished" for record in found.values()) == 2
