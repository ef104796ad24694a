"""Cross-entropy in nats and the z-loss, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracles.norms import Array


def sums(logits: Array, targets: Sequence[int], alpha: float = 0.0, ignore: int = -100) -> tuple[float, float, int]:
    """Summed negative log-likelihood, summed ``alpha z^2`` and the number of predicted rows."""
    nll = penalty = 0.0
    count = 0
    for row, target in zip(logits, targets, strict=True):
        if target == ignore:
            continue
        z = math.log(sum(math.exp(value) for value in row))
        nll += z - row[target]
        penalty += alpha * z**2
        count += 1
    return nll, penalty, count
