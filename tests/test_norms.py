"""Norms against float64 NumPy."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.model import TransformerLM
from andrea_ablate.norms import NORMS
from andrea_ablate.ops import library
from andrea_ablate.registry import ConfigError
from designs import design
from oracles import norms as oracle

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its autocast has rules of its own for norms")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


WITH_EPS = [name for name in NORMS.names() if "eps" in inspect.signature(NORMS.get(name)).parameters]
DESIGNS = [*((name, {}) for name in NORMS.names()), ("layernorm", {"bias": False}), ("rmsnorm", {"bias": True})]


ROUNDED_ONCE = [name for name in NORMS.names() if name != "rmsnorm_llama" and not name.endswith("_narrow")]


def options_of(name: str, eps: float) -> dict[str, Any]:
    return {"eps": eps} if name in WITH_EPS else {}


def build(name: str, d_model: int, **options: Any) -> nn.Module:
    """A norm whose parameters are small fractions, exact in every dtype."""
    norm = NORMS.build({"type": name, **options}, d_model=d_model)
    generator = torch.Generator().manual_seed(d_model)
    for parameter in norm.parameters():
        parameter.data = torch.randint(-32, 33, parameter.shape, generator=generator) / 16
    return norm


def expected(norm: Any, name: str, x: Tensor, eps: float) -> Tensor:
    arrays = {key: value.detach().double().cpu().numpy() for key, value in norm.named_parameters()}
    return torch.from_numpy(oracle.NORMS[name](x.detach().double().numpy(), arrays, {"eps": eps}))


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize(("name", "options"), DESIGNS)
@pytest.mark.parametrize(("rows", "d_model"), [(0, 41), (1, 1), (1, 41), (7, 123), (5, 128)])
def test_norm_matches_float64_oracle(name: str, options: dict[str, Any], rows: int, d_model: int) -> None:
    torch.manual_seed(0)
    norm = build(name, d_model, **options_of(name, 1e-3), **options).double()
    x = torch.randn(2, rows, d_model, dtype=torch.float64) * 3 + 1
    torch.testing.assert_close(norm(x), expected(norm, name, x, 1e-3), rtol=1e-12, atol=1e-12)
    low = norm.float()(x.float())
    torch.testing.assert_close(low.double(), expected(norm, name, x.float(), 1e-3), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", ROUNDED_ONCE)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_low_precision_is_rounded_once_at_the_end(
    name: str, dtype: torch.dtype, unit: float, autocast: bool, device: str
) -> None:
    torch.manual_seed(1)
    norm = build(name, 123, **options_of(name, 1e-5)).to(device)
    x = (torch.randn(7, 123) * 3 + 1).to(dtype)
    with torch.autocast(device, dtype, enabled=autocast):
        y = norm(x.to(device)).cpu()
    assert y.dtype == dtype
    want = expected(norm, name, x, 1e-5)
    assert ((y.double() - want).abs() <= unit * (want.abs() + 2**-6)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS.names())
def test_a_model_in_low_precision_keeps_its_dtype(name: str, dtype: torch.dtype) -> None:
    norm = build(name, 16).to(dtype)
    assert norm(torch.randn(3, 16).to(dtype)).dtype == dtype


@pytest.mark.parametrize("name", NORMS.names())
def test_memory_layout_does_not_matter(name: str) -> None:
    torch.manual_seed(2)
    norm = build(name, 6, **options_of(name, 1e-5)).double()
    wide = torch.randn(5, 12, dtype=torch.float64)
    for x in (
        wide[:, ::2],
        torch.randn(6, 5, dtype=torch.float64).t(),
        wide[:1, :6].expand(4, 6),
        wide.flip(0)[:, 1:7],
    ):
        torch.testing.assert_close(norm(x), expected(norm, name, x, 1e-5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), DESIGNS)
def test_gradients(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    norm = build(name, 5, **options).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    own = {key: torch.randn_like(value, requires_grad=True) for key, value in norm.named_parameters()}

    def f(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(norm, dict(zip(own, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *own.values()), fast_mode=True)


# What (3, 4, 3, 4) becomes before anything is learned, eps aside.
AT_START = {
    "layernorm": [-1.0, 1.0],
    "layernorm_plain": [-1.0, 1.0],
    "rmsnorm": [3 / 12.5**0.5, 4 / 12.5**0.5],
    "rmsnorm_llama": [3 / 12.5**0.5, 4 / 12.5**0.5],
    "rmsnorm_offset": [3 / 12.5**0.5, 4 / 12.5**0.5],
    "rmsnorm_plain": [3 / 12.5**0.5, 4 / 12.5**0.5],
    "scalenorm": [2 * 3 / 50**0.5, 2 * 4 / 50**0.5],
    "dyt": [0.905148, 0.964028],  # tanh 1.5, tanh 2
    "none": [3.0, 4.0],
}


@pytest.mark.parametrize("name", AT_START)
def test_a_new_norm_leaves_each_dimension_its_size(name: str) -> None:
    model = TransformerLM(design(norm_type=name, norm=options_of(name, 1e-12), pos="none", d_model=4))
    got = model.blocks[0].attn_norm["before"](torch.tensor([3.0, 4.0, 3.0, 4.0]))[:2]
    assert got.tolist() == pytest.approx(AT_START[name], rel=1e-6)


@pytest.mark.usefixtures("impl")
def test_eps_is_inside_the_root_of_the_mean_square() -> None:
    """Ignored it would give 1, outside the root 0.990, with the dtype's default eps 0.278."""
    y = ops.norm(torch.full((4,), 1e-4), torch.ones(4), eps=1e-6, center=False)
    np.testing.assert_allclose(y.numpy(), 1e-4 / np.sqrt(1e-8 + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(y.numpy(), 0.0995, atol=5e-5)
    head, ones = torch.full((1, 1, 1, 4), 1e-4), torch.ones(4)
    for normed in ops.qk_rope(head, head, q_gain=ones, k_gain=ones, eps=1e-6):
        torch.testing.assert_close(normed.flatten(), y)


@pytest.mark.usefixtures("impl")
def test_squares_are_taken_in_fp32() -> None:
    """The square of 300 is above the largest fp16 number."""
    x = torch.tensor([300.0, 0, 0, 0], dtype=torch.float16)
    y = ops.norm(x, torch.ones(4), eps=1e-6, center=False)
    assert y.dtype == torch.float16
    assert y.tolist() == [2.0, 0.0, 0.0, 0.0]
    head = x.view(1, 1, 1, 4)
    for normed in ops.qk_rope(head, head, q_gain=torch.ones(4), k_gain=torch.ones(4), eps=1e-6):
        assert torch.equal(normed.flatten(), y)


@pytest.mark.usefixtures("impl")
def test_the_gain_is_applied_before_the_result_is_rounded() -> None:
    x, gain = torch.tensor([1.0, 3.0], dtype=torch.bfloat16), torch.tensor([1.00390625, 1.0])
    # 1/sqrt(5) * 257/256 = 0.4489604: rounding first gives bf16(0.4472136) = 0.447265625, times the gain 0.44921875.
    exact = torch.tensor([1.00390625 / 5**0.5, 3 / 5**0.5], dtype=torch.float64)
    assert torch.equal(ops.norm(x, gain, eps=1e-12, center=False), exact.to(torch.bfloat16))


@pytest.mark.usefixtures("impl")
def test_llamas_order_rounds_the_normalised_value_and_then_the_product() -> None:
    torch.manual_seed(4)
    x, gain = torch.randn(400, 2).bfloat16(), torch.tensor([1.00390625, 1.75])
    norm = NORMS.build({"type": "rmsnorm_llama", "eps": 1e-12}, d_model=2)
    norm.get_parameter("gain").data = gain
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(norm(x), (exact.bfloat16().double() * gain).bfloat16())
    assert not torch.equal(norm(x), (exact * gain).bfloat16())


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", ["layernorm_narrow", "rmsnorm_narrow"])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("autocast", [True, False])
def test_narrow_statistics_are_rounded_at_every_step(name: str, dtype: torch.dtype, bits: int, autocast: bool) -> None:
    torch.manual_seed(5)
    norm = build(name, 41, eps=1e-3, bias=True)
    x = (torch.randn(300, 41) + 0.5).to(dtype)
    p = {key: value.detach().double().numpy() for key, value in norm.named_parameters()}
    want = torch.from_numpy(
        oracle.narrow(x.double().numpy(), p["gain"], p["bias"], 1e-3, name.startswith("layernorm"), bits)
    )
    with torch.autocast("cpu", dtype, enabled=autocast):
        got = norm(x)
    assert got.dtype == dtype
    assert library.taken["norm"] == "reference"
    # A sum in fp32 may fall on the other side of a tie than one in fp64.
    assert (got.double() != want).float().mean() < 0.01
    once = NORMS.build({"type": name.removesuffix("_narrow"), "eps": 1e-3, "bias": True}, d_model=41)
    once.load_state_dict(norm.state_dict())
    assert (got != once(x)).float().mean() > 0.1


def test_narrow_squares_overflow() -> None:
    """What the other norms are widened for: the square of 300 is above the largest fp16 number."""
    norm = NORMS.build({"type": "rmsnorm_narrow"}, d_model=4)
    norm.get_parameter("gain").data.fill_(1.0)
    assert norm(torch.tensor([300.0, 0, 0, 0], dtype=torch.float16)).tolist() == [0.0] * 4


@pytest.mark.parametrize("alpha", [0.0, -0.5, float("nan")])
def test_the_slope_of_dynamic_tanh_must_be_positive(alpha: float) -> None:
    with pytest.raises(ConfigError, match=f"alpha_init={alpha}.*positive"):
        NORMS.build({"type": "dyt", "alpha_init": alpha}, d_model=4)


@pytest.mark.parametrize("name", WITH_EPS)
@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_eps_must_be_positive(name: str, eps: float) -> None:
    with pytest.raises(ConfigError, match=f"eps={eps}.*positive"):
        NORMS.build({"type": name, "eps": eps}, d_model=4)
