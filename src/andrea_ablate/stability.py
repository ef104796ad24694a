"""Stability tricks. Each names the seam it plugs into, in the order in which a step passes them.

``embedding`` token embeddings · ``stream`` the same with positions added · ``qk`` queries and keys · ``scores`` of
attention · ``branch`` what a sublayer adds to the stream · ``output`` what the output projection reads · ``logits`` ·
``loss`` · ``step`` the update of the weights
"""

# Shapes: B batch, L length, D d_model, H query heads, G key/value heads, K d_head
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError, Registry

STABILITY: Registry[nn.Module] = Registry("stability")


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"stability: {name}={value} must be positive and finite")


CASTS = ("t5", "llama")


def _rmsnorm(x: Tensor, gain: Tensor, eps: float, cast: str) -> Tensor:
    """RMSNorm over the last dimension; where the gain multiplies is said by `cast`, as in QKNorm."""
    if cast == "llama":
        return (ops.norm(x, None, eps=eps, center=False) * gain).to(x.dtype)
    return ops.norm(x, gain, eps=eps, center=False)


def _check_cast(cast: str) -> None:
    if cast not in CASTS:
        raise ConfigError(f"stability: cast='{cast}' is not one of {', '.join(CASTS)}")


@STABILITY.register("qk_norm")
class QKNorm(nn.Module):
    """RMSNorm of every query and key head before the scores, with learned gains: ``|score| <= sqrt(d_head)`` at gain 1.

    Args:
        d_head: width of a head; eps: inside the root, > 0.
        cast: ``t5``, the gain multiplies before the result is rounded to the input's dtype; ``llama``, after (Qwen 3).
    Shape: q ``(B, L, H, K)``, k ``(B, L, G, K)`` -> the same.
    Raises: ConfigError if ``eps <= 0`` or cast is unknown.
    Source: Henry et al. 2020, arXiv:2010.04245; in this form Dehghani et al. 2023, arXiv:2302.05442.
    """

    q_gain: nn.Parameter
    k_gain: nn.Parameter
    seam = "qk"

    def __init__(self, *, d_head: int, eps: float = 1e-6, cast: str = "t5") -> None:
        super().__init__()
        _check_positive(eps=eps)
        _check_cast(cast)
        self.eps, self.cast = eps, cast
        declare(self, self.table(d_head=d_head))

    @staticmethod
    def table(*, d_head: int) -> Table:
        return {"q_gain": Param((d_head,), "gain"), "k_gain": Param((d_head,), "gain")}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.cast == "t5":
            return ops.qk_rope(q, k, q_gain=self.q_gain, k_gain=self.k_gain, eps=self.eps)
        return _rmsnorm(q, self.q_gain, self.eps, self.cast), _rmsnorm(k, self.k_gain, self.eps, self.cast)


@STABILITY.register("qk_norm_full")
class FullQKNorm(nn.Module):
    """RMSNorm over all query heads together, and over all key heads, with a gain for each dimension of each head.

    Args:
        n_heads, n_kv_heads, d_head: sizes; eps: inside the root, > 0; cast: as in QKNorm.
    Shape: q ``(B, L, H, K)``, k ``(B, L, G, K)`` -> the same.
    Raises: ConfigError if ``eps <= 0`` or cast is unknown.
    Source: OLMo 2, arXiv:2501.00656, section 3.3.
    """

    q_gain: nn.Parameter
    k_gain: nn.Parameter
    seam = "qk"

    def __init__(self, *, n_heads: int, n_kv_heads: int, d_head: int, eps: float = 1e-6, cast: str = "t5") -> None:
        super().__init__()
        _check_positive(eps=eps)
        _check_cast(cast)
        self.eps, self.cast = eps, cast
        declare(self, self.table(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head))

    @staticmethod
    def table(*, n_heads: int, n_kv_heads: int, d_head: int) -> Table:
        sizes = {"q_gain": n_heads * d_head, "k_gain": n_kv_heads * d_head}
        return {name: Param((size,), "gain") for name, size in sizes.items()}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._normed(q, self.q_gain), self._normed(k, self.k_gain)

    def _normed(self, x_BLHK: Tensor, gain: Tensor) -> Tensor:
        return _rmsnorm(x_BLHK.flatten(-2), gain, self.eps, self.cast).view(x_BLHK.shape)


@STABILITY.register("qk_layernorm")
class QKLayerNorm(nn.Module):
    """LayerNorm of every query and key head before the scores, with learned gains.

    Args:
        n_heads, n_kv_heads, d_head: sizes; eps: inside the root, > 0; bias: whether to learn a shift, too (Phi).
        gains: ``shared`` by the heads, or ``per_head`` (Cohere; with a bias, Chameleon), which holds for the bias, too.
    Shape: q ``(B, L, H, K)``, k ``(B, L, G, K)`` -> the same; rounded once, at the end.
    Raises: ConfigError if ``eps <= 0`` or gains is unknown.
    Source: Dehghani et al. 2023 (ViT-22B), arXiv:2302.05442, section 2.
    """

    q_gain: nn.Parameter
    k_gain: nn.Parameter
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None
    seam = "qk"

    def __init__(
        self,
        *,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        eps: float = 1e-6,
        bias: bool = False,
        gains: str = "shared",
    ) -> None:
        super().__init__()
        _check_positive(eps=eps)
        if gains not in ("shared", "per_head"):
            raise ConfigError(f"stability: gains='{gains}' is not one of shared, per_head")
        self.eps, self.gains = eps, gains
        table = self.table(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias, gains=gains)
        declare(self, table, optional=("q_bias", "k_bias"))

    @staticmethod
    def table(*, n_heads: int, n_kv_heads: int, d_head: int, bias: bool = False, gains: str = "shared") -> Table:
        heads = {"q": 1, "k": 1} if gains == "shared" else {"q": n_heads, "k": n_kv_heads}
        table = {f"{side}_gain": Param((n * d_head,), "gain") for side, n in heads.items()}
        if bias:
            table.update({f"{side}_bias": Param((n * d_head,), "bias") for side, n in heads.items()})
        return table

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._normed(q, self.q_gain, self.q_bias), self._normed(k, self.k_gain, self.k_bias)

    def _normed(self, x_BLHK: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if self.gains == "shared":
            return ops.norm(x_BLHK, gain, bias, eps=self.eps, center=True)
        wide_BLHK = x_BLHK.to(torch.promote_types(x_BLHK.dtype, torch.float32))
        y_BLD = ops.norm(wide_BLHK, None, eps=self.eps, center=True).flatten(-2) * gain
        return (y_BLD if bias is None else y_BLD + bias).view(x_BLHK.shape).to(x_BLHK.dtype)


@STABILITY.register("embedding_norm")
class EmbeddingNorm(nn.Module):
    """LayerNorm of the embeddings, positions included, before the first block.

    Args:
        d_model: width; eps: added to the variance, > 0.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Raises: ConfigError if ``eps <= 0``.
    Source: BLOOM, arXiv:2211.05100, section 3.2.2; BERT, arXiv:1810.04805, has it too.
    """

    gain: nn.Parameter
    bias: nn.Parameter
    seam = "stream"

    def __init__(self, *, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        _check_positive(eps=eps)
        self.eps = eps
        declare(self, self.table(d_model=d_model))

    @staticmethod
    def table(*, d_model: int) -> Table:
        return {"gain": Param((d_model,), "gain"), "bias": Param((d_model,), "bias")}

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.gain, self.bias, eps=self.eps, center=True)


class Multiplier(nn.Module):
    """``factor * x``.

    Args:
        factor: > 0.
    Raises: ConfigError if ``factor <= 0``.
    """

    def __init__(self, *, factor: float) -> None:
        super().__init__()
        _check_positive(factor=factor)
        self.factor = factor

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@STABILITY.register("embedding_scale")
class EmbeddingScale(Multiplier):
    """``factor * embedding``, before positions are added.

    Args:
        d_model: width; factor: null for ``sqrt(d_model)``, 12 in Granite 3.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.4; Gemma, arXiv:2403.08295; MiniCPM, arXiv:2404.06395.
    """

    seam = "embedding"

    def __init__(self, *, d_model: int, factor: float | None = None) -> None:
        super().__init__(factor=math.sqrt(d_model) if factor is None else factor)


@STABILITY.register("residual_multiplier")
class ResidualMultiplier(Multiplier):
    """``x + factor * f(x)``: every branch is scaled by one constant. Granite 3 (0.22); MiniCPM, arXiv:2404.06395."""

    seam = "branch"


@STABILITY.register("logit_multiplier")
class LogitMultiplier(Multiplier):
    """``factor * logits``, before a soft-cap. Cohere's Command R (1/16); Granite 3; MiniCPM, arXiv:2404.06395.

    What the projection reads is multiplied in their place: the logits are never all in memory.

    Args:
        d_model: width; factor: null for ``1 / sqrt(d_model)``, T5's (arXiv:1910.10683, in its public code).
    """

    seam = "output"

    def __init__(self, *, d_model: int, factor: float | None = 0.0625) -> None:
        super().__init__(factor=d_model**-0.5 if factor is None else factor)


@STABILITY.register("layerscale")
class LayerScale(nn.Module):
    """``x + gain * f(x)``: every branch has a learned gain per dimension that starts small.

    Args:
        d_model: width; start: first value of the gain, > 0; 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 above.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Raises: ConfigError if ``start <= 0``.
    Source: Touvron et al. 2021 (CaiT), arXiv:2103.17239, equation 4.
    """

    gain: nn.Parameter
    seam = "branch"

    def __init__(self, *, d_model: int, start: float = 0.1) -> None:
        super().__init__()
        _check_positive(start=start)
        declare(self, self.table(d_model=d_model, start=start))

    @staticmethod
    def table(*, d_model: int, start: float = 0.1) -> Table:
        return {"gain": Param((d_model,), "gain", start=start)}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)


class SoftCap(nn.Module):
    """``cap * tanh(x / cap)``: bounds logits smoothly to ``[-cap, cap]``.

    Args:
        cap: bound, > 0.
    Raises: ConfigError if ``cap <= 0``.
    Source: Gemma 2, arXiv:2408.00118, section 2 (50 on attention scores, 30 on output logits).
    """

    def __init__(self, *, cap: float) -> None:
        super().__init__()
        _check_positive(cap=cap)
        self.cap = cap

    @staticmethod
    def table() -> Table:
        return {}


@STABILITY.register("attn_softcap")
class AttentionSoftCap(SoftCap):
    """Soft-cap on the scaled attention scores, before the mask; attention applies it itself (`cap`)."""

    seam = "scores"


@STABILITY.register("output_softcap")
class OutputSoftCap(SoftCap):
    """Soft-cap on the output logits; the loss applies it itself (`cap`)."""

    seam = "logits"


@STABILITY.register("z_loss")
class ZLoss(nn.Module):
    """``alpha * z^2`` per predicted token, ``z = log sum exp(logits)``: part of the training loss, of no reported one.

    The loss computes it (`alpha`), see loss.py.

    Args:
        alpha: weight, >= 0; PaLM uses 1e-4.
    Raises: ConfigError if ``alpha < 0``.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5; earlier Devlin et al. 2014.
    """

    seam = "loss"

    def __init__(self, *, alpha: float = 1e-4) -> None:
        super().__init__()
        if not alpha >= 0:
            raise ConfigError(f"stability: alpha={alpha} must not be negative")
        self.alpha = alpha

    @staticmethod
    def table() -> Table:
        return {}


@STABILITY.register("skip_step")
class SkipStep(nn.Module):
    """No update where the loss or the gradient norm is an outlier; training/outliers.py decides (`window`, `sigma`).

    Args:
        window: number of past steps that an outlier is seen against, >= 2.
        sigma: an outlier is more than so many standard deviations above their mean, > 0.
    Raises: ConfigError for values outside these ranges.
    Source: OLMo 2, arXiv:2501.00656, and its public code (128 steps, 6 deviations).
    """

    seam = "step"

    def __init__(self, *, window: int = 128, sigma: float = 6.0) -> None:
        super().__init__()
        if window < 2:
            raise ConfigError(f"stability: window={window} must be at least 2, such as 128")
        _check_positive(sigma=sigma)
        self.window, self.sigma = window, sigma

    @staticmethod
    def table() -> Table:
        return {}
