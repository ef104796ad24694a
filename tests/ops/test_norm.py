"""norm and add_norm against float64 NumPy, torch's own kernels and the contracts of torch.library."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops.norm import norm_reference
from ops.checks import LOW, ODD_WIDTHS, assert_as_precise_as, layouts, needs_library

pytestmark = needs_library
KINDS = list(itertools.product((True, False), (True, False), (True, False), (True, False)))


def oracle(x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None, center: bool, offset: bool) -> np.ndarray:
    mean = x.mean(-1, keepdims=True) if center else 0.0
    y = (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    y = y if gain is None else y * (gain + offset)
    return y if bias is None else y + bias


def op(center: bool, offset: bool = False):
    def call(x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        with ops.using("compiled"):
            return ops.norm(x, gain, bias, eps=1e-5, center=center, unit_offset=offset)

    return call


def reference(center: bool, offset: bool = False):
    return lambda x, gain=None, bias=None: norm_reference(x, gain, bias, eps=1e-5, center=center, unit_offset=offset)


@pytest.mark.parametrize(("center", "with_gain", "with_bias", "offset"), KINDS)
def test_forward_is_the_formula_in_float64(center: bool, with_gain: bool, with_bias: bool, offset: bool) -> None:
    for rows, width in ((0, 16), (1, 1), (7, 41), (3, 123)):
        x = torch.randn(rows, width, dtype=torch.float64)
        gain, bias = torch.randn(width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
        given = (gain if with_gain else None), (bias if with_bias else None)
        expected = oracle(x.numpy(), *(None if t is None else t.numpy() for t in given), center, offset)
        np.testing.assert_allclose(op(center, offset)(x, *given).numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("center", "with_gain", "with_bias", "offset"), KINDS)
def test_gradients_match_finite_differences(center: bool, with_gain: bool, with_bias: bool, offset: bool) -> None:
    x, r = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gain, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = (gain if with_gain else None), (bias if with_bias else None)
    assert torch.autograd.gradcheck(op(center, offset), (x, *given))

    def fused(x: Tensor, r: Tensor, gain: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        with ops.using("compiled"):
            return ops.add_norm(x, r, gain, bias, eps=1e-5, center=center, unit_offset=offset)

    assert torch.autograd.gradcheck(fused, (x, r, *given))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("center", [True, False])
def test_precision_at_odd_widths(center: bool, dtype: torch.dtype) -> None:
    for width in ODD_WIDTHS:
        x, gain, bias = torch.randn(7, width).to(dtype), torch.randn(width), torch.randn(width)
        assert_as_precise_as(op(center), reference(center), reference(center), [x, gain, bias])


@pytest.mark.parametrize("center", [True, False])
def test_memory_that_is_not_packed_gives_the_same_numbers(center: bool) -> None:
    x, gain = torch.randn(6, 10), torch.randn(20)[::2]
    for name, strided in {"packed": x, **layouts(x)}.items():
        leaf = strided.detach().requires_grad_()
        y = op(center)(leaf, gain)
        (grad,) = torch.autograd.grad(y, leaf, torch.ones(()).expand_as(y))  # an expanded gradient
        expected = x.clone().requires_grad_()
        z = reference(center)(expected, gain)
        torch.testing.assert_close(y, z, msg=name)
        torch.testing.assert_close(grad, torch.autograd.grad(z.sum(), expected)[0], rtol=1e-4, atol=1e-5, msg=name)


def test_empty_inputs_have_empty_outputs_and_zero_gradients() -> None:
    for shape in ((0, 16), (4, 0), (0, 0)):
        gain = torch.ones(shape[1], requires_grad=True)
        x = torch.ones(shape, requires_grad=True)
        op(True)(x, gain).sum().backward()
        assert x.grad.shape == shape and gain.grad.tolist() == [0.0] * shape[1]


def test_gain_gradient_of_many_bf16_rows_is_summed_in_fp32() -> None:
    x, gain = torch.ones(4096, 64, dtype=torch.bfloat16), torch.zeros(64, requires_grad=True)
    for times in (1, 2):  # the second time accumulates into the gradient of the first
        op(False)(x, gain).sum().backward()
        torch.testing.assert_close(gain.grad, torch.full((64,), 4096.0 * times), rtol=1e-3, atol=0)


def test_many_rows_of_each_width() -> None:
    # Enough rows that every block of a GPU has some, at widths on both sides of each change of its layout.
    for width in (32, 256, 264, 512, 520, 768, 1024, 1030, 4096, 4104):
        x, gain = torch.randn(1100 if width < 4096 else 140, width), torch.randn(width)
        assert_as_precise_as(op(False), reference(False), reference(False), [x, gain])


def test_rows_too_wide_for_registers() -> None:
    for width in (8192, 8193, 16392, 20001):
        x, gain, bias = torch.randn(3, width), torch.randn(width), torch.randn(width)
        assert_as_precise_as(op(True), reference(True), reference(True), [x, gain, bias])


def test_dtypes_mix_and_unsupported_ones_are_named() -> None:
    x = torch.randn(3, 8).bfloat16()
    for gain in (torch.ones(8), torch.ones(8).bfloat16()):
        assert op(True)(x, gain).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert op(True)(x.float(), gain).dtype == torch.float32
    with pytest.raises(RuntimeError, match="norm: dtype .* is not one of float32, float64, bfloat16, float16"):
        torch.ops.andrea_ablate.norm(torch.ones(2, 3, dtype=torch.int64), None, None, 1e-5, True, False)
    with pytest.raises(RuntimeError, match=r"norm: gain has shape \(4\), expected \(3\)"):
        torch.ops.andrea_ablate.norm(torch.ones(2, 3), torch.ones(4), None, 1e-5, True, False)


@pytest.mark.slow  # opcheck imports and traces much
@pytest.mark.parametrize("dtype", LOW)
def test_contracts_of_torch_library(dtype: torch.dtype) -> None:
    gain = torch.randn(5, requires_grad=True)
    for x in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(3, 10)[:, ::2], torch.randn(0, 5)):
        x = x.to(dtype).detach().requires_grad_()
        torch.library.opcheck(torch.ops.andrea_ablate.norm.default, (x, gain, None, 1e-5, True, False))
        r = torch.randn_like(x).requires_grad_()
        torch.library.opcheck(torch.ops.andrea_ablate.add_norm.default, (x, r, gain, gain, 1e-5, False, True))
