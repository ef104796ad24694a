"""The plan and the live display: what they say, that they cost little, and that nothing they read can break a sweep."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from andrea_ablate.jobs import Job
from andrea_ablate.progress import Progress, device_lines, expected_seconds, format_seconds, plan_table
from andrea_ablate.tracking import Store
from support import Compose

Jobs = Callable[..., list[Job]]


@pytest.fixture
def jobs(tiny: Compose) -> Jobs:
    """``jobs(3, "norm=post")``: jobs ``run0`` … of one arm, one seed each, 10 steps of 128 tokens."""
    cfg = tiny()

    def make(n: int, arm: str = "norm=post") -> list[Job]:
        return [Job([], arm, replace(cfg, seed=seed), f"run{seed}") for seed in range(n)]

    return make


def text_of(found: object, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(found)
    return console.file.getvalue()  # type: ignore[attr-defined]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the display did not follow"
        time.sleep(0.01)


class Output(io.StringIO):
    """Text that was written so far, without what moves the cursor."""

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "PERIOD_S", 0.01)


# --- the plan


def test_the_plan_counts_arms_runs_and_tokens(tmp_path: Path, tiny: Compose, jobs: Jobs) -> None:
    store = Store(tmp_path / "runs")
    pre, post = jobs(3, "stability=[qk_norm]"), [replace(job, run_id=f"x{job.run_id}", arm="[red]b") for job in jobs(2)]
    found = text_of(plan_table([*pre, *post], [pre[2], *post], store))
    assert "Plan: 2 arms, 5 runs, 3 to train (3,840 tokens, " in found
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in found.splitlines() if line.startswith("│")]
    params = "41,344"  # by hand: 2*257*32 + 2*(4*32^2 + 2*4*32^2 + 2*2*32) + 2*32
    assert rows[0] == ["stability=[qk_norm]", params, "0.22", "1,280", "3", "1"]
    assert rows[1] == ["[red]b", params, "0.22", "1,280", "2", "2"]
    assert "Plan: 1 arm, 1 run, none to train" in text_of(plan_table(pre[:1], [], store))


def test_the_plan_names_what_cannot_be_built(tmp_path: Path, jobs: Jobs) -> None:
    (job,) = jobs(1, "model.n_heads=3")
    refused = replace(job, cfg=replace(job.cfg, model=replace(job.cfg.model, n_heads=3)))
    found = " ".join(text_of(plan_table([refused], [refused], Store(tmp_path))).replace("│", " ").split())
    assert "model.n_heads=3 must divide model.d_model=32" in found and "under 1 s plus start-up)" in found


def test_the_expected_time_comes_from_stored_runs(tmp_path: Path, jobs: Jobs) -> None:
    store = Store(tmp_path / "runs")
    # 100, 200 and 400 FLOPs per second; the median counts, and a run that failed does not.
    for run_id, tokens, seconds, status in (
        ("a", 1000, 100.0, "finished"), ("b", 1000, 50.0, "finished"), ("c", 1000, 25.0, "finished"),
        ("d", 1000, 1e-9, "failed"),
    ):  # fmt: skip
        with store.open(run_id) as run:
            run.update(status=status, tokens=tokens, flops_per_token=10, train_s=seconds)
    # FLOPs per token by hand: 3 * 2 * (2 layers * 12 * 32^2 + 257 * 32 + 2 layers * 2 * 32 * 32 scores).
    flops = 3 * 2 * (2 * 12 * 32**2 + 257 * 32 + 2 * 2 * 32 * 32)
    assert expected_seconds(jobs(2), store) == pytest.approx(2 * flops * 1280 / 200)
    assert expected_seconds([], store) == 0
    assert expected_seconds(jobs(1), Store(tmp_path / "none")) > 0  # a short measurement instead


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "under 1 s"), (0.9, "under 1 s"), (45.4, "about 45 s"), (99.4, "about 99 s"), (150.0, "about 2 min"),
     (5399.0, "about 90 min"), (5400.0, "about 1.5 h"), (1e6, "about 277.8 h")],
)  # fmt: skip
def test_times_as_people_say_them(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said


# --- lines in a pipe


@pytest.mark.usefixtures("quick")
def test_a_pipe_gets_one_line_for_each_run_that_ends(tmp_path: Path, jobs: Jobs) -> None:
    store, out = Store(tmp_path / "runs"), Output()
    planned = jobs(4, "stability=[qk_norm]")
    with store.open("run3") as run:
        run.update(status="failed", reason="of an earlier command")
    with Progress(Console(width=40, file=out), store, planned):
        with store.open("run0") as run:
            run.update(status="running", reason="")
            run.log({"step": 1, "train/loss": 5.0})
            run.update(status="finished", **{"val/loss": 0.0})
        wait_until(lambda: "run" in out.plain)
        with store.open("run1") as run:
            run.update(status="diverged", reason="loss not finite from step 3 on, which is quite a long reason")
        with store.open("run2") as run:
            run.update(status="running", reason="")
    assert sorted(out.getvalue().splitlines()) == [
        "[1/4 runs] stability=[qk_norm] seed=0: finished, validation loss 0.0000",
        "[2/4 runs] stability=[qk_norm] seed=1: diverged, loss not finite from step 3 on, which is quite a long reason",
    ]


@pytest.mark.usefixtures("quick")
def test_a_run_that_another_process_has_begun_is_followed(tmp_path: Path, jobs: Jobs) -> None:
    store, out = Store(tmp_path / "runs"), Output()
    with store.open("run0") as run:
        run.update(status="running", reason="")
        run.log({"step": 3, "train/loss": 2.5})
        with Progress(Console(file=out, force_terminal=True, width=100), store, jobs(1)):
            wait_until(lambda: "step 3/10 loss 2.500" in out.plain)
            run.update(status="finished", **{"val/loss": 2.0})
    assert "[1/1 runs] norm=post seed=0: finished, validation loss 2.0000\n" in out.plain


@pytest.mark.usefixtures("quick")
def test_nothing_in_the_store_breaks_the_display(tmp_path: Path, jobs: Jobs) -> None:
    store, out = Store(tmp_path / "runs"), Output()
    planned = jobs(6)
    with Progress(Console(file=out, force_terminal=True, width=100), store, planned) as progress:
        for name, content in (("run0", "{"), ("run1", '{"status": "finished"}'), ("run2", "[]"), ("run3", "\x00\xff")):
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / "record.json").write_text(content)
        (tmp_path / "runs" / "run0" / "metrics.jsonl").write_text("not a row\n")
        with store.open("run4") as run:
            run.update(status="running", reason="")
            run.log({"step": 7, "train/loss": float("nan")})
            wait_until(lambda: "step 7/10 loss nan" in out.plain)
            with open(tmp_path / "runs" / "run4" / "metrics.jsonl", "a") as rows:
                rows.write("torn and broken\n")
            progress._look()
            run.update(status="finished", **{"val/loss": 3.0})
        wait_until(lambda: "norm=post seed=4: finished, validation loss 3.0000" in out.plain)
        assert progress._thread.is_alive()
        (tmp_path / "runs" / "run0" / "record.json").write_text('{"status": "finished", "val/loss": 4.0}')
        wait_until(lambda: "norm=post seed=0: finished, validation loss 4.0000" in out.plain)
    assert "Traceback" not in out.plain and not progress._thread.is_alive()


# --- bars on a terminal


@pytest.mark.usefixtures("quick")
def test_a_terminal_shows_how_far_everything_is(tmp_path: Path, jobs: Jobs) -> None:
    store, out = Store(tmp_path / "runs"), Output()
    arm = "stability=[qk_norm,z_loss,attn_softcap,output_softcap] norm=post"
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(console, store, jobs(2, arm)), store.open("run0") as run:
        run.update(status="running", reason="")
        run.log({"step": 4, "train/loss": 2.71828})
        wait_until(lambda: "step 4/10 loss 2.718" in out.plain)
        run.log({"step": 5, "val/loss": 9.0})
        run.log({"step": 6, "train/loss": 2.5})
        wait_until(lambda: "step 6/10 loss 2.500" in out.plain and "0/2 runs" in out.plain)
        run.update(status="finished", **{"val/loss": 2.25})
        wait_until(lambda: "1/2 runs" in out.plain)
    frames = re.split(r"[\r\n]+", out.plain)
    assert max(map(len, frames)) <= 100 or f"{arm} seed=0: finished" in max(frames, key=len)
    assert any(frame.startswith("stability=[qk_norm,z_loss") and "…" in frame for frame in frames)
    assert f"[1/2 runs] {arm} seed=0: finished, validation loss 2.2500" in out.plain.replace("\n", "")
    assert "loss nan" not in out.plain and "9.0" not in out.plain


# --- what it costs


class Counting(Store):
    """A store that counts what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def record(self, run_id: str) -> dict[str, Any] | None:
        self.read.append(f"{run_id} record")
        return super().record(run_id)

    def last_row(self, run_id: str) -> dict[str, Any] | None:
        self.read.append(f"{run_id} rows")
        return super().last_row(run_id)


def test_a_look_at_a_thousand_jobs_reads_only_what_changed(tmp_path: Path, jobs: Jobs) -> None:
    store = Counting(tmp_path / "runs")
    planned = jobs(1000)
    progress = Progress(Console(file=io.StringIO()), store, planned)
    writers = [store.open(f"run{i}") for i in range(3)]
    for run in writers:
        run.update(status="running", reason="")
        run.log({"step": 1, "train/loss": 1.0})
    with store.open("run3") as run:
        run.update(status="finished", **{"val/loss": 1.0})
    progress._look()
    assert sorted(store.read) == sorted([f"run{i} record" for i in range(4)] + [f"run{i} rows" for i in range(3)])
    store.read.clear()
    began = time.thread_time()
    for _ in range(10):
        progress._look()
    assert not store.read
    # Looks are half a second apart: under 1 % of one core, five times that on a slow machine.
    assert (time.thread_time() - began) / 10 < 0.025
    writers[1].log({"step": 2, "train/loss": 1.0})
    progress._look()
    assert store.read == ["run1 rows"]
    for run in writers:
        run.close()


def test_the_display_stops_with_the_sweep_whatever_ends_it(tmp_path: Path, jobs: Jobs) -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Progress(Console(file=io.StringIO()), Store(tmp_path), jobs(2)):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_an_interrupted_run_that_goes_on_ends_once(tmp_path: Path, jobs: Jobs, quick: None) -> None:
    first, second = jobs(2)
    store, output = Store(tmp_path / "runs"), Output()
    with Progress(Console(file=output, width=200), store, [first, second]) as shown:
        for job in (first, second):
            with store.open(job.run_id) as run:
                run.update(status="interrupted", reason="SIGUSR2 after step 3")
        wait_until(lambda: len(shown._interrupted) == 2)
        with store.open(first.run_id) as run:
            run.update(status="running", reason="")
            wait_until(lambda: first.run_id not in shown._interrupted)
            run.update(status="finished", **{"val/loss": 1.0})
        wait_until(lambda: "finished" in output.plain)
        assert "interrupted" not in output.plain
    lines = output.plain.splitlines()
    assert lines[0].startswith("[1/2 runs]") and lines[0].endswith("finished, validation loss 1.0000")
    assert lines[1].startswith("[2/2 runs]") and lines[1].endswith("interrupted, SIGUSR2 after step 3")


def test_devices_are_planned_without_a_gpu(tmp_path: Path, jobs: Jobs) -> None:
    store = Store(tmp_path / "runs")

    def cells(launcher: str, gpus: int | None) -> list[tuple[str, str]]:
        title, columns, *lines = device_lines(jobs(3), launcher, gpus, store).splitlines()
        rows = [re.split("  +", line) for line in lines]
        assert [row[0] for row in rows] == ["0", "1", "2"] and f"hydra/launcher={launcher}" in title
        assert columns.split() == ["job", "arm", "seed", "device", "starts"]
        return [(row[3], row[4].split()[0]) for row in rows]

    assert cells("joblib", 2) == [("cuda:0", "at"), ("cuda:1", "at"), ("cuda:0", "after")]
    assert cells("basic", 2) == [("cuda:0", "at"), ("cuda:0", "after"), ("cuda:0", "after")]
    assert cells("submitit_slurm", None) == [("1 that SLURM gives", "when")] * 3
    assert {device for device, _ in cells("joblib", None)} == {"cpu"}
