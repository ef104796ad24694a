"""Intervals of findings as a small SVG, one line each; it takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from andrea_ablate.claims.claim import Finding
from andrea_ablate.claims.report import figure

ROW, LEFT, WIDTH, RIGHT = 34, 8, 560, 8


def svg(findings: Sequence[Finding]) -> str:
    """Value and interval of each finding that has one, over one axis; empty without any.

    The axis is logarithmic where everything is above 0 and spans more than a factor of ten.
    """
    drawn = [f for f in findings if isinstance(f.value, float) and f.low is not None and f.high is not None]
    ends = [end for f in drawn for end in (f.low, f.high) if end is not None]
    if not drawn or not all(map(math.isfinite, ends)) or min(ends) == max(ends):
        return ""
    log = min(ends) > 0 and max(ends) > 10 * min(ends)
    scaled = [math.log(end) if log else end for end in ends]
    first, span = min(scaled), max(scaled) - min(scaled)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((math.log(value) if log else value) - first) / span

    height = ROW * len(drawn) + 24
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px" role="img" '
        f'aria-label="95 % intervals" font-size="12" fill="currentColor" stroke="currentColor">'
    ]
    for row, found in enumerate(drawn):
        assert isinstance(found.value, float) and found.low is not None and found.high is not None
        y = ROW * row + 26
        lines += [
            f'<text x="{LEFT}" y="{y - 10}" stroke="none">{escape(found.name)}</text>',
            f'<line x1="{x(found.low):.1f}" x2="{x(found.high):.1f}" y1="{y}" y2="{y}" stroke-width="2"/>',
            f'<circle cx="{x(found.value):.1f}" cy="{y}" r="4"/>',
        ]
    axis = height - 4
    lines += [
        f'<text x="{LEFT}" y="{axis}" stroke="none">{figure(min(ends))}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{axis}" stroke="none" text-anchor="end">'
        f"{figure(max(ends))}{' (log)' if log else ''}</text>",
        "</svg>",
    ]
    return "".join(lines)
