"""Output projection and loss in one: never all logits are in memory. Kernel: csrc/kernels/cross_entropy.h."""

# Shapes: N tokens, D width of the residual stream, V vocabulary
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.ops import library

IGNORE = -100


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None = None,
    *,
    softcap: float = 0.0,
    z_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens whose target is not IGNORE: of ``w * nll``, and of ``w * z_weight * z^2``, with
    ``s = softcap * tanh(x @ weight.T / softcap)``, ``z = logsumexp(s)``, ``nll = z - s[target]``.

    The compiled path takes the gradients of x and weight with the loss, for one common gradient of both sums; where
    they turn out to differ, or to be wanted twice, backward computes them anew. It has no second derivative.

    Args:
        weight: its first V rows may be a slice of more. Another dtype than that of x is converted; gradients are not.
        target: int64 in [0, V), or IGNORE: such rows count for nothing, whatever x holds there.
        token_weight: ``(N,)`` of any float dtype; None for ones.
        softcap: 0 for none. z_weight: 0 for no penalty.
    Shape: x ``(N, D)``, weight ``(V, D)``, target ``(N,)`` -> two scalars, fp32 or wider.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if library.compiled("linear_cross_entropy", x):
        grad = torch.is_grad_enabled()
        nll, penalty, *_ = library.call(
            *("linear_cross_entropy", x, weight, target, token_weight, softcap, z_weight),
            *(grad and x.requires_grad, grad and weight.requires_grad),
        )
        return nll, penalty
    return linear_cross_entropy_reference(x, weight, target, token_weight, softcap=softcap, z_weight=z_weight)


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor | None, *, softcap: float, z_weight: float
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` in torch's own operations."""
    kept = target != IGNORE
    # Zeros, because 0 * inf in the gradient of the weight is NaN.
    s = F.linear(x.masked_fill(~kept[:, None], 0.0), weight.to(x.dtype))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.to(_wide(x))
    nll = F.cross_entropy(s, target, ignore_index=IGNORE, reduction="none")
    weights = kept if token_weight is None else kept * token_weight.to(s.dtype)
    penalty = nll.new_zeros(()) if z_weight == 0 else z_weight * (weights * s.logsumexp(-1).square()).sum()
    return (weights * nll).sum(), penalty


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Tokens whose logits are in memory together: enough that a chunk's products run at the speed of undivided ones."""
    elements, fewest = (2**23, 1024) if device.type == "cuda" else (2**21, 256)
    return min(max(elements // max(vocab, 1), fewest), 8192)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _product_dtype(x: Tensor) -> torch.dtype:
    """That of x; fp32 on a CPU without instructions for it, where torch's own product is many times slower."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        supported = torch.ops.mkldnn
        bf16 = x.dtype == torch.bfloat16
        if not (supported._is_mkldnn_bf16_supported() if bf16 else supported._is_mkldnn_fp16_supported()):
            return torch.float32
    return x.dtype


def _run(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    softcap: float,
    z_weight: float,
    scales: tuple[Tensor | None, Tensor | None],
    dx: Tensor | None,
    dw: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return nll and z of every row, and fill dx and dw, for the gradients `scales` of the two sums (None for 1)."""
    n, vocab = x.shape[0], weight.shape[0]
    dtype = _product_dtype(x)
    weight = weight.to(dtype)
    if 1 not in weight.stride():
        weight = weight.contiguous()
    nll, z = (x.new_empty(n, dtype=_wide(x)) for _ in range(2))
    rows = chunk_rows(vocab, x.device)
    # Rows that start at whole cache lines: products of an odd width are slow otherwise.
    buffer = x.new_empty(min(rows, n), (vocab + 15) // 16 * 16, dtype=dtype)[:, :vocab]
    ignored = target == IGNORE
    all_kept = x.device.type == "cpu" and not ignored.any()  # asking a GPU would wait for it
    if dw is not None and (n == 0 or dw.dtype != dtype):
        dw.zero_()
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        x_part = x[part].to(dtype)
        if not all_kept:
            x_part = x_part.masked_fill(ignored[part, None], 0.0)
        logits = torch.mm(x_part, weight.t(), out=buffer[: len(x_part)])
        torch.ops.andrea_ablate.cross_entropy(
            *(logits, target[part], None if token_weight is None else token_weight[part], *scales),
            *(softcap, z_weight, dx is not None or dw is not None, nll[part], z[part]),
        )
        if dx is not None and dx.dtype == dtype:
            torch.mm(logits, weight, out=dx[part])
        elif dx is not None:
            dx[part] = torch.mm(logits, weight)
        if dw is None:
            continue
        if dw.dtype != dtype:  # summed over chunks in fp32
            dw += torch.mm(logits.t(), x_part)
        elif start == 0:
            torch.mm(logits.t(), x_part, out=dw)
        else:
            torch.addmm(dw, logits.t(), x_part, out=dw)
    return nll, z


def _check(x: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor | None) -> None:
    op = "linear_cross_entropy"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{op}: x {tuple(x.shape)} and weight {tuple(weight.shape)} are not (N, D) and (V, D)")
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"{op}: x is {x.dtype} and weight {weight.dtype}, expected floating-point types")
    if target.shape != x.shape[:1] or target.dtype != torch.int64:
        raise ValueError(f"{op}: target is {target.dtype} {tuple(target.shape)}, expected int64 {tuple(x.shape[:1])}")
    if token_weight is not None and token_weight.shape != x.shape[:1]:
        raise ValueError(f"{op}: token_weight {tuple(token_weight.shape)} is not {tuple(x.shape[:1])}")


def _total(rows: Tensor) -> Tensor:
    # In pieces that torch adds up in one thread, so that the sum is the same for any number of them.
    parts = [rows[start : start + 8192].sum(dtype=torch.float64) for start in range(0, max(len(rows), 1), 8192)]
    return torch.stack(parts).sum().to(rows.dtype)


def _scale(grad: Tensor, by: Tensor) -> None:
    """Multiply in place, with the factor as precise as it is."""
    if grad.dtype == by.dtype:
        grad *= by
    else:
        for start in range(0, len(grad), 1024):
            part = grad[start : start + 1024]
            part.copy_(part.to(by.dtype) * by)


def _forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    softcap: float,
    z_weight: float,
    keep_dx: bool,
    keep_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both sums, nll and z of the rows, and the gradients where they are to be kept for backward (else empty)."""
    _check(x, weight, target, token_weight)
    dx, dw = _fake_gradients(x, weight, keep_dx, keep_dw)
    arguments = (x, weight, target, token_weight, softcap, z_weight)
    nll, z = _run(*arguments, (None, None), dx if keep_dx else None, dw if keep_dw else None)
    weights = 1 if token_weight is None else token_weight.to(nll.dtype)
    return _total(weights * nll), z_weight * _total(weights * z.square()), nll, z, dx, dw


@torch.library.custom_op("andrea_ablate::linear_cross_entropy_backward", mutates_args=("dx", "dw"))
def _finish(
    dnll: Tensor,
    dpenalty: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    softcap: float,
    z_weight: float,
    dx: Tensor | None,
    dw: Tensor | None,
    kept: bool,
) -> None:
    """Turn kept gradients for unit gradients of both sums into those for dnll and dpenalty, or compute these."""
    # The gradient of nll + penalty reaches both as one tensor, so that a GPU need not be asked.
    if kept and (z_weight == 0 or dnll.data_ptr() == dpenalty.data_ptr() or torch.equal(dnll, dpenalty)):
        for grad in (dx, dw):
            if grad is not None:
                _scale(grad, dnll)
    else:
        _run(x, weight, target, token_weight, softcap, z_weight, (dnll, dpenalty), dx, dw)


def _fake_gradients(x: Tensor, weight: Tensor, with_dx: bool, with_dw: bool) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if with_dx else 0)
    return dx, x.new_empty(weight.shape if with_dw else 0, dtype=_wide(x))


def _fake_forward(
    x: Tensor, weight: Tensor, target: Tensor, token_weight: Any, softcap: float, z_weight: float, dx: bool, dw: bool
) -> tuple[Tensor, ...]:
    wide = _wide(x)
    sums, rows = (x.new_empty((), dtype=wide) for _ in range(2)), (x.new_empty(len(x), dtype=wide) for _ in range(2))
    return *sums, *rows, *_fake_gradients(x, weight, dx, dw)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, target, token_weight, ctx.softcap, ctx.z_weight, keep_dx, keep_dw = inputs
    nll, z, dx, dw = output[2:]
    ctx.mark_non_differentiable(nll, z, dx, dw)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, target, token_weight, nll, z)
    ctx.kept = {"dx": dx if keep_dx else None, "dw": dw if keep_dw else None}


def _backward(ctx: Any, dnll: Tensor | None, dpenalty: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("linear_cross_entropy has no second derivative; choose ops=reference")
    x, weight, target, token_weight, nll, z = ctx.saved_tensors
    needs_x, needs_w, _, needs_token_weight = ctx.needs_input_grad[:4]
    dnll = nll.new_zeros(()) if dnll is None else dnll
    dpenalty = nll.new_zeros(()) if dpenalty is None else dpenalty
    # Taken away, not saved: they are scaled in place, and a second backward must not find them so.
    dx, dw = ctx.kept.pop("dx", None), ctx.kept.pop("dw", None)
    kept = needs_x == (dx is not None) and needs_w == (dw is not None)
    if not kept:
        new_dx, new_dw = _fake_gradients(x, weight, needs_x, needs_w)
        dx, dw = (new_dx if needs_x else None), (new_dw if needs_w else None)
    if needs_x or needs_w:
        arguments = (x, weight, target, token_weight, ctx.softcap, ctx.z_weight)
        torch.ops.andrea_ablate.linear_cross_entropy_backward(dnll, dpenalty, *arguments, dx, dw, kept)
    dtoken = None
    if needs_token_weight:
        dtoken = (dnll * nll + dpenalty * ctx.z_weight * z.square()).to(token_weight.dtype)
    return dx, None if dw is None else dw.to(weight.dtype), None, dtoken, None, None, None, None


torch.library.custom_op("andrea_ablate::linear_cross_entropy", _forward, mutates_args=())


def _fake_cross_entropy(*_: Any) -> None:
    return None


library.declare("cross_entropy", _fake_cross_entropy)
library.declare("linear_cross_entropy", _fake_forward, _setup, _backward, kernel=_forward)
