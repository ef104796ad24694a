"""What a reader must know before believing a comparison: failures, untuned arms, budgets, tokens, kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from andrea_ablate.report.compare.arms import designs, edge
from andrea_ablate.report.compare.comparison import Comparison
from andrea_ablate.report.compare.rows import (
    BUDGET_TOLERANCE,
    NAMED,
    STUCK_NATS,
    TUNED_NATS,
    TUNING,
    ArmSummary,
    RunRow,
    finished_runs,
    known,
)
from andrea_ablate.report.compare.text import si


def warnings_of(found: Comparison, kept: Mapping[str, Sequence[RunRow]]) -> list[str]:
    warnings = []
    for row in found.rows:
        if row.status != "finished":
            reason = " ".join(row.reason.split())
            run = f" (run {row.run_id})" if row.run_id else ""
            warnings.append(
                f"'{row.arm}' seed {row.seed}{run} {'is ' * (row.status == 'missing')}{row.status}"
                f"{': ' * bool(reason)}{reason}."
            )
    if len(found.arms) > 1:  # of one arm the verdict says it
        warnings += _said_of("one seed gives no interval", [arm for arm in found.arms if arm.loss.n == 1])
    warnings += _said_of(
        f"stuck at the unigram entropy or above (counted from {STUCK_NATS} nats below it): it did not train, so its "
        "design is not judged",
        [arm for arm in found.arms if "stuck" in arm.marks],
    )
    warnings += _tuning_warnings(found)
    warnings += _said_of(
        "differs from the baseline by the same amount at every seed: the seeds had no effect, and an interval of no "
        "width is no evidence",
        [arm for arm in found.arms if arm.effect and arm.effect.sd == 0 and arm.effect.mean],
    )
    warnings += _seed_warnings(found, kept)
    for name, words, text in (
        ("params", "parameters", si),
        ("flops_per_token", "training FLOPs per token", si),
        ("tokens", "tokens trained on", lambda n: f"{n:,}"),
    ):
        warnings += _budget_warning(found, kept, name, words, text)
    warnings += _token_warnings(found)
    warnings += _path_warnings(found)
    entropies = {arm.arm: arm.unigram_entropy for arm in found.arms if arm.unigram_entropy is not None}
    if len(set(entropies.values())) > 1:
        listed = ", ".join(f"'{arm}' {entropy:.4f}" for arm, entropy in entropies.items())
        warnings.append(
            f"arms do not share one corpus and tokenizer (unigram entropy: {listed}): their losses in nats "
            "per token cannot be compared."
        )
    return warnings


def _said_of(what: str, arms: Sequence[ArmSummary]) -> list[str]:
    """One warning for all the arms that it is true of; the table shows which, so a long list is cut short."""
    return [f"{_named([arm.arm for arm in arms])}: {what}."] if arms else []


def _named(arms: Sequence[str]) -> str:
    more = f" and {len(arms) - NAMED} more" if len(arms) > NAMED else ""
    return ", ".join(f"'{arm}'" for arm in arms[:NAMED]) + more


def _tuning_warnings(found: Comparison) -> list[str]:
    warnings = _said_of(
        f"diverged, or is more than {TUNED_NATS} nats worse than the same design at another learning rate or warm-up; "
        "judge a design at its best",
        [arm for arm in found.arms if any(mark.endswith("not its own") for mark in arm.marks)],
    )
    for one in found.tuned:
        if lost := {status: n for status, n in one.ended.items() if status not in ("finished", "diverged")}:
            listed = ", ".join(f"{n} {status}" for status, n in lost.items())
            warnings.append(f"the learning rate of '{one.arm}' was chosen without the runs that did not end: {listed}.")
    for name, words in TUNING.items():
        edges = {best.arm: edge(best, grid, name) for best, grid in designs(found.arms)}
        if found.tuned and name == "lr":
            edges = {one.arm: one.edge for one in found.tuned}
        listed = ", ".join(f"'{arm}' ({side} tried)" for arm, side in edges.items() if side)
        if listed:
            warnings.append(f"best at the edge of its {words}s, so a better one may lie beyond: {listed}.")
    return warnings


def _seed_warnings(found: Comparison, kept: Mapping[str, Sequence[RunRow]]) -> list[str]:
    planned = {name: sorted(row.seed for row in runs) for name, runs in kept.items()}
    others = [f"'{name}' {seeds}" for name, seeds in planned.items() if seeds != planned[found.baseline]]
    if not others:
        return []
    return [
        f"arms do not have the same seeds as the baseline {planned[found.baseline]}: {', '.join(others)}; means "
        "are over different seeds, differences over the shared ones."
    ]


def _budget_warning(
    found: Comparison, kept: Mapping[str, Sequence[RunRow]], name: str, words: str, text: Callable[[Any], str]
) -> list[str]:
    base = next(getattr(arm, name) for arm in found.arms if arm.arm == found.baseline)
    if not base:
        return []
    off = {}
    for arm, runs in kept.items():
        # A run that broke off has fewer tokens: that is its failure, not the arm's budget.
        values = known(finished_runs(runs) if name == "tokens" else runs, name)
        worst = max(values, key=lambda value: abs(value - base), default=base)
        if abs(worst - base) / base > BUDGET_TOLERANCE:
            off[arm] = worst
    if not off:
        return []
    extremes = dict.fromkeys((min(off, key=off.__getitem__), max(off, key=off.__getitem__)))
    listed = " to ".join(f"'{arm}' {100 * (off[arm] / base - 1):+.1f} % ({text(off[arm])})" for arm in extremes)
    many = f" in {len(off)} of {len(kept) - 1} arms" if len(off) > 1 else ""
    return [
        f"{words} differ from the baseline's {text(base)} by more than {100 * BUDGET_TOLERANCE:g} %{many}: {listed}."
    ]


def _token_warnings(found: Comparison) -> list[str]:
    finished = finished_runs(found.rows)
    hashes: dict[int, dict[str, str]] = {}
    for row in finished:
        if row.token_hash:
            hashes.setdefault(row.seed, {})[row.arm] = row.token_hash
    warnings = []
    for seed, by_arm in sorted(hashes.items()):
        if len(set(by_arm.values())) > 1:
            first: dict[str, str] = {}  # one arm for each order of tokens
            for arm, digest in by_arm.items():
                first.setdefault(digest, arm)
            listed = ", ".join(f"'{arm}' {digest[:8]}" for digest, arm in list(first.items())[:NAMED])
            more = f" and {len(first) - NAMED} others" if len(first) > NAMED else ""
            warnings.append(
                f"arms did not see the same tokens at seed {seed} ({listed}{more}): their difference there is "
                "not the design's alone."
            )
    unknown = {row.arm for row in finished if not row.token_hash}
    if unknown and len(found.arms) > 1:
        warnings.append(
            "whether arms saw the same tokens cannot be checked: no token hash for "
            f"{_named([arm.arm for arm in found.arms if arm.arm in unknown])}."
        )
    return warnings


def _path_warnings(found: Comparison) -> list[str]:
    taken: dict[str, dict[str, list[str]]] = {}
    for row in finished_runs(found.rows):
        for op, path in row.paths.items():
            arms = taken.setdefault(op, {}).setdefault(str(path), [])
            if f"'{row.arm}'" not in arms:
                arms.append(f"'{row.arm}'")
    return [
        f"op {op} did not run the same way everywhere: "
        + "; ".join(f"{path} in {', '.join(arms)}" for path, arms in by_path.items())
        + ": tokens/s compare kernels as well as designs."
        for op, by_path in taken.items()
        if len(by_path) > 1
    ]
