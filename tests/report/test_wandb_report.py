"""The W&B report of planted runs: what its spec holds, and that nothing asks, hangs or gives a secret away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import andrea_ablate
from andrea_ablate.registry import ConfigError
from andrea_ablate.report import RunRow, compare, load, save
from andrea_ablate.report import wandb as module
from andrea_ablate.report.contents import read
from andrea_ablate.report.wandb import publish
from andrea_ablate.tracking.store import Store

pytest.importorskip("wandb_workspaces", reason="needs the wandb-workspaces package")

KEY = "0123456789abcdef" * 2 + "01234567"
WANDB = {"type": "wandb", "project": "ablations", "entity": None, "mode": "offline", "init_timeout_s": 20}
SPIKE = {"start": 3, "peak": 3, "baseline": 2.0, "height": 1.5, "lost": 1.5, "end": 4}
ARMS = {"optim.lr=0.001": [2.0, 2.1, 2.2], "optim.lr=0.002": [2.3, 2.4, 2.5]}


def plant(root: Path, logger: dict[str, Any] | None = None, spikes: bool = True) -> tuple[Path, Store]:
    """Two learning rates over three seeds, as a sweep's folder and the store of its runs."""
    store = Store(root / "runs")
    rows = [
        RunRow(
            arm=arm, seed=seed, status="finished", design="default", lr=float(arm.split("=")[1]), val_loss=loss,
            run_id=f"r{arm[-1]}{seed}", params=1000, flops_per_token=6e3, tokens=5120, tokens_per_s=900.0,
        )
        for arm, losses in ARMS.items()
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    for row in rows:
        with store.open(row.run_id) as writer:
            writer.write_config({"logger": logger or WANDB, "schedule": {"warmup_tokens": 640}})
            for step in range(1, 6):
                writer.log({"step": step, "train/loss": 3.0 - 0.1 * step})
            writer.log({"step": 5, "val/loss": row.val_loss})
            bands = {"val_64/loss_from_0": 2.5, "val_64/loss_from_16": 2.25}
            writer.update(run_id=row.run_id, status="finished", spikes=[SPIKE] * spikes, **bands)
    folder = root / "sweeps" / "rates"
    save(compare(rows), folder)
    return folder, store


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def spec_of(root: Path, **changes: Any) -> dict[str, Any]:
    folder, store = plant(root, **changes)
    path = root / "report.wandb.json"
    said = publish([read(folder, store, "python -m andrea_ablate.report x --wandb")], store, path)
    assert str(path) in said and "wandb login" in said and "wandb sync" in said and said.count("\n") == 0
    spec: dict[str, Any] = json.loads(path.read_text())
    return spec


def blocks(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in spec["spec"]["blocks"] if block["type"] == kind]


def text(block: dict[str, Any]) -> str:
    return "".join(child["text"] for child in block["children"])


def test_every_figure_of_the_page_is_a_grid_of_panels(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec["project"], spec["entity"], spec["title"]) == ("ablations", "", "rates")
    heads = [text(block) for block in blocks(spec, "heading")]
    assert heads == [
        "rates", "Effects against the baseline", "Loss curves", "Loss against learning rate",
        "Loss past the length of training", "Cost against loss",
        "Loss spikes", "Loss by position", "Commands",
    ]  # fmt: skip
    grids = [
        [(panel["viewType"], panel["config"]) for panel in grid["metadata"]["panelBankSectionConfig"]["panels"]]
        for grid in blocks(spec, "panel-grid")
    ]
    curves, rates, costs, spikes, positions = grids
    assert [(kind, config["metrics"], config["xAxis"]) for kind, config in curves] == [
        ("Run History Line Plot", ["train/loss"], "step"),
        ("Run History Line Plot", ["val/loss"], "step"),
    ]
    assert all(config["pointVisualizationMethod"] == "bucketing-gorilla" for _, config in curves)
    assert all((config["groupAgg"], config["groupArea"]) == ("mean", "minmax") for _, config in curves)
    ((kind, rate),) = rates
    assert (kind, rate["xAxis"], rate["yAxis"], rate["xAxisLogScale"]) == (
        "Scatter Plot", "config:optim.value.lr", "summary:val/loss", True,
    )  # fmt: skip
    assert [config["xAxis"] for _, config in costs] == [
        "summary:params", "summary:flops_per_token", "summary:train_s",
    ]  # fmt: skip
    for grid, key, axes in (
        (spikes, "spike/table", {"x": "start", "y": "height"}),
        (positions, "val/by_position", {"x": "from", "y": "loss", "stroke": "length"}),
    ):
        (chart_kind, chart), (table_kind, table) = grid
        assert (chart_kind, table_kind) == ("Vega2", "Weave")
        assert chart["fieldSettings"] == axes and f'"{key}"' in json.dumps(chart["userQuery"])
        assert f'"{key}"' in json.dumps(table)


def test_a_run_set_is_an_arm_chosen_by_run_id_and_drawn_as_one_line(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    curves, *_, spikes, _ = blocks(spec, "panel-grid")
    for grid, grouping in ((curves, [{"section": "run", "name": "jobType"}]), (spikes, [])):
        sets = grid["metadata"]["runSets"]
        assert [one["name"] for one in sets] == list(ARMS)
        for one, ids in zip(sets, (["r10", "r11", "r12"], ["r20", "r21", "r22"]), strict=True):
            (chosen,) = one["filters"]["filters"]
            assert (chosen["key"], chosen["op"], chosen["value"]) == ({"section": "run", "name": "name"}, "IN", ids)
            assert one["grouping"] == grouping and "project" not in one


def test_verdict_effects_and_commands_are_in_it(tmp_path: Path) -> None:
    folder, _ = plant(tmp_path / "other")
    spec = spec_of(tmp_path)
    comparison, effects, commands = (block["content"] for block in blocks(spec, "markdown-block"))
    assert comparison == load(folder).to_markdown()
    assert "| optim.lr=0.002 | +0.3000 | [+0.3000, +0.3000] | 3 |" in effects
    assert commands.splitlines() == [
        "```sh",
        "python -m andrea_ablate -m optim.lr=0.001 schedule.warmup_tokens=640 seed=0,1,2",
        "python -m andrea_ablate -m optim.lr=0.002 schedule.warmup_tokens=640 seed=0,1,2",
        "python -m andrea_ablate.report x --wandb",
        "```",
    ]


def test_without_spikes_there_is_no_panel_of_them(tmp_path: Path) -> None:
    heads = [text(block) for block in blocks(spec_of(tmp_path, spikes=False), "heading")]
    assert "Loss spikes" not in heads and "Loss by position" in heads


def test_a_key_stays_out_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert KEY not in json.dumps(spec_of(tmp_path))


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ({"type": "none"}, "these 6 runs are in none"),
        ({**WANDB, "project": "a/b"}, r"project='a/b' must have 1 to 128 characters"),
    ],
)
def test_runs_that_it_cannot_show_are_refused(tmp_path: Path, logger: dict[str, Any], message: str) -> None:
    folder, store = plant(tmp_path, logger)
    with pytest.raises(ConfigError, match=message):
        publish([read(folder, store, "x")], store, tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()


def test_without_its_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = plant(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(ConfigError, match="pip install wandb-workspaces"):
        publish([read(folder, store, "x")], store, tmp_path / "s.json")


def test_a_server_that_hangs_or_refuses_leaves_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb_workspaces.reports.v2 as wr

    folder, store = plant(tmp_path, {**WANDB, "entity": "team"})
    path, found = tmp_path / "s.json", [read(folder, store, "x")]
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(module, "SAVE_S", 0.2)

    monkeypatch.setattr(wr.Report, "save", lambda report: time.sleep(5))
    with pytest.raises(ConfigError, match="did not take the report .no answer within 0.2 s.; its spec is in .*s.json"):
        publish(found, store, path)
    assert json.loads(path.read_text())["entity"] == "team"

    def refuse(report: Any) -> None:
        raise RuntimeError(f"{KEY} is not allowed\nand more")

    monkeypatch.setattr(module, "SAVE_S", 20)
    monkeypatch.setattr(wr.Report, "save", refuse)
    with pytest.raises(ConfigError, match=r"did not take the report \(\*\*\* is not allowed\)"):
        publish(found, store, path)


def test_with_a_key_the_report_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb_workspaces.reports.v2 as wr

    folder, store = plant(tmp_path, {**WANDB, "entity": "team"})
    saved: list[Any] = []

    class Saved:
        url = "https://wandb.ai/team/ablations/reports/rates--1"

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wr.Report, "save", lambda report: saved.append(report) or Saved())
    said = publish([read(folder, store, "x")], store, tmp_path / "s.json")
    assert said == f"the report is at {Saved.url}"
    assert [(report.entity, report.project, report.title) for report in saved] == [("team", "ablations", "rates")]
    assert not (tmp_path / "s.json").exists()


@pytest.mark.slow  # starts the command
def test_the_command_writes_page_and_spec_and_asks_nobody(tmp_path: Path) -> None:
    folder, store = plant(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "andrea_ablate.report", str(folder), "--runs", str(store.root), "--wandb"],
        env={**os.environ, "PYTHONPATH": str(Path(andrea_ablate.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    page, *_, said = done.stdout.splitlines()
    assert page == str(folder / "report.html") and "report.wandb.json" in said
    assert {"report.html", "report.wandb.json"} <= {path.name for path in folder.iterdir()}
