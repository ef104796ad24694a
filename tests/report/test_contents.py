"""What a report finds in plans, records and capsules: figures by layer, length and rate, confounds, commits."""

from __future__ import annotations

import json
import math

import pytest
from scipy import stats
from test_page import TWO, plant, rows_of

from andrea_ablate.report import RunRow, Tuned, compare, load, save
from andrea_ablate.report.contents import read
from andrea_ablate.tracking.plans import Plan
from andrea_ablate.tracking.store import encode


def table(contents, title):
    (found,) = [table for table in contents.tables if table.title.startswith(title)]
    return found


def figure(contents, name):
    (found,) = [figure for figure in contents.figures if figure.id.startswith(name)]
    return found


def capsule(run_id, step, layers, **changed):
    """A capsule of the steps before `step`, whose layer l has the activation l + 1 and one gap."""
    steps = [
        {
            "step": at,
            "tokens": [[1, 2, 3]],
            "train/loss": math.nan if at == step else 2.0,
            "layers": [{"out_rms": math.inf if (at, n) == (step, 0) else n + 1.0} for n in range(layers)],
        }
        for at in range(step - 2, step + 1)
    ]
    plain = {"run_id": run_id, "step": step, "changes": {}, "exchanged": [], "identical": True, "steps": steps}
    return encode({**plain, **changed})


def write(store, run_id, name, content):
    path = store.path(run_id) / "spikes" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_a_capsule_becomes_a_map_of_step_by_layer(tmp_path):
    spikes = [{"start": 7, "peak": 7, "baseline": 3.0, "height": 4.0, "lost": 5.0, "end": 9}]
    folder, store = plant(tmp_path, TWO, spikes={"A-0": spikes})
    write(store, "A-0", "step-00000007.json", capsule("A-0", 7, 3))
    write(store, "A-0", "step-00000007-changed.json", capsule("A-0", 7, 3, changes={"optim.lr": 1.0}, identical=None))
    write(store, "B-1", "step-00000030.json", capsule("B-1", 30, 2, identical=False))
    contents = read(folder, store, "")
    first, second = [figure for figure in contents.figures if figure.kind == "heat"]
    assert (first.title, first.runs) == ("Before step 7 of A seed=0", ("A-0",))
    (view,) = first.views  # nothing but the activation was recorded
    assert (view["steps"], view["loss"]) == ([5, 6, 7], [2.0, 2.0, None])
    assert view["values"] == [[1.0, 1.0, None], [2.0] * 3, [3.0] * 3]
    assert "NOT the recorded ones" in second.caption and "NOT" not in first.caption
    (line,) = table(contents, "Loss spikes (1)").lines
    assert line[:3] == ("A-0", "A seed=0", "7") and "shown" in line


def test_loss_past_the_length_of_training(tmp_path):
    folder, store = plant(tmp_path, TWO)
    by_seed = {"A": [2.0, 2.2, 2.1], "B": [3.0, 3.5, 3.1]}
    for row in TWO:
        long = by_seed[row.arm][row.seed]
        ends = {"val_64/loss_from_0": 3.0, "val_64/loss_from_16": 2.5, "val_64/loss_from_32": long}
        record = {**store.record(row.run_id), "val_32/loss": 2.4, "val_64/loss": long, **ends}
        (store.path(row.run_id) / "record.json").write_text(json.dumps(record))
        (store.path(row.run_id) / "config.yaml").write_text("data: {seq_len: 32}\n")
    whole, inside = figure(read(folder, store, ""), "positions").views
    a, b = whole["series"]
    assert (whole["name"], a["x"], b["name"]) == ("whole windows", [32, 64], "B")
    assert b["mean"] == [2.4, pytest.approx(3.2)]
    half = stats.t.ppf(0.975, 2) * stats.tstd(by_seed["B"]) / math.sqrt(3)
    assert b["high"][1] == pytest.approx(3.2 + half, rel=1e-5)
    assert (inside["name"], inside["series"][0]["x"]) == ("windows of 64", [16, 32, 64])
    assert inside["series"][0]["mean"] == [3.0, 2.5, pytest.approx(2.1)]
    assert whole["at"]["x"] == inside["at"]["x"] == 32


def test_rates_that_were_chosen_from_are_drawn(tmp_path):
    folder, store = plant(tmp_path, TWO)
    grid = ((1e-3, 2.5), (2e-3, 2.2), (4e-3, None))
    tuned = [Tuned("A", 2e-3, 2.2, 0.1, "", {"finished": 2, "diverged": 1}, grid)]
    save(compare(TWO, tuned=tuned), folder)
    contents = read(folder, store, "")
    (view,) = figure(contents, "rates").views
    (series,) = view["series"]
    assert (series["x"], series["mean"], series["low"]) == ([1e-3, 2e-3, 4e-3], [2.5, 2.2, None], [None] * 3)
    assert [(mark["kind"], mark["x"]) for mark in series["marks"]] == [("spike", 2e-3), ("not finite", 4e-3)]
    assert table(contents, "Learning rates").lines[0][:2] == ("A", "0.002")


def test_confounds_are_what_the_records_and_settings_of_the_arms_differ_in(tmp_path):
    folder, store = plant(tmp_path, TWO)
    for row in TWO:
        b = row.arm == "B"
        record = {
            **store.record(row.run_id),
            "commit": "aaaabbbbcccc" if (b, row.seed) == (True, 2) else "ddddeeeeffff+",
            "versions": {"torch": "2.13" if b else "2.12", "numpy": "2"},
            "device": {"type": "cpu", "name": "x86", "threads": 1 + b, "cores": row.seed},
            "paths": {"norm": "compiled"},
        }
        (store.path(row.run_id) / "record.json").write_text(json.dumps(record))
        config = f"seed: {row.seed}\nname: run {row.seed}\nmodel: {{norm: {{type: {row.arm}}}, d_model: 8}}\n"
        (store.path(row.run_id) / "config.yaml").write_text(config)
    contents = read(folder, store, "")
    found = table(contents, "Noise floor and confounds")
    assert [line[:2] for line in found.lines] == [
        ("how it was trained", "commit"),
        ("how it was trained", "versions.torch"),
        ("how it was trained", "device.threads"),
        ("setting", "model.norm.type"),
    ]
    assert found.lines[0][2] == "ddddeeeeffff+ (A); ddddeeeeffff+ and aaaabbbbcccc (B)"
    assert found.note.startswith("Noise floor, the baseline against itself")
    assert contents.commits(figure(contents, "curves")) == ["ddddeeeeffff+", "aaaabbbbcccc"]
    commits = {line[0]: line[6] for line in table(contents, "Runs").lines}
    assert commits["B-2"] == "aaaabbbbcccc" and commits["A-0"] == "ddddeeeeffff+"


def test_a_run_from_no_checkout_has_no_commit(tmp_path):
    folder, store = plant(tmp_path, TWO)
    contents = read(folder, store, "")
    assert {line[6] for line in table(contents, "Runs").lines} == {"-"}
    assert contents.commits(figure(contents, "curves")) == []


def test_the_command_of_the_sweep_is_that_of_its_plan(tmp_path):
    folder, store = plant(tmp_path, TWO)
    assert read(folder, store, "made by").commands == ("made by",)
    Plan("planted", ["-m", "a=[x, y]"], "/", str(store.root), {}).save(folder.parent)
    assert read(folder, store, "made by").commands == ("python -m andrea_ablate -m 'a=[x, y]'", "made by")


@pytest.mark.parametrize("b", [[2.31, 2.4, 2.52], [1.9, 2.6, 2.9]], ids=["settled", "not settled"])
def test_the_lead_is_read_as_a_difference_of_losses(tmp_path, b):
    rows = [*rows_of("base", [2.6, 2.7, 2.75]), *rows_of("A", [2.0, 2.1, 2.2]), *rows_of("B", b)]
    folder, store = plant(tmp_path, rows)
    ahead, against = read(folder, store, "").leads
    lead = load(folder).lead.effect
    assert ahead.size == f"{lead.mean:.4f}"
    assert ahead.way == "lower" and ahead.against.startswith("than the next best 'B'")
    assert ahead.interval == f"95 % [{lead.low:+.4f}, {lead.high:+.4f}]"
    assert (against.size, against.doubt) == ("0.5833", "better: supported")
    assert "the baseline 'base', paired over 3 seeds" in against.against


def test_a_best_mean_that_is_behind_on_the_shared_seeds_says_so(tmp_path):
    rows = [*rows_of("A", [2.0, 2.1, 3.0]), *rows_of("B", [2.05, 2.16]), RunRow("B", 2, "failed", run_id="B-2")]
    folder, store = plant(tmp_path, rows)
    (lead,) = read(folder, store, "").leads
    assert (lead.size, lead.doubt) == ("0.0550", "not settled")
    assert lead.way == "higher" and lead.against.startswith("than the baseline 'A'")
