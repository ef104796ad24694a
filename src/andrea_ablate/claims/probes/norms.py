"""Norms on inputs that are hard for them, and how well what they lost can be restored."""

# Shapes: N tokens, D d_model, 2 gain and bias
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def hard_rows(d_model: int = 123) -> Tensor:
    """Tokens ``(N, D)`` in fp64: random, far from zero, tiny, huge, one feature alone, and constant."""
    random_ND = torch.randn(6, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one_D = torch.zeros(d_model, dtype=torch.float64)
    one_D[3] = 1.0
    return torch.stack(
        (
            *random_ND[:2],
            random_ND[2] + 1e4,
            random_ND[3] * 1e-3,
            random_ND[4] * 1e8,
            one_D,
            torch.full_like(one_D, 7.0),
        )
    )


def moment_errors(norm: Norm, x_ND: Tensor, eps: float) -> tuple[float, float]:
    """Largest ``|mean|`` of the outputs and ``|variance - s2 / (s2 + eps)|``, s2 the (biased) variance of the input."""
    y_ND = norm(x_ND)
    s2_N = x_ND.var(-1, correction=0)
    mean = float(y_ND.mean(-1).abs().max())
    return mean, float((y_ND.var(-1, correction=0) - s2_N / (s2_N + eps)).abs().max())


def leak(norm: Norm, x_ND: Tensor) -> float:
    """Largest change of any token's output when another token changes."""
    before_ND, largest = norm(x_ND), 0.0
    for changed in range(len(x_ND)):
        moved_ND = x_ND.clone()
        moved_ND[changed] = moved_ND[changed] * -3 + 1
        change_ND = (norm(moved_ND) - before_ND).abs()
        change_ND[changed] = 0
        largest = max(largest, float(change_ND.max()))
    return largest


def restore_error(normed_ND: Tensor, x_ND: Tensor) -> float:
    """RMS of what the best gain and bias per feature leave of x when applied to the normed tokens, relative to x."""
    normed_DN1 = normed_ND.T.unsqueeze(-1)
    a_DN2 = torch.cat((normed_DN1, torch.ones_like(normed_DN1)), -1)
    x_DN1 = x_ND.T.unsqueeze(-1)
    # pinv and not lstsq: two tokens of one direction make the two columns equal.
    left_DN1 = a_DN2 @ (torch.linalg.pinv(a_DN2) @ x_DN1) - x_DN1
    return float(left_DN1.norm() / x_DN1.norm())
