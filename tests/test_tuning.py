"""Learning rates chosen per arm: the choice on planted losses, and the whole way through the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from andrea_ablate.config import SweepConfig
from andrea_ablate.registry import ConfigError
from andrea_ablate.report import RunRow, Tuned, compare
from andrea_ablate.tuning import check_seeds, check_tuning, choose, select
from support import Cli

GRID = [0.001, 0.002, 0.004]


def rows(losses: Mapping[float, Sequence[float | None]], initial: float = 5.0) -> dict[float, list[RunRow]]:
    """One run per loss; None is a run that diverged."""
    return {
        lr: [
            RunRow("a", seed, "diverged" if loss is None else "finished", val_loss=loss, initial_loss=initial)
            for seed, loss in enumerate(values)
        ]
        for lr, values in losses.items()
    }


def test_the_lowest_mean_is_chosen_and_its_sensitivity_is_wortsmans() -> None:
    tuned = choose("a", rows({0.004: [3.0, None], 0.001: [2.5, 2.7], 0.002: [2.2, 2.4]}), GRID)
    assert (tuned.lr, tuned.edge, tuned.ended) == (0.002, "", {"finished": 5, "diverged": 1})
    # By hand: means 2.6, 2.3 and (3 + 5) / 2 = 4 over the grid, the best 2.3.
    assert tuned.loss == pytest.approx(2.3) and tuned.sensitivity == pytest.approx((0.3 + 0 + 1.7) / 3)
    assert tuned.grid == ((0.001, pytest.approx(2.6)), (0.002, pytest.approx(2.3)), (0.004, pytest.approx(4.0)))


@pytest.mark.parametrize(
    ("losses", "lr", "edge"),
    [
        ({0.001: [2.0], 0.002: [2.1], 0.004: [2.2]}, 0.001, "lowest of 3"),
        ({0.001: [2.3], 0.002: [2.2], 0.004: [2.1]}, 0.004, "highest of 3"),
        ({0.001: [2.3], 0.002: [2.2], 0.004: [2.1], 0.008: [2.2]}, 0.004, ""),  # extended, and inside now
        ({0.001: [2.3], 0.002: [2.2], 0.004: [2.1], 0.008: [2.0]}, 0.008, "highest of 4"),
        ({0.001: [None], 0.002: [None], 0.004: [None]}, 0.001, "none of 3 trained"),
    ],
)
def test_a_best_at_the_edge_is_flagged(losses: Mapping[float, Sequence[float | None]], lr: float, edge: str) -> None:
    tuned = choose("a", rows(losses), GRID)
    assert (tuned.lr, tuned.edge) == (lr, edge)


@dataclass(frozen=True)
class Point:
    """Stands for a job."""

    arm: str
    lr: float
    seed: int

    @property
    def run_id(self) -> str:
        return f"{self.arm} {self.lr} {self.seed}"


@pytest.mark.parametrize("extend", [False, True])
def test_the_grid_extends_by_one_step_for_the_arms_at_an_edge(extend: bool) -> None:
    best = {"inside": 0.002, "high": 0.02, "low": 0.0005}  # the loss grows with the distance to it
    asked: list[list[Point]] = []

    def train(jobs: Sequence[Any]) -> dict[str, RunRow]:
        asked.append(list(jobs))
        return {
            job.run_id: RunRow(
                job.arm, job.seed, "finished", val_loss=2 + abs(job.lr - best[job.arm]), initial_loss=5.0
            )
            for job in jobs
        }

    settings = SweepConfig("none", "d_ff", [], 0.03, lr_grid=[0.004, 0.001, 0.002], lr_seeds=[7, 9], lr_extend=extend)
    arms: Any = {arm: lambda lr, seed, arm=arm: Point(arm, lr, seed) for arm in best}
    tuned = {one.arm: one for one in select(arms, settings, train)}
    assert {(job.lr, job.seed) for job in asked[0]} == {(lr, seed) for lr in GRID for seed in (7, 9)}
    assert len(asked[0]) == 18 and len(asked) == 1 + extend
    if extend:
        assert {(job.arm, job.lr) for job in asked[1]} == {("high", 0.008), ("low", 0.0005)} and len(asked[1]) == 4
    assert {arm: (one.lr, one.edge) for arm, one in tuned.items()} == {
        "inside": (0.002, ""),
        "high": (0.008, "highest of 4") if extend else (0.004, "highest of 3"),
        "low": (0.0005, "lowest of 4") if extend else (0.001, "lowest of 3"),
    }
    # The shared grid alone, so that arms stay comparable: by hand for the arm that wants more.
    assert tuned["high"].sensitivity == pytest.approx((0.003 + 0.002 + 0) / 3)


def test_an_edge_makes_the_verdict_inconclusive_and_stands_below_the_table() -> None:
    start = [4.0, 4.1, 4.2, 4.3, 4.4]
    runs = [RunRow("base", seed, "finished", val_loss=loss) for seed, loss in enumerate(start)]
    runs += [RunRow("arm", seed, "finished", val_loss=loss - 0.1 - seed / 1000) for seed, loss in enumerate(start)]
    inside = [
        Tuned(arm, lr, 4.0, 0.25, "", {"finished": 6, "diverged": 1}, ((lr, 4.0),))
        for arm, lr in (("base", 0.002), ("arm", 0.004))
    ]
    found = compare(runs, tuned=inside)
    assert found.arms[1].verdict == "supported"
    text = found.to_markdown()
    assert "| arm | learning rate | sensitivity | edge | runs |" in text
    assert "| arm | 0.004 | 0.2500 | no | 6 finished, 1 diverged |" in text
    assert json.loads(json.dumps(found.to_dict()))["tuned"][0]["lr"] == 0.002
    for at in (0, 1):
        edge = [replace(one, edge="highest of 3") if i == at else one for i, one in enumerate(inside)]
        found = compare(runs, tuned=edge)
        assert found.arms[1].verdict == "inconclusive" and "learning rate at the edge" in (found.arms[1].why or "")
        assert f"'{edge[at].arm}' (highest of 3 tried)" in " ".join(found.warnings)


@pytest.mark.parametrize(
    ("changes", "given", "said"),
    [
        ({}, {"optim.lr"}, r"lr_grid=\[.*\] chooses optim.lr for each arm, but optim.lr is given too; leave one out"),
        ({"lr_seeds": [5, 1]}, set(), r"seed=1 is in lr_seeds=\[5, 1\]"),
    ],
)
def test_a_grid_that_cannot_choose_is_refused(changes: dict[str, Any], given: set[str], said: str) -> None:
    settings = replace(SweepConfig("none", "d_ff", [], 0.03, lr_grid=GRID, lr_seeds=[1000]), **changes)
    with pytest.raises(ConfigError, match=said):
        check_tuning(settings, given)
        check_seeds(settings, [0, 1])


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("lr_grid=[1e-3,2e-3]", "lr_grid=[0.001, 0.002] must be at least three different positive numbers"),
        ("lr_grid=[1e-3,2e-3,-1]", "must be at least three different positive numbers"),
        ("lr_grid=[1e-3,2e-3,4e-3] lr_seeds=[]", "lr_seeds=[] leaves no seed to choose learning rates on"),
        ("match_also=flop", "match_also=flop is not one of none, params, nonembedding, flops"),
    ],
)
def test_wrong_settings_are_said_in_one_sentence(cli: Cli, argument: str, said: str) -> None:
    answer = cli("-m", "norm=pre,post", *argument.split())
    assert answer.status == 2 and said in answer.err


@pytest.mark.slow  # 26 runs
def test_a_tuned_sweep_from_the_grid_to_the_table(tmp_path: Path, cli: Cli) -> None:
    command = ("-m", "norm=pre,post", "lr_grid=[1e-4,2e-4,4e-4]", "lr_extend=true", "trainer.tokens=512")
    first = cli(*command, "seed=0,1")
    assert first.status == 0, first
    assert "First the learning rates, on seeds 1000, 1001; then 4 runs at those chosen." in first.out
    assert "Plan: 2 arms, 12 runs, 12 to train" in first.out and "norm=pre optim.lr=0.0001 seed=1000: fini" in first.out
    assert "Plan: 2 arms, 4 runs, 4 to train" in first.out
    (path,) = tmp_path.glob("sweeps/*/comparison.json")
    saved = json.loads(path.read_text())
    trained = {path.parent.name for path in tmp_path.glob("runs/*/record.json")}
    for tuned in saved["tuned"]:
        # Four steps are too few for any of these rates: the highest is best, and so is the step beyond.
        assert (tuned["lr"], tuned["edge"]) == (0.0008, "highest of 4") and tuned["ended"] == {"finished": 8}
        losses = [loss for _, loss in tuned["grid"]]
        assert losses == sorted(losses, reverse=True) and [lr for lr, _ in tuned["grid"]] == [1e-4, 2e-4, 4e-4, 8e-4]
    assert {(run["seed"], run["lr"]) for run in saved["runs"]} == {(0, 0.0008), (1, 0.0008)}
    assert {run["run_id"] for run in saved["runs"]} < trained and len(trained) == 20
    assert saved["arms"][1]["verdict"] == "inconclusive" and "learning rate at the edge" in saved["arms"][1]["marks"]
    assert "'norm=pre' (highest of 4 tried)" in " ".join(first.out.split())

    more = cli(*command, "seed=0,1,2")
    assert more.status == 0 and "Plan: 2 arms, 12 runs, none to train" in more.out
    assert "Plan: 2 arms, 6 runs, 2 to train" in more.out
    assert len(list(tmp_path.glob("runs/*/record.json"))) == 22

    # A seed that is not swept stays what it was while others are tried.
    alone = cli(*command)
    assert alone.status == 0 and "Plan: 2 arms, 2 runs, none to train" in alone.out
