"""Rotary encoding of queries and keys."""

# Shapes: B batch, L length, H query heads, G key heads, K d_head, R the rotary part of K
from __future__ import annotations

import torch
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Table
from andrea_ablate.positions.scaling import NoScaling
from andrea_ablate.positions.tables import POSITIONS, AngleTables
from andrea_ablate.registry import ConfigError


@POSITIONS.register("rope")
class RotaryPosition(nn.Module):
    """Rotary encoding: pair i of a query or key at position m is turned by the angle ``m * theta^(-2i/R)``.

    Args:
        d_head: width of a head; theta: base of the frequencies.
        pairing: ``interleaved`` pairs dimension 2i with 2i + 1 (the paper and the lecture), ``half`` pairs i with
            i + R/2 (Llama weights); a fixed permutation of the dimensions turns one into the other.
        rotary_fraction: ``R = rotary_fraction * K`` rounded down; the dimensions after the first R are not turned.
        rotated: the layers whose queries and keys are turned: ``all``, ``local`` or ``global`` (model.layer_pattern).
        local_theta: base in the local layers; null for theta.
        scaled: the layers whose frequencies `scaling` changes: ``all``, ``local`` or ``global``.
        scaling: of SCALINGS; None for plain frequencies.
    Shape: q ``(B, L, H, K)`` and k ``(B, L, G, K)`` -> the same; the rotation is computed in fp32 or wider.
    Raises: ConfigError if R is odd or 0, theta is not positive, or pairing or a kind of layer is unknown.
    Source: Su et al. 2021, arXiv:2104.09864, equation 15; a part of the head as in GPT-J (Wang & Komatsuzaki 2021),
        layers without rotation as in Cohere 2 (arXiv:2504.00698) and SmolLM3, two bases as in Gemma 3 (2503.19786).
    """

    seam = "qk"
    max_len: int | None = None

    def __init__(
        self,
        *,
        d_head: int,
        theta: float = 10000.0,
        pairing: str = "interleaved",
        rotary_fraction: float = 1.0,
        rotated: str = "all",
        local_theta: float | None = None,
        scaled: str = "all",
        scaling: NoScaling | None = None,
    ) -> None:
        super().__init__()
        rotary = int(d_head * rotary_fraction)
        if rotary_fraction == 1 and d_head % 2:
            raise ConfigError(
                f"pos=rope needs an even head width, not {d_head}; change model.n_heads or model.d_head "
                "(attn=mla: model.attn.qk_rope_head_dim)"
            )
        if not 0 < rotary <= d_head or rotary % 2:
            raise ConfigError(
                f"model.pos.rotary_fraction={rotary_fraction} turns {rotary} of the {d_head} dimensions of a head; "
                f"their number must be even, from 2 to {d_head}"
            )
        if pairing not in ("half", "interleaved"):
            raise ConfigError(f"pos: pairing='{pairing}' is not one of half, interleaved")
        for key, value in (("rotated", rotated), ("scaled", scaled)):
            if value not in ("all", "local", "global"):
                raise ConfigError(f"pos: {key}='{value}' is not one of all, local, global")
        self.pairing = pairing
        self.tables = {
            kind: AngleTables(rotary, base, scaling if scaled in ("all", kind) else None)
            for kind, base in (("local", theta if local_theta is None else local_theta), ("global", theta))
            if rotated in ("all", kind)
        }

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, q: Tensor, k: Tensor, kind: str = "local", start: int = 0) -> tuple[Tensor, Tensor]:
        """Turn the queries and keys of a layer of this kind.

        Args:
            start: position of the first query. The last query and the last key are of one token; there may be more
                keys, of tokens before.
        """
        if kind not in self.tables:
            return q, k
        end = start + q.shape[1]
        cos_LP, sin_LP = self.tables[kind](end, q.device, torch.promote_types(q.dtype, torch.float32))
        if q.shape[1] == k.shape[1]:
            return ops.qk_rope(q, k, cos_LP[start:], sin_LP[start:], pairing=self.pairing)
        turned_q, turned_k = (
            ops.qk_rope(x, x[:, :, :0], cos_LP[end - x.shape[1] :], sin_LP[end - x.shape[1] :], pairing=self.pairing)[0]
            for x in (q, k)
        )
        return turned_q, turned_k
