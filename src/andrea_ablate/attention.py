"""Multi-head attention with any number of key/value heads, over one core with three backends."""

# Shapes: B batch, L query length, M key length, D d_model, H query heads, G key/value heads, K d_head
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError, Registry

ATTENTIONS: Registry[nn.Module] = Registry("attn")
BACKENDS = ("auto", "fused", "sdpa", "eager")

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@ATTENTIONS.register("multihead")
class MultiHeadAttention(nn.Module):
    """``softmax(q k^T * scale) v`` per head; MHA, GQA and MQA differ in the number of key/value heads only.

    Args:
        d_model, n_heads, n_kv_heads, d_head: sizes; n_heads * d_head need not equal d_model. Query head h reads
            key/value head ``h // (n_heads / n_kv_heads)``.
        linear_bias: whether the four projections have biases.
        dropout: probability of dropping an attention weight, training only.
        window: a query sees itself and the ``window - 1`` tokens before it; null for all of them.
        scale: factor on the scores; null for ``1 / sqrt(d_head)``.
        backend: ``fused`` (`ops.attention`, memory linear in length on a CPU), ``sdpa`` (torch's kernels), ``eager``
            (matmul, softmax, matmul), or ``auto``: the first of the three that can compute the choice here.
        qk: module applied to queries and keys before the scores (qk_norm), or None.
        softcap: the scaled score s becomes ``softcap * tanh(s / softcap)`` before the mask; None for s. Not with sdpa.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``; key_mask ``(B, L)``, True where a key may be seen.
    Raises: ConfigError for a window below 1, an unknown backend, sdpa with a soft-cap, or fused with dropout.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Shazeer 2019, arXiv:1911.02150; Ainslie 2023, arXiv:2305.13245.
    """

    w_q: nn.Parameter
    w_k: nn.Parameter
    w_v: nn.Parameter
    w_o: nn.Parameter
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None
    v_bias: nn.Parameter | None
    o_bias: nn.Parameter | None

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        linear_bias: bool,
        dropout: float = 0.0,
        window: int | None = None,
        scale: float | None = None,
        backend: str = "auto",
        qk: Rotate | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"model.attn.window={window} must be at least 1 (the query itself), or null for no limit")
        if backend not in BACKENDS:
            raise ConfigError(f"model.attn.backend='{backend}' is not one of {', '.join(BACKENDS)}")
        if backend == "fused" and dropout:
            raise ConfigError(
                f"model.attn.backend=fused has no dropout, but model.attn.dropout={dropout}; "
                "use model.attn.backend=auto or model.attn.dropout=0"
            )
        if backend == "sdpa" and softcap is not None:
            raise ConfigError(
                "model.attn.backend=sdpa cannot apply an attention soft-cap, it would be dropped; "
                "use model.attn.backend=eager or auto"
            )
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head
        self.dropout, self.window, self.softcap = dropout, window, softcap
        self.scale = d_head**-0.5 if scale is None else scale
        self.backend, self.qk = backend, qk
        sizes = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head}
        declare(self, self.table(**sizes, linear_bias=linear_bias), optional=("q_bias", "k_bias", "v_bias", "o_bias"))

    @staticmethod
    def table(*, d_model: int, n_heads: int, n_kv_heads: int, d_head: int, linear_bias: bool) -> Table:
        wide, narrow = n_heads * d_head, n_kv_heads * d_head
        table = {
            "w_q": Param((wide, d_model), "matrix"),
            "w_k": Param((narrow, d_model), "matrix"),
            "w_v": Param((narrow, d_model), "matrix"),
            "w_o": Param((d_model, wide), "out"),
        }
        if linear_bias:
            sizes = {"q_bias": wide, "k_bias": narrow, "v_bias": narrow, "o_bias": d_model}
            table.update({name: Param((size,), "bias") for name, size in sizes.items()})
        return table

    def forward(self, x_BLD: Tensor, rotate: Rotate | None = None, key_mask: Tensor | None = None) -> Tensor:
        q_BLHK = torch.unflatten(F.linear(x_BLD, self.w_q, self.q_bias), -1, (self.n_heads, self.d_head))
        k_BLGK = torch.unflatten(F.linear(x_BLD, self.w_k, self.k_bias), -1, (self.n_kv_heads, self.d_head))
        v_BLGK = torch.unflatten(F.linear(x_BLD, self.w_v, self.v_bias), -1, (self.n_kv_heads, self.d_head))
        for change in (self.qk, rotate):
            if change is not None:
                q_BLHK, k_BLGK = change(q_BLHK, k_BLGK)
        out_BLHK = attend(
            q_BLHK,
            k_BLGK,
            v_BLGK,
            scale=self.scale,
            window=self.window,
            key_mask=key_mask,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return F.linear(out_BLHK.flatten(-2), self.w_o, self.o_bias)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Causal attention: scale, soft-cap, mask, softmax in fp32, in this order. A query without a key gives zeros.

    Shape: q ``(B, L, H, K)``, k and v ``(B, L, G, K)`` with G dividing H, key_mask ``(B, L)`` -> ``(B, L, H, K)``.
    """
    if backend == "auto":
        fused = q.device.type == "cpu" and not dropout and ops.compiled("attention", q)
        backend = "fused" if fused else "sdpa" if softcap is None else "eager"
    if backend == "fused":
        return ops.attention(q, k, v, scale=scale, window=window, softcap=softcap, key_mask=key_mask)[0]
    ops.note("attention", backend)
    allowed = causal_mask(q.shape[1], window, q.device) if window is not None or key_mask is not None else None
    seen = None
    if key_mask is not None:
        assert allowed is not None
        allowed = allowed & key_mask[:, None, None, :]
        # A softmax over nothing is NaN, forward and backward: such rows attend to everything and are zeroed afterwards.
        seen = allowed.any(-1, keepdim=True)
        allowed = allowed | ~seen
    q_BHLK, k_BGMK, v_BGMK = (t.transpose(1, 2) for t in (q, k, v))
    if backend == "sdpa":
        assert softcap is None
        out_BHLK = F.scaled_dot_product_attention(
            q_BHLK,
            k_BGMK,
            v_BGMK,
            attn_mask=allowed,
            is_causal=allowed is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    else:
        out_BHLK = _eager(q_BHLK, k_BGMK, v_BGMK, scale, allowed, softcap, dropout)
    if seen is not None:
        out_BHLK = out_BHLK * seen
    return out_BHLK.transpose(1, 2)


def _eager(
    q_BHLK: Tensor,
    k_BGMK: Tensor,
    v_BGMK: Tensor,
    scale: float,
    allowed: Tensor | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    groups = q_BHLK.shape[1] // k_BGMK.shape[1]
    k_BHMK, v_BHMK = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k_BGMK, v_BGMK))
    score_BHLM = q_BHLK @ k_BHMK.transpose(-2, -1) * scale
    if softcap is not None:
        score_BHLM = ops.softcap(score_BHLM, softcap)
    if allowed is None:
        allowed = causal_mask(score_BHLM.shape[-1], None, score_BHLM.device)
    # Softmax in fp32: bf16 has 8 significant bits, so a long sum of small weights stalls below one.
    wide = torch.promote_types(score_BHLM.dtype, torch.float32)
    weight_BHLM = score_BHLM.to(wide).masked_fill(~allowed, float("-inf")).softmax(-1).to(v_BHMK.dtype)
    return F.dropout(weight_BHLM, dropout) @ v_BHMK


@lru_cache(maxsize=16)
def causal_mask(length: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Bool ``(L, L)``, True where query i sees key j: ``i - window < j <= i``, the window counts the query itself."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < (length if window is None else window))
