"""RMSNorm of every query and key head, then rotary encoding, in one pass. Kernels: csrc/kernels/qk_rope.h."""

# Shapes: B batch, L length, H query heads, G key heads, K d_head, R the rotary part of K, P = R / 2 pairs
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.ops import library
from andrea_ablate.registry import ConfigError

PAIRINGS = ("interleaved", "half")


def qk_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
    pairing: str = "interleaved",
) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * gain`` per head, then the pairs of its first R dimensions turned by their angles.

    Args:
        cos, sin: ``(L, R/2)`` of the angles, R <= K, fp32 (fp64 for fp64 inputs); None for no rotation.
        q_gain, k_gain: ``(K,)`` of any float dtype; None for no norm of that side.
        pairing: ``interleaved`` turns dimensions (2i, 2i + 1) together, ``half`` (i, i + R/2).
    Shape: q ``(B, L, H, K)``, k ``(B, L, G, K)`` -> the same, packed, in their dtype; the arithmetic is fp32 or wider.
        Slices of a fused projection are read where they lie. The tables get no gradient.
    Raises: ConfigError for an unknown pairing.
    """
    if pairing not in PAIRINGS:
        raise ConfigError(f"qk_rope: pairing='{pairing}' is not one of {', '.join(PAIRINGS)}")
    if library.compiled("qk_rope", q):
        turned_q, turned_k, _, _ = library.call(
            "qk_rope", q, k, cos, sin, q_gain, k_gain, eps, pairing == "interleaved"
        )
        return turned_q, turned_k
    return qk_rope_reference(q, k, cos, sin, q_gain=q_gain, k_gain=k_gain, eps=eps, pairing=pairing)


def qk_rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
    pairing: str = "interleaved",
) -> tuple[Tensor, Tensor]:
    """`qk_rope` in torch's own operations."""
    return _reference(q, q_gain, cos, sin, eps, pairing), _reference(k, k_gain, cos, sin, eps, pairing)


def _reference(
    x: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, pairing: str
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if gain is not None:
        wide = F.rms_norm(wide, x.shape[-1:], gain.to(wide.dtype), eps)
    if cos is not None and sin is not None:
        rotary = 2 * cos.shape[-1]
        turned = _turn(wide[..., :rotary], cos, sin, pairing)
        wide = turned if rotary == x.shape[-1] else torch.cat((turned, wide[..., rotary:]), -1)
    # A new tensor, also where there was nothing to do: the compiled op does not return its inputs either.
    return wide.to(x.dtype, memory_format=torch.contiguous_format, copy=wide is x)


def _turn(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor, pairing: str) -> Tensor:
    cos_L1P, sin_L1P = cos_LP.unsqueeze(1), sin_LP.unsqueeze(1)
    if pairing == "interleaved":  # a pair is a complex number, turning it one multiplication
        if torch.compiler.is_compiling() or not _in_pairs(x_BLHR):  # the compiler does not trace where a tensor begins
            x_BLHR = x_BLHR.clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(torch.unflatten(x_BLHR, -1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos_L1P, sin_L1P)).flatten(-2)
    swapped = torch.roll(x_BLHR, x_BLHR.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BLHR * torch.cat((cos_L1P, cos_L1P), -1), swapped, torch.cat((-sin_L1P, sin_L1P), -1))


def _in_pairs(x: Tensor) -> bool:
    """Whether the numbers of each pair lie side by side from an even place on, as complex numbers do."""
    return x.stride(-1) == 1 and not any(n % 2 for n in (*x.stride()[:-1], x.storage_offset()))


def _fake(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    q_rstd, k_rstd = (
        x.new_empty(x.shape[:-1].numel() if gain is not None else 0, dtype=wide)
        for x, gain in ((q, q_gain), (k, k_gain))
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), q_rstd, k_rstd


def _fake_backward(
    dy_q: Tensor,
    dy_k: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, width = torch.promote_types(dy_q.dtype, torch.float32), dy_q.shape[-1]
    dq_gain, dk_gain = (dy_q.new_empty(0 if gain is None else width, dtype=wide) for gain in (q_gain, k_gain))
    return dy_q.new_empty(dy_q.shape), dy_k.new_empty(dy_k.shape), dq_gain, dk_gain


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, cos, sin, q_gain, k_gain, _, ctx.interleaved = inputs
    # A rotation alone is undone by its angles: its input is not kept.
    kept = (None if q_gain is None else q), (None if k_gain is None else k)
    ctx.save_for_backward(*kept, cos, sin, q_gain, k_gain, *output[2:])


def _backward(ctx: Any, dy_q: Tensor, dy_k: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q_gain, k_gain = ctx.saved_tensors[4:6]
    dq, dk, *sums = torch.ops.andrea_ablate.qk_rope_backward(dy_q, dy_k, *ctx.saved_tensors, ctx.interleaved)
    dq_gain, dk_gain = (
        None if gain is None else total.to(gain.dtype) for gain, total in zip((q_gain, k_gain), sums, strict=True)
    )
    return dq, dk, None, None, dq_gain, dk_gain, None, None


library.declare("qk_rope", _fake, _setup, _backward)
library.declare("qk_rope_backward", _fake_backward)
