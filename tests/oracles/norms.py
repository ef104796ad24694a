"""Norms over the last dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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


def rounded(x: Array, bits: int) -> Array:
    """The nearest numbers with so many significant bits, ties to even; 8 in bf16, 11 in fp16."""
    part, exponent = np.frexp(x)
    return np.ldexp(np.rint(part * 2.0**bits) / 2.0**bits, exponent)


def narrow(x: Array, gain: Array, bias: Array | None, eps: float, center: bool, bits: int) -> Array:
    """Layer or RMS norm where each number on the way is rounded."""
    if center:
        x = rounded(x - rounded(x.mean(-1, keepdims=True), bits), bits)
    variance = rounded(rounded(x * x, bits).mean(-1, keepdims=True), bits)
    y = rounded(x * rounded(1 / np.sqrt(rounded(variance + eps, bits)), bits), bits)
    y = rounded(y * rounded(gain, bits), bits)
    return y if bias is None else rounded(y + rounded(bias, bits), bits)


def scalenorm(x: Array, gain: Array, eps: float) -> Array:
    """Nguyen & Salazar 2019, with eps as in rmsnorm: ``|x|^2 + D eps`` under the root."""
    return gain * x / np.sqrt(np.einsum("...d,...d->...", x, x)[..., None] + x.shape[-1] * eps)


def dyt(x: Array, alpha: Array, gain: Array, bias: Array) -> Array:
    """Zhu et al. 2025, by ``tanh z = 1 - 2 / (1 + exp 2z)``."""
    return gain * (1 - 2 / (1 + np.exp(2 * alpha * x))) + bias


# name: what it makes of x, given its parameters and options
Norm = Callable[[Array, Mapping[str, Array], Mapping[str, Any]], Array]
NORMS: dict[str, Norm] = {
    "layernorm": lambda x, p, o: layernorm(x, p["gain"], p.get("bias", 0.0), o["eps"]),
    "layernorm_plain": lambda x, p, o: layernorm(x, np.ones(x.shape[-1]), 0.0, o["eps"]),
    "layernorm_narrow": lambda x, p, o: layernorm(x, p["gain"], p.get("bias", 0.0), o["eps"]),  # in fp32 and wider
    "rmsnorm": lambda x, p, o: rmsnorm(x, p["gain"], p.get("bias", 0.0), o["eps"]),
    "rmsnorm_llama": lambda x, p, o: rmsnorm(x, p["gain"], 0.0, o["eps"]),
    "rmsnorm_narrow": lambda x, p, o: rmsnorm(x, p["gain"], p.get("bias", 0.0), o["eps"]),
    "rmsnorm_offset": lambda x, p, o: rmsnorm(x, 1 + p["offset"], 0.0, o["eps"]),
    "rmsnorm_plain": lambda x, p, o: rmsnorm(x, np.ones(x.shape[-1]), 0.0, o["eps"]),
    "scalenorm": lambda x, p, o: scalenorm(x, p["gain"], o["eps"]),
    "dyt": lambda x, p, o: dyt(x, p["alpha"], p["gain"], p["bias"]),
    "none": lambda x, p, o: x,
}
