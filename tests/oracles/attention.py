"""Attention, one query at a time over the keys that it may see: nothing is masked, so nothing can leak."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from oracles.norms import Array, rmsnorm


def softcap(x: Array, cap: float) -> Array:
    """Gemma 2, section 2."""
    return cap * np.tanh(x / cap)


def visible(i: int, window: int | None) -> range:
    """The keys that query i may see: itself and those before it, at most `window` in all."""
    return range(0 if window is None else max(0, i + 1 - window), i + 1)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    key_mask: Array | None = None,
    cap: float | None = None,
    causal: bool = True,
    shift: Callable[[int, int, int], float] | None = None,
    sinks: Array | None = None,
) -> Array:
    """q ``(B, L, H, K)``, k and v ``(B, L, G, …)``; key/value head g serves the query heads g H/G … (g + 1) H/G - 1.

    Args:
        shift: what is added to the score of (head, query, key). sinks: a logit per head that has no value.
    """
    batch, length, heads, width = q.shape
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            g = h * k.shape[2] // heads
            for i in range(length):
                allowed = visible(i, window) if causal else range(length)
                keys = [j for j in allowed if key_mask is None or key_mask[b, j]]
                if not keys:
                    continue
                scores = k[b, keys, g] @ q[b, i, h] * (1 / math.sqrt(width) if scale is None else scale)
                if cap is not None:
                    scores = softcap(scores, cap)
                if shift is not None:
                    scores = scores + np.array([shift(h, i, j) for j in keys])
                weights = np.exp(scores)
                total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[h]))
                out[b, i, h] = weights / total @ v[b, keys, g]
    return out


def latent(
    x: Array,
    p: Mapping[str, Array],
    *,
    heads: int,
    nope: int,
    eps: float,
    scale: float | None = None,
    turn: Callable[[Array], Array] = lambda t: t,
    key_mask: Array | None = None,
    cap: float | None = None,
) -> Array:
    """DeepSeek-V2, equations 9 to 19: one head at a time, rows of the matrices cut by hand.

    Args:
        nope: width of the part of a head without position. turn: the rotation of ``(B, L, 1, R)``.
    """
    rank = p["kv_gain"].shape[0]
    c_q = x
    if "w_q_down" in p:
        c_q = rmsnorm(x @ p["w_q_down"].T + p.get("q_down_bias", 0.0), p["q_gain"], 0.0, eps)
    both = x @ p["w_kv_down"].T + p.get("kv_down_bias", 0.0)
    c_kv, k_rotary = rmsnorm(both[..., :rank], p["kv_gain"], 0.0, eps), turn(both[..., None, rank:])
    w_q, w_kv = np.split(p["w_q"], heads), np.split(p["w_kv_up"], heads)
    out = []
    for h in range(heads):
        q, kv = c_q @ w_q[h].T, c_kv @ w_kv[h].T
        q_rotary = turn(q[..., None, nope:])
        query, key = (
            np.concatenate((part[..., None, :nope], rotary), -1) for part, rotary in ((q, q_rotary), (kv, k_rotary))
        )
        out.append(attend(query, key, kv[..., None, nope:], scale=scale, key_mask=key_mask, cap=cap)[..., 0, :])
    return np.asarray(np.concatenate(out, -1) @ p["w_o"].T + p.get("o_bias", 0.0))
