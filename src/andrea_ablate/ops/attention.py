"""Causal attention with every choice of the scores in one op, on the CPU. Kernels: csrc/kernels/attention.h."""

# Shapes: B batch, L query length, M key length, H query heads, G key/value heads, K d_head, R distances
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from andrea_ablate.ops import library


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(bias + cap(scale * q k^T)) v`` over the keys at or before each query, and the log of its sums.

    Args:
        q: ``(B, L, H, K)``; with M > L the queries are the last L positions.
        k, v: ``(B, M, G, K)``, G divides H; query head h reads key/value head ``h // (H / G)``.
        window: a query sees itself and the ``window - 1`` positions before it; None for all.
        softcap: the scaled score s becomes ``softcap * tanh(s / softcap)``; None for s.
        slopes: ``(H,)``; ``slopes[h] * (i - j)`` is taken from the score of query i and key j (ALiBi). No gradient.
        bias: ``(H, R)``; ``bias[h, min(i - j, R - 1)]`` is added to that score.
        sinks: ``(H,)``; a further logit per head that takes its share of the softmax and has no value.
        key_mask: bool ``(B, M)``, True where a key may be seen. A query without a key gives zeros and has no gradient.
    Returns: out ``(B, L, H, K)`` in the dtype of q, lse ``(B, H, L)`` in fp32 or wider, -inf for a query without a key.
    """
    given = (slopes, bias, sinks, key_mask, scale, window or 0, softcap or 0.0)
    if window == 0 or softcap == 0.0:
        raise ValueError(f"attention: window={window} and softcap={softcap} must be above 0, or None for none")
    if library.compiled("attention", q) and q.device.type == "cpu":
        out, lse = library.call("attention", q, k, v, *given)
        return out, lse
    return attention_reference(q, k, v, *given)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """`attention` in torch's own operations, with a matrix of L by M scores. Arguments as in the schema: 0 is none."""
    length, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    k_BHKM = k.repeat_interleave(group, dim=2).permute(0, 2, 3, 1)
    v_BHMK = v.repeat_interleave(group, dim=2).transpose(1, 2)
    score_BHLM = (q.transpose(1, 2) @ k_BHKM).to(wide) * scale
    if softcap:
        score_BHLM = softcap * torch.tanh(score_BHLM / softcap)
    distance_LM = torch.arange(keys - length, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    if bias is not None:
        score_BHLM = score_BHLM + bias.to(wide)[:, distance_LM.clamp(0, bias.shape[1] - 1)]
    if slopes is not None:
        score_BHLM = score_BHLM - slopes.detach().to(wide)[:, None, None] * distance_LM
    allowed = (distance_LM >= 0) & (distance_LM < (window or keys))
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    score_BHLM = score_BHLM.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        sink_BHL1 = sinks.to(wide)[None, :, None, None].expand(*score_BHLM.shape[:-1], 1)
        score_BHLM = torch.cat([score_BHLM, sink_BHL1], dim=-1)
    # A softmax over nothing is NaN, forward and backward: such rows get equal scores and are zeroed afterwards.
    seen = (score_BHLM > -torch.inf).any(-1, keepdim=True)
    score_BHLM = score_BHLM.masked_fill(~seen, 0.0)
    weight_BHLM = (score_BHLM.softmax(-1) * seen)[..., :keys].to(v.dtype)
    lse_BHL = score_BHLM.logsumexp(-1).masked_fill(~seen[..., 0], -torch.inf)
    return (weight_BHLM @ v_BHMK).transpose(1, 2), lse_BHL


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _d_head = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    return (
        *(t.new_empty(t.shape) for t in (q, k, v)),
        lse.new_empty((0, 0) if bias is None else bias.shape),
        lse.new_empty((0,) if sinks is None else sinks.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, bias, sinks, key_mask, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 10
    dq, dk, dv, dbias, dsinks = torch.ops.andrea_ablate.attention_backward(
        torch.zeros_like(out) if dout is None else dout,
        *(dlse, q, k, v, out, lse, slopes, bias, sinks, key_mask, ctx.scale, ctx.window, ctx.softcap),
    )
    dbias = None if bias is None else dbias.to(bias.dtype)
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, None, dbias, dsinks, None, None, None, None


library.declare("attention", _fake, _setup, _backward)
library.declare("attention_backward", _fake_backward)
