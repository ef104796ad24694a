"""LayerNorm and RMSNorm, alone or fused with the residual addition before them. Kernels: csrc/kernels/norm.h."""

# Shapes: ... any leading dimensions, D the normalised one
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.ops import library


def norm(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float,
    center: bool,
    unit_offset: bool = False,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * (gain, or 1 + gain) + bias`` over the last dimension.

    Args:
        gain, bias: ``(D,)`` of any float dtype, or None.
        center: True for LayerNorm; False for RMSNorm, which has mean 0 and the mean square for var.
        unit_offset: the gain is stored as its distance from 1.
    Shape: x ``(..., D)`` -> ``(..., D)`` in the dtype of x, empty for D = 0; the arithmetic is fp32 or wider.
    """
    if library.compiled("norm", x):
        y: Tensor = library.call("norm", x, gain, bias, eps, center, unit_offset)[0]
        return y
    return norm_reference(x, gain, bias, eps=eps, center=center, unit_offset=unit_offset)


def norm_narrow(x: Tensor, gain: Tensor | None, bias: Tensor | None = None, *, eps: float, center: bool) -> Tensor:
    """`norm` whose every step is rounded to the dtype of x, statistics included: low precision without widening.

    In fp32 and wider it is `norm`. Below that it takes torch's own operations, for no kernel rounds so often.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return norm(x, gain, bias, eps=eps, center=center)
    library.note("norm", "reference")

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True, dtype=torch.float32).to(t.dtype)  # the sum itself is rounded once

    with torch.autocast(x.device.type, enabled=False):
        x = x - mean(x) if center else x
        y = x * (mean(x * x) + eps).rsqrt()
        y = y if gain is None else y * gain.to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)


def add_norm(
    x: Tensor,
    residual: Tensor,
    gain: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float,
    center: bool,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` (rounded to the dtype) and `norm` of s, in one pass; returns ``(norm(s), s)``."""
    if library.compiled("add_norm", x):
        y, s, _, _ = library.call("add_norm", x, residual, gain, bias, eps, center, unit_offset)
        return y, s
    s = x + residual
    return norm_reference(s, gain, bias, eps=eps, center=center, unit_offset=unit_offset), s


def norm_reference(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, *, eps: float, center: bool, unit_offset: bool
) -> Tensor:
    """`norm` in torch's own operations."""
    # The square of an fp16 value above 255 overflows, so low precision is widened before it is squared.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gain = None if gain is None else gain.to(wide.dtype) + (1 if unit_offset else 0)
    bias = None if bias is None else bias.to(wide.dtype)
    if center:
        return F.layer_norm(wide, x.shape[-1:], gain, bias, eps).to(x.dtype)
    y = F.rms_norm(wide, x.shape[-1:], gain, eps)
    return (y if bias is None else y + bias).to(x.dtype)


def _statistics(x: Tensor, center: bool) -> tuple[Tensor, Tensor]:
    wide, rows = torch.promote_types(x.dtype, torch.float32), x.shape[:-1].numel()
    return x.new_empty(rows if center else 0, dtype=wide), x.new_empty(rows, dtype=wide)


def _fake_norm(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, center: bool, unit_offset: bool
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), *_statistics(x, center)


def _fake_add_norm(
    x: Tensor, residual: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, center: bool, unit_offset: bool
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape), *_statistics(x, center)


def _fake_backward(
    dy: Tensor, dsum: Tensor | None, s: Tensor, gain: Tensor | None, mean: Tensor, rstd: Tensor, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    vector = s.new_empty(s.shape[-1], dtype=torch.promote_types(s.dtype, torch.float32))
    return s.new_empty(s.shape), vector, torch.empty_like(vector)


def _save(ctx: Any, s: Tensor, gain: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> None:
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # zeros for these two cost as much as a short row
    ctx.save_for_backward(s, gain, mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gain, bias, _, _, ctx.unit_offset = inputs
    _save(ctx, x, gain, bias, *output[1:])


def _setup_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gain, bias, _, _, ctx.unit_offset = inputs
    _save(ctx, output[1], gain, bias, *output[2:])


def _gradients(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
    s, gain, mean, rstd = ctx.saved_tensors
    if dy is None:  # the norm is not used, or neither is its input
        return dsum, None, None
    dx, dgain, dbias = torch.ops.andrea_ablate.norm_backward(dy, dsum, s, gain, mean, rstd, ctx.unit_offset)
    return dx, None if gain is None else dgain.to(gain.dtype), ctx.bias_dtype and dbias.to(ctx.bias_dtype)


def _backward_norm(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dy, None), None, None, None


def _backward_add_norm(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    dx, dgain, dbias = _gradients(ctx, dy, dsum)
    return dx, dx, dgain, dbias, None, None, None


library.declare("norm", _fake_norm, _setup_norm, _backward_norm)
library.declare("add_norm", _fake_add_norm, _setup_add_norm, _backward_add_norm)
library.declare("norm_backward", _fake_backward)
