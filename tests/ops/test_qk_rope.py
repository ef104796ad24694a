"""qk_rope against float64 NumPy, torch's own operations, what a rotation keeps, and the contracts of torch.library."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops.qk_rope import PAIRINGS, qk_rope_reference
from andrea_ablate.registry import ConfigError
from ops.checks import LOW, assert_as_precise_as, needs_library
from oracles.norms import rmsnorm
from oracles.positions import rope

pytestmark = needs_library
EPS = 1e-5


def tables(length: int, rotary: int, theta: float = 100.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    frequency = theta ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / max(rotary, 1))
    angle = torch.arange(length, dtype=torch.float64).outer(frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def op(pairing: str = "interleaved"):
    def call(q: Tensor, k: Tensor, cos=None, sin=None, q_gain=None, k_gain=None) -> tuple[Tensor, Tensor]:
        with ops.using("compiled"):
            return ops.qk_rope(q, k, cos, sin, q_gain=q_gain, k_gain=k_gain, eps=EPS, pairing=pairing)

    return call


def reference(pairing: str = "interleaved"):
    def call(q: Tensor, k: Tensor, cos=None, sin=None, q_gain=None, k_gain=None) -> tuple[Tensor, Tensor]:
        return qk_rope_reference(q, k, cos, sin, q_gain=q_gain, k_gain=k_gain, eps=EPS, pairing=pairing)

    return call


def heads(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("call", [op, reference])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("with_gain", [True, False])
def test_forward_is_the_formula_in_float64(call, pairing: str, with_gain: bool) -> None:
    for batch, length, n, groups, width in ((2, 7, 3, 1, 10), (1, 5, 2, 2, 32), (2, 3, 4, 2, 64), (1, 1, 1, 1, 2)):
        for rotary in {0, 2 * (width // 6), width}:
            q, k = heads((batch, length, n, width)), heads((batch, length, groups, width), 1)
            gains = (heads((width,), 2), heads((width,), 3)) if with_gain else (None, None)
            got = call(pairing)(q, k, *tables(length, rotary), *gains)
            for x, gain, y in zip((q, k), gains, got, strict=True):
                expected = x.numpy() if gain is None else rmsnorm(x.numpy(), gain.numpy(), 0.0, EPS)
                turned = rope(expected[..., :rotary], 100.0, pairing)
                expected = np.concatenate((turned, expected[..., rotary:]), -1)
                np.testing.assert_allclose(y.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_depend_on_the_distance_only(pairing: str) -> None:
    q, k = (heads((1, 1, 2, 16), seed).expand(1, 9, 2, 16) for seed in (0, 1))
    gain = heads((16,), 2)
    turned_q, turned_k = op(pairing)(q, k, *tables(9, 16), gain, gain)
    score = torch.einsum("blhk,bmhk->hlm", turned_q, turned_k)
    for distance in range(-8, 9):
        same = score.diagonal(distance, 1, 2)
        torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=1e-10, atol=1e-10)
    assert (score.diagonal(1, 1, 2)[:, 0] - score.diagonal(3, 1, 2)[:, 0]).abs().min() > 0.01


def test_pairings_agree_up_to_their_permutation() -> None:
    for width, rotary in ((12, 12), (12, 8), (64, 64)):
        order = torch.cat((torch.arange(0, rotary, 2), torch.arange(1, rotary, 2), torch.arange(rotary, width)))
        q, k, gain = heads((2, 5, 3, width)), heads((2, 5, 1, width), 1), heads((width,), 2)
        interleaved = op("interleaved")(q, k, *tables(5, rotary), gain, gain)
        half = op("half")(q[..., order], k[..., order], *tables(5, rotary), gain[order], gain[order])
        for a, b in zip(interleaved, half, strict=True):
            torch.testing.assert_close(a[..., order], b)


@pytest.mark.parametrize(
    ("pairing", "rotary"), [("interleaved", None), ("interleaved", 2), ("interleaved", 4), ("half", 2), ("half", 4)]
)
@pytest.mark.parametrize("gains", [(True, True), (False, False), (True, False), (False, True)])
def test_gradients_are_those_of_finite_differences(pairing: str, rotary: int | None, gains: tuple[bool, bool]) -> None:
    for wanted in itertools.product((True, False), repeat=2):
        q, k = heads((1, 2, 2, 4)).requires_grad_(wanted[0]), heads((1, 2, 1, 4), 1).requires_grad_(wanted[1])
        given = [heads((4,), 2 + i).requires_grad_() if has else None for i, has in enumerate(gains)]
        if any(t is not None and t.requires_grad for t in (q, k, *given)):
            angles = (None, None) if rotary is None else tables(2, rotary)
            fast = not (all(wanted) and all(gains) and rotary == 2)  # along random directions, not element by element
            assert torch.autograd.gradcheck(op(pairing), (q, k, *angles, *given), fast_mode=fast)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_precision_at_odd_sizes(pairing: str, dtype: torch.dtype) -> None:
    for width in (1, 2, 3, 5, 8, 31, 46, 64, 127, 256):
        for rotary in {2 * (width // 2), 2 * (width // 4)}:
            cos, sin = tables(7, rotary, 10000.0, torch.float32)
            given = [heads((3, 7, 3, width), 0, dtype), heads((3, 7, 1, width), 1, dtype)]
            gains = [heads((width,), 2, torch.float32), heads((width,), 3, torch.float32)]
            for sums in ([], gains if width > 30 else []):  # how far off a few sums are is luck

                def with_tables(call):
                    return lambda q, k, *g: call(pairing)(q, k, cos.to(_wide(q)), sin.to(_wide(q)), *g)  # noqa: B023

                assert_as_precise_as(with_tables(op), with_tables(reference), with_tables(reference), [*given, *sums])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def test_strided_inputs_and_gradients_give_the_same_numbers() -> None:
    fused = heads((2, 3, (4 + 2 * 2) * 6), 0, torch.float32)
    q, k, _ = fused.unflatten(-1, (8, 6)).split((4, 2, 2), 2)
    spread = q.new_zeros(*q.shape[:3], 12)
    spread[..., ::2] = q
    inner = q.new_zeros(q.numel() + 1)
    inner[1:] = q.flatten()
    memory = {
        "a slice of a fused projection": q,
        "heads first": q.transpose(1, 2).contiguous().transpose(1, 2),
        "batch last": q.movedim(0, 2).contiguous().movedim(2, 0),
        "width first": q.movedim(3, 0).contiguous().movedim(0, 3),
        "every second element": spread[..., ::2],
        "one element in": inner[1:].view(q.shape),
    }
    gain, (cos, sin) = heads((12,), 2, torch.float32)[::2], tables(5, 6, dtype=torch.float32)
    cos, sin = cos[2:], sin.t().contiguous().t()[2:]
    for pairing, gains in itertools.product(PAIRINGS, ([], [gain, gain])):
        leaves = q.contiguous().requires_grad_(), k.contiguous().requires_grad_()
        expected = reference(pairing)(*leaves, cos, sin, *gains)
        for name, strided in memory.items():
            given = strided.detach().requires_grad_(), k.detach().requires_grad_()
            assert given[0].stride() == strided.stride()
            got = op(pairing)(*given, cos, sin, *gains)
            dy_q = heads((2, 4, 3, 6), 3, torch.float32).transpose(1, 2)
            for dy in ((dy_q, k.detach()), (dy_q[:1, :1].expand(q.shape), torch.ones(()).expand(k.shape))):
                grads = torch.autograd.grad(got, given, dy, retain_graph=True)
                expected_grads = torch.autograd.grad(expected, leaves, dy, retain_graph=True)
                for a, b in zip((*got, *grads), (*expected, *expected_grads), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{name}, {pairing}")
            assert got[0].is_contiguous() and got[1].is_contiguous()


def test_very_wide_heads() -> None:
    q, k, gain = heads((1, 3, 5, 2052)), heads((1, 3, 1, 2052), 1), heads((2052,), 2)
    for pairing in PAIRINGS:
        results = []
        for call in (op(pairing), reference(pairing)):
            leaves = [t.clone().requires_grad_() for t in (q, k, gain)]
            out = call(*leaves[:2], *tables(3, 1026), leaves[2], leaves[2])
            results.append([*out, *torch.autograd.grad(out, leaves, (q.cos(), k.cos()))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_side_is_a_copy_where_nothing_is_asked() -> None:
    q, k = heads((2, 3, 2, 5)), heads((2, 3, 1, 5), 1)
    for call in (op(), reference()):
        turned_q, turned_k = call(q, k)
        assert torch.equal(turned_q, q) and torch.equal(turned_k, k)
        assert turned_q.data_ptr() != q.data_ptr()


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0), (0, 0, 0, 0)])
def test_empty_inputs_have_empty_outputs_and_zero_gradients(shape: tuple[int, ...]) -> None:
    for pairing in PAIRINGS:
        q, k = (torch.ones(shape, requires_grad=True) for _ in range(2))
        gains = [torch.ones(shape[3], requires_grad=True) for _ in range(2)]
        turned_q, turned_k = op(pairing)(q, k, *tables(shape[1], shape[3], dtype=torch.float32), *gains)
        assert turned_q.shape == turned_k.shape == shape
        (turned_q.sum() + turned_k.sum()).backward()
        assert q.grad.shape == k.grad.shape == shape
        assert all(gain.grad.tolist() == [0.0] * shape[3] for gain in gains)


def test_the_threads_do_not_change_a_bit() -> None:
    q, k, gain = heads((3, 37, 4, 32), 0, torch.float32), heads((3, 37, 2, 32), 1, torch.float32), torch.ones(32)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        leaves = [t.clone().requires_grad_() for t in (q, k, gain)]
        out = op()(leaves[0], leaves[1], *tables(37, 32, dtype=torch.float32), leaves[2], leaves[2])
        results.append([*out, *torch.autograd.grad(out, leaves, (q, k))])
    torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_gain_gradient_of_many_bf16_heads_is_summed_in_fp32() -> None:
    q = torch.ones(4, 1024, 2, 64, dtype=torch.bfloat16)
    gain = torch.zeros(64, requires_grad=True)
    for times in (1, 2):  # the second time accumulates into the gradient of the first
        turned_q, _ = op()(q, q[:, :, :1], q_gain=gain)
        turned_q.sum().backward()
        torch.testing.assert_close(gain.grad, torch.full((64,), 8192.0 * times), rtol=1e-3, atol=0)


def test_dtypes_mix_and_wrong_arguments_are_named() -> None:
    q, cos, sin = torch.randn(2, 3, 2, 8).bfloat16(), *tables(3, 8, dtype=torch.float32)
    for gain in (torch.ones(8), torch.ones(8).bfloat16()):
        gain.requires_grad_()
        turned_q, turned_k = op()(q, q, cos, sin, gain, gain)
        assert turned_q.dtype == turned_k.dtype == torch.bfloat16
        assert torch.autograd.grad(turned_q.sum(), gain)[0].dtype == gain.dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert op()(q.float(), q.float(), cos, sin, gain, gain)[0].dtype == torch.float32
    raw = torch.ops.andrea_ablate.qk_rope
    for arguments, message in (
        ((q.long(), q.long(), None, None, None, None), "dtype .* is not one of float32, float64, bfloat16, float16"),
        ((q, q.float(), None, None, None, None), "k has shape .* expected the same batch, length, width, dtype"),
        ((q, q[:, :2], None, None, None, None), r"k has shape \(2, 2, 2, 8\) and q \(2, 3, 2, 8\)"),
        ((q[0], q[0], None, None, None, None), r"q has shape \(3, 2, 8\), expected \(batch, length, heads, width\)"),
        ((q, q, cos, None, None, None), "cos and sin are given both or neither"),
        ((q, q, cos[:2], sin[:2], None, None), r"a table has shape \(2, 4\), expected \(3, at most 4\)"),
        (
            (q, q, *tables(3, 10, dtype=torch.float32), None, None),
            r"a table has shape \(3, 5\), expected \(3, at most 4\)",
        ),
        ((q, q, *tables(3, 8), None, None), "not the dtype of its sums, float32"),
        ((q, q, None, None, torch.ones(4), None), r"q_gain has shape \(4\), expected \(8\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            raw(*arguments, EPS, True)
    with pytest.raises(ConfigError, match="pairing='whole' is not one of interleaved, half"):
        op("whole")(q, q)


@pytest.mark.slow  # opcheck imports and traces much
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contracts_of_torch_library(dtype: torch.dtype) -> None:
    cos, sin = tables(3, 4, dtype=torch.float32)
    gain = torch.randn(6, requires_grad=True)
    fused = torch.randn(2, 3, 4, 6, dtype=dtype)
    sliced, crossed = fused.split((3, 1), 2), (fused.transpose(0, 1).contiguous().transpose(0, 1), fused[:, :, :0])
    for sides, rest in (
        (sliced, (cos, sin, gain, gain)),
        (crossed, (cos, sin, None, None)),
        (sliced, (None, None, gain, None)),
    ):
        leaves = [side.detach().requires_grad_() for side in sides]
        torch.library.opcheck(torch.ops.andrea_ablate.qk_rope.default, (*leaves, *rest, EPS, rest[3] is None))
