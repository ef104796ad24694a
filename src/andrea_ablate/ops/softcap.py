"""Soft-capping of logits. Kernels: csrc/kernels/activation.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from andrea_ablate.ops import library
from andrea_ablate.registry import ConfigError


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``: bounds x smoothly to ``[-cap, cap]``; keeps only x for the backward pass.

    Args:
        cap: the bound, in the units of x, > 0.
    Shape: x ``(...)`` -> ``(...)``, in the dtype of x and packed; the arithmetic is fp32 or wider.
    Raises: ConfigError unless 0 < cap < 1e38.
    Source: Gemma 2, arXiv:2408.00118, section 2.
    """
    if not 0 < cap < 1e38:
        raise ConfigError(f"softcap: cap={cap} must be a finite number above 0; Gemma 2 has 30 and 50")
    if library.compiled("softcap", x):
        y: Tensor = library.call("softcap", x, cap)
        return y
    return softcap_reference(x, cap)


def softcap_reference(x: Tensor, cap: float) -> Tensor:
    """`softcap` in torch's own operations."""
    return cap * torch.tanh(x / cap)


def _fake(x: Tensor, cap: float) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.cap = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return torch.ops.andrea_ablate.softcap_backward(dy, *ctx.saved_tensors, ctx.cap), None


library.declare("softcap", _fake, _setup, _backward)
library.declare("softcap_backward", _fake_backward)
