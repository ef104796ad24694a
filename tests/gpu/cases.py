"""What is run on a GPU of each op: it, the same in torch's own operations, and inputs for a number of rows and a width.

A new op adds one entry to CASES; the tests here, the sanitizer and the timings of experiments/gpu/check.py follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops.cross_entropy import linear_cross_entropy_reference
from andrea_ablate.ops.norm import norm_reference
from andrea_ablate.ops.qk_rope import qk_rope_reference

Outputs = Tensor | tuple[Tensor, ...]


class Case(NamedTuple):
    """draw: fp32 inputs on the CPU; those of one dimension are parameters and stay fp32 in every run."""

    op: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    draw: Callable[[int, int], Sequence[Tensor]]
    widths: Sequence[int] = (1, 5, 31, 41, 64, 123, 384, 768, 1030, 3420, 4096, 8192, 20000)
    timed: Sequence[tuple[int, int]] = ((16384, 768), (8192, 1536), (8192, 4096), (4096, 8192))


def _add_norm_reference(x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return norm_reference(s, gain, bias, eps=1e-5, center=True, unit_offset=True), s


def turned_rows(
    op: Callable[..., Outputs], q: Tensor, k: Tensor, q_gain: Tensor | None = None, k_gain: Tensor | None = None
) -> Outputs:
    """Rows as positions of one head."""
    rows, width = q.shape
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(0, width, 2).double() / width)
    tables = (t.to(q.device, torch.promote_types(q.dtype, torch.float32)) for t in (angle.cos(), angle.sin()))
    return op(q[None, :, None], k[None, :, None], *tables, q_gain=q_gain, k_gain=k_gain)


CASES = {
    "rmsnorm": Case(
        lambda x, gain: ops.norm(x, gain, eps=1e-5, center=False),
        lambda x, gain: norm_reference(x, gain, None, eps=1e-5, center=False, unit_offset=False),
        lambda rows, width: [torch.randn(rows, width), torch.randn(width)],
    ),
    "layernorm": Case(
        lambda x, gain, bias: ops.norm(x, gain, bias, eps=1e-5, center=True),
        lambda x, gain, bias: norm_reference(x, gain, bias, eps=1e-5, center=True, unit_offset=False),
        lambda rows, width: [torch.randn(rows, width), torch.randn(width), torch.randn(width)],
    ),
    "add_norm": Case(
        lambda x, residual, gain, bias: ops.add_norm(x, residual, gain, bias, eps=1e-5, center=True, unit_offset=True),
        _add_norm_reference,
        lambda rows, width: [
            torch.randn(rows, width),
            torch.randn(rows, width),
            torch.randn(width),
            torch.randn(width),
        ],
    ),
    "gelu": Case(lambda x: ops.activation(x, "gelu"), F.gelu, lambda rows, width: [torch.randn(rows, width)]),
    "swiglu": Case(
        lambda gate, up: ops.gated(gate, up, "silu"),
        lambda gate, up: F.silu(gate) * up,
        lambda rows, width: [torch.randn(rows, width), torch.randn(rows, width)],
    ),
    "softcap": Case(
        lambda x: ops.softcap(x, 30.0),
        lambda x: 30.0 * torch.tanh(x / 30.0),
        lambda rows, width: [40 * torch.randn(rows, width)],
    ),
    "qk_rope": Case(
        partial(turned_rows, ops.qk_rope),
        partial(turned_rows, qk_rope_reference),
        lambda rows, width: [
            torch.randn(rows, width),
            torch.randn(rows, width),
            torch.randn(width),
            torch.randn(width),
        ],
        widths=(32, 40, 64, 80, 128),
        timed=((262144, 64), (131072, 128)),
    ),
    "linear_cross_entropy": Case(
        lambda x, weight, target: ops.linear_cross_entropy(x, weight, target, z_weight=1e-4),
        partial(linear_cross_entropy_reference, token_weight=None, softcap=0.0, z_weight=1e-4),
        lambda rows, width: [
            torch.randn(rows, width),
            torch.randn(8449 if rows > 1000 else 41, width),
            torch.randint(0, 41, (rows,)),
        ],
        widths=(8, 64, 384),
        timed=((8192, 768), (16384, 1024)),
    ),
}


def inputs(case: Case, rows: int, width: int, dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Inputs of a case on the device, in the dtype where they are neither parameters nor integers."""
    return [
        t.to(device, dtype) if t.dim() > 1 and t.is_floating_point() else t.to(device) for t in case.draw(rows, width)
    ]
