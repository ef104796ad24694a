"""Position encodings, one position and one pair of dimensions at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oracles.norms import Array


def sine(length: int, d_model: int, theta: float) -> Array:
    """Vaswani et al. 2017, section 3.5: the table that is added to the embeddings."""
    table = np.zeros((length, d_model))
    for m in range(length):
        for i in range(d_model // 2):
            table[m, 2 * i] = math.sin(m / theta ** (2 * i / d_model))
            table[m, 2 * i + 1] = math.cos(m / theta ** (2 * i / d_model))
    return table


def rope(
    x: Array, theta: float, pairing: str, rotary: int | None = None, frequencies: Sequence[float] | None = None
) -> Array:
    """Su et al. 2021, equation 15: turn each pair of the last dimension of x ``(B, L, H, K)`` by m theta_i.

    Args:
        rotary: how many of the K dimensions are turned, the first ones. frequencies: other than those of theta.
    """
    y, width = x.copy(), rotary or x.shape[-1]
    for m in range(x.shape[1]):
        for i in range(width // 2):
            a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + width // 2)
            angle = m * (theta ** (-2 * i / width) if frequencies is None else frequencies[i])
            turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            y[:, m, :, [a, b]] = np.einsum("ij,j...->i...", turn, np.stack((x[:, m, :, a], x[:, m, :, b])))
    return y


def scaled_frequencies(plan: Mapping[str, Any], theta: float, width: int, length: int) -> tuple[list[float], float]:
    """Radians per position of every pair after a context extension, and the factor on cosines and sines.

    Args:
        plan: the extension's options by their names in conf/scaling, original_len given.
    """
    kind, s, original = plan["type"], plan.get("factor", 1.0), plan.get("original_len")
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if kind == "linear":  # positions are divided by s
        return [f / s for f in plain], 1.0
    if kind in ("ntk", "dynamic_ntk"):
        if kind == "dynamic_ntk":
            s = 1.0 if length <= original else s * length / original - s + 1
        return [f * s ** (-2 * i / (width - 2)) if i else f for i, f in enumerate(plain)], 1.0
    if kind == "longrope":
        over = length > original
        factors = plan["long_factor" if over else "short_factor"] or [s if over else 1.0] * len(plain)
        magnitude = math.sqrt(1 + math.log(s, original)) if s > 1 else 1.0
        given = plan["attention_factor"]
        return [f / by for f, by in zip(plain, factors, strict=True)], magnitude if given is None else given
    if kind == "llama3":
        out = []
        for f in plain:
            turns = original * f / (2 * math.pi)
            if turns <= plan["low_freq_factor"]:
                out.append(f / s)
            elif turns >= plan["high_freq_factor"]:
                out.append(f)
            else:
                part = (turns - plan["low_freq_factor"]) / (plan["high_freq_factor"] - plan["low_freq_factor"])
                out.append((1 - part) * f / s + part * f)
        return out, 1.0
    if kind == "yarn":
        # A pair i turns r times over the original length where i = width ln(original / 2 pi r) / (2 ln theta).
        ends = [width * math.log(original / (2 * math.pi * plan[b]), theta) / 2 for b in ("beta_fast", "beta_slow")]
        if plan["truncate"]:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], width - 1)
        ramp = [min(1.0, max(0.0, (i - low) / ((high - low) or 0.001))) for i in range(width // 2)]
        given = plan["attention_factor"]
        magnitude = 0.1 * math.log(s) + 1 if given is None else given
        return [r * f / s + (1 - r) * f for r, f in zip(ramp, plain, strict=True)], magnitude
    assert kind == "none"
    return plain, 1.0


def alibi_slope(head: int, heads: int) -> float:
    """Press et al. 2021, section 3: a geometric sequence for a power of two, else every other one of twice that."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return float(2.0 ** (-8 / power * (head + 1)))
    return alibi_slope(2 * (head - power), 2 * power)


def t5_bucket(distance: int, buckets: int, max_distance: int, causal: bool) -> int:
    """Raffel et al. 2020, section 2.1: the bucket of query position minus key position, in whole numbers.

    Bucket ``exact + n`` begins where ``(d / exact)^(size - exact) >= (max_distance / exact)^n``.
    """
    first = 0
    if not causal:
        buckets //= 2
        first, distance = (buckets if distance < 0 else 0), abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    n = 0
    while n + exact < buckets - 1 and distance ** (buckets - exact) * exact ** (n + 1) >= (
        max_distance ** (n + 1) * exact ** (buckets - exact)
    ):
        n += 1
    return first + exact + n
