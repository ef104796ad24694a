"""Activation functions, alone and as the gate of a gated linear unit. Kernels: csrc/kernels/activation.h."""

# Shapes: ... any leading dimensions, F the last one
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.ops import library
from andrea_ablate.registry import ConfigError, nearest


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": F.relu,
    "relu2": _relu2,
    "gelu": F.gelu,  # x Phi(x), through erf
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # at most 4.8e-4 away
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
REFERENCE_ONLY = ("sigmoid",)  # the compiled library has no kernel for these


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)`` element by element; keeps only x for the backward pass.

    Args:
        kind: a name in REFERENCES.
    Shape: x ``(...)`` -> ``(...)``, in the dtype of x and packed; the arithmetic is fp32 or wider.
    Raises: ConfigError for an unknown kind.
    """
    reference = activation_reference(kind)
    if _compiled("activation", x, kind):
        y: Tensor = library.call("activation", x, kind)
        return y
    return reference(x)


def gated(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """``act(gate) * up``; keeps only gate and up for the backward pass.

    Args:
        up: same shape and dtype as gate; None where gate is ``(..., 2 F)`` and holds both, gate first.
        kind: a name in REFERENCES; silu gives SwiGLU, gelu GeGLU, relu ReGLU, identity the bilinear unit, sigmoid GLU.
    Shape: ``(..., F)``. Rows at one distance from each other (halves of a matrix) are read in place; others copied.
    Raises: ConfigError for an unknown kind.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    reference = activation_reference(kind)
    if _compiled("gated", gate, kind):
        y: Tensor = library.call("gated", gate, up, kind)
        return y
    if up is None:
        gate, up = gate.chunk(2, -1)
    return reference(gate) * up


def _compiled(op: str, x: Tensor, kind: str) -> bool:
    if kind in REFERENCE_ONLY:
        library.note(op, "reference")
        return False
    return library.compiled(op, x)


def activation_reference(kind: str) -> Callable[[Tensor], Tensor]:
    """`activation` in torch's own operations."""
    if kind not in REFERENCES:
        allowed = ", ".join(REFERENCES)
        raise ConfigError(f"activation='{kind}' is not one of {allowed}{nearest(kind, REFERENCES)}")
    return REFERENCES[kind]


def _fake_activation(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


def _fake_activation_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gated(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


def _fake_gated_backward(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape if up is not None else (0,))


def _setup_activation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _backward_activation(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return torch.ops.andrea_ablate.activation_backward(dy, *ctx.saved_tensors, ctx.kind), None


def _setup_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _backward_gated(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    gate, up = ctx.saved_tensors
    dgate, dup = torch.ops.andrea_ablate.gated_backward(dy, gate, up, ctx.kind)
    return dgate, None if up is None else dup, None


library.declare("activation", _fake_activation, _setup_activation, _backward_activation)
library.declare("activation_backward", _fake_activation_backward)
library.declare("gated", _fake_gated, _setup_gated, _backward_gated)
library.declare("gated_backward", _fake_gated_backward)
