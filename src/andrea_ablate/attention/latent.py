"""Multi-head latent attention: a small latent per token in place of keys and values."""

# Shapes: B batch, L length, D d_model, C latent, H heads, K width of a query, R its part for rope, N width of a value,
# X a key without that part and a value
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.attention.cache import LayerCache
from andrea_ablate.attention.core import ATTENTIONS, Rotate, Widths, attend, check_backend
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError


@ATTENTIONS.register("mla")
class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are made from one small normed latent per token, all that is cached.

    ``c = n(W_dkv x)``, ``k = [W_uk c ; rope(W_kr x)]``, ``v = W_uv c``, ``q = W_uq n(W_dq x)`` (or ``W_q x``). The last
    part of every query, and one key that all heads share, carry the position.

    Args:
        d_model, n_heads, d_head: sizes; d_head is the default of the widths below, in the paper's proportions.
        linear_bias: whether the projections down to the latents and the output projection have biases.
        dropout, kind, scale, backend, softcap: as in MultiHeadAttention; the default scale is that of the whole query.
        q_lora_rank: width of the latent of the queries; null for none.
        kv_lora_rank: width of the latent of keys and values; null for ``4 d_head``.
        qk_nope_head_dim, qk_rope_head_dim: widths of the two parts of a query; null for d_head and ``d_head / 2``.
        v_head_dim: width of a value; null for d_head.
        eps: of the norms of the latents, inside the root, > 0.
        qk: None; the latents are normed already.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``; key_mask ``(B, L)``.
    Raises: ConfigError for a width below 1, eps <= 0, qk_norm, backend=fused with values not as wide as queries, or
        what `check_backend` refuses.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C; the norms are those of its code.
    """

    w_q: nn.Parameter
    w_q_down: nn.Parameter | None
    q_gain: nn.Parameter | None
    w_kv_down: nn.Parameter
    kv_gain: nn.Parameter
    w_kv_up: nn.Parameter
    w_o: nn.Parameter
    q_down_bias: nn.Parameter | None
    kv_down_bias: nn.Parameter | None
    o_bias: nn.Parameter | None

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        d_head: int,
        linear_bias: bool,
        dropout: float = 0.0,
        kind: str = "local",
        q_lora_rank: int | None = None,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        eps: float = 1e-6,
        scale: float | None = None,
        backend: str = "auto",
        qk: Rotate | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        given = {
            "q_lora_rank": q_lora_rank,
            "kv_lora_rank": kv_lora_rank,
            "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim,
            "v_head_dim": v_head_dim,
        }
        for key, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"model.attn.{key}={value} must be at least 1, or null")
        if not eps > 0:
            raise ConfigError(f"model.attn.eps={eps} must be positive, such as 1e-6")
        if qk is not None:
            raise ConfigError(
                "attn=mla norms its latents already, so a norm of queries and keys has no agreed meaning with it; "
                "leave stability=qk_norm away"
            )
        check_backend(backend, causal=True, dropout=dropout, softcap=softcap, sinks=False)
        self.rank, self.nope, self.rotary, self.value = _latent_widths(
            d_head, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        )
        width = self.nope + self.rotary
        if backend == "fused" and self.value != width:
            raise ConfigError(
                f"model.attn.backend=fused needs values as wide as queries, not {self.value} and {width}; "
                "use model.attn.backend=auto"
            )
        self.n_heads, self.kind, self.eps, self.backend = n_heads, kind, eps, backend
        self.dropout, self.softcap = dropout, softcap
        self.scale = width**-0.5 if scale is None else scale
        table = self.table(d_model=d_model, n_heads=n_heads, d_head=d_head, linear_bias=linear_bias, **given)
        declare(self, table, optional=("w_q_down", "q_gain", "q_down_bias", "kv_down_bias", "o_bias"))

    @staticmethod
    def table(
        *,
        d_model: int,
        n_heads: int,
        d_head: int,
        linear_bias: bool,
        q_lora_rank: int | None = None,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
    ) -> Table:
        rank, nope, rotary, value = _latent_widths(d_head, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        table = {
            "w_q": Param((n_heads * (nope + rotary), q_lora_rank or d_model), "query"),
            "w_kv_down": Param((rank + rotary, d_model), "matrix"),
            "kv_gain": Param((rank,), "gain"),
            "w_kv_up": Param((n_heads * (nope + value), rank), "matrix"),
            "w_o": Param((d_model, n_heads * value), "out"),
        }
        sizes = {"kv_down_bias": rank + rotary, "o_bias": d_model}
        if q_lora_rank is not None:
            table |= {"w_q_down": Param((q_lora_rank, d_model), "query"), "q_gain": Param((q_lora_rank,), "gain")}
            sizes["q_down_bias"] = q_lora_rank
        if linear_bias:
            table |= {name: Param((size,), "bias") for name, size in sizes.items()}
        return table

    @staticmethod
    def widths(
        *,
        n_heads: int,
        d_head: int,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
    ) -> Widths:
        rank, nope, rotary, value = _latent_widths(d_head, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        return Widths(turned=rotary, scores=n_heads * (nope + rotary + value), cache=rank + rotary)

    def forward(
        self,
        x_BLD: Tensor,
        rotate: Rotate | None = None,
        key_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        c_BLC = x_BLD
        if self.w_q_down is not None:
            c_BLC = ops.norm(F.linear(x_BLD, self.w_q_down, self.q_down_bias), self.q_gain, eps=self.eps, center=False)
        q_BLHK = torch.unflatten(F.linear(c_BLC, self.w_q), -1, (self.n_heads, -1))
        latent_BMC, rotary_BM1R = self.compress(x_BLD)
        if cache is not None:
            latent_BMC, rotary_BM1R = cache.extend(latent_BMC, rotary_BM1R)
        if rotate is not None:
            nope_BLHK, turned_BLHR = torch.split(q_BLHK, [self.nope, self.rotary], -1)
            turned_BLHR, rotary_BM1R = rotate(turned_BLHR, rotary_BM1R)
            q_BLHK = torch.cat((nope_BLHK, turned_BLHR), -1)
        k_BMHK, v_BMHN = self.expand(latent_BMC, rotary_BM1R)
        out_BLHN = attend(
            q_BLHK,
            k_BMHK,
            v_BMHN,
            scale=self.scale,
            key_mask=key_mask,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return F.linear(out_BLHN.flatten(-2), self.w_o, self.o_bias)

    def compress(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent of keys and values, and the part of the keys that all heads share, not yet turned."""
        both = F.linear(x_BLD, self.w_kv_down, self.kv_down_bias)
        latent_BLC, rotary_BLR = torch.split(both, [self.rank, self.rotary], -1)
        return ops.norm(latent_BLC, self.kv_gain, eps=self.eps, center=False), rotary_BLR.unsqueeze(2)

    def expand(self, latent_BLC: Tensor, rotary_BL1R: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head from what a cache keeps."""
        both_BLHX = torch.unflatten(F.linear(latent_BLC, self.w_kv_up), -1, (self.n_heads, -1))
        nope_BLHK, v_BLHN = torch.split(both_BLHX, [self.nope, self.value], -1)
        return torch.cat((nope_BLHK, rotary_BL1R.expand(-1, -1, self.n_heads, -1)), -1), v_BLHN


def _latent_widths(
    d_head: int, rank: int | None, nope: int | None, rotary: int | None, value: int | None
) -> tuple[int, int, int, int]:
    """Those given, the others in the proportions of DeepSeek-V2: 512, 128, 64 and 128 for heads of 128."""
    return rank or 4 * d_head, nope or d_head, rotary or max(d_head // 2, 1), value or d_head
