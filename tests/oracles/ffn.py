"""Activations and feed-forward sublayers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from oracles.norms import Array

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS = {
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.where(x > 0, x, 0.0) ** 2,
    "identity": lambda x: x,
    "sigmoid": lambda x: 0.5 * (1 + np.tanh(x / 2)),
}


def _linear(x: Array, p: Mapping[str, Array], weight: str, bias: str) -> Array:
    return x @ p[weight].T + p.get(bias, 0.0)


def dense(x: Array, p: Mapping[str, Array], activation: str) -> Array:
    """Vaswani et al. 2017, equation 2."""
    return _linear(ACTIVATIONS[activation](_linear(x, p, "w_up", "up_bias")), p, "w_down", "down_bias")


def gated(x: Array, p: Mapping[str, Array], activation: str) -> Array:
    """Shazeer 2020, equation 6."""
    gate = ACTIVATIONS[activation](_linear(x, p, "w_gate", "gate_bias"))
    return _linear(gate * _linear(x, p, "w_up", "up_bias"), p, "w_down", "down_bias")


FFNS = {"dense": dense, "gated": gated}
