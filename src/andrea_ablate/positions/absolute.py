"""Encodings that say where a token stands, added once to the embeddings; and none at all."""

# Shapes: B batch, L length, D d_model
from __future__ import annotations

import torch
from torch import Tensor, nn

from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.positions.tables import POSITIONS, AngleTables
from andrea_ablate.registry import ConfigError


@POSITIONS.register("none")
class NoPosition(nn.Module):
    """No encoding: order reaches the model through the causal mask alone. Haviv et al. 2022, arXiv:2203.16634."""

    seam = None
    max_len: int | None = None

    @staticmethod
    def table() -> Table:
        return {}


@POSITIONS.register("learned")
class LearnedPosition(nn.Module):
    """A learned vector per position, added to the token embedding.

    Args:
        d_model: width; max_seq_len: number of positions, the longest sequence the model accepts.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Raises: ConfigError for a sequence longer than the table.
    Source: Radford et al. 2018 (GPT).
    """

    vectors: nn.Parameter
    seam = "embedding"

    def __init__(self, *, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.max_len: int | None = max_seq_len
        declare(self, self.table(d_model=d_model, max_seq_len=max_seq_len))

    @staticmethod
    def table(*, d_model: int, max_seq_len: int) -> Table:
        return {"vectors": Param((max_seq_len, d_model), "position")}

    def forward(self, x_BLD: Tensor, start: int = 0) -> Tensor:
        end, limit = start + x_BLD.shape[1], self.vectors.shape[0]
        if end > limit:
            raise ConfigError(
                f"a sequence of {end} tokens is longer than the position table, model.max_seq_len={limit}; "
                "raise model.max_seq_len or choose pos=rope"
            )
        return x_BLD + self.vectors[start:end].to(x_BLD.dtype)


@POSITIONS.register("sine")
class SinePosition(nn.Module):
    """Fixed sinusoids added to the token embedding: ``p[m, 2i] = sin(m / theta^(2i/D))``, ``p[m, 2i+1] = cos(…)``.

    Args:
        d_model: width, even; theta: longest wavelength is ``2 pi theta`` positions.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Raises: ConfigError if d_model is odd or theta is not positive.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5 (without its sqrt(d_model) embedding scale).
    """

    seam = "embedding"
    max_len: int | None = None

    def __init__(self, *, d_model: int, theta: float = 10000.0) -> None:
        super().__init__()
        if d_model % 2:
            raise ConfigError(f"pos=sine needs an even model.d_model, not {d_model}; try {d_model + 1}")
        self.tables = AngleTables(d_model, theta)

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, x_BLD: Tensor, start: int = 0) -> Tensor:
        end, wide = start + x_BLD.shape[1], torch.promote_types(x_BLD.dtype, torch.float32)
        cos_LK, sin_LK = (table[start:] for table in self.tables(end, x_BLD.device, wide))
        return x_BLD + torch.stack((sin_LK, cos_LK), dim=-1).flatten(1).to(x_BLD.dtype)
