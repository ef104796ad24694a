"""Norms against float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.norms import NORMS
from andrea_ablate.registry import ConfigError
from oracles import norms as oracle

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its autocast has rules of its own for norms")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def build(name: str, d_model: int, **options: Any) -> nn.Module:
    """A norm whose gain and bias are small fractions, exact in every dtype."""
    norm = NORMS.build({"type": name, **options}, d_model=d_model)
    generator = torch.Generator().manual_seed(d_model)
    for parameter in norm.parameters():
        parameter.data = torch.randint(-32, 33, parameter.shape, generator=generator) / 16
    return norm


def expected(norm: Any, name: str, x: Tensor) -> Tensor:
    gain = norm.gain.detach().double().numpy()
    bias = 0.0 if norm.bias is None else norm.bias.detach().double().numpy()
    return torch.from_numpy(oracle.NORMS[name](x.detach().double().numpy(), gain, bias, norm.eps))


@pytest.mark.parametrize("name", NORMS.names())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "d_model"), [(0, 41), (1, 1), (1, 41), (7, 123), (5, 128)])
def test_norm_matches_float64_oracle(name: str, bias: bool, rows: int, d_model: int) -> None:
    torch.manual_seed(0)
    norm = build(name, d_model, eps=1e-3, bias=bias).double()
    x = torch.randn(2, rows, d_model, dtype=torch.float64) * 3 + 1
    torch.testing.assert_close(norm(x), expected(norm, name, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.float()(x.float()).double(), expected(norm, name, x.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NORMS.names())
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_low_precision_is_rounded_once_at_the_end(
    name: str, dtype: torch.dtype, unit: float, autocast: bool, device: str
) -> None:
    torch.manual_seed(1)
    norm = build(name, 123).to(device)
    x = (torch.randn(7, 123) * 3 + 1).to(dtype)
    with torch.autocast(device, dtype, enabled=autocast):
        y = norm(x.to(device)).cpu()
    norm.cpu()
    assert y.dtype == dtype
    want = expected(norm, name, x)
    assert ((y.double() - want).abs() <= unit * (want.abs() + 2**-6)).all()


@pytest.mark.parametrize("name", NORMS.names())
def test_memory_layout_does_not_matter(name: str) -> None:
    torch.manual_seed(2)
    norm = build(name, 6).double()
    wide = torch.randn(5, 12, dtype=torch.float64)
    for x in (
        wide[:, ::2],
        torch.randn(6, 5, dtype=torch.float64).t(),
        wide[:1, :6].expand(4, 6),
        wide.flip(0)[:, 1:7],
    ):
        torch.testing.assert_close(norm(x), expected(norm, name, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMS.names())
def test_gradients(name: str) -> None:
    torch.manual_seed(3)
    norm = build(name, 5, bias=True).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor, gain: Tensor, bias: Tensor) -> Any:
        return torch.func.functional_call(norm, {"gain": gain, "bias": bias}, (x,))

    gain, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(f, (x, gain, bias), fast_mode=True)


def test_eps_is_inside_the_root_of_the_mean_square() -> None:
    """Ignored it would give 1, outside the root 0.990, with the dtype's default eps 0.278."""
    y = ops.norm(torch.full((4,), 1e-4), torch.ones(4), eps=1e-6, center=False)
    np.testing.assert_allclose(y.numpy(), 1e-4 / np.sqrt(1e-8 + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(y.numpy(), 0.0995, atol=5e-5)


def test_squares_are_taken_in_fp32() -> None:
    """The square of 300 is above the largest fp16 number."""
    x = torch.tensor([300.0, 0, 0, 0], dtype=torch.float16)
    y = ops.norm(x, torch.ones(4), eps=1e-6, center=False)
    assert y.dtype == torch.float16
    assert y.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_the_gain_is_applied_before_the_result_is_rounded() -> None:
    x, gain = torch.tensor([1.0, 3.0], dtype=torch.bfloat16), torch.tensor([1.00390625, 1.0])
    # 1/sqrt(5) * 257/256 = 0.4489604: rounding first gives bf16(0.4472136) = 0.447265625, times the gain 0.44921875.
    exact = torch.tensor([1.00390625 / 5**0.5, 3 / 5**0.5], dtype=torch.float64)
    assert torch.equal(ops.norm(x, gain, eps=1e-12, center=False), exact.to(torch.bfloat16))


@pytest.mark.parametrize("name", NORMS.names())
@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_eps_must_be_positive(name: str, eps: float) -> None:
    with pytest.raises(ConfigError, match=f"eps={eps}.*positive"):
        NORMS.build({"type": name, "eps": eps}, d_model=4)
