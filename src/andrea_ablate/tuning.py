"""Every arm at its own best learning rate: a grid on seeds of its own, the choice, the step beyond an edge."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from andrea_ablate.analysis.rules import lr_sensitivity
from andrea_ablate.config import SweepConfig
from andrea_ablate.registry import ConfigError
from andrea_ablate.report.compare import RunRow, Tuned

if TYPE_CHECKING:
    from andrea_ablate.jobs import Job

LR = "optim.lr"


def check_tuning(settings: SweepConfig, given: Collection[str]) -> None:
    """Refuse a grid beside a learning rate of one's own. `given`: keys that the command or the experiment sets."""
    if LR in given:
        raise ConfigError(f"lr_grid={settings.lr_grid} chooses {LR} for each arm, but {LR} is given too; leave one out")


def check_seeds(settings: SweepConfig, seeds: Iterable[int]) -> None:
    """Refuse to choose on a seed that measures too. `seeds`: of the measuring runs."""
    if both := sorted({*settings.lr_seeds} & {*seeds}):
        raise ConfigError(
            f"seed={both[0]} is in lr_seeds={settings.lr_seeds}: a learning rate is chosen and its effect measured on "
            "different seeds; give other lr_seeds"
        )


def rates(settings: SweepConfig) -> list[float]:
    """Every learning rate that ``lr_grid`` may come to, ascending: with ``lr_extend`` one step beyond either end."""
    grid = sorted({*settings.lr_grid})
    return [_beyond(grid[0], grid[1]), *grid, _beyond(grid[-1], grid[-2])] if settings.lr_extend else grid


def select(
    arms: Mapping[str, Callable[[float, int], Job]],
    settings: SweepConfig,
    train: Callable[[Sequence[Job]], Mapping[str, RunRow]],
) -> list[Tuned]:
    """Train every arm at every learning rate of ``lr_grid`` on ``lr_seeds`` and choose the best of each.

    With ``lr_extend``, an arm whose best is the lowest or highest of the grid gets one more rate beyond it, as far away
    on a logarithmic scale as its neighbour, and is chosen anew.

    Args:
        arms: what makes an arm's job at a learning rate and a seed.
        train: trains what is missing of the jobs and returns the row of each by its run id.
    """
    rows: dict[str, dict[float, list[RunRow]]] = {arm: {} for arm in arms}

    def add(points: Mapping[str, Sequence[float]]) -> None:
        jobs = {
            (arm, lr): [arms[arm](lr, seed) for seed in settings.lr_seeds] for arm, lrs in points.items() for lr in lrs
        }
        found = train([job for members in jobs.values() for job in members])
        for (arm, lr), members in jobs.items():
            rows[arm][lr] = [found[job.run_id] for job in members]

    grid = sorted({*settings.lr_grid})
    add(dict.fromkeys(arms, grid))
    tuned = {arm: choose(arm, rows[arm], grid) for arm in arms}
    tried = rates(settings)
    beyond = {arm: [tried[0 if one.lr == grid[0] else -1]] for arm, one in tuned.items() if one.edge}
    if settings.lr_extend and beyond:
        add(beyond)
        tuned |= {arm: choose(arm, rows[arm], grid) for arm in beyond}
    return list(tuned.values())


def choose(arm: str, rows: Mapping[float, Sequence[RunRow]], grid: Sequence[float]) -> Tuned:
    """The learning rate with the lowest mean loss; a run that did not finish, or is worse, counts as its initial loss.

    The sensitivity is taken over `grid` alone, which all arms share; the best over all rates that were tried. Where no
    rate gave a finished run, the lowest is taken and the arm is marked.
    """
    starts = [row.initial_loss for runs in rows.values() for row in runs if row.initial_loss is not None]
    initial = statistics.fmean(starts) if starts else math.inf
    losses = {lr: _mean(runs, initial) for lr, runs in sorted(rows.items())}
    ended = dict(Counter(row.status for runs in rows.values() for row in runs))
    points = tuple((lr, loss if math.isfinite(loss) else None) for lr, loss in losses.items())
    if not any(math.isfinite(loss) for loss in losses.values()):
        return Tuned(arm, min(losses), None, None, f"none of {len(losses)} trained", ended, points)
    best = lr_sensitivity(losses, initial)
    shared = {lr: losses[lr] for lr in grid}
    known = any(map(math.isfinite, shared.values()))
    edge = ""
    if best.at_edge:
        edge = f"{'lowest' if best.best_lr == min(losses) else 'highest'} of {len(losses)}"
    sensitivity = lr_sensitivity(shared, initial).mean_excess if known else None
    return Tuned(arm, best.best_lr, best.best, sensitivity, edge, ended, points)


def _mean(runs: Sequence[RunRow], initial: float) -> float:
    """Mean loss over the seeds, infinite where none finished."""
    losses = [row.val_loss if row.status == "finished" and row.val_loss is not None else math.inf for row in runs]
    if not any(map(math.isfinite, losses)):
        return math.inf
    return statistics.fmean(min(loss, initial) for loss in losses)


def _beyond(edge: float, neighbour: float) -> float:
    """One step past the edge, to six digits, so that a repeated command asks for the same run."""
    return float(f"{edge * edge / neighbour:.6g}")
