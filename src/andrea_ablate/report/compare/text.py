"""Numbers and arms as the cells of a table: for people, for CSV and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from andrea_ablate.analysis.stats import Effect
from andrea_ablate.report.compare.rows import STATUSES, TUNING, ArmSummary


def cells(arm: ArmSummary) -> tuple[str, ...]:
    half = arm.loss.half_width
    loss = "-" if arm.loss.mean is None else f"{arm.loss.mean:.4f}" + ("" if half is None else f" ±{half:.4f}")
    flops, speed = arm.flops_per_token, arm.tokens_per_s
    return (
        "-" if arm.rank is None else f"{arm.rank}{'*' * (not arm.complete)}",
        f"{arm.arm} ({'; '.join(arm.marks)})" if arm.marks else arm.arm,
        loss,
        "baseline" if arm.effect is None else with_interval(arm.effect),
        "-" if arm.params is None else si(arm.params),
        "-" if flops is None else f"{flops / 1e6:,.{2 if flops < 1e8 else 0}f}",
        "-" if speed is None else f"{speed:,.0f}",
        arm.runs,
    )


def signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # adding 0.0 turns -0.0 into 0.0


def with_interval(effect: Effect) -> str:
    if effect.mean is None:
        return "-"
    if effect.low is None or effect.high is None:
        return signed(effect.mean)
    return f"{signed(effect.mean)} [{signed(effect.low)}, {signed(effect.high)}]"


def si(value: float) -> str:
    """Three digits with k, M, G or T: 98698752 is 98.7M."""
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            scaled = value / unit
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{suffix}"
    return f"{value:g}"


def csv_fields(arm: ArmSummary) -> dict[str, Any]:
    effect = arm.effect or Effect(None, None, None, None, 0, None, None)
    return {
        "arm": arm.arm,
        "rank": arm.rank,
        "complete": arm.complete,
        "baseline": arm.effect is None,
        "n": arm.loss.n,
        "planned": arm.planned,
        **{status: arm.counts.get(status, 0) for status in STATUSES},
        **{f"loss_{key}": getattr(arm.loss, key) for key in ("mean", "sd", "low", "high")},
        "bits_per_byte": arm.bits_per_byte.mean,
        **{f"effect_{key}": getattr(effect, key) for key in ("mean", "sd", "low", "high", "n", "p", "p_sign")},
        "effect_p_holm": arm.p_holm,
        **{
            key: getattr(arm, key)
            for key in ("params", "non_embedding", "flops_per_token", "tokens", "tokens_per_s", "train_s")
        },
        "initial_loss": arm.initial_loss,
        "unigram_entropy": arm.unigram_entropy,
        **{key: getattr(arm, key) for key in ("design", *TUNING)},
        "marks": "; ".join(arm.marks),
        "verdict": arm.verdict,
        "verdict_seeds": arm.verdict_seeds,
    }


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)
