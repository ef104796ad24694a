"""The comparison at the end of a sweep: ranked arms, paired effects, warnings and a verdict, from plain rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from andrea_ablate.analysis.stats import holm, mean_interval, paired_effect
from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.report.compare.arms import checked, decided, one_per_seed, summary, with_tuning_marks
from andrea_ablate.report.compare.comparison import Comparison, Lead
from andrea_ablate.report.compare.rows import (
    BUDGET_TOLERANCE,
    CONFIDENCE,
    MARGIN_NATS,
    TUNED_NATS,
    ArmSummary,
    RunRow,
    arm_key,
    finished_runs,
    row_from_record,
)
from andrea_ablate.report.compare.second import rules_markdown, rules_table
from andrea_ablate.report.compare.tuned import Tuned
from andrea_ablate.report.compare.verdict import verdict_of
from andrea_ablate.report.compare.warnings import warnings_of
from andrea_ablate.tracking.store import write_atomic

__all__ = [
    "BUDGET_TOLERANCE",
    "MARGIN_NATS",
    "TUNED_NATS",
    "ArmSummary",
    "Comparison",
    "Lead",
    "RunRow",
    "Tuned",
    "arm_key",
    "compare",
    "load",
    "row_from_record",
    "rules_table",
    "save",
    "save_rules",
]


def compare(
    rows: Sequence[RunRow],
    *,
    baseline: str | None = None,
    margin: float = MARGIN_NATS,
    tuned: Sequence[Tuned] = (),
) -> Comparison:
    """Summarise each arm over its seeds and compare it with the baseline, seed by seed.

    A finished run whose loss is missing counts as failed, one whose loss is not finite as diverged. Of two runs of one
    arm and seed the first is used, and a warning says so.

    Args:
        rows: one per planned run; arms keep the order in which they appear.
        baseline: the arm that differences are taken to; the first one unless named.
        margin: differences of the loss within it do not matter, nats per token, > 0.
        tuned: the learning rates that were chosen for the arms on other seeds; one at the edge marks its arm.
    Raises: ConfigError without rows, or for a baseline that is not an arm.
    """
    if not rows:
        raise ConfigError("compare: there are no runs to compare; train at least one arm")
    kept, twice = one_per_seed(checked(row) for row in rows)
    names = list(kept)
    base = names[0] if baseline is None else baseline
    if base not in kept:
        raise ConfigError(f"compare: baseline='{base}' is not one of the arms {names}{nearest(base, names)}")

    losses = {
        name: {row.seed: row.val_loss for row in finished_runs(runs) if row.val_loss is not None}
        for name, runs in kept.items()
    }
    effects = {name: paired_effect(losses[name], losses[base], CONFIDENCE) for name in names if name != base}
    p_holm = dict(zip(effects, holm([effect.p for effect in effects.values()]), strict=True))
    estimates = {name: mean_interval(losses[name].values(), CONFIDENCE) for name in names}
    means = [estimate.mean for estimate in estimates.values() if estimate.mean is not None]
    arms = with_tuning_marks(
        [summary(kept[name], estimates[name], means, effects.get(name), p_holm.get(name)) for name in names],
        {one.arm: one for one in tuned},
    )
    reference = next(arm for arm in arms if arm.arm == base)
    arms = tuple(arm if arm is reference else decided(arm, reference, losses, margin) for arm in arms)
    found = Comparison(arms, base, "", (), tuple(row for runs in kept.values() for row in runs), margin, tuple(tuned))
    return replace(found, verdict=verdict_of(found), warnings=(*twice, *warnings_of(found, kept)))


def save(comparison: Comparison, folder: Path) -> None:
    """Write comparison.json, .csv and .md into `folder`, each in one piece."""
    text = json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "comparison.json", text + "\n")
    write_atomic(folder / "comparison.csv", comparison.to_csv())
    write_atomic(folder / "comparison.md", comparison.to_markdown())


def save_rules(found: Mapping[str, Comparison], folder: Path) -> None:
    """Write rules.md, the same sweep under each rule of matching, into `folder`."""
    write_atomic(folder / "rules.md", rules_markdown(found))


def load(folder: Path) -> Comparison:
    """The comparison that `save` wrote, its arms computed anew from its runs.

    Raises: ConfigError where there is none that this version can read.
    """
    path = folder / "comparison.json"
    try:
        saved = json.loads(path.read_bytes())
        found = compare(
            [RunRow(**row) for row in saved["runs"]],
            baseline=saved["baseline"],
            margin=saved.get("margin", MARGIN_NATS),
            tuned=[Tuned.from_plain(one) for one in saved.get("tuned", ())],
        )
        return replace(found, verdict=saved["verdict"], warnings=tuple(saved["warnings"]))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the folder of a sweep") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged or of another version ({error}); run its sweep again") from None
