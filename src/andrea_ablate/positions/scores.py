"""Encodings that say how far apart two tokens are: added to the scores of every layer, nothing to the embeddings."""

# Shapes: H heads, R distances
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.positions.tables import POSITIONS
from andrea_ablate.registry import ConfigError


@POSITIONS.register("alibi")
class LinearBias(nn.Module):
    """ALiBi: ``-slope_h * (i - j)`` is added to the score of query i and key j; the slopes are fixed.

    Args:
        n_heads: number of query heads.
    Returns: slopes ``(H,)``, for `attention.attend`; never rounded below fp32.
    Source: Press et al. 2021, arXiv:2108.12409, section 3; head counts that are no power of two as in its code.
    """

    seam = "scores"
    max_len: int | None = None

    def __init__(self, *, n_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(n_heads)
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        key = x.device, torch.promote_types(x.dtype, torch.float32)
        if key not in self._kept:
            with torch.inference_mode(False):
                self._kept[key] = torch.tensor(self.slopes, device=key[0], dtype=key[1])
        return {"slopes": self._kept[key]}


def alibi_slopes(n_heads: int) -> list[float]:
    """``2^(-8/n), 2^(-16/n), …, 2^-8`` for n a power of two; else those of the power below, then every other one of the
    power above until there are enough."""
    power = 2 ** int(math.log2(n_heads))
    below, above = ([2 ** (-8 * (i + 1) / n) for i in range(n)] for n in (power, 2 * power))
    return below + above[::2][: n_heads - power]


@POSITIONS.register("t5")
class BucketBias(nn.Module):
    """T5: a learned number per head and bucket of distances is added to the score, the same in every layer.

    The first half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`, and the
    last one holds everything beyond. Without causality half of all buckets are for keys after the query.

    Args:
        n_heads: number of query heads; causal: whether keys after the query are masked.
        buckets: their number, even, >= 4 (a multiple of 4, >= 8 without causality); max_distance: in tokens.
    Returns: bias ``(H, R)``, for `attention.attend`.
    Raises: ConfigError for a number of buckets or a distance that leaves no bucket for either half.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1, with the buckets of its code.
    """

    bucket_bias: nn.Parameter
    seam = "scores"
    max_len: int | None = None

    def __init__(self, *, n_heads: int, causal: bool = True, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        sides = 1 if causal else 2
        exact = buckets // sides // 2
        if buckets % (2 * sides) or exact < 2:
            raise ConfigError(f"pos: buckets={buckets} must be a multiple of {2 * sides} from {4 * sides} up")
        if max_distance <= exact:
            raise ConfigError(
                f"pos: max_distance={max_distance} must be above {exact}, the buckets of one distance each"
            )
        self.causal, self.buckets, self.max_distance = causal, buckets, max_distance
        declare(self, self.table(n_heads=n_heads, buckets=buckets))

    @staticmethod
    def table(*, n_heads: int, buckets: int = 32) -> Table:
        return {"bucket_bias": Param((buckets, n_heads), "position")}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        before_R = torch.arange(self.max_distance + 1, device=x.device)  # what is farther is in the last bucket too
        bucket_R = _bucket(before_R, self.buckets if self.causal else self.buckets // 2, self.max_distance)
        if not self.causal:  # keys after the query stand first, the farthest at the very front
            bucket_R = torch.cat((bucket_R[1:].flip(0) + self.buckets // 2, bucket_R))
        return {"bias": self.bucket_bias[bucket_R].T}


def _bucket(distance_R: Tensor, buckets: int, max_distance: int) -> Tensor:
    exact = buckets // 2
    # In fp32, as where the weights come from: fp64 would put some distances on the other side of a bucket's edge.
    part_R = torch.log(distance_R.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far_R = exact + (part_R * (buckets - exact)).long()
    return torch.where(distance_R < exact, distance_R, far_R.clamp(max=buckets - 1))
