"""The learning rate that was chosen for an arm, and the small table of them below a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TUNED_TITLE = "learning rates, chosen on seeds of their own"
TUNED_COLUMNS = ("arm", "learning rate", "sensitivity", "edge", "runs")


@dataclass(frozen=True)
class Tuned:
    """What the selection runs said about one arm."""

    arm: str
    lr: float
    loss: float | None  # mean over the selection seeds at that rate; None where none finished
    sensitivity: float | None  # nats: how much worse the mean rate of the grid is than the best, see `lr_sensitivity`
    edge: str  # ``highest of 5`` where the best lies at the end of what was tried, else empty
    ended: Mapping[str, int]  # selection runs by status
    grid: tuple[tuple[float, float | None], ...]  # learning rate and mean loss, by learning rate

    @classmethod
    def from_plain(cls, node: Mapping[str, Any]) -> Tuned:
        """Inverse of `dataclasses.asdict` after JSON."""
        return cls(**{**node, "grid": tuple((lr, loss) for lr, loss in node["grid"])})


def tuned_cells(tuned: Sequence[Tuned]) -> list[tuple[str, ...]]:
    """A line per arm, in the order of TUNED_COLUMNS."""
    return [
        (
            one.arm,
            f"{one.lr:g}",
            "-" if one.sensitivity is None else f"{one.sensitivity:.4f}",
            one.edge or "no",
            ", ".join(f"{count} {status}" for status, count in one.ended.items()),
        )
        for one in tuned
    ]
