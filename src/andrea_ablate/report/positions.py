"""Loss at other lengths than that of training (`trainer.val_lengths`), in all and by position."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from andrea_ablate.analysis.stats import mean_interval
from andrea_ablate.report.compare import Comparison
from andrea_ablate.report.parts import LOSS, Figure, StoredRun, numbers

CAPTION = (
    "Validation loss after the last step, in windows of other lengths than that of training: over whole windows, and "
    "by where in the window a token stands (a point per band of positions, at its end). Mean over the finished seeds "
    "with its 95 % interval. Beyond the line no position was trained."
)
KEY = re.compile(r"val_(\d+)/loss(?:_from_(\d+))?")


def positions(comparison: Comparison, runs: Mapping[str, StoredRun], styles: Mapping[str, int]) -> Figure | None:
    """None where no run has a loss at another length."""
    finished = [row for row in comparison.rows if row.status == "finished" and row.run_id in runs]
    losses: dict[tuple[int, int | None], dict[str, list[float]]] = {}  # (length, first position) -> by arm
    trained = {runs[row.run_id].config.get("data", {}).get("seq_len") for row in finished}
    for row in finished:
        for key, loss in runs[row.run_id].record.items():
            if match := KEY.fullmatch(key):
                length, first = int(match[1]), None if match[2] is None else int(match[2])
                losses.setdefault((length, first), {}).setdefault(row.arm, []).append(loss)
    if not losses:
        return None
    at = {"x": trained.pop(), "text": "length of training"} if len(trained) == 1 else None
    lengths = sorted({length for length, _ in losses})
    views = []
    if len(lengths) > 1:
        points = [(length, losses[length, None]) for length in lengths if (length, None) in losses]
        views.append(_view("whole windows", "length of the window, tokens", points, styles, at))
    for length in reversed(lengths):
        firsts = sorted(first for of, first in losses if of == length and first is not None)
        # The bands of `LanguageModule.evaluate_at`: 0 to 15, 16 to 31, 32 to 63 …
        bands = [(min(length, max(16, 2 * first)), losses[length, first]) for first in firsts]
        if bands:
            views.append(_view(f"windows of {length}", "position in the window, up to", bands, styles, at))
    arms = tuple(arm for arm in styles if any(arm in by_arm for by_arm in losses.values()))
    return Figure("positions", "Loss past the length of training", CAPTION, "xy", views, arms)


def _view(
    name: str,
    x: str,
    points: list[tuple[int, dict[str, list[float]]]],
    styles: Mapping[str, int],
    at: Mapping[str, Any] | None,
) -> dict[str, Any]:
    series = []
    for arm, style in styles.items():
        own = [(place, mean_interval(by_arm[arm])) for place, by_arm in points if arm in by_arm]
        if own:
            sides = {side: numbers(getattr(loss, side) for _, loss in own) for side in ("mean", "low", "high")}
            series.append({"name": arm, "style": style, "x": [place for place, _ in own], **sides, "marks": []})
    y = f"validation loss, {LOSS}"
    zooms = [{"name": "all"}]
    view = {"name": name, "x": x, "log": True, "ticks": [place for place, _ in points], "y": y, "at": at}
    return {**view, "band": "bar", "zooms": zooms, "series": series}
