"""Multi-head attention with any number of key/value heads."""

# Shapes: B batch, L length, D d_model, H query heads, G key/value heads, K d_head
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate.attention.cache import LayerCache
from andrea_ablate.attention.core import ATTENTIONS, Rotate, Widths, attend, check_backend
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError


@ATTENTIONS.register("multihead")
class MultiHeadAttention(nn.Module):
    """``softmax(q k^T * scale) v`` per head; MHA, GQA and MQA differ in the number of key/value heads only.

    Args:
        d_model, n_heads, n_kv_heads, d_head: sizes; n_heads * d_head need not equal d_model. Query head h reads
            key/value head ``h // (n_heads / n_kv_heads)``.
        linear_bias: whether the projections have biases, unless `bias` says otherwise.
        dropout: probability of dropping an attention weight, training only.
        kind: ``local`` or ``global``, what this layer is in model.layer_pattern.
        causal: whether a query sees itself and what is before it, or everything.
        window: in a local layer a query sees itself and the ``window - 1`` tokens before it; null for all of them.
        scale: factor on the scores; null for ``1 / sqrt(d_head)``.
        bias: the projections with a bias: ``none``, ``qkv``, ``out`` or ``all`` (the gate's too); null for none or all.
        sinks: whether every head has a learned logit that takes its share of the softmax and has no value.
        gate: ``headwise`` multiplies what a head returns by ``sigmoid(w_h x)``, ``elementwise`` each of its numbers
            by one of its own; null for neither.
        backend: ``fused`` (`ops.attention`, memory linear in length on a CPU), ``sdpa`` (torch's kernels), ``eager``
            (matmul, softmax, matmul), or ``auto``: the first of the three that can compute the choice here.
        qk: module applied to queries and keys before the scores (qk_norm), or None.
        softcap: the scaled score s becomes ``softcap * tanh(s / softcap)`` before the mask; None for s. Not with sdpa.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``; key_mask ``(B, L)``, True where a key may be seen;
        cache: the one of this module, see `cache.KVCache`.
    Raises: ConfigError for a window below 1 or without causality, an unknown name, or what `check_backend` refuses.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Shazeer 2019, arXiv:1911.02150; Ainslie 2023, arXiv:2305.13245;
        window: Beltagy et al. 2020, arXiv:2004.05150; sinks: gpt-oss, arXiv:2508.10925; gate: Qiu et al. 2025,
        arXiv:2505.06708, section 2; biases of q, k and v alone: Qwen, arXiv:2309.16609.
    """

    w_q: nn.Parameter
    w_k: nn.Parameter
    w_v: nn.Parameter
    w_o: nn.Parameter
    w_gate: nn.Parameter | None
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None
    v_bias: nn.Parameter | None
    o_bias: nn.Parameter | None
    gate_bias: nn.Parameter | None
    sink: nn.Parameter | None

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        linear_bias: bool,
        dropout: float = 0.0,
        kind: str = "local",
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        bias: str | None = None,
        sinks: bool = False,
        gate: str | None = None,
        backend: str = "auto",
        qk: Rotate | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"model.attn.window={window} must be at least 1 (the query itself), or null for no limit")
        if window is not None and not causal:
            raise ConfigError(
                f"model.attn.window={window} has no agreed meaning with model.attn.causal=false; set one of them back"
            )
        for key, value, allowed in (("bias", bias, tuple(_BIASED)), ("gate", gate, ("headwise", "elementwise"))):
            if value is not None and value not in allowed:
                raise ConfigError(f"model.attn.{key}='{value}' is not one of {', '.join(allowed)}, or null")
        check_backend(backend, causal=causal, dropout=dropout, softcap=softcap, sinks=sinks)
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head
        self.kind, self.causal, self.window = kind, causal, window if kind == "local" else None
        self.dropout, self.softcap = dropout, softcap
        self.scale = d_head**-0.5 if scale is None else scale
        self.backend, self.qk = backend, qk
        sizes = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head}
        table = self.table(**sizes, linear_bias=linear_bias, bias=bias, sinks=sinks, gate=gate)
        declare(self, table, optional=("q_bias", "k_bias", "v_bias", "o_bias", "w_gate", "gate_bias", "sink"))

    @staticmethod
    def table(
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        linear_bias: bool,
        bias: str | None = None,
        sinks: bool = False,
        gate: str | None = None,
    ) -> Table:
        wide, narrow = n_heads * d_head, n_kv_heads * d_head
        table = {
            "w_q": Param((wide, d_model), "query"),
            "w_k": Param((narrow, d_model), "query"),
            "w_v": Param((narrow, d_model), "matrix"),
            "w_o": Param((d_model, wide), "out"),
        }
        sizes = {"q_bias": wide, "k_bias": narrow, "v_bias": narrow, "o_bias": d_model}
        if gate is not None:
            sizes["gate_bias"] = n_heads if gate == "headwise" else wide
            table["w_gate"] = Param((sizes["gate_bias"], d_model), "matrix")
        biased = _BIASED[bias or ("all" if linear_bias else "none")]
        table.update({name: Param((size,), "bias") for name, size in sizes.items() if name in biased})
        return {**table, "sink": Param((n_heads,), "bias")} if sinks else table

    @staticmethod
    def widths(*, n_heads: int, n_kv_heads: int, d_head: int) -> Widths:
        return Widths(turned=d_head, scores=2 * n_heads * d_head, cache=2 * n_kv_heads * d_head)

    def forward(
        self,
        x_BLD: Tensor,
        rotate: Rotate | None = None,
        key_mask: Tensor | None = None,
        slopes: Tensor | None = None,
        bias: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        q_BLHK = torch.unflatten(F.linear(x_BLD, self.w_q, self.q_bias), -1, (self.n_heads, self.d_head))
        k_BLGK = torch.unflatten(F.linear(x_BLD, self.w_k, self.k_bias), -1, (self.n_kv_heads, self.d_head))
        v_BLGK = torch.unflatten(F.linear(x_BLD, self.w_v, self.v_bias), -1, (self.n_kv_heads, self.d_head))
        if self.qk is not None:
            q_BLHK, k_BLGK = self.qk(q_BLHK, k_BLGK)
        k_BMGK, v_BMGK = (k_BLGK, v_BLGK) if cache is None else cache.extend(k_BLGK, v_BLGK, window=self.window)
        if rotate is not None:
            q_BLHK, k_BMGK = rotate(q_BLHK, k_BMGK)
        out_BLHK = attend(
            q_BLHK,
            k_BMGK,
            v_BMGK,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            key_mask=key_mask,
            softcap=self.softcap,
            slopes=slopes,
            bias=bias,
            sinks=self.sink,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        if self.w_gate is not None:
            gate = torch.sigmoid(F.linear(x_BLD, self.w_gate, self.gate_bias))
            out_BLHK = out_BLHK * torch.unflatten(gate, -1, (self.n_heads, -1))  # one number, or K of them, per head
        return F.linear(out_BLHK.flatten(-2), self.w_o, self.o_bias)


_BIASED: dict[str, tuple[str, ...]] = {
    "none": (),
    "qkv": ("q_bias", "k_bias", "v_bias"),
    "out": ("o_bias",),
    "all": ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias"),
}
