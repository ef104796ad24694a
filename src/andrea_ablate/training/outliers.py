"""Steps whose loss or gradient norm stands out from those before: the trick ``skip_step`` leaves them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class OutlierGuard:
    """Tells ordinary steps from outliers: loss and gradient norm at most ``mean + sigma * std`` of the last `window`.

    With fewer than half a window known, every finite step is ordinary. An outlier is remembered, so a lasting change of
    level is soon let through; a step that is not finite is an outlier and is forgotten.

    Args:
        window: steps remembered, >= 2. sigma: standard deviations (unbiased) above the mean.
    Source: OLMo 2, arXiv:2501.00656, and its public code.
    """

    def __init__(self, window: int, sigma: float) -> None:
        self.window, self.sigma = window, sigma
        self.past: list[list[float]] = []  # (loss, gradient norm), oldest first

    def accepts(self, loss: float, grad_norm: float) -> bool:
        """Whether a step is ordinary; it is then one of those before."""
        latest = [loss, grad_norm]
        if not all(map(math.isfinite, latest)):
            return False
        few = len(self.past) < max(2, self.window // 2)
        ordinary = few or all(
            value <= self._limit(past) for value, past in zip(latest, zip(*self.past, strict=True), strict=True)
        )
        self.past = [*self.past, latest][-self.window :]
        return ordinary

    def _limit(self, past: Sequence[float]) -> float:
        mean = sum(past) / len(past)
        return mean + self.sigma * math.sqrt(sum((value - mean) ** 2 for value in past) / (len(past) - 1))

    def state_dict(self) -> dict[str, Any]:
        return {"past": self.past}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.past = state_dict["past"]
