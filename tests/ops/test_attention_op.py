"""attention against float64 NumPy, torch's own kernels, finite differences and the contracts of torch.library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops import library
from andrea_ablate.ops.attention import attention_reference
from ops.checks import LOW, assert_as_precise_as, error, needs_library

pytestmark = needs_library

# Sizes B, L, M, H, G, K and the options that each goes with: every option alone, then together.
SIZES = ((2, 7, 7, 4, 2, 5), (1, 1, 1, 1, 1, 1), (1, 129, 129, 2, 1, 33), (2, 5, 60, 6, 2, 16), (1, 50, 101, 3, 3, 80))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 50},
    "softcap": {"softcap": 2.0},
    "slopes": {"slopes": True},
    "bias": {"bias": 4},
    "sinks": {"sinks": True},
    "key_mask": {"key_mask": True},
    "all": {"window": 5, "softcap": 1.5, "slopes": True, "bias": 9, "sinks": True, "key_mask": True},
}


def drawn(
    size: tuple[int, ...], option: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the keyword arguments of `option`; the parameters are in the dtype of sums."""
    B, L, M, H, G, K = size
    torch.manual_seed(B + L + M + H + G + K)
    qkv = [torch.randn(B, n, heads, K).to(dtype) for n, heads in ((L, H), (M, G), (M, G))]
    keys: dict[str, Any] = {"scale": 0.7 * K**-0.5, **OPTIONS[option]}
    wide = torch.promote_types(dtype, torch.float32)
    if keys.get("slopes"):
        keys["slopes"] = torch.rand(H, dtype=wide)
    if keys.get("bias"):
        keys["bias"] = torch.randn(H, keys["bias"], dtype=wide)
    if keys.get("sinks"):
        keys["sinks"] = torch.randn(H, dtype=wide)
    if keys.get("key_mask"):
        keys["key_mask"] = torch.rand(B, M) > 0.4
        keys["key_mask"][0, : M // 2 + 1] = False  # with L = M, the first queries see nothing
    return qkv, keys


def oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The formula, one query at a time."""
    (B, L, H, _), M, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out, lse = np.zeros(q.shape), np.full((B, H, L), -np.inf)
    for b, row, h in np.ndindex(B, L, H):
        i = M - L + row
        seen = [j for j in range(i + 1) if window is None or j > i - window]
        seen = [j for j in seen if key_mask is None or key_mask[b, j]]
        scores = []
        for j in seen:
            s = scale * float(np.dot(q[b, row, h], k[b, j, h // group]))
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            s += 0.0 if bias is None else bias[h, min(i - j, bias.shape[1] - 1)].item()
            scores.append(s - (0.0 if slopes is None else slopes[h].item() * (i - j)))
        terms = scores + ([] if sinks is None else [sinks[h].item()])
        if terms:
            lse[b, h, row] = np.log(np.exp(terms).sum())
            for j, s in zip(seen, scores, strict=True):
                out[b, row, h] += np.exp(s - lse[b, h, row]) * v[b, j, h // group]
    return out, lse


def op(q: Tensor, k: Tensor, v: Tensor, **keys: Any) -> tuple[Tensor, Tensor]:
    with ops.using("compiled"):
        result = ops.attention(q, k, v, **keys)
        assert library.taken == {"attention": "compiled"}
    return result


def eager(q: Tensor, k: Tensor, v: Tensor, **keys: Any) -> tuple[Tensor, Tensor]:
    with ops.using("reference"):
        return ops.attention(q, k, v, **keys)


@pytest.mark.parametrize("option", OPTIONS)
def test_forward_is_the_formula_in_float64(option: str) -> None:
    for size in SIZES:
        qkv, keys = drawn(size, option)
        expected = oracle(*(t.numpy() for t in qkv), **keys)
        for path in (op, eager):
            for got, true in zip(path(*qkv, **keys), expected, strict=True):
                np.testing.assert_allclose(got.numpy(), true, rtol=1e-10, atol=1e-12, err_msg=f"{path.__name__} {size}")


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_those_of_finite_differences(option: str) -> None:
    for size in ((2, 4, 4, 4, 2, 3), (1, 3, 5, 2, 2, 2)):
        qkv, keys = drawn(size, option)
        trained = [name for name in ("bias", "sinks") if name in keys]
        seen = torch.isfinite(op(*qkv, **keys)[1])

        def call(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = op(q, k, v, **{**keys, **dict(zip(trained, parameters, strict=True))})  # noqa: B023
            return out, lse[seen]  # noqa: B023

        leaves = [t.requires_grad_() for t in (*qkv, *(keys[name] for name in trained))]
        assert torch.autograd.gradcheck(call, leaves), size


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("option", OPTIONS)
def test_precision_at_odd_sizes(option: str, dtype: torch.dtype) -> None:
    for size in (*(s for s in SIZES if s[1] > 1), (2, 7, 7, 3, 1, 1), (2, 128, 128, 2, 2, 32), (1, 200, 200, 1, 1, 64)):
        qkv, keys = drawn(size, option, dtype)

        def of(path: Any) -> Any:
            def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                out, lse = path(q, k, v, **keys)  # noqa: B023
                return out, lse.nan_to_num(neginf=0.0)

            return call

        assert_as_precise_as(of(op), of(eager), of(eager), qkv)
        parameters = [name for name in ("bias", "sinks") if name in keys]
        grads = [_of_parameters(path, qkv, keys, parameters) for path in (op, eager)]
        wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in keys.items()}
        true = _of_parameters(eager, [t.double() for t in qkv], wide, parameters)
        for name, ours, theirs, exact in zip(parameters, *grads, true, strict=True):
            # A handful of long sums: chance decides between two roundings, and the op's sums hold the rounded output.
            allowance = (8 if dtype == torch.float32 else 0.5) * torch.finfo(dtype).eps * exact.abs().max().item()
            assert error(ours, exact) <= 2 * error(theirs, exact) + allowance, (name, size)


def _of_parameters(path: Any, qkv: list[Tensor], keys: dict[str, Any], names: list[str]) -> tuple[Tensor, ...]:
    leaves = {name: keys[name].detach().clone().requires_grad_() for name in names}
    out = path(*qkv, **{**keys, **leaves})[0]
    # Integers, which are exact in any dtype.
    grad = torch.randint(-4, 5, out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return torch.autograd.grad(out, list(leaves.values()), grad) if names else ()


def test_torch_sdpa_gives_the_same_numbers() -> None:
    for L, K in ((128, 32), (7, 80), (129, 64)):
        q, k, v = (torch.randn(2, L, 4, K, requires_grad=True) for _ in range(3))
        ours = op(q, k, v, scale=K**-0.5)[0]
        theirs = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(ours)
        for a, b in zip(*(torch.autograd.grad(o, (q, k, v), grad) for o in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("option", OPTIONS)
def test_later_tokens_have_no_influence_and_no_gradient(option: str) -> None:
    (q, k, v), keys = drawn((2, 61, 61, 4, 2, 8), option, torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    cut = 37
    out = op(*leaves, **keys)[0]
    grads = torch.autograd.grad(out[:, :cut].square().sum(), leaves)
    assert all((g[:, cut:] == 0).all() for g in grads)
    with torch.no_grad():
        for t in (q, k, v):
            t[:, cut:] = 100 * torch.randn_like(t[:, cut:])
    assert torch.equal(op(*leaves, **keys)[0][:, :cut], out[:, :cut])


def test_a_query_that_sees_nothing_gives_zeros_and_has_no_gradient() -> None:
    q, k, v = (torch.randn(2, 9, 2, 4, requires_grad=True) for _ in range(3))
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0] = False
    key_mask[1, :3] = False
    out, lse = op(q, k, v, scale=0.5, key_mask=key_mask)
    assert (out[0] == 0).all() and (out[1, :3] == 0).all() and (out[1, 3:] != 0).all()
    assert (lse[0] == -torch.inf).all() and torch.isfinite(lse[1, :, 3:]).all()
    for g in torch.autograd.grad(out.sum() + lse[1, :, 3:].sum(), (q, k, v)):
        assert (g[0] == 0).all() and (g[1, :3] == 0).all() and torch.isfinite(g).all()


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_views_of_one_projection_are_read_in_place(dtype: torch.dtype) -> None:
    B, L, H, G, K = 2, 20, 4, 2, 6
    fused = torch.randn(B, L, (H + 2 * G) * K).to(dtype)
    q, k, v = (t.unflatten(-1, (-1, K)) for t in fused.split([H * K, G * K, G * K], dim=-1))
    assert not k.is_contiguous()
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    columns = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    results = []
    for given in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous()), heads_first, columns):
        leaves = [t.detach().requires_grad_() for t in given]
        out, lse = op(*leaves, scale=0.4)
        results.append([out, lse, *torch.autograd.grad(out, leaves, torch.ones((), dtype=dtype).expand_as(out))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert all(t.is_contiguous() for t in results[0])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    (q, k, v), keys = drawn((3, 70, 70, 4, 2, 16), "all", torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v, keys["bias"], keys["sinks"])]
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            out = op(q, k, v, **keys)[0]
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_heads_that_share_keys_and_values_equal_repeated_ones() -> None:
    (q, k, v), keys = drawn((2, 30, 30, 6, 2, 8), "plain")
    repeated = [t.repeat_interleave(3, dim=2) for t in (k, v)]
    torch.testing.assert_close(op(q, k, v, **keys), op(q, *repeated, **keys))


def test_large_scores_and_nan() -> None:
    q, k, v = (torch.randn(1, 40, 1, 8) for _ in range(3))
    out, lse = op(1e3 * q, 1e3 * k, v, scale=1.0)
    true = eager(1e3 * q.double(), 1e3 * k.double(), v.double(), scale=1.0)
    torch.testing.assert_close(lse, true[1].float(), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(out).all()
    q[0, 20] = torch.nan
    out, _ = op(q, k, v, scale=1.0)
    assert out[0, 20].isnan().all() and torch.isfinite(out[0, :20]).all() and torch.isfinite(out[0, 21:]).all()


def test_empty_inputs() -> None:
    for B, L, M, K in ((0, 3, 3, 4), (2, 0, 0, 4), (2, 0, 3, 4), (1, 3, 3, 0)):
        q, k, v = (torch.ones(B, n, 2, K, requires_grad=True) for n in (L, M, M))
        sinks = torch.ones(2, requires_grad=True)
        out, lse = op(q, k, v, scale=1.0, sinks=sinks)
        assert out.shape == q.shape and lse.shape == (B, 2, L)
        for t, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v, sinks))[:3], strict=True):
            assert grad.shape == t.shape and (grad == 0).all()


MEMORY = """
import resource, torch
from andrea_ablate import ops
torch.set_num_threads(1)
def peak(length):
    q, k, v = (torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3))
    with ops.using("compiled"):
        ops.attention(q, k, v, scale=0.3, window=64, softcap=5.0, bias=torch.zeros(1, 32))[0].sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
peak(128)
short = peak(2048)
print(peak(32768) - short)
"""


@pytest.mark.slow  # measures a Python of its own
def test_memory_is_linear_in_length() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64, done.stdout  # MiB; one fp32 matrix of scores would be 4096


def test_arguments_are_checked_by_name() -> None:
    q, k = torch.ones(1, 4, 4, 2), torch.ones(1, 4, 2, 2)
    call = torch.ops.andrea_ablate.attention
    none = (None, None, None, None, 1.0, 0, 0.0)
    for given, message in (
        ((q, torch.ones(1, 4, 3, 2), torch.ones(1, 4, 3, 2), *none), "3 key/value heads must divide 4 query heads"),
        ((q, k[:, :3], k[:, :3], *none), "3 keys for 4 queries"),
        ((q, k.double(), k, *none), "attention: k has shape .* expected the same batch, d_head, dtype and device"),
        ((q, k, k, torch.ones(3), *none[1:]), r"slopes has shape \(3\), expected \(4\)"),
        ((q, k, k, None, torch.ones(2, 5), *none[2:]), r"bias has shape \(2, 5\), expected \(4, distances\)"),
        ((q, k, k, *none[:3], torch.ones(1, 4), 1.0, 0, 0.0), r"key_mask has shape \(1, 4\), expected a bool \(1, 4\)"),
        ((q, k, k, *none[:5], -1, 0.0), "window is -1"),
        ((q.int(), k.int(), k.int(), *none), "dtype .* is not one of float32, float64, bfloat16, float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*given)
    with pytest.raises(ValueError, match="window=0"):
        ops.attention(q, k, k, scale=1.0, window=0)


@pytest.mark.slow  # opcheck imports and traces much
@pytest.mark.parametrize("option", ["plain", "all"])
def test_contracts_of_torch_library(option: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (q, k, v), keys = drawn((2, 6, 8, 4, 2, 4), option, dtype)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        parameters = [keys.get(name) for name in ("slopes", "bias", "sinks", "key_mask")]
        numbers = (keys["scale"], keys.get("window", 0), keys.get("softcap", 0.0))
        torch.library.opcheck(torch.ops.andrea_ablate.attention.default, (*leaves, *parameters, *numbers))


def test_reference_and_op_take_the_same_arguments() -> None:
    (q, k, v), keys = drawn((1, 6, 6, 2, 2, 4), "all")
    positional = tuple(keys[name] for name in ("slopes", "bias", "sinks", "key_mask", "scale", "window", "softcap"))
    torch.testing.assert_close(attention_reference(q, k, v, *positional), op(q, k, v, **keys))
