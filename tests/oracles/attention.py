"""Causal attention, one query at a time over the keys that it may see: nothing is masked, so nothing can leak."""

from __future__ import annotations

import math

import numpy as np

from oracles.norms import Array


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
) -> Array:
    """q ``(B, L, H, K)``, k and v ``(B, L, G, K)``; key/value head g serves the query heads g H/G … (g + 1) H/G - 1."""
    batch, length, heads, width = q.shape
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            g = h * k.shape[2] // heads
            for i in range(length):
                keys = [j for j in visible(i, window) if key_mask is None or key_mask[b, j]]
                if not keys:
                    continue
                scores = k[b, keys, g] @ q[b, i, h] * (1 / math.sqrt(width) if scale is None else scale)
                if cap is not None:
                    scores = softcap(scores, cap)
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights / weights.sum() @ v[b, keys, g]
    return out
