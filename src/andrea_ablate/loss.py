"""The language-model loss as sums and counts, so that any split of a batch adds up to the undivided one."""

# Shapes: D d_model, V vocabulary
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from andrea_ablate import ops

IGNORE = ops.IGNORE


class LossSums(NamedTuple):
    """nll: summed negative log-likelihood in nats; penalty: summed auxiliary terms; n_tokens: predicted tokens."""

    nll: Tensor
    penalty: Tensor
    n_tokens: Tensor

    def mean(self) -> Tensor:
        """Loss in nats per token, 0 (with zero gradients) when no token is predicted."""
        return self.nll / self.n_tokens.clamp(min=1)


def lm_loss(
    x: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None, z_weight: float = 0.0
) -> LossSums:
    """Output projection, cross-entropy and z-loss, as sums over predicted tokens; the logits are never all in memory.

    Args:
        x: ``(..., D)``, what the output projection reads. weight: ``(V, D)``.
        targets: ``(...)`` int64, IGNORE where nothing is predicted: such rows count for nothing, whatever they hold.
        softcap: bound of the logits, None for none. z_weight: the alpha of the z-loss.
    """
    target_N = targets.flatten()
    nll, penalty = ops.linear_cross_entropy(
        x.flatten(0, -2), weight, target_N, softcap=softcap or 0.0, z_weight=z_weight
    )
    return LossSums(nll, penalty, (target_N != IGNORE).sum())
