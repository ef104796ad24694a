"""A run as `wandb leet inspect`, W&B's own reader, reads it back from the offline file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from andrea_ablate.analysis import Spike
from andrea_ablate.tracking import MirrorInfo, open_mirrors
from andrea_ablate.tracking.store import decode
from offline_wandb import offline_files, offline_run

pytest.importorskip("wandb", reason="needs the wandb package")

# The step of each row and its loss: a spike at 3, then what is no number, and the ends of the range of floats.
LOSSES = [2.5, 2.25, 9.0, math.nan, math.inf, -math.inf, 1.7976931348623157e308, 5e-324, 2.0]
SPIKES = [Spike(3, 3, 2.375, 6.625, 6.625, 4), Spike(4, 5, 2.375, math.inf, 0.0, None)]
BANDS = {"val_64/loss_from_0": 2.5, "val_64/loss_from_16": math.inf, "val_128/loss_from_0": 2.25}


def leet(path: Path, *options: str) -> str:
    """What ``wandb leet inspect`` prints of a .wandb file."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    if "No such command" in done.stderr:
        pytest.skip("this version of wandb has no `wandb leet inspect`")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .wandb file of an offline run with a home folder of its own."""
    folder = tmp_path_factory.mktemp("r")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(folder / "home"))
        (folder / "home").mkdir()
        about = MirrorInfo("r-1", "norm=post seed=0", "norms", "train", ["toy"], {"seed": 0}, folder, False)
        mirrors = open_mirrors({"type": "wandb", "mode": "offline"}, about)
        for step, loss in enumerate(LOSSES, 1):
            mirrors.log({"step": step, "train/loss": loss, "spike/count": (step >= 3) + (step >= 4)})
        summary: dict[str, Any] = {"val/loss": math.nan, "train_s": 1.5, "params": 10**9, "initial_loss": math.inf}
        mirrors.finish({**summary, **BANDS, "spikes": list(map(asdict, SPIKES))}, "diverged")
        assert mirrors.state == "ok"
        assert "WANDB_DATA_DIR" not in os.environ
        assert list((folder / "home").iterdir()) == []  # all that waits for an upload waits in the run's folder
    (file,) = offline_files(folder)
    offline_run(file)  # waits for its last record
    return file


def table(run: Path, entry: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table that a run's history or summary points at."""
    assert entry["_type"] == "table-file"
    text = (run.parent / "files" / entry["path"]).read_text()
    assert "Infinity" not in text.replace('"Infinity"', "") and "NaN" not in text  # strict JSON: words, not tokens
    stored = json.loads(text)
    assert (entry["nrows"], entry["ncols"]) == (len(stored["data"]), len(stored["columns"]))
    return stored["columns"], stored["data"]


@pytest.mark.slow  # starts W&B's service and its reader
def test_every_loss_comes_back_as_it_was_logged(run: Path) -> None:
    records = [json.loads(line) for line in leet(run).splitlines()]
    rows = [decode(record["history"]["item"]) for record in records if record["type"] == "history"]
    rows = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(LOSSES) + 1))
    assert repr([float(row["train/loss"]) for row in rows]) == repr(LOSSES)  # NaN is not equal to itself
    assert [row["spike/count"] for row in rows] == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    (about,) = (record["run"] for record in records if record["type"] == "run")
    shown = {key: about[key] for key in ("run_id", "display_name", "run_group", "job_type", "tags")}
    assert shown == {
        "run_id": "r-1", "display_name": "norm=post seed=0", "run_group": "norms", "job_type": "train", "tags": ["toy"],
    }  # fmt: skip


@pytest.mark.slow  # starts W&B's service and its reader
def test_summary_and_tables_come_back(run: Path) -> None:
    read = json.loads(leet(run, "--summary"))
    assert (read["state"], read["exit_code"], read["config"]) == ("failed", 1, {"seed": 0})
    summary = read["summary"]
    assert (summary["status"], summary["train_s"], summary["params"]) == ("diverged", 1.5, 10**9)
    assert (summary["val/loss"], summary["initial_loss"]) == ("NaN", "Infinity")
    assert "spikes" not in summary

    columns, rows = table(run, summary["spike/table"])
    assert columns == ["start", "peak", "baseline", "height", "lost", "end", "look inside"]
    assert rows == [
        [3, 3, 2.375, 6.625, 6.625, 4, "python -m andrea_ablate.replay r-1 3"],
        [4, 5, 2.375, "Infinity", 0.0, None, "python -m andrea_ablate.replay r-1 4"],
    ]
    columns, rows = table(run, summary["val/by_position"])
    assert columns == ["length", "from", "loss"]
    assert rows == [[64, 0, 2.5], [64, 16, "Infinity"], [128, 0, 2.25]]


@pytest.mark.slow  # starts W&B's service and its reader
def test_the_custom_charts_name_their_tables_and_axes(run: Path) -> None:
    records = [json.loads(line) for line in leet(run).splitlines()]
    charts: dict[str, Any] = {}
    for record in records:
        if record["type"] == "config":
            charts |= record["config"]["update"]
    for key, preset, fields in (
        ("spike/table", "scatter", {"x": "start", "y": "height"}),
        ("val/by_position", "line", {"x": "from", "y": "loss", "stroke": "length"}),
    ):
        panel = charts[f"_wandb.visualize.{key}_chart"]["panel_config"]
        assert panel["panelDefId"] == f"wandb/{preset}/v0"
        assert {axis: panel["fieldSettings"][axis] for axis in fields} == fields
        assert f"{key}_chart_table" in json.dumps(panel["userQuery"])
