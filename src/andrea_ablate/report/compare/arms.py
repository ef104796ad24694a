"""From the rows of an arm to its summary: counts, means, marks and the decision against the baseline."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from andrea_ablate.analysis.rules import Decision, Verdict, superiority
from andrea_ablate.analysis.stats import Effect, Estimate, mean_interval
from andrea_ablate.report.compare.rows import (
    CONFIDENCE,
    STATUSES,
    STUCK_NATS,
    TUNED_NATS,
    TUNING,
    ArmSummary,
    RunRow,
    finished_runs,
    known,
    typical,
)
from andrea_ablate.report.compare.tuned import Tuned


def checked(row: RunRow) -> RunRow:
    if row.status != "finished" or (row.val_loss is not None and math.isfinite(row.val_loss)):
        return row
    status = "failed" if row.val_loss is None else "diverged"
    found = "no validation loss" if row.val_loss is None else f"validation loss {row.val_loss}"
    return replace(row, status=status, reason="; ".join(filter(None, (found, row.reason))))


def one_per_seed(rows: Iterable[RunRow]) -> tuple[dict[str, list[RunRow]], list[str]]:
    kept: dict[str, dict[int, RunRow]] = {}
    twice = []
    for row in rows:
        first = kept.setdefault(row.arm, {}).setdefault(row.seed, row)
        if first != row:
            twice.append(
                f"'{row.arm}' has two runs of seed {row.seed}: '{first.run_id}' ({first.status}) is used, "
                f"'{row.run_id}' ({row.status}) is not."
            )
    return {arm: list(by_seed.values()) for arm, by_seed in kept.items()}, twice


def summary(
    runs: Sequence[RunRow], loss: Estimate, means: Sequence[float], effect: Effect | None, p_holm: float | None
) -> ArmSummary:
    counts = Counter(row.status for row in runs)
    finished = finished_runs(runs)
    entropy = typical(runs, "unigram_entropy")
    # Rounded, so that 3.24 - 3.09 is 0.15.
    stuck = loss.mean is not None and entropy is not None and round(entropy - loss.mean, 9) <= STUCK_NATS
    return ArmSummary(
        arm=runs[0].arm,
        rank=None if loss.mean is None else 1 + sum(mean < loss.mean for mean in means),
        complete=len(finished) == len(runs),
        planned=len(runs),
        counts={status: counts[status] for status in (*STATUSES, *sorted(counts.keys() - STATUSES)) if counts[status]},
        loss=loss,
        bits_per_byte=mean_interval(known(finished, "val_bpb"), CONFIDENCE),
        effect=effect,
        p_holm=p_holm,
        params=typical(runs, "params"),
        non_embedding=typical(runs, "non_embedding"),
        flops_per_token=typical(runs, "flops_per_token"),
        tokens=typical(finished, "tokens"),
        tokens_per_s=typical(finished, "tokens_per_s", statistics.median),
        train_s=typical(finished, "train_s", statistics.median),
        initial_loss=typical(runs, "initial_loss", statistics.fmean),
        unigram_entropy=entropy,
        design=runs[0].design or runs[0].arm,
        lr=runs[0].lr,
        warmup_tokens=runs[0].warmup_tokens,
        marks=("stuck",) * stuck,
    )


def designs(arms: Sequence[ArmSummary]) -> list[tuple[ArmSummary, list[ArmSummary]]]:
    """Per design with a finished run: its best arm, and its arms that ended, which differ in what tunes them alone."""
    ended: dict[str, list[ArmSummary]] = {}
    for arm in arms:
        if arm.loss.n or arm.counts.get("diverged"):
            ended.setdefault(arm.design, []).append(arm)
    grids = [grid for grid in ended.values() if any(arm.loss.n for arm in grid)]
    return [(min(grid, key=lambda arm: math.inf if arm.loss.mean is None else arm.loss.mean), grid) for grid in grids]


def with_tuning_marks(arms: Sequence[ArmSummary], tuned: Mapping[str, Tuned]) -> tuple[ArmSummary, ...]:
    """Mark arms that their own design beats at another learning rate or warm-up, and bests at the edge of the grid."""
    marks: dict[str, list[str]] = {}
    swept = {name: words for name, words in TUNING.items() if not (tuned and name == "lr")}
    for best, grid in designs(arms):
        assert best.loss.mean is not None
        for arm in grid:
            if arm.loss.mean is None or arm.loss.mean - best.loss.mean > TUNED_NATS:
                differs = [words for name, words in swept.items() if getattr(arm, name) != getattr(best, name)]
                marks[arm.arm] = [f"{words} not its own" for words in differs[:1]]
        marks[best.arm] = [f"{words} at the edge" for name, words in swept.items() if edge(best, grid, name)]
    for one in tuned.values():
        if one.edge:
            marks.setdefault(one.arm, []).append(f"{TUNING['lr']} at the edge")
    return tuple(replace(arm, marks=(*arm.marks, *marks.get(arm.arm, ()))) for arm in arms)


def edge(best: ArmSummary, grid: Sequence[ArmSummary], name: str) -> str:
    """``highest of 3`` or ``lowest of 3`` where the best arm has an outermost value of its design, else nothing."""
    values = sorted({getattr(arm, name) for arm in grid} - {None})
    if len(values) < 2 or getattr(best, name) not in (values[0], values[-1]):
        return ""
    return f"{'lowest' if getattr(best, name) == values[0] else 'highest'} of {len(values)}"


def decided(arm: ArmSummary, base: ArmSummary, losses: Mapping[str, Mapping[int, float]], margin: float) -> ArmSummary:
    """The arm with the rule's verdict; one that rests on arms that cannot be judged becomes inconclusive."""
    found = superiority(losses[arm.arm], losses[base.arm], margin=margin)
    doubts = [f"'{one.arm}' is marked {mark}" for one in (arm, base) for mark in one.marks]
    doubts += ["runs that did not finish are not in it"] * (not (arm.complete and base.complete))
    doubts += ["the difference is the same at every seed"] * (found.effect.sd == 0)
    if doubts and found.verdict is not Verdict.INCONCLUSIVE:
        found = Decision(Verdict.INCONCLUSIVE, found.effect, f"{found.why}, but {doubts[0]}")
    return replace(arm, verdict=str(found.verdict), why=found.why, verdict_seeds=found.seeds)
