"""Planted runs with known answers: means, ranks, marks, warnings, and what is printed."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats as scipy_stats

from andrea_ablate.analysis import holm, paired_effect
from andrea_ablate.registry import ConfigError
from andrea_ablate.report import RunRow, arm_key, compare, save
from andrea_ablate.report.cells import ArmName


def run(arm, seed, loss=None, status="finished", **known):
    defaults = {"token_hash": f"tokens-of-{seed}", "run_id": f"{arm}-{seed}"}
    return RunRow(arm=arm, seed=seed, status=status, val_loss=loss, **(defaults | known))


def panel(arm, losses, **known):
    return [run(arm, seed, loss, **known) for seed, loss in enumerate(losses)]


def by_name(comparison):
    return {arm.arm: arm for arm in comparison.arms}


def text_of(comparison, width=100):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(comparison.render())
    return console.file.getvalue()


CRASHES = [
    *panel("A", [2.0, 2.2, 2.4]),
    run("B", 0, 2.1),
    run("C", 0, 2.0),
    run("C", 1, math.nan, reason="loss spiked"),
    run("C", 2, status="failed", reason="out of\nmemory"),
]


# --- means, counts, ranks


def test_mean_and_spread_over_seeds_never_hide_failures():
    comparison = compare(CRASHES)
    arms = by_name(comparison)
    a, b, c = arms["A"], arms["B"], arms["C"]
    assert (a.loss.mean, a.loss.sd, a.loss.n) == (pytest.approx(2.2), pytest.approx(0.2), 3)
    assert (b.loss.mean, b.loss.sd, b.loss.low, b.loss.n) == (2.1, None, None, 1)
    assert (c.loss.mean, c.loss.n, c.planned) == (2.0, 1, 3)
    assert c.counts == {"finished": 1, "diverged": 1, "failed": 1}
    assert c.runs == "n 1 of 3, 1 diverged, 1 failed"
    assert (a.complete, b.complete, c.complete) == (True, True, False)
    assert [arm.arm for arm in comparison.arms] == ["A", "B", "C"]
    assert [arm.arm for arm in comparison.ranked] == ["C", "B", "A"]
    assert "| 1\\* | C | 2.0000 |" in comparison.to_markdown()
    assert "mean of the finished runs only" in comparison.to_markdown()
    assert "'C' has the lowest mean loss, 2.0000, but over its finished runs only (n 1 of 3, 1 diverged, 1 failed)" in (
        comparison.verdict
    )
    assert "Among the arms whose runs all finished 'B' is lowest, 2.1000." in comparison.verdict
    assert "'C' seed 1 (run C-1) diverged: validation loss nan; loss spiked." in comparison.warnings
    assert "'C' seed 2 (run C-2) failed: out of memory." in comparison.warnings
    assert "'B', 'C': one seed gives no interval." in comparison.warnings
    for arm in (b, c):
        assert arm.effect.p is arm.effect.low is arm.p_holm is None


def test_a_finished_run_without_a_loss_is_a_failure():
    comparison = compare([*panel("A", [2.0, None, math.inf])])
    assert by_name(comparison)["A"].runs == "n 1 of 3, 1 diverged, 1 failed"
    assert "'A' seed 1 (run A-1) failed: no validation loss." in comparison.warnings


def test_a_loss_of_a_run_that_did_not_finish_is_not_used():
    rows = [*panel("A", [2.0, 2.2]), run("A", 2, 0.1, status="diverged"), run("A", 3, 0.1, status="interrupted")]
    assert by_name(compare(rows))["A"].loss.mean == pytest.approx(2.1)


def test_a_grid_with_holes_groups_values_by_meaning():
    values = [None, None, None, 30, 30, 30.0, "30", "null"]
    rows = [run(arm_key({"softcap": value}), i, 2.0 + i / 100) for i, value in enumerate(values)]
    rows.append(run("softcap=30", 8, status="missing", run_id=""))
    comparison = compare(rows)
    assert {arm.arm: arm.runs for arm in comparison.arms} == {
        "softcap=null": "n 4 of 4",
        "softcap=30": "n 4 of 5, 1 missing",
    }
    assert "'softcap=30' seed 8 is missing." in comparison.warnings


@pytest.mark.parametrize(
    "values, key",
    [
        ({"norm": "pre", "ffn": "gelu4x"}, "norm=pre ffn=gelu4x"),
        ({"ffn": "gelu4x", "norm": "pre"}, "ffn=gelu4x norm=pre"),
        ({"lr": 1e-3}, "lr=0.001"),
        ({"lr": "1e-3"}, "lr=0.001"),
        ({"lr": np.float64(3e-05)}, "lr=3e-05"),
        ({"n": np.int64(4), "z": -0.0, "v": "1.2.3", "i": 2**60 + 1}, "n=4 z=0 v=1.2.3 i=1152921504606846977"),
        ({"bias": True, "tie": False, "n": 1}, "bias=true tie=false n=1"),
        ({"stability": ["qk_norm", "z_loss"], "b": []}, "stability=[qk_norm,z_loss] b=[]"),
        ({"betas": (0.9, 1.0), "o": {"a": None, "b": 2.0}}, "betas=[0.9,1] o={a:null,b:2}"),
        ({"x": math.inf, "y": math.nan, "name": "nan"}, "x=inf y=nan name=nan"),
        ({}, ""),
    ],
)
def test_arm_key(values, key):
    assert arm_key(values) == key


def test_ties_share_a_rank_in_the_order_of_the_sweep():
    rows = panel("A", [2.5]) + panel("Z", [2.0, 2.2, 2.4]) + panel("B", [2.4, 2.0, 2.2]) + panel("C", [3.0])
    comparison = compare(rows)
    assert [(arm.arm, arm.rank) for arm in comparison.ranked] == [("Z", 1), ("B", 1), ("A", 3), ("C", 4)]
    assert "on the seeds that both finished it is not ahead, not settled at 3 seeds." in comparison.verdict


def test_arms_without_a_finished_run_come_last_without_a_rank():
    rows = [run("dead", 0, status="failed"), *panel("ok", [5.0, 5.1]), run("gone", 0, status="missing")]
    comparison = compare(rows)
    assert [(arm.arm, arm.rank) for arm in comparison.ranked] == [("ok", 1), ("dead", None), ("gone", None)]
    assert "It shares no finished seed with the baseline 'dead'." in comparison.verdict
    assert "| - | dead | - | baseline |" in comparison.to_markdown()


def test_a_run_given_twice_counts_once_and_another_run_of_its_seed_is_named():
    first, other = run("A", 0, 2.0, run_id="aa"), run("A", 0, 3.0, run_id="bb")
    assert compare([first, first]).warnings == compare([first]).warnings
    comparison = compare([first, first, other])
    assert by_name(comparison)["A"].loss.mean == 2.0
    assert comparison.warnings[0] == ("'A' has two runs of seed 0: 'aa' (finished) is used, 'bb' (finished) is not.")


def test_baseline_is_the_first_arm_unless_named():
    rows = panel("pre", [2.0]) + panel("post", [2.1])
    assert compare(rows).baseline == "pre"
    assert compare(rows, baseline="post").baseline == "post"
    with pytest.raises(ConfigError, match="baseline='prr' is not one of the arms .*did you mean 'pre'"):
        compare(rows, baseline="prr")
    with pytest.raises(ConfigError, match="no runs"):
        compare([])


# --- effects


def test_effects_are_paired_by_seed_and_adjusted_over_the_table():
    rng = np.random.default_rng(0)
    base = rng.normal(2.3, 0.05, 5)
    arms = {f"arm{i}": base + shift + rng.normal(0, 0.004, 5) for i, shift in enumerate([-0.02, 0.005, 0.0])}
    rows = panel("base", base) + [row for name, losses in arms.items() for row in reversed(panel(name, losses))]
    found = by_name(compare(rows))
    expected = {name: scipy_stats.ttest_rel(losses, base) for name, losses in arms.items()}
    for name, test in expected.items():
        interval = test.confidence_interval(0.95)
        assert found[name].effect.p == pytest.approx(test.pvalue, rel=1e-9)
        assert (found[name].effect.low, found[name].effect.high) == pytest.approx((interval.low, interval.high))
    adjusted = holm([test.pvalue for test in expected.values()])
    assert [found[name].p_holm for name in arms] == pytest.approx(adjusted)
    assert found["base"].effect is None and found["base"].p_holm is None


def test_verdict_settled_and_not_settled():
    base, better = [2.30, 2.40, 2.50], [2.20, 2.31, 2.39]
    settled = compare(panel("A", base) + panel("B", better)).verdict
    # differences .10 .09 .11: mean .10, sd .01, half-width 4.302653 * .01 / sqrt(3) = .0248
    assert settled == (
        "'B' has the lowest mean loss, 2.3000 (n 3 of 3). Its paired lead over the runner-up 'A' (the baseline) is "
        "+0.1000 [+0.0752, +0.1248] nats over 3 seeds: the interval excludes zero, this lead is settled at 95 %. "
        "Holm-adjusted p = 0.0033 over 1 comparison with the baseline."
    )
    noisy = compare(panel("A", base) + panel("B", [2.10, 2.50, 2.30])).verdict
    # differences .2 -.1 .2: mean .1, sd .1732; t(0.975, n-1) * .1732 / sqrt(n) <= .05 from n = 49
    assert "includes zero, not settled at 3 seeds; about 49 seeds would narrow" in noisy
    assert "half the lead" in noisy


def test_a_lead_settles_nothing_where_its_verdict_takes_more_seeds():
    # differences .10 .05 .08: mean .0767, sd .0252, half-width 4.302653 * .0252 / sqrt(3) = .0625; 3.05 deviations
    base, better = [2.30, 2.40, 2.50], [2.20, 2.35, 2.42]
    comparison = compare(panel("A", base) + panel("B", better))
    doubt = "+0.0767 [+0.0142, +0.1392] nats over 3 seeds: the interval excludes zero, but a verdict takes 5 seeds, or"
    assert doubt in comparison.verdict
    assert not comparison.settled and comparison.arms[1].verdict == "inconclusive"
    five = compare(panel("A", [*base, 2.35, 2.45]) + panel("B", [*better, 2.26, 2.39]))
    assert five.settled and five.arms[1].verdict == "supported"


def test_verdict_names_the_effect_against_a_baseline_that_is_not_the_runner_up():
    rows = panel("base", [2.5, 2.6]) + panel("B", [2.2, 2.29]) + panel("C", [2.3, 2.4])
    verdict = compare(rows).verdict
    assert "runner-up 'C'" in verdict
    effect = paired_effect({0: 2.2, 1: 2.29}, {0: 2.5, 1: 2.6})
    assert f"difference to the baseline 'base' is {effect.mean:+.4f} [{effect.low:+.4f}, {effect.high:+.4f}]" in verdict
    assert "over 2 comparisons with the baseline" in verdict


def test_one_seed_settles_nothing():
    verdict = compare(panel("A", [2.3]) + panel("B", [2.2])).verdict
    assert "one seed gives no interval, so their order is not settled: add seed=0,1,2." in verdict
    assert "settled at 95" not in verdict
    assert compare(panel("A", [2.3])).verdict.endswith("One seed gives no interval: add seed=0,1,2.")


def test_survivors_settle_nothing():
    rows = panel("A", [2.3, 2.4, 2.5]) + panel("B", [2.2, 2.301]) + [run("B", 2, status="diverged")]
    verdict = compare(rows).verdict
    assert "runs that did not finish are not in it, so it is not settled" in verdict


def test_the_lead_is_the_paired_one():
    # B's mean is lower only because its bad seed died; on the shared seeds A is ahead.
    rows = panel("A", [2.0, 2.1, 3.0]) + panel("B", [2.05, 2.16]) + [run("B", 2, status="failed")]
    assert "on the seeds that both finished it is not ahead" in compare(rows).verdict


def test_equal_differences_are_not_called_settled():
    comparison = compare(panel("A", [2.5, 2.5, 2.5]) + panel("B", [2.25, 2.25, 2.25]))
    assert "the same at every seed, so seeds had no effect, not settled" in comparison.verdict
    assert "Holm" not in comparison.verdict
    assert any("differs from the baseline by the same amount at every seed" in w for w in comparison.warnings)


def test_no_shared_seed_and_no_finished_run():
    assert "nothing is paired" in compare([run("A", 0, 2.0), run("B", 1, 2.1)]).verdict
    assert compare([run("A", 0, status="failed")]).verdict == "No run finished, so there is nothing to rank."


# --- marks and warnings


def test_two_clean_arms_give_no_warning():
    known = {
        "params": 1000,
        "flops_per_token": 6e3,
        "tokens": 4096,
        "unigram_entropy": 3.24,
        "paths": {"norm": "torch"},
    }
    assert compare(panel("A", [2.0, 2.2], **known) + panel("B", [2.1, 2.2], **known)).warnings == ()


@pytest.mark.parametrize("loss, stuck", [(3.0899, False), (3.09, True), (3.24, True), (6.06, True)])
def test_stuck_from_exactly_the_edge_on(loss, stuck):
    comparison = compare(panel("A", [loss] * 2, unigram_entropy=3.24))
    assert (by_name(comparison)["A"].marks == ("stuck",)) == stuck
    assert any("stuck at the unigram entropy or above" in warning for warning in comparison.warnings) == stuck
    assert ("A (stuck)" in text_of(comparison)) == stuck
    assert ("says little about the designs" in comparison.verdict) == stuck
    assert "(unigram entropy 3.2400)" in comparison.title


def test_stuck_arms_share_one_warning_and_no_lead_over_them_is_settled():
    arms = {"A": [6.0, 6.1, 6.2], "B": [5.0, 5.12, 5.2], "C": [3.2, 3.31, 3.4], "D": [2.2, 2.32, 2.4]}
    rows = {name: panel(name, losses, unigram_entropy=3.24) for name, losses in arms.items()}
    stuck = compare(rows["A"] + rows["B"] + rows["C"])
    (warning,) = [warning for warning in stuck.warnings if "stuck" in warning]
    assert warning.startswith("'A', 'B', 'C': stuck at the unigram entropy or above (counted from 0.15 nats below it)")
    assert "It is stuck at the unigram entropy or above" in stuck.verdict
    assert "excludes zero, but both arms are stuck, so between the designs nothing is settled." in stuck.verdict
    trained = compare(rows["C"] + rows["D"]).verdict
    assert "excludes zero, but the other arm is stuck, so between the designs nothing is settled." in trained
    for verdict in (stuck.verdict, trained):
        assert "this lead is settled" not in verdict


def test_a_warning_for_many_arms_names_the_first():
    rows = [row for i in range(8) for row in panel(f"arm{i}", [9.0, 9.1 + i / 100], unigram_entropy=3.24)]
    (warning,) = [warning for warning in compare(rows).warnings if "stuck" in warning]
    assert warning.startswith("'arm0', 'arm1', 'arm2', 'arm3', 'arm4', 'arm5' and 2 more: stuck")


def tuned(design, grid, **known):
    """One design over learning rates: ``{lr: losses}``."""
    return [
        row
        for lr, losses in grid.items()
        for row in panel(f"{design} lr={lr}", losses, design=design, lr=lr, warmup_tokens=1024, **known)
    ]


def test_an_arm_that_its_own_design_beats_at_another_learning_rate_is_marked():
    # Of A the best is 2.00 at 0.002, inside its grid: 2.049 is near it, 2.06 is not. B is best at the edge of its own.
    rows = tuned("A", {0.001: [2.049] * 2, 0.002: [2.00] * 2, 0.004: [2.06] * 2})
    rows += tuned("B", {0.001: [2.5] * 2, 0.002: [2.3] * 2, 0.004: [2.2] * 2})
    rows += tuned("C", {0.002: [9.0] * 2})  # one learning rate says nothing about others
    comparison = compare(rows)
    marks = {arm.arm: arm.marks for arm in comparison.arms if arm.marks}
    assert marks == {
        "A lr=0.004": ("learning rate not its own",),
        "B lr=0.001": ("learning rate not its own",),
        "B lr=0.002": ("learning rate not its own",),
        "B lr=0.004": ("learning rate at the edge",),
    }
    said = [warning for warning in comparison.warnings if "learning rate" in warning]
    assert said == [
        "'A lr=0.004', 'B lr=0.001', 'B lr=0.002': diverged, or is more than 0.05 nats worse than the same design at "
        "another learning rate or warm-up; judge a design at its best.",
        "best at the edge of its learning rates, so a better one may lie beyond: 'B lr=0.004' (highest of 3 tried).",
    ]
    assert "A lr=0.004 (learning rate not its own) |" in comparison.to_markdown()
    assert "'A lr=0.002' has the lowest" in comparison.verdict
    assert "lead over the best of the other designs, 'B lr=0.004' is +0.2000" in comparison.verdict
    lines = {line["arm"]: line for line in csv.DictReader(io.StringIO(comparison.to_csv()))}
    found = {arm["arm"]: arm for arm in comparison.to_dict()["arms"]}
    for name, design, lr, mark in (
        ("A lr=0.004", "A", 0.004, "learning rate not its own"),
        ("B lr=0.004", "B", 0.004, "learning rate at the edge"),
    ):
        assert (lines[name]["design"], float(lines[name]["lr"]), lines[name]["marks"]) == (design, lr, mark)
        assert (found[name]["design"], found[name]["lr"], found[name]["marks"]) == (design, lr, [mark])


def test_an_arm_that_its_own_design_beats_at_another_warm_up_is_marked():
    grid = {512: 2.0, 1024: 2.2, 2048: 2.1}
    rows = [
        run(f"warmup={tokens}", 0, loss, design="A", lr=0.001, warmup_tokens=tokens) for tokens, loss in grid.items()
    ]
    assert {arm.arm: arm.marks for arm in compare(rows).arms} == {
        "warmup=512": ("warm-up at the edge",),
        "warmup=1024": ("warm-up not its own",),
        "warmup=2048": ("warm-up not its own",),
    }


def test_a_learning_rate_that_diverged_was_tried_and_one_that_never_ran_was_not():
    rows = tuned("A", {0.001: [2.4] * 2, 0.002: [2.0] * 2})
    diverged = [run("A lr=1", 0, status="diverged", design="A", lr=1.0, warmup_tokens=1024)]
    assert {arm.arm: arm.marks for arm in compare(rows + diverged).arms} == {
        "A lr=0.001": ("learning rate not its own",),
        "A lr=0.002": (),
        "A lr=1": ("learning rate not its own",),
    }
    missing = [replace(row, status="missing") for row in diverged]
    assert by_name(compare(rows + missing))["A lr=0.002"].marks == ("learning rate at the edge",)
    assert compare(diverged).arms[0].marks == ()


def test_a_sweep_of_one_run_is_told_as_one():
    comparison = compare(panel("A", [2.34567]))
    assert comparison.verdict == (
        "'A' has a mean loss of 2.3457 (n 1 of 1). One seed gives no interval: add seed=0,1,2."
    )
    assert comparison.warnings == ()


@pytest.mark.parametrize("name, words", [("params", "parameters"), ("flops_per_token", "FLOPs"), ("tokens", "tokens")])
@pytest.mark.parametrize(
    "value, said", [(10_190, None), (10_200, None), (10_210, "+2.1 %"), (9_800, None), (9_790, "-2.1 %")]
)
def test_budgets_that_differ_by_more_than_two_percent_are_said(name, words, value, said):
    rows = panel("A", [2.0, 2.2], **{name: 10_000}) + panel("B", [2.1, 2.2], **{name: value})
    warnings = compare(rows).warnings
    assert len(warnings) == (said is not None)
    if said:
        assert words in warnings[0] and f"'B' {said}" in warnings[0]


def test_one_run_off_budget_is_enough_and_a_broken_one_is_not():
    off = [run("B", 0, 2.1, tokens=1000), run("B", 1, 2.1, tokens=1000), run("B", 2, 2.1, tokens=500)]
    assert any("'B' -50.0 % (500)" in w for w in compare(panel("A", [2.0, 2.1, 2.3], tokens=1000) + off).warnings)
    broken = [*off[:2], run("B", 2, status="diverged", tokens=500, token_hash="short", reason="loss is nan")]
    warnings = compare(panel("A", [2.0, 2.2, 2.3], tokens=1000) + broken).warnings
    assert warnings == ("'B' seed 2 (run B-2) diverged: loss is nan.",)


def test_many_arms_off_budget_are_counted_and_their_extremes_named():
    rows = panel("A", [2.0, 2.2], params=1000)
    rows += [row for i in range(40) for row in panel(f"B{i}", [2.1, 2.2], params=1100 + i, token_hash=f"{i}" * 8)]
    budget, *tokens = compare(rows).warnings
    assert budget == (
        "parameters differ from the baseline's 1.00k by more than 2 % in 40 of 40 arms: 'B0' +10.0 % (1.10k) to 'B39' "
        "+13.9 % (1.14k)."
    )
    assert len(tokens) == 2 and all("'B4' 44444444 and 35 others): their difference" in said for said in tokens)


def test_other_tokens_at_the_same_seed_are_said():
    rows = panel("A", [2.0, 2.2]) + [run("B", 0, 2.1), run("B", 1, 2.2, token_hash="0123456789")]
    assert compare(rows).warnings == (
        "arms did not see the same tokens at seed 1 ('A' tokens-o, 'B' 01234567): their difference there is not the "
        "design's alone.",
    )
    rows[-1] = replace(rows[-1], token_hash=None)
    assert compare(rows).warnings == ("whether arms saw the same tokens cannot be checked: no token hash for 'B'.",)


def test_other_seeds_are_said():
    warnings = compare(panel("A", [2.0, 2.2, 2.3]) + panel("B", [2.1, 2.2])).warnings
    assert len(warnings) == 1 and "the same seeds as the baseline [0, 1, 2]: 'B' [0, 1]" in warnings[0]


def test_other_op_paths_are_said():
    rows = panel("A", [2.0, 2.2], paths={"rmsnorm": "compiled", "attention": "sdpa"})
    rows += panel("B", [2.1, 2.2], paths={"rmsnorm": "torch", "layernorm": "torch"})
    assert compare(rows).warnings == (
        "op rmsnorm did not run the same way everywhere: compiled in 'A'; torch in 'B': tokens/s compare kernels as "
        "well as designs.",
    )


def test_other_corpora_are_said():
    rows = panel("A", [2.0, 2.2], unigram_entropy=3.24) + panel("B", [2.1, 2.2], unigram_entropy=6.5)
    comparison = compare(rows)
    assert len(comparison.warnings) == 1 and "do not share one corpus" in comparison.warnings[0]
    assert "entropy" not in comparison.title


# --- outputs


def known_rows():
    known = {"flops_per_token": 6.1e6, "tokens": 409_600, "unigram_entropy": 3.2412}
    rows = panel("norm=pre", [2.30, 2.40, 2.50], params=1_020_000, tokens_per_s=12_345.6, **known)
    rows += panel("norm=a|b", [2.20, 2.31, 2.39], params=98_698_752, tokens_per_s=999.4, **known)
    rows += [run("norm=none", seed, status="diverged", reason="loss is nan") for seed in range(3)]
    return rows


def test_markdown_snapshot():
    assert compare(known_rows()).to_markdown() == (
        "**validation loss, nats per token, lower is better (unigram entropy 3.2412)**\n"
        "\n"
        "| rank | arm | loss | difference to baseline | params | MFLOP/token | tokens/s | runs |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 1 | norm=a\\|b | 2.3000 ±0.2370 | -0.1000 [-0.1248, -0.0752] | 98.7M | 6.10 | 999 | n 3 of 3 |\n"
        "| 2 | norm=pre | 2.4000 ±0.2484 | baseline | 1.02M | 6.10 | 12,346 | n 3 of 3 |\n"
        "| - | norm=none | - | - | - | - | - | n 0 of 3, 3 diverged |\n"
        "\n"
        "'norm=a|b' has the lowest mean loss, 2.3000 (n 3 of 3). Its paired lead over the runner-up 'norm=pre' (the "
        "baseline) is +0.1000 [+0.0752, +0.1248] nats over 3 seeds: the interval excludes zero, this lead is settled "
        "at 95 %. Holm-adjusted p = 0.0033 over 1 comparison with the baseline.\n"
        "\n"
        "Noise floor, the baseline against itself: two of its runs are typically 0.1414 nats apart (rms) by their "
        "seeds alone; between arms of 3 seeds that are not paired, differences within ±0.2267 are noise at 95 %.\n"
        "\n"
        "Decisions, differences within 0.03 nats not counting:\n"
        "\n"
        "- 'norm=a|b' better than 'norm=pre': supported, the 95 % interval lies beyond 0 (Holm-adjusted p = 0.0033).\n"
        "- 'norm=none' better than 'norm=pre': inconclusive, 0 paired seeds give no interval.\n"
        "\n"
        "Warnings:\n"
        "\n"
        "- 'norm=none' seed 0 (run norm=none-0) diverged: loss is nan.\n"
        "- 'norm=none' seed 1 (run norm=none-1) diverged: loss is nan.\n"
        "- 'norm=none' seed 2 (run norm=none-2) diverged: loss is nan.\n"
        "- parameters differ from the baseline's 1.02M by more than 2 %: 'norm=a|b' +9576.3 % (98.7M).\n"
    )


@pytest.mark.parametrize(
    ("gains", "margin", "verdict"),
    [
        ([0.10, 0.11, 0.09, 0.10, 0.12], 0.03, "supported"),
        ([-0.10, -0.11, -0.09, -0.10, -0.12], 0.03, "contradicted"),
        ([0.01, -0.01, 0.005, -0.005, 0.0], 0.03, "no-effect"),
        ([0.01, -0.01, 0.005, -0.005, 0.0], 0.003, "inconclusive"),
        ([0.10, 0.11, 0.02], 0.03, "inconclusive"),  # three seeds, and the effect is less than five deviations
        ([0.1, 0.1, 0.1, 0.1, 0.1], 0.03, "inconclusive"),  # by hand the same at every seed
        ([0.1], 0.03, "inconclusive"),
    ],
)
def test_arms_are_decided_by_the_rule_and_its_margin(gains, margin, verdict):
    start = [4.0 + seed / 8 for seed in range(len(gains))]
    rows = panel("base", start) + panel("arm", [loss - gain for loss, gain in zip(start, gains, strict=True)])
    comparison = compare(rows, margin=margin)
    base, arm = comparison.arms
    assert (base.verdict, arm.verdict) == (None, verdict)
    assert arm.verdict == verdict
    (line,) = [line for line in csv.DictReader(io.StringIO(comparison.to_csv())) if line["arm"] == "arm"]
    found = next(one for one in comparison.to_dict()["arms"] if one["arm"] == "arm")
    assert line["verdict"] == found["verdict"] == verdict and comparison.to_dict()["margin"] == margin
    assert f"- 'arm' better than 'base': {verdict}, " in comparison.to_markdown()
    assert f"'arm' better than 'base': {verdict}, " in " ".join(text_of(comparison).split())
    if verdict == "inconclusive" and len(gains) == 3:
        assert line["verdict_seeds"] == "5" and "; about 2 more seeds would settle it." in comparison.to_markdown()


def test_what_cannot_be_judged_is_not_decided():
    start = [4.0, 4.1, 4.2, 4.3, 4.4, 4.5]
    better = [loss - 0.1 - seed / 1000 for seed, loss in enumerate(start)]
    assert compare(panel("base", start) + panel("arm", better)).arms[1].verdict == "supported"
    broken = [*panel("arm", better[:5]), run("arm", 5, status="diverged")]
    stuck = panel("arm", better, unigram_entropy=3.0)
    edge = [*panel("arm", better, design="d", lr=0.1), *panel("low", start, design="d", lr=0.01)]
    for rows, said in ((broken, "did not finish"), (stuck, "marked stuck"), (edge, "learning rate at the edge")):
        arm = compare(panel("base", start) + rows).arms[1]
        assert arm.verdict == "inconclusive" and arm.why is not None and said in arm.why


def test_json_is_strict_and_holds_every_run():
    rows = [
        *CRASHES,
        run("D", 0, math.inf, tokens_per_s=math.nan, initial_loss=np.float32(5.5), paths={1: ("a", None)}),
    ]
    content = compare(rows).to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert [arm["arm"] for arm in content["arms"]] == ["A", "B", "C", "D"]
    assert len(content["runs"]) == len(rows)
    last = content["runs"][-1]
    assert (last["status"], last["val_loss"], last["reason"]) == ("diverged", None, "validation loss inf")
    assert (last["tokens_per_s"], last["initial_loss"], last["paths"]) == (None, 5.5, {"1": ["a", None]})
    assert content["arms"][0]["loss"]["sd"] == pytest.approx(0.2)
    assert content["arms"][1]["loss"]["sd"] is None


def test_csv_has_one_line_per_arm_and_leaves_unknowns_empty():
    lines = list(csv.DictReader(io.StringIO(compare(CRASHES).to_csv())))
    assert [line["arm"] for line in lines] == ["C", "B", "A"]
    c, b, a = lines
    assert (b["n"], b["loss_sd"], b["loss_low"], b["effect_p"]) == ("1", "", "", "")
    assert (c["rank"], c["complete"], c["n"], c["planned"], c["diverged"], c["failed"]) == ("1", "False", *"1311")
    assert (float(a["loss_mean"]), float(a["loss_sd"])) == (pytest.approx(2.2), pytest.approx(0.2))
    assert (a["baseline"], b["baseline"]) == ("True", "False")


def test_rich_table_shows_the_markdown_cells_within_80_columns():
    rows = known_rows()
    long = "norm=double ffn=swiglu stability=[qk_norm,z_loss] schedule.warmup_tokens=10240 optim.lr=0.004"
    rows += panel(long, [9.9, 10.4, 112.5], params=479_000_000, flops_per_token=2.9e9, tokens=409_600)
    rows += [run("bold=[red]x[/red]", seed, status=status) for seed, status in enumerate(["interrupted", "failed"])]
    comparison = compare(rows)
    double = by_name(comparison)[long].effect
    cells = ["2.3000", "±0.2370", "-0.1000", "[-0.1248, -0.0752]", "12,346", "2,900", "1 interrupted", "baseline"]
    cells += [f"{double.mean:+.4f}", f"[{double.low:+.4f}, {double.high:+.4f}]"]
    for width in (80, 100, 160):
        text = text_of(comparison, width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "…" not in text
        for cell in cells:
            assert cell in text
        # No piece between two marks of punctuation is broken.
        for piece in ("norm=double", "ffn=swiglu", "warmup_", "10240", "0.004", "[red]x[/", "qk_"):
            assert piece in text
        flat = " ".join(text.split())
        assert " ".join(comparison.verdict.split()) in flat
        for warning in comparison.warnings:
            assert warning in flat
        assert "validation loss, nats per token, lower is better" in text


def test_a_name_breaks_at_spaces_and_only_a_word_that_is_too_long_at_its_punctuation():
    name = ArmName("norm=post optim.lr=0.004 schedule.warmup_tokens=10240 (stuck)")
    assert name.lines(28) == ["norm=post optim.lr=0.004", "schedule.warmup_tokens=10240", "(stuck)"]
    assert name.lines(16) == ["norm=post", "optim.lr=0.004", "schedule.warmup_", "tokens=10240", "(stuck)"]
    assert name.lines(100) == [name.text]


def test_numbers_that_round_to_zero_have_no_minus():
    comparison = compare(panel("A", [2.0, 2.1]) + panel("B", [1.99999, 2.09998]))
    assert "| +0.0000 [-0.0001, +0.0000] |" in comparison.to_markdown()


def test_save_writes_three_files(tmp_path):
    comparison = compare(CRASHES)
    folder = tmp_path / "new" / "folder"
    save(comparison, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.csv", "comparison.json", "comparison.md"]
    assert json.loads((folder / "comparison.json").read_text(encoding="utf-8")) == comparison.to_dict()
    assert (folder / "comparison.csv").read_text(encoding="utf-8") == comparison.to_csv()
    assert (folder / "comparison.md").read_text(encoding="utf-8") == comparison.to_markdown()


# --- the noise floor and the effects of a factorial


def test_the_noise_floor_is_the_unpaired_interval_of_a_panel_against_another_like_it():
    losses = [2.30, 2.41, 2.38, 2.29, 2.35]
    comparison = compare(panel("base", losses) + panel("arm", [2.1, 2.2, 2.3, 2.25, 2.15]))
    # Another panel with the same spread and the same mean: what scipy says of two groups without a difference.
    oracle = scipy_stats.ttest_ind(losses, losses).confidence_interval(0.95)
    assert comparison.noise.high == pytest.approx(oracle.high) and comparison.noise.low == pytest.approx(oracle.low)
    pairs = [(a - b) ** 2 for i, a in enumerate(losses) for b in losses[:i]]
    assert comparison.noise.sd == pytest.approx(math.sqrt(np.mean(pairs)))
    said = f"typically {comparison.noise.sd:.4f} nats apart (rms) by their seeds alone"
    assert said in comparison.to_markdown() and said in " ".join(text_of(comparison).split())
    assert (
        compare(panel("base", [2.3])).noise is None and "Noise floor" not in compare(panel("base", [2.3])).to_markdown()
    )


def test_a_full_factorial_has_main_effects_and_an_interaction():
    rng = np.random.default_rng(0)
    shared = 0.1 * rng.standard_normal(6)
    planted = {
        "norm=pre ffn=gelu": 0.0,
        "norm=pre ffn=glu": -0.2,
        "norm=post ffn=gelu": -0.1,
        "norm=post ffn=glu": -0.26,
    }
    rows = [row for arm, effect in planted.items() for row in panel(arm, 2 + effect + shared + 0.001 * rng.random(6))]
    effects = compare(rows).factorial
    # By hand: norm ((-0.1 - 0) + (-0.26 + 0.2)) / 2, ffn ((-0.2) + (-0.16)) / 2, and half of what ffn changes norm by.
    expected = {"norm: post instead of pre": -0.08, "ffn: glu instead of gelu": -0.18, "norm x ffn": 0.02}
    assert {name: effect.mean for name, effect in effects.items()} == pytest.approx(expected, abs=1e-3)
    assert all(effect.high - effect.low < 0.004 for effect in effects.values())  # the seeds' part is gone
    for text in (compare(rows).to_markdown(), " ".join(text_of(compare(rows), 300).split())):
        assert f"- norm x ffn: {effects['norm x ffn'].mean:+.4f} [" in text and "over 6 seeds" in text
    assert compare(rows).to_dict()["factorial"]["norm x ffn"]["n"] == 6
    assert compare(rows[:18]).factorial == {} and compare(rows[:12]).factorial == {}
    assert compare([*rows, *panel("norm=none ffn=glu", [2.0] * 6)]).factorial == {}
