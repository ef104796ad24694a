"""The registry of position encodings, and the cosines and sines that several of them read."""

# Shapes: L length, P pairs of dimensions
from __future__ import annotations

import torch
from torch import Tensor, nn

from andrea_ablate.positions.scaling import NoScaling
from andrea_ablate.registry import ConfigError, Registry

POSITIONS: Registry[nn.Module] = Registry("pos")


class AngleTables:
    """Cosines and sines of ``m * theta^(-2i/dim)``, shape ``(length, dim/2)``, computed in fp64; the longest is kept.

    Args:
        scaling: changes the frequencies, and multiplies both tables by its magnitude.
    Not a buffer: casting the model to bf16 must not round the angles (256 and 257 are the same number in bf16).
    """

    def __init__(self, dim: int, theta: float, scaling: NoScaling | None = None) -> None:
        if not theta > 0:
            raise ConfigError(f"pos: theta={theta} must be positive, such as 10000")
        self.dim, self.theta, self.scaling = dim, theta, scaling or NoScaling()
        with torch.device("cpu"):  # on "meta", where plans build, torch.arange would load torch's compiler
            self.scaling.frequencies(theta, dim, length=1)  # what does not fit is refused now, not in the first step
        self._kept: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._regime = 0

    def __call__(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, regime = (device, dtype), self.scaling.regime(length)
        if regime != self._regime:
            self._kept.clear()
            self._regime = regime
        if key not in self._kept or len(self._kept[key][0]) < length:
            # Kept for training, whoever asks first: what is made in inference mode cannot be saved for a backward pass.
            with torch.inference_mode(False):
                self._kept[key] = self._make(length, device, dtype)
        cos_LP, sin_LP = self._kept[key]
        return cos_LP[:length], sin_LP[:length]

    def _make(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequency_P, magnitude = self.scaling.frequencies(self.theta, self.dim, length), self.scaling.magnitude
        angle_LP = torch.arange(length, dtype=torch.float64).outer(frequency_P)
        return (angle_LP.cos() * magnitude).to(device, dtype), (angle_LP.sin() * magnitude).to(device, dtype)
