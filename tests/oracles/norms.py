"""Norms over the last dimension."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def layernorm(x: Array, gain: Array, bias: Array | float, eps: float) -> Array:
    """Ba et al. 2016: subtract the mean, divide by the root of the biased variance plus eps."""
    centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
    variance = (centred**2).sum(-1, keepdims=True) / x.shape[-1]
    return centred / np.sqrt(variance + eps) * gain + bias


def rmsnorm(x: Array, gain: Array, bias: Array | float, eps: float) -> Array:
    """Zhang & Sennrich 2019, equation 4, with eps inside the root."""
    return x / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) * gain + bias


NORMS = {"layernorm": layernorm, "rmsnorm": rmsnorm}
