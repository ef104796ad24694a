"""Position encodings, one position and one pair of dimensions at a time."""

from __future__ import annotations

import math

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


def rope(x: Array, theta: float, pairing: str) -> Array:
    """Su et al. 2021, equation 15: turn each pair of the last dimension of x ``(B, L, H, K)`` by m theta_i."""
    y, width = np.zeros_like(x), x.shape[-1]
    for m in range(x.shape[1]):
        for i in range(width // 2):
            a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + width // 2)
            angle = m * theta ** (-2 * i / width)
            turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            y[:, m, :, [a, b]] = np.einsum("ij,j...->i...", turn, np.stack((x[:, m, :, a], x[:, m, :, b])))
    return y
