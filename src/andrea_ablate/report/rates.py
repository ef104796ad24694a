"""Loss against learning rate: where a sweep varies the rate, and where `lr_grid` chose one for each arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from andrea_ablate.report.compare import ArmSummary, Comparison, Tuned
from andrea_ablate.report.parts import LOSS, Figure, number, numbers

NEAR = 0.5  # nats above the best that the closer view shows
CAPTION = (
    "Mean over the finished seeds with its 95 % interval. A square: not every seed finished at this rate. On the seeds "
    "that only choose a rate there is no interval, and a triangle marks the rate chosen."
)


def learning_rates(comparison: Comparison, styles: Mapping[str, int]) -> Figure | None:
    """None where every design has one rate."""
    tuned = [_chosen(one, styles[one.arm]) for one in comparison.tuned if one.arm in styles and len(one.grid) > 1]
    views = [_view(series) for series in (_swept(comparison), tuned) if series]
    if len(views) == 2:
        views = [{**views[0], "name": "swept"}, {**views[1], "name": "chosen from"}]
    if not views:
        return None
    arms = tuple(arm.arm for arm in comparison.arms if arm.lr is not None)
    return Figure("rates", "Loss against learning rate", CAPTION, "xy", views, arms)


def _swept(comparison: Comparison) -> list[dict[str, Any]]:
    """A series per design that has several rates."""
    grids: dict[tuple[str, int | None], list[ArmSummary]] = {}
    for arm in comparison.arms:
        if arm.lr is not None:
            grids.setdefault((arm.design, arm.warmup_tokens), []).append(arm)
    several = {key: sorted(arms, key=lambda arm: arm.lr or 0) for key, arms in grids.items() if len(arms) > 1}
    warmups = len({design for design, _ in several}) < len(several)
    return [
        {
            "name": design + f" warmup_tokens={warmup}" * warmups,
            "style": style,
            "x": [arm.lr for arm in arms],
            **{side: numbers(getattr(arm.loss, side) for arm in arms) for side in ("mean", "low", "high")},
            "marks": [
                {"kind": "end", "x": arm.lr, "y": number(arm.loss.mean), "text": f"{arm.arm}: {arm.runs}"}
                for arm in arms
                if not arm.complete
            ],
        }
        for style, ((design, warmup), arms) in enumerate(several.items())
    ]


def _chosen(one: Tuned, style: int) -> dict[str, Any]:
    rates, losses = zip(*one.grid, strict=True)
    edge = f", {one.edge}" if one.edge else ""
    said = "" if one.sensitivity is None else f", sensitivity {one.sensitivity:.4f} nats"
    return {
        "name": one.arm,
        "style": style,
        "x": list(rates),
        "mean": numbers(losses),
        **{side: [None] * len(rates) for side in ("low", "high")},
        "marks": [
            {"kind": "spike", "x": one.lr, "y": number(one.loss), "text": f"{one.arm}: chosen {one.lr:g}{edge}{said}"},
            *(
                {"kind": "not finite", "x": rate, "y": None, "text": f"{one.arm}: none finished at {rate:g}"}
                for rate, loss in one.grid
                if loss is None
            ),
        ],
    }


def _view(series: list[dict[str, Any]]) -> dict[str, Any]:
    zooms: list[dict[str, Any]] = [{"name": "all"}]
    means = [mean for one in series for mean in one["mean"] if mean is not None]
    if means and max(means) > min(means) + NEAR:
        zooms.append({"name": f"within {NEAR} nats of the best", "y1": min(means) + NEAR})
    y = f"validation loss, {LOSS}"
    rates = sorted({rate for one in series for rate in one["x"]})
    view = {"name": "", "x": "learning rate", "log": True, "ticks": rates, "y": y, "band": "bar"}
    return {**view, "zooms": zooms, "series": series}
