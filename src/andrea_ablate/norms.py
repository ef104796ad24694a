"""What a norm computes. Where it sits is `blocks.py`."""

# Shapes: ... any leading dimensions, D d_model
from __future__ import annotations

from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError, Registry

NORMS: Registry[nn.Module] = Registry("norm")


def _check_eps(eps: float) -> None:
    if not eps > 0:
        raise ConfigError(f"norm: eps={eps} must be positive, such as 1e-5")


@NORMS.register("layernorm")
class LayerNorm(nn.Module):
    """Layer normalisation: ``(x - mean(x)) / sqrt(var(x) + eps) * gain + bias``, statistics over the last dimension.

    Args:
        d_model: width of the residual stream.
        eps: added to the (biased) variance, > 0.
        bias: whether to learn the shift.
    Shape: x ``(..., D)`` -> ``(..., D)``; dtype and device are kept, statistics are at least fp32.
    Raises: ConfigError if ``eps <= 0``.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    gain: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, *, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps
        declare(self, self.table(d_model=d_model, bias=bias), optional=("bias",))

    @staticmethod
    def table(*, d_model: int, bias: bool = True) -> Table:
        gain = {"gain": Param((d_model,), "gain")}
        return {**gain, "bias": Param((d_model,), "bias")} if bias else gain

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.gain, self.bias, eps=self.eps, center=True)


@NORMS.register("rmsnorm")
class RMSNorm(nn.Module):
    """Root-mean-square normalisation: ``x / sqrt(mean(x^2) + eps) * gain (+ bias)``.

    Args:
        d_model: width of the residual stream.
        eps: added to the mean square, inside the root, > 0.
        bias: whether to learn a shift (rare).
    Shape: x ``(..., D)`` -> ``(..., D)``; dtype and device are kept. The arithmetic is fp32 or wider, the gain is
        applied before the result is rounded to the input's dtype.
    Raises: ConfigError if ``eps <= 0``.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467, equation 4 (eps as in its reference code).
    """

    gain: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, *, d_model: int, eps: float = 1e-5, bias: bool = False) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps
        declare(self, self.table(d_model=d_model, bias=bias), optional=("bias",))

    @staticmethod
    def table(*, d_model: int, bias: bool = False) -> Table:
        return LayerNorm.table(d_model=d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.gain, self.bias, eps=self.eps, center=False)
