"""Stability tricks. Each names the seam it plugs into: ``qk``, ``scores`` (of attention), ``logits`` or ``loss``."""

# Shapes: B batch, L length, H query heads, G key/value heads, K d_head
from __future__ import annotations

from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError, Registry

STABILITY: Registry[nn.Module] = Registry("stability")


@STABILITY.register("qk_norm")
class QKNorm(nn.Module):
    """RMSNorm of every query and key head before the scores, with learned gains: ``|score| <= sqrt(d_head)`` at gain 1.

    Args:
        d_head: width of a head; eps: inside the root, > 0.
    Shape: q ``(B, L, H, K)``, k ``(B, L, G, K)`` -> the same.
    Raises: ConfigError if ``eps <= 0``.
    Source: Henry et al. 2020, arXiv:2010.04245; in this form Dehghani et al. 2023, arXiv:2302.05442.
    """

    q_gain: nn.Parameter
    k_gain: nn.Parameter
    seam = "qk"

    def __init__(self, *, d_head: int, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps > 0:
            raise ConfigError(f"stability: eps={eps} must be positive, such as 1e-6")
        self.eps = eps
        declare(self, self.table(d_head=d_head))

    @staticmethod
    def table(*, d_head: int) -> Table:
        return {"q_gain": Param((d_head,), "gain"), "k_gain": Param((d_head,), "gain")}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return ops.qk_rope(q, k, q_gain=self.q_gain, k_gain=self.k_gain, eps=self.eps)


class SoftCap(nn.Module):
    """``cap * tanh(x / cap)``: bounds logits smoothly to ``[-cap, cap]``.

    Args:
        cap: bound, > 0.
    Raises: ConfigError if ``cap <= 0``.
    Source: Gemma 2, arXiv:2408.00118, section 2 (50 on attention scores, 30 on output logits).
    """

    def __init__(self, *, cap: float) -> None:
        super().__init__()
        if not cap > 0:
            raise ConfigError(f"stability: cap={cap} must be positive, such as 30")
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
