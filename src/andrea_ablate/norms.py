"""What a norm computes. Where it sits is `blocks.py`."""

# Shapes: ... any leading dimensions, D d_model
from __future__ import annotations

import math

import torch
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
        bias: whether to learn the shift; PaLM, MPT and Cohere do not.
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


@NORMS.register("rmsnorm_llama")
class LlamaRMSNorm(nn.Module):
    """`RMSNorm` in Llama's order of casts: ``gain * round(x / sqrt(mean(x^2) + eps))``.

    The normalised value is rounded to the input's dtype before the gain multiplies it, which `rmsnorm` (and T5) do the
    other way round; in fp32 the two are one.

    Args, shape, raises: as RMSNorm.
    Source: Touvron et al. 2023, arXiv:2302.13971, and its public code.
    """

    gain: nn.Parameter

    def __init__(self, *, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps
        declare(self, self.table(d_model=d_model))

    @staticmethod
    def table(*, d_model: int) -> Table:
        return {"gain": Param((d_model,), "gain")}

    def forward(self, x: Tensor) -> Tensor:
        return (ops.norm(x, None, eps=self.eps, center=False) * self.gain).to(x.dtype)


@NORMS.register("rmsnorm_offset")
class OffsetRMSNorm(nn.Module):
    """RMSNorm whose gain is stored as its distance from 1: ``x / sqrt(mean(x^2) + eps) * (1 + offset)``.

    Low precision is finest around 0, so what is stored keeps more digits.

    Args, shape, raises: as RMSNorm.
    Source: Gemma, arXiv:2403.08295, in its public code.
    """

    offset: nn.Parameter

    def __init__(self, *, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps
        declare(self, self.table(d_model=d_model))

    @staticmethod
    def table(*, d_model: int) -> Table:
        return {"offset": Param((d_model,), "gain", start=0.0)}

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.offset, eps=self.eps, center=False, unit_offset=True)


@NORMS.register("layernorm_narrow")
class NarrowLayerNorm(LayerNorm):
    """`LayerNorm` whose statistics have the dtype of its input, as every step between them.

    In fp32 the two are one. In bf16 and fp16 it shows what widening is for: in fp16 the square of 300 is infinite.

    Args, shape, raises: as LayerNorm. The compiled operations have no kernel for it in low precision.
    Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.3, for why reductions are not computed like this.
    """

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm_narrow(x, self.gain, self.bias, eps=self.eps, center=True)


@NORMS.register("rmsnorm_narrow")
class NarrowRMSNorm(RMSNorm):
    """`RMSNorm` whose statistics have the dtype of its input, as every step between them.

    Args, shape, raises, source: as NarrowLayerNorm.
    Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.3, for why reductions are not computed like this.
    """

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm_narrow(x, self.gain, self.bias, eps=self.eps, center=False)


class _Plain(nn.Module):
    """A norm with nothing to learn."""

    center: bool

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps = eps

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, None, eps=self.eps, center=self.center)


@NORMS.register("layernorm_plain")
class PlainLayerNorm(_Plain):
    """Layer normalisation without parameters: ``(x - mean(x)) / sqrt(var(x) + eps)``.

    Args, shape, raises: as LayerNorm.
    Source: OLMo 1, Groeneveld et al. 2024, arXiv:2402.00838, section 2.1.
    """

    center = True


@NORMS.register("rmsnorm_plain")
class PlainRMSNorm(_Plain):
    """RMSNorm without a gain: ``x / sqrt(mean(x^2) + eps)``.

    Args, shape, raises: as RMSNorm.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467, equation 4 with the gain left out, as in modded-nanogpt.
    """

    center = False


@NORMS.register("scalenorm")
class ScaleNorm(nn.Module):
    """``gain * x / |x|``: every vector gets one learned length, which starts at sqrt(d_model).

    Args:
        d_model: width of the residual stream.
        eps: added to the mean square, inside the root, > 0 (the paper's code bounds ``|x|`` from below instead).
    Shape: x ``(..., D)`` -> ``(..., D)``; dtype and device are kept, the arithmetic is fp32 or wider.
    Raises: ConfigError if ``eps <= 0``.
    Source: Nguyen & Salazar 2019, arXiv:1910.05895.
    """

    gain: nn.Parameter

    def __init__(self, *, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        _check_eps(eps)
        self.eps, self.root = eps, math.sqrt(d_model)
        declare(self, self.table(d_model=d_model))

    @staticmethod
    def table(*, d_model: int) -> Table:
        return {"gain": Param((1,), "gain", start=math.sqrt(d_model))}

    def forward(self, x: Tensor) -> Tensor:
        # |x| = sqrt(D mean(x^2)): RMSNorm with the same gain for every dimension.
        return ops.norm(x, (self.gain / self.root).expand(x.shape[-1]), eps=self.eps, center=False)


@NORMS.register("dyt")
class DynamicTanh(nn.Module):
    """Dynamic tanh, a norm without statistics: ``gain * tanh(alpha * x) + bias``.

    Args:
        d_model: width of the residual stream.
        alpha_init: starting slope of the one alpha, > 0.
    Shape: x ``(..., D)`` -> ``(..., D)``; dtype and device are kept, the arithmetic is fp32 or wider.
    Raises: ConfigError if ``alpha_init <= 0``.
    Source: Zhu et al. 2025, arXiv:2503.10622.
    """

    alpha: nn.Parameter
    gain: nn.Parameter
    bias: nn.Parameter

    def __init__(self, *, d_model: int, alpha_init: float = 0.5) -> None:
        super().__init__()
        if not alpha_init > 0:
            raise ConfigError(f"norm: alpha_init={alpha_init} must be positive, such as 0.5")
        declare(self, self.table(d_model=d_model, alpha_init=alpha_init))

    @staticmethod
    def table(*, d_model: int, alpha_init: float = 0.5) -> Table:
        return {"alpha": Param((1,), "gain", start=alpha_init), **LayerNorm.table(d_model=d_model)}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (self.gain * torch.tanh(self.alpha * wide) + self.bias).to(x.dtype)


@NORMS.register("none")
class NoNorm(nn.Module):
    """``x``: a place for a norm that stays empty. Zhang et al. 2019 (Fixup), arXiv:1901.09321."""

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return x
