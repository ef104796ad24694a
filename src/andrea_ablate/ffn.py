"""Feed-forward sublayers: dense (two matrices) and gated (three)."""

# Shapes: B batch, L length, D d_model, F d_ff
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import Registry

FFNS: Registry[nn.Module] = Registry("ffn")


@FFNS.register("dense")
class DenseFFN(nn.Module):
    """Two linear maps around an activation: ``act(x W_up + b_up) W_down + b_down``.

    Args:
        d_model, d_ff: outer and inner width.
        linear_bias: whether the linear maps have biases.
        activation: a name that `ops.activation` knows.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Raises: ConfigError for an unknown activation.
    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 2; relu2: So et al. 2021, arXiv:2109.08668.
    """

    w_up: nn.Parameter
    w_down: nn.Parameter
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, *, d_model: int, d_ff: int, linear_bias: bool, activation: str) -> None:
        super().__init__()
        ops.activation_reference(activation)  # refuses an unknown name
        self.activation = activation
        table = self.table(d_model=d_model, d_ff=d_ff, linear_bias=linear_bias)
        declare(self, table, optional=("up_bias", "down_bias"))

    @staticmethod
    def table(*, d_model: int, d_ff: int, linear_bias: bool) -> Table:
        matrices = {"w_up": Param((d_ff, d_model), "matrix"), "w_down": Param((d_model, d_ff), "out")}
        biases = {"up_bias": Param((d_ff,), "bias"), "down_bias": Param((d_model,), "bias")}
        return {**matrices, **biases} if linear_bias else matrices

    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BLF = ops.activation(F.linear(x_BLD, self.w_up, self.up_bias), self.activation)
        return F.linear(hidden_BLF, self.w_down, self.down_bias)


@FFNS.register("gated")
class GatedFFN(nn.Module):
    """Gated linear unit: ``(act(x W_gate) * (x W_up)) W_down``.

    The activation names the unit: sigmoid GLU, identity bilinear, relu ReGLU, gelu GeGLU, silu SwiGLU.

    Args:
        d_model, d_ff: outer and inner width; ``8/3 * d_model`` matches a dense FFN of ratio 4 in parameters and FLOPs.
        linear_bias: whether the linear maps have biases.
        activation: a name that `ops.activation` knows, applied to the gate.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Raises: ConfigError for an unknown activation.
    Source: Shazeer 2020, arXiv:2002.05202, equations 4 to 6; GLU: Dauphin et al. 2016, arXiv:1612.08083.
    """

    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, *, d_model: int, d_ff: int, linear_bias: bool, activation: str) -> None:
        super().__init__()
        ops.activation_reference(activation)  # refuses an unknown name
        self.activation = activation
        table = self.table(d_model=d_model, d_ff=d_ff, linear_bias=linear_bias)
        declare(self, table, optional=("gate_bias", "up_bias", "down_bias"))

    @staticmethod
    def table(*, d_model: int, d_ff: int, linear_bias: bool) -> Table:
        gate = {"w_gate": Param((d_ff, d_model), "matrix")}
        if linear_bias:
            gate["gate_bias"] = Param((d_ff,), "bias")
        return {**gate, **DenseFFN.table(d_model=d_model, d_ff=d_ff, linear_bias=linear_bias)}

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate_BLF, up_BLF = (
            F.linear(x_BLD, w, b) for w, b in ((self.w_gate, self.gate_bias), (self.w_up, self.up_bias))
        )
        return F.linear(ops.gated(gate_BLF, up_BLF, self.activation), self.w_down, self.down_bias)
