"""Position encodings. Each names its seam: ``embedding`` (added once to the stream), ``qk`` (every layer) or none."""

# Shapes: B batch, L length, D d_model, H heads (query or key), K d_head
from __future__ import annotations

import torch
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.registry import ConfigError, Registry

POSITIONS: Registry[nn.Module] = Registry("pos")


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

    def forward(self, x_BLD: Tensor) -> Tensor:
        length, limit = x_BLD.shape[1], self.vectors.shape[0]
        if length > limit:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than the position table, model.max_seq_len={limit}; "
                "raise model.max_seq_len or choose pos=rope"
            )
        return x_BLD + self.vectors[:length].to(x_BLD.dtype)


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

    def forward(self, x_BLD: Tensor) -> Tensor:
        cos_LK, sin_LK = self.tables(x_BLD.shape[1], x_BLD.device, torch.promote_types(x_BLD.dtype, torch.float32))
        return x_BLD + torch.stack((sin_LK, cos_LK), dim=-1).flatten(1).to(x_BLD.dtype)


@POSITIONS.register("rope")
class RotaryPosition(nn.Module):
    """Rotary encoding: pair i of a query or key at position m is turned by the angle ``m * theta^(-2i/K)``.

    Args:
        d_head: width of a head, even; theta: base of the frequencies.
        pairing: ``interleaved`` pairs dimension 2i with 2i + 1 (the paper and the lecture), ``half`` pairs i with
            i + K/2 (Llama weights); a fixed permutation of the dimensions turns one into the other.
    Shape: q ``(B, L, H, K)`` and k ``(B, L, G, K)`` -> the same; the rotation is computed in fp32 or wider.
    Raises: ConfigError if d_head is odd, theta is not positive or pairing is unknown.
    Source: Su et al. 2021, arXiv:2104.09864, equation 15.
    """

    seam = "qk"
    max_len: int | None = None

    def __init__(self, *, d_head: int, theta: float = 10000.0, pairing: str = "interleaved") -> None:
        super().__init__()
        if d_head % 2:
            raise ConfigError(f"pos=rope needs an even head width, not {d_head}; change model.n_heads or model.d_head")
        if pairing not in ("half", "interleaved"):
            raise ConfigError(f"pos: pairing='{pairing}' is not one of half, interleaved")
        self.pairing = pairing
        self.tables = AngleTables(d_head, theta)

    @staticmethod
    def table() -> Table:
        return {}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos_LK, sin_LK = self.tables(q.shape[1], q.device, torch.promote_types(q.dtype, torch.float32))
        return ops.qk_rope(q, k, cos_LK, sin_LK, pairing=self.pairing)


class AngleTables:
    """Cosines and sines of ``m * theta^(-2i/dim)``, shape ``(length, dim/2)``, computed in fp64; the longest is kept.

    Not a buffer: casting the model to bf16 must not round the angles (256 and 257 are the same number in bf16).
    """

    def __init__(self, dim: int, theta: float) -> None:
        if not theta > 0:
            raise ConfigError(f"pos: theta={theta} must be positive, such as 10000")
        self.dim, self.theta = dim, theta
        self._kept: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (device, dtype)
        if key not in self._kept or len(self._kept[key][0]) < length:
            # Kept for training, whoever asks first: what is made in inference mode cannot be saved for a backward pass.
            with torch.inference_mode(False):
                self._kept[key] = self._make(length, device, dtype)
        cos_LK, sin_LK = self._kept[key]
        return cos_LK[:length], sin_LK[:length]

    def _make(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequency = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angle = torch.arange(length, dtype=torch.float64).outer(frequency)
        return angle.cos().to(device, dtype), angle.sin().to(device, dtype)
