"""Activations and feed-forward sublayers against float64 NumPy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from andrea_ablate import ops
from andrea_ablate.ffn import FFNS
from andrea_ablate.ops.activation import REFERENCES as ACTIVATIONS
from andrea_ablate.registry import ConfigError
from oracles import ffn as oracle


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_matches_float64_oracle(name: str) -> None:
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    want = torch.from_numpy(oracle.ACTIVATIONS[name](x.numpy()))
    torch.testing.assert_close(ops.activation(x, name), want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize(
    ("name", "value"),
    [("gelu", -0.158655), ("gelu_tanh", -0.158808), ("silu", -0.268941), ("relu", 0.0), ("sigmoid", 0.268941)],
)
def test_activation_at_minus_one(name: str, value: float) -> None:
    assert ops.activation(torch.tensor(-1.0), name).item() == pytest.approx(value, abs=5e-7)
    assert ops.gated(torch.tensor([-1.0]), torch.tensor([2.0]), name).item() == pytest.approx(2 * value, abs=1e-6)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", FFNS.names())
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("linear_bias", [True, False])
def test_ffn_matches_float64_oracle(name: str, activation: str, linear_bias: bool) -> None:
    torch.manual_seed(0)
    ffn = FFNS.build({"type": name, "activation": activation}, d_model=7, d_ff=13, linear_bias=linear_bias).double()
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    arrays = {key: value.detach().numpy() for key, value in ffn.named_parameters()}
    assert ("up_bias" in arrays) == linear_bias
    want = torch.from_numpy(oracle.FFNS[name](x.numpy(), arrays, activation))
    torch.testing.assert_close(ffn(x), want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", FFNS.names())
def test_ffn_takes_the_given_width_without_rescaling_it(name: str) -> None:
    ffn: Any = FFNS.build({"type": name, "activation": "silu"}, d_model=8, d_ff=24, linear_bias=False)
    assert {tuple(p.shape) for p in ffn.parameters()} == {(24, 8), (8, 24)}


@pytest.mark.parametrize("name", FFNS.names())
def test_unknown_activation_is_refused_with_the_nearest_name(name: str) -> None:
    with pytest.raises(ConfigError, match="activation='gelu_tan' is not one of .*; did you mean 'gelu_tanh'"):
        FFNS.build({"type": name, "activation": "gelu_tan"}, d_model=8, d_ff=24, linear_bias=False)
