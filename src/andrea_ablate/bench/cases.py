"""What `bench ops` measures: inputs, our operation, and torch's own ways to compute the same."""

# Shapes: N rows, D width, V vocabulary
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops.attention import attention_reference
from andrea_ablate.ops.norm import norm_reference
from andrea_ablate.ops.qk_rope import qk_rope_reference

Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Case(NamedTuple):
    """inputs: arguments of every function; wanted: those of them that need a gradient; grads: of the outputs;
    eager: the plain form; torch: torch's fused functions, by name."""

    inputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    ours: Function
    eager: Function
    torch: Mapping[str, Function]


# (rows, width, dtype, device) -> a case, None where the op does not apply
Make = Callable[[int, int, torch.dtype, str], Case | None]
CASES: dict[str, Make] = {}


def _leaf(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _norm(rows: int, width: int, dtype: torch.dtype, device: str, *, center: bool) -> Case:
    x = _leaf(rows, width, dtype=dtype, device=device)
    gain, dy = _leaf(width, dtype=torch.float32, device=device), torch.randn_like(x)

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        return ops.norm(x, gain, eps=1e-5, center=center)

    def eager(x: Tensor, gain: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True) if center else wide
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain).to(x.dtype)

    def fused(x: Tensor, gain: Tensor) -> Tensor:
        gain = gain.to(x.dtype)
        return F.layer_norm(x, (width,), gain, None, 1e-5) if center else F.rms_norm(x, (width,), gain, 1e-5)

    return Case((x, gain), (x, gain), (dy,), ours, eager, {"torch": fused})


CASES["layernorm"] = partial(_norm, center=True)
CASES["rmsnorm"] = partial(_norm, center=False)


def _add_rmsnorm(rows: int, width: int, dtype: torch.dtype, device: str) -> Case:
    x, r = (_leaf(rows, width, dtype=dtype, device=device) for _ in range(2))
    gain, dy = _leaf(width, dtype=torch.float32, device=device), torch.randn_like(x)

    def ours(x: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, r, gain, eps=1e-5, center=False)

    def eager(x: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return norm_reference(s, gain, None, eps=1e-5, center=False, unit_offset=False), s

    return Case((x, r, gain), (x, r, gain), (dy, torch.randn_like(x)), ours, eager, {})


CASES["add_rmsnorm"] = _add_rmsnorm


def _elementwise(ours: Function, eager: Function, operands: int = 1, **fused: Function) -> Make:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Case:
        xs = tuple(_leaf(rows, width, dtype=dtype, device=device) for _ in range(operands))
        return Case(xs, xs, (torch.randn_like(xs[0]),), ours, eager, fused)

    return make


def _gelu_eager(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


CASES["gelu"] = _elementwise(partial(ops.activation, kind="gelu"), _gelu_eager, torch=F.gelu)
CASES["gelu_tanh"] = _elementwise(
    partial(ops.activation, kind="gelu_tanh"),
    ops.activation_reference("gelu_tanh"),
    torch=ops.activation_reference("gelu_tanh"),
)
CASES["swiglu"] = _elementwise(partial(ops.gated, kind="silu"), lambda gate, up: F.silu(gate) * up, 2)
CASES["geglu"] = _elementwise(partial(ops.gated, kind="gelu"), lambda gate, up: F.gelu(gate) * up, 2)
CASES["softcap"] = _elementwise(partial(ops.softcap, cap=30.0), lambda x: 30.0 * torch.tanh(x / 30.0))


def _qk_norm_rope(rows: int, width: int, dtype: torch.dtype, device: str) -> Case:
    """Heads of 64 dimensions, sequences of 128."""
    q, k = (_leaf(rows // 128, 128, max(1, width // 64), 64, dtype=dtype, device=device) for _ in range(2))
    gains = tuple(_leaf(64, dtype=torch.float32, device=device) for _ in range(2))
    angle = torch.arange(128.0, device=device)[:, None] * 1e4 ** (-torch.arange(0, 64, 2.0, device=device) / 64)
    cos, sin = angle.cos(), angle.sin()

    def call(op: Function, q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor) -> Tensor | tuple[Tensor, ...]:
        return op(q, k, cos, sin, q_gain=q_gain, k_gain=k_gain)

    inputs, grads = (q, k, *gains), (torch.randn_like(q), torch.randn_like(k))
    return Case(inputs, inputs, grads, partial(call, ops.qk_rope), partial(call, qk_rope_reference), {})


CASES["qk_norm_rope"] = _qk_norm_rope


def _cross_entropy(rows: int, width: int, dtype: torch.dtype, device: str, *, vocab: int) -> Case | None:
    if dtype != torch.float32 and device == "cpu":
        return None  # torch's own product takes seconds where the CPU has no instructions for the dtype
    x = _leaf(rows, width, dtype=dtype, device=device)
    weight_VD = (_leaf(vocab, width, dtype=dtype, device=device) * width**-0.5).detach().requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(x, weight, target)[0]

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")

    fused = getattr(F, "linear_cross_entropy", None)  # from torch 2.13 on
    rivals = {} if fused is None else {"torch": lambda x, weight: fused(x, weight, target, reduction="sum")}
    grad = torch.ones((), device=device)
    return Case((x, weight_VD), (x, weight_VD), (grad,), ours, eager, rivals)


CASES["cross_entropy_8449"] = partial(_cross_entropy, vocab=8449)
CASES["cross_entropy_50304"] = partial(_cross_entropy, vocab=50304)


def _attention(
    rows: int, width: int, dtype: torch.dtype, device: str, *, length: int, window: int | None, softcap: float | None
) -> Case | None:
    """Heads of 64 dimensions."""
    if device != "cpu" or rows < length:
        return None
    shape = (rows // length, length, max(1, width // 64), 64)
    q, k, v = (_leaf(*shape, dtype=dtype, device=device) for _ in range(3))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, scale=0.125, window=window, softcap=softcap)[0]

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, None, None, None, None, 0.125, window or 0, softcap or 0.0)[0]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    rivals: dict[str, Function] = {} if window or softcap else {"torch": sdpa}
    return Case((q, k, v), (q, k, v), (torch.randn_like(q),), ours, eager, rivals)


CASES["attention_256"] = partial(_attention, length=256, window=None, softcap=None)
CASES["attention_2048_window_softcap"] = partial(_attention, length=2048, window=256, softcap=50.0)
