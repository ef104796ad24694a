"""What `bench ops` measures: inputs, our operation, and other ways to compute the same."""

# Shapes: N rows, D width, V vocabulary
from __future__ import annotations

import importlib
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
    eager: the plain form; rivals: others, by name."""

    inputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    ours: Function
    eager: Function
    rivals: Mapping[str, Function]


# (rows, width, dtype, device) -> a case, None where the op does not apply
Make = Callable[[int, int, torch.dtype, str], Case | None]
CASES: dict[str, Make] = {}


def _leaf(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _liger(call: Callable[..., Tensor | tuple[Tensor, ...]], function: str) -> dict[str, Function]:
    """`call` with a function of liger-kernel before its arguments; nothing where that is not installed."""
    try:
        library = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return {}
    return {"liger": partial(call, getattr(library, function))}


def _norm(rows: int, width: int, dtype: torch.dtype, device: str, *, center: bool) -> Case:
    x = _leaf(rows, width, dtype=dtype, device=device)
    gain, dy = _leaf(width, dtype=torch.float32, device=device), torch.randn_like(x)

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        return ops.norm(x, gain, eps=1e-5, center=center)

    def eager(x: Tensor, gain: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True) if center else wide
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain).to(x.dtype)

    def liger(function: Function, x: Tensor, gain: Tensor) -> Tensor | tuple[Tensor, ...]:
        if center:
            return function(x, gain.to(x.dtype), torch.zeros_like(gain, dtype=x.dtype), 1e-5)
        return function(x, gain.to(x.dtype), 1e-5, in_place=False)

    fused = {"torch": partial(_torch_norm, center=center)}
    rivals = fused | _liger(liger, "liger_layer_norm" if center else "liger_rms_norm")
    return Case((x, gain), (x, gain), (dy,), ours, eager, rivals)


def _torch_norm(x: Tensor, gain: Tensor, *, center: bool) -> Tensor:
    gain = gain.to(x.dtype)
    if center:
        return F.layer_norm(x, x.shape[-1:], gain, None, 1e-5)
    return F.rms_norm(x, x.shape[-1:], gain, 1e-5)


CASES["layernorm"] = partial(_norm, center=True)
CASES["rmsnorm"] = partial(_norm, center=False)


def _add_norm(rows: int, width: int, dtype: torch.dtype, device: str, *, center: bool) -> Case:
    x, r = (_leaf(rows, width, dtype=dtype, device=device) for _ in range(2))
    gain, dy = _leaf(width, dtype=torch.float32, device=device), torch.randn_like(x)

    def ours(x: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, r, gain, eps=1e-5, center=center)

    def eager(x: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return norm_reference(s, gain, None, eps=1e-5, center=center, unit_offset=False), s

    def fused(x: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return _torch_norm(s, gain, center=center), s

    def liger(function: Function, x: Tensor, r: Tensor, gain: Tensor) -> Tensor | tuple[Tensor, ...]:
        return function(x, r, gain.to(x.dtype), 1e-5, in_place=False)

    rivals = {"torch": fused} | ({} if center else _liger(liger, "liger_fused_add_rms_norm"))
    return Case((x, r, gain), (x, r, gain), (dy, torch.randn_like(x)), ours, eager, rivals)


CASES["add_layernorm"] = partial(_add_norm, center=True)
CASES["add_rmsnorm"] = partial(_add_norm, center=False)


def _elementwise(
    ours: Function, eager: Function, operands: int = 1, torch_s: Function | None = None, liger: str | None = None
) -> Make:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Case:
        xs = tuple(_leaf(rows, width, dtype=dtype, device=device) for _ in range(operands))
        rivals = {"torch": torch_s} if torch_s else {}
        rivals |= _liger(lambda function, *xs: function(*xs), liger) if liger else {}
        return Case(xs, xs, (torch.randn_like(xs[0]),), ours, eager, rivals)

    return make


def _activation(kind: str, eager: Function, liger: str | None = None) -> Make:
    torch_s = None if kind == "relu2" else ops.activation_reference(kind)  # which has none
    return _elementwise(partial(ops.activation, kind=kind), eager, torch_s=torch_s, liger=liger)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


CASES["gelu"] = _activation("gelu", lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)))
CASES["gelu_tanh"] = _activation("gelu_tanh", _gelu_tanh)
CASES["relu2"] = _activation("relu2", lambda x: F.relu(x).square(), "liger_relu_squared")
CASES["silu"] = _activation("silu", lambda x: x * torch.sigmoid(x))
CASES["softcap"] = _elementwise(partial(ops.softcap, cap=30.0), lambda x: 30.0 * torch.tanh(x / 30.0))


def _gated(kind: str, liger: str | None = None) -> Make:
    act = ops.activation_reference(kind)
    return _elementwise(partial(ops.gated, kind=kind), lambda gate, up: act(gate) * up, 2, liger=liger)


CASES["swiglu"] = _gated("silu", "liger_swiglu")
CASES["geglu"] = _gated("gelu")
CASES["geglu_tanh"] = _gated("gelu_tanh", "liger_geglu")
CASES["reglu"] = _gated("relu")
CASES["bilinear"] = _gated("identity")


def _qk_rope(rows: int, width: int, dtype: torch.dtype, device: str, *, normed: bool, pairing: str) -> Case:
    """Heads of 64 dimensions, sequences of 128."""
    q, k = (_leaf(rows // 128, 128, max(1, width // 64), 64, dtype=dtype, device=device) for _ in range(2))
    gains = tuple(_leaf(64, dtype=torch.float32, device=device) for _ in range(2)) if normed else ()
    angle = torch.arange(128.0, device=device)[:, None] * 1e4 ** (-torch.arange(0, 64, 2.0, device=device) / 64)
    cos, sin = angle.cos(), angle.sin()

    def call(
        op: Function, q: Tensor, k: Tensor, q_gain: Tensor | None = None, k_gain: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        return op(q, k, cos, sin, q_gain=q_gain, k_gain=k_gain, pairing=pairing)

    inputs, grads = (q, k, *gains), (torch.randn_like(q), torch.randn_like(k))
    return Case(inputs, inputs, grads, partial(call, ops.qk_rope), partial(call, qk_rope_reference), {})


CASES["rope"] = partial(_qk_rope, normed=False, pairing="interleaved")
CASES["qk_norm_rope"] = partial(_qk_rope, normed=True, pairing="interleaved")
CASES["qk_norm_rope_half"] = partial(_qk_rope, normed=True, pairing="half")


def _cross_entropy(rows: int, width: int, dtype: torch.dtype, device: str, *, vocab: int) -> Case | None:
    # On a CPU, torch's own product takes seconds in a dtype that the CPU has no instructions for, or at such widths.
    if device == "cpu" and (dtype != torch.float32 or width > 1024):
        return None
    x = _leaf(rows, width, dtype=dtype, device=device)
    weight_VD = (_leaf(vocab, width, dtype=dtype, device=device) * width**-0.5).detach().requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(x, weight, target)[0]

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")

    def liger(function: Function, x: Tensor, weight: Tensor) -> Tensor | tuple[Tensor, ...]:
        return function(x, weight, target, reduction="sum")

    fused = getattr(F, "linear_cross_entropy", None)  # from torch 2.13 on
    rivals = {} if fused is None else {"torch": lambda x, weight: fused(x, weight, target, reduction="sum")}
    rivals |= _liger(liger, "liger_fused_linear_cross_entropy")
    grad = torch.ones((), device=device)
    return Case((x, weight_VD), (x, weight_VD), (grad,), ours, eager, rivals)


CASES["cross_entropy_8449"] = partial(_cross_entropy, vocab=8449)
CASES["cross_entropy_50304"] = partial(_cross_entropy, vocab=50304)


def _attention(
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    *,
    length: int,
    window: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    group: int = 1,
) -> Case | None:
    """Heads of 64 dimensions, `group` of them to a key/value head."""
    heads = max(1, width // 64)
    if device != "cpu" or rows < length or width > 1024 or heads % group:  # wider, the eager form needs 10 GiB
        return None
    q, k, v = (
        _leaf(rows // length, length, n, 64, dtype=dtype, device=device)
        for n in (heads, heads // group, heads // group)
    )
    slopes = 2.0 ** torch.linspace(-1, -8, heads) if alibi else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, scale=0.125, window=window, softcap=softcap, slopes=slopes)[0]

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, slopes, None, None, None, 0.125, window or 0, softcap or 0.0)[0]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if slopes is not None:
            distance = torch.arange(length)[:, None] - torch.arange(length)
            mask = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).to(q.dtype)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=group > 1)
        return out.transpose(1, 2)

    rivals: dict[str, Function] = {} if window or softcap else {"torch": sdpa}
    return Case((q, k, v), (q, k, v), (torch.randn_like(q),), ours, eager, rivals)


CASES["attention_256"] = partial(_attention, length=256)
CASES["attention_256_alibi_gqa"] = partial(_attention, length=256, alibi=True, group=2)
CASES["attention_2048"] = partial(_attention, length=2048)
CASES["attention_2048_window_softcap"] = partial(_attention, length=2048, window=256, softcap=50.0)
