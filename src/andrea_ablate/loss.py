"""The language-model loss as sums and counts, so that any split of a batch adds up to the undivided one."""

# Shapes: N predicted positions, V vocabulary
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100


class LossSums(NamedTuple):
    """nll: summed negative log-likelihood in nats; penalty: summed auxiliary terms; n_tokens: predicted tokens."""

    nll: Tensor
    penalty: Tensor
    n_tokens: Tensor

    def mean(self) -> Tensor:
        """Loss in nats per token, 0 (with zero gradients) when no token is predicted."""
        return self.nll / self.n_tokens.clamp(min=1)


def lm_loss(logits: Tensor, targets: Tensor, penalties: Iterable[nn.Module] = ()) -> LossSums:
    """Cross-entropy of the targets plus the penalties on the log-partition, both as sums over predicted tokens.

    Args:
        logits: ``(..., V)``, any float dtype; the loss is computed in fp32 or wider.
        targets: ``(...)`` int64, IGNORE where nothing is predicted: such rows count for nothing, whatever they hold.
        penalties: modules of the ``loss`` seam, called with z ``(N,)`` of the predicted rows.
    """
    flat_NV = logits.flatten(0, -2)
    flat_NV = flat_NV.to(torch.promote_types(flat_NV.dtype, torch.float32))
    target_N = targets.flatten()
    kept_N = target_N != IGNORE
    # A row of infinities has no loss here, and yet a gradient of NaN. (Compiled, the fill is free and a branch is not.)
    if torch.compiler.is_compiling() or not kept_N.all():
        flat_NV = flat_NV.masked_fill(~kept_N[:, None], 0.0)
    nll = F.cross_entropy(flat_NV, target_N, ignore_index=IGNORE, reduction="sum")
    penalties = list(penalties)
    penalty = nll.new_zeros(())
    if penalties:
        z_N = flat_NV.logsumexp(-1)[kept_N]
        penalty = torch.stack([term(z_N) for term in penalties]).sum()
    return LossSums(nll, penalty, kept_N.sum())
