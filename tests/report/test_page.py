"""The report's page from planted runs: its numbers, its marks, its warnings and its commands."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from html import escape, unescape

import numpy as np
import pytest

from andrea_ablate.registry import ConfigError
from andrea_ablate.report import RunRow, compare, load, save
from andrea_ablate.report.contents import read
from andrea_ablate.report.curves import not_finite, over_seeds, thin
from andrea_ablate.report.page import page as page_of
from andrea_ablate.tracking.store import Store

EVIL = "<script>alert(1)</script>&\"'"


def page(folders, store, made_by):
    return page_of([read(folder, store, made_by) for folder in folders])


def losses(seed, steps=40):
    rng = np.random.default_rng(seed)
    return [(step, 5 * step**-0.2 + 0.01 * rng.standard_normal()) for step in range(1, steps + 1)]


def plant(root, rows, curves=None, spikes=None):
    """Write rows as a saved comparison and the runs behind them; return (sweep folder, store)."""
    store = Store(root / "runs")
    for row in rows:
        if row.status == "missing":
            continue
        with store.open(row.run_id) as writer:
            writer.write_config({"schedule": {"warmup_tokens": 640 if row.lr else None}})
            for step, loss in (curves or {}).get(row.run_id, losses(row.seed)):
                writer.log({"step": step, "train/loss": loss})
            if row.val_loss is not None:
                writer.log({"step": 40, "val/loss": row.val_loss})
            writer.update(run_id=row.run_id, status=row.status, spikes=(spikes or {}).get(row.run_id, []))
    folder = root / "sweeps" / "planted"
    save(compare(rows), folder)
    return folder, store


def rows_of(arm, values, **known):
    defaults = {"params": 1000, "flops_per_token": 6e3, "tokens": 5120, "tokens_per_s": 900.0, "token_hash": "same"}
    return [
        RunRow(arm=arm, seed=seed, status="finished", val_loss=value, run_id=f"{known.get('id', arm)}-{seed}",
               **(defaults | {key: value for key, value in known.items() if key != "id"}))
        for seed, value in enumerate(values)
    ]  # fmt: skip


def data_of(html):
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert len(found) == 1
    return {figure["id"]: figure for sweep in json.loads(found[0]) for figure in sweep["figures"]}


TWO = [*rows_of("A", [2.0, 2.1, 2.2]), *rows_of("B", [2.31, 2.40, 2.52], params=1500)]


@pytest.fixture
def two(tmp_path):
    return plant(tmp_path, TWO)


# --- curves


def test_thinning_keeps_a_spike_of_one_step_and_the_lowest_point():
    values = np.full(10_000, 2.0)
    values[6_543], values[77] = 9.0, 1.0
    curve = thin(over_seeds([list(enumerate(values.tolist()))]))
    assert len(curve.steps) < 2_000
    assert curve.mean[curve.steps == 6_543].tolist() == [9.0]
    assert curve.mean[curve.steps == 77].tolist() == [1.0]
    assert (curve.steps[0], curve.steps[-1]) == (0, 9_999)


def test_thinning_keeps_the_extremes_of_every_bucket_at_odd_sizes():
    values = np.random.default_rng(0).standard_normal(1_237)
    curve = thin(over_seeds([list(enumerate(values.tolist()))]), buckets=50)
    edges = np.linspace(0, 1_237, 51).astype(int)
    for start, stop in zip(edges, edges[1:], strict=False):
        kept = curve.mean[(curve.steps >= start) & (curve.steps < stop)]
        assert (kept.min(), kept.max()) == (values[start:stop].min(), values[start:stop].max())


def test_a_spike_of_one_seed_stays_in_the_band():
    calm, spiked = np.full(5_000, 2.0), np.full(5_000, 2.0)
    spiked[4_321] = 8.0
    curve = thin(over_seeds([list(enumerate(calm.tolist())), list(enumerate(spiked.tolist()))]))
    at = curve.steps == 4_321
    assert (curve.low[at][0], curve.mean[at][0], curve.high[at][0]) == (2.0, 5.0, 8.0)


def test_values_that_are_not_finite_leave_a_gap_and_are_listed():
    run = [(1, 3.0), (2, math.nan), (3, math.inf), (4, 2.0), (5, -math.inf)]
    curve = over_seeds([run])
    assert np.isnan(curve.mean).tolist() == [False, True, True, False, True]
    assert not_finite(run) == [(2, 3), (5, 5)]
    other = over_seeds([run, [(1, 5.0), (2, 4.0)]])
    np.testing.assert_array_equal(other.mean, [4.0, 4.0, math.nan, 2.0, math.nan])
    long = [(step, math.nan if step == 700 else 2.0) for step in range(2_000)]
    assert np.isnan(thin(over_seeds([long])).mean).sum() == 1


def test_seeds_of_different_length_and_none_at_all():
    curve = over_seeds([[(1, 1.0), (3, 3.0)], [(1, 2.0)], []])
    assert (curve.steps.tolist(), curve.mean.tolist(), curve.high.tolist()) == ([1, 3], [1.5, 3.0], [2.0, 3.0])
    assert len(over_seeds([]).steps) == 0


# --- the page


def test_headline_says_winner_effect_and_doubt(two):
    html = page([two[0]], two[1], "made by")
    top = html[: html.index("Loss curves")]
    lead = np.array([0.31, 0.30, 0.32])
    half = 4.302653 * lead.std(ddof=1) / math.sqrt(3)
    assert ">A has the lowest loss</h1>" in top
    assert (
        "<strong>0.3100</strong>" in top and "nats lower" in top and "than the next best &#x27;B&#x27;, paired" in top
    )
    assert f"[{lead.mean() - half:+.4f}, {lead.mean() + half:+.4f}]" in top
    assert '<b class="settled">settled</b>' in top
    assert escape(load(two[0]).verdict) in top


def test_the_effects_stand_above_the_ranking_and_a_doubt_is_never_folded(two, tmp_path):
    html = page([two[0]], two[1], "made by")
    order = ["<h1", 'class="effect"', '<figure id="effects-0"', "<h2>Ranking</h2>", '<figure id="curves-0"']
    assert order == sorted(order, key=html.index)
    assert "<summary>The verdict in sentences</summary>" in html
    folder, store = plant(tmp_path / "other", [*rows_of("A", [2.0, 2.4]), *rows_of("B", [2.3, 2.2])])
    doubtful = page([folder], store, "")
    assert "The verdict in sentences" not in doubtful and 'class="verdict"' in doubtful


def test_one_seed_has_no_interval_and_is_not_settled(tmp_path):
    folder, store = plant(tmp_path, [*rows_of("A", [2.0]), *rows_of("B", [2.5])])
    html = page([folder], store, "")
    assert "no interval" in html and '<b class="open">not settled</b>' in html


def test_numbers_of_the_figures_are_those_of_the_runs(two):
    figures = data_of(page([two[0]], two[1], ""))
    train, val = figures["curves-0"]["content"]
    a = train["series"][0]
    values = np.array([[loss for _, loss in losses(seed)] for seed in range(3)])
    assert a["x"] == list(range(1, 41))
    np.testing.assert_allclose(a["mean"], values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(a["low"], values.min(0), rtol=1e-5)
    np.testing.assert_allclose(a["high"], values.max(0), rtol=1e-5)
    assert (val["series"][1]["x"], val["series"][1]["mean"]) == ([40], [pytest.approx(2.41)])
    (forest,) = figures["effects-0"]["content"]
    effect, noise = forest["rows"]
    assert (effect["name"], effect["n"], effect["mean"]) == ("B", 3, pytest.approx(0.31))
    assert effect["low"] < 0.31 < effect["high"] and effect["verdict"] == "contradicted"
    assert (
        forest["margin"] == 0.03 and noise["noise"] and noise["high"] == pytest.approx(2.776445 * 0.1 * (2 / 3) ** 0.5)
    )
    params, flops, speed = figures["costs-0"]["content"]
    assert [series["x"] for series in params["series"]] == [[1000], [1500]]
    assert flops["series"][0]["x"] == [6000] and speed["series"][0]["x"] == [900]
    assert "rates-0" not in figures


def test_learning_rates_are_drawn_where_a_design_has_several(tmp_path):
    rows = []
    for lr, values in ((1e-2, [2.2, 2.3]), (1e-3, [2.5, 2.6])):
        rows += rows_of(f"lr={lr}", values, id=f"lr-{lr}", design="norm=pre", lr=lr)
    rows.append(RunRow("lr=1", 0, "diverged", design="norm=pre", lr=1.0, run_id="burst"))
    folder, store = plant(tmp_path, rows)
    (view,) = data_of(page([folder], store, ""))["rates-0"]["content"]
    (series,) = view["series"]
    assert (series["x"], series["mean"]) == ([1e-3, 1e-2, 1.0], [pytest.approx(2.55), pytest.approx(2.25), None])
    assert [(mark["x"], mark["y"]) for mark in series["marks"]] == [(1.0, None)]


def test_spikes_and_steps_without_a_finite_loss_are_marked(tmp_path):
    spike = {"start": 7, "peak": 8, "baseline": 3.0, "height": 4.0, "lost": 5.25, "end": 11}
    endless = {"start": 20, "peak": 20, "baseline": 3.0, "height": math.inf, "lost": 0.0, "end": None}
    curve = [(step, math.nan if step == 20 else 3.0) for step in range(1, 21)]
    rows = [*rows_of("A", [2.0]), RunRow("B", 0, "diverged", reason="loss is nan", run_id="B-0")]
    folder, store = plant(tmp_path, rows, {"B-0": curve}, {"A-0": [spike], "B-0": [endless]})
    html = page([folder], store, "")
    a, b = data_of(html)["curves-0"]["content"][0]["series"]
    assert [(mark["kind"], mark["x"], mark["y"]) for mark in a["marks"]] == [("spike", 8, 7.0)]
    assert [(mark["kind"], mark["x"], mark["y"]) for mark in b["marks"]] == [
        ("not finite", 20, None),
        ("spike", 20, None),
        ("end", 20, None),
    ]
    table = html[html.index("Loss spikes (2)") : html.index("Runs (2)")]
    text = unescape(re.sub(r"<[^>]+>", "|", table))
    assert all(f"|{cell}|" in text for cell in ("7", "4.000", "4 steps", "5.250", "not finite", "none"))
    assert f"python -m andrea_ablate.replay A-0 7 --runs {shlex.quote(str(store.root))}" in text
    assert table.index("B-0") < table.index("A-0")  # the highest first
    assert "loss is nan" in html[html.index("Runs (2)") :]


def test_names_are_inert(tmp_path):
    rows = [*rows_of(EVIL, [2.0], id="a"), *rows_of("B", [2.5])]
    rows.append(RunRow("C", 0, "failed", reason=f"</script>{EVIL}", run_id="c"))
    folder, store = plant(tmp_path, rows)
    html = page([folder], store, EVIL)
    assert "<script>alert" not in html and "</script>&" not in html and "</script><" not in html
    assert html.count("<script") == html.count("</script>") == 2
    assert data_of(html)["curves-0"]["content"][0]["series"][0]["name"] == EVIL
    assert escape(EVIL) in html


def test_page_fetches_nothing(two):
    html = page([two[0]], two[1], "")
    without_namespace = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://|\bsrc=|@import|fetch\(|XMLHttpRequest|<link (?!rel=\"icon\" href=\"data:,\")", without_namespace
    )


def test_runs_that_are_not_there_are_warned_of(tmp_path):
    folder, _ = plant(tmp_path, TWO)
    html = page([folder], Store(tmp_path / "elsewhere"), "")
    assert html.count("it has no curve and no spikes here") == 6
    assert "curves-0" not in data_of(html) and "effects-0" in data_of(html)


def test_a_damaged_run_is_left_out_and_named(tmp_path):
    folder, store = plant(tmp_path, TWO)
    (store.path("A-1") / "metrics.jsonl").write_text("{\n{}\n")
    html = page([folder], store, "")
    assert "run A-1 is left out of curves and spikes" in html
    mean = data_of(html)["curves-0"]["content"][0]["series"][0]["mean"]
    assert mean[0] == pytest.approx((losses(0)[0][1] + losses(2)[0][1]) / 2, rel=1e-5)


def test_no_run_finished(tmp_path):
    folder, store = plant(tmp_path, [RunRow("A", 0, "missing"), RunRow("B", 0, "missing")])
    html = page([folder], store, "")
    assert ">No run finished</h1>" in html
    assert set(data_of(html)) == {"effects-0"}


def test_two_sweeps_share_a_page_without_sharing_ids(two):
    figures = data_of(page([two[0], two[0]], two[1], ""))
    assert {"curves-0", "curves-1"} <= set(figures)


def test_load_gives_back_what_was_saved(two):
    assert load(two[0]) == compare(TWO)


def test_load_refuses_what_is_not_a_sweep(tmp_path):
    with pytest.raises(ConfigError, match=r"comparison\.json: No such file .*give the folder of a sweep"):
        load(tmp_path)
    (tmp_path / "comparison.json").write_text('{"runs": [{"arm": 1, "colour": 2}]}')
    with pytest.raises(ConfigError, match="of another version"):
        load(tmp_path)


@pytest.mark.slow  # pictures of every figure
def test_command_line_writes_the_page_and_refuses_other_folders(two, tmp_path):
    call = [sys.executable, "-m", "andrea_ablate.report", "--runs", str(two[1].root), "-o", str(tmp_path / "r.html")]
    done = subprocess.run([*call, str(two[0])], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == [str(tmp_path / "r.html"), str(tmp_path / "r.md")]
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert escape(shlex.join(["python", *call[1:], str(two[0])])) in html
    done = subprocess.run([*call, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "give the folder of a sweep" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_commands_under_the_figures_name_the_runs_they_show(cli, tiny, tmp_path):
    """From the command to the configuration, and from there to the id of the run."""
    from andrea_ablate.training.identity import identify

    fixed = ("stability=[qk_norm,z_loss]", "optim.lr=2e-3", "schedule.warmup_tokens=256")
    answer = cli("-m", "norm=pre,post", *fixed, "seed=0,3")
    assert answer.status == 0
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert f"python -m andrea_ablate.report {folder} --runs {tmp_path}/runs" in answer.out
    html = page([folder], Store(tmp_path / "runs"), "python -m andrea_ablate.report")
    shown = unescape(html[html.index('<figure id="curves-0"') :])
    ids = re.findall(r"<code>([0-9a-f]{16})</code>", shown[: shown.index("</figure>")])
    made = []
    for line in re.findall(r"python -m andrea_ablate -m .*", shown[: shown.index("</pre>")]):
        *words, seeds = shlex.split(line)[4:]
        words.remove("size=tiny")  # the fixture gives it
        made += [identify(tiny(*words, f"seed={seed}"))[0] for seed in seeds.removeprefix("seed=").split(",")]
    assert len(ids) == 4 and made == ids
