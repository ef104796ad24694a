"""Context extension: how the frequencies of rope change for sequences longer than those of training.

Names and arithmetic are those of Hugging Face's configurations (``rope_parameters``), so that their weights read alike.
"""

# Shapes: P pairs of dimensions; frequencies are radians per position, fp64
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from andrea_ablate.registry import ConfigError, Registry

SCALINGS: Registry[NoScaling] = Registry("scaling")


@SCALINGS.register("none")
class NoScaling:
    """``theta^(-2i/dim)`` for pair i, at any length. Su et al. 2021, arXiv:2104.09864, equation 15."""

    magnitude = 1.0  # factor on the cosines and sines, so squared on the scores

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        """``(dim/2,)`` for a sequence of `length` tokens."""
        return _plain(theta, dim)

    def regime(self, length: int) -> int:
        """Lengths of one regime share their frequencies."""
        return 0


@SCALINGS.register("linear")
class LinearScaling(NoScaling):
    """Position interpolation: every frequency divided by `factor`, so that `factor` times the length looks as before.

    Args:
        factor: new length over the old one, >= 1.
    Source: Chen et al. 2023, arXiv:2306.15595, equation 4.
    """

    def __init__(self, *, factor: float = 4.0) -> None:
        self.factor = _at_least_one(factor)

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        return _plain(theta, dim) / self.factor


@SCALINGS.register("ntk")
class NTKScaling(NoScaling):
    """NTK-aware: the base becomes ``theta * factor^(dim / (dim - 2))``; slow pairs are interpolated, fast ones not.

    Args:
        factor: new length over the old one, >= 1.
    Source: Peng et al. 2023, arXiv:2309.00071, definition 1.
    """

    def __init__(self, *, factor: float = 4.0) -> None:
        self.factor = _at_least_one(factor)

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        return _plain(_stretched(theta, self.factor, dim), dim)


@SCALINGS.register("dynamic_ntk")
class DynamicNTKScaling(NoScaling):
    """NTK-aware with the factor ``factor * length / original_len - (factor - 1)``: plain up to the original length.

    Args:
        factor: how fast the base grows with the length, >= 1.
        original_len: length of training; null for model.max_seq_len.
    Source: Peng et al. 2023, arXiv:2309.00071, appendix B.1; the form with a factor is Hugging Face's.
    """

    def __init__(self, *, max_seq_len: int, factor: float = 4.0, original_len: int | None = None) -> None:
        self.factor, self.original_len = _at_least_one(factor), _original(original_len, max_seq_len)

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        factor = self.factor * self.regime(length) / self.original_len - (self.factor - 1)
        return _plain(_stretched(theta, factor, dim), dim)

    def regime(self, length: int) -> int:
        return max(length, self.original_len)


@SCALINGS.register("yarn")
class YarnScaling(NoScaling):
    """YaRN: slow pairs are interpolated, fast ones left alone, with a ramp over those between; scores are sharpened.

    Args:
        factor: new length over the old one, >= 1; 1 is plain rope.
        original_len: length of training; null for model.max_seq_len.
        beta_fast, beta_slow: a pair that turns more often than `beta_fast` times over the original length is left
            alone, one that turns less often than `beta_slow` times is interpolated.
        truncate: whether the ramp begins and ends at whole pairs.
        attention_factor: factor on cosines and sines, the root of the paper's 1/t; null for ``0.1 ln(factor) + 1``.
    Source: Peng et al. 2023, arXiv:2309.00071, equations 19 to 22; truncation is that of its published code.
    """

    def __init__(
        self,
        *,
        max_seq_len: int,
        factor: float = 4.0,
        original_len: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        attention_factor: float | None = None,
    ) -> None:
        if not beta_fast > beta_slow > 0:
            raise ConfigError(f"scaling: beta_fast={beta_fast} must be above beta_slow={beta_slow}, and both above 0")
        self.factor, self.original_len = _at_least_one(factor), _original(original_len, max_seq_len)
        self.beta_fast, self.beta_slow, self.truncate = beta_fast, beta_slow, truncate
        self.magnitude = 0.1 * math.log(factor) + 1 if attention_factor is None else attention_factor

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        if not theta > 1:
            raise ConfigError(f"scaling=yarn needs model.pos.theta above 1, not {theta}")

        def pair_that_turns(times: float) -> float:
            return dim * math.log(self.original_len / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        interpolated_P = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
        return _plain(theta, dim) * (1 - interpolated_P * (1 - 1 / self.factor))


@SCALINGS.register("longrope")
class LongRopeScaling(NoScaling):
    """LongRoPE: each pair's frequency divided by a factor of its own, one list up to the original length, one past it.

    Args:
        factor: new length over the old one, >= 1.
        original_len: length of training; null for model.max_seq_len.
        short_factor, long_factor: one number per pair, found by search; null for ones, and for `factor` throughout.
        attention_factor: factor on cosines and sines; null for ``sqrt(1 + ln(factor) / ln(original_len))``.
    Raises: ConfigError for a list that has not one number per pair.
    Source: Ding et al. 2024, arXiv:2402.13753; the attention factor is that of Phi-3 (arXiv:2404.14219).
    """

    def __init__(
        self,
        *,
        max_seq_len: int,
        factor: float = 4.0,
        original_len: int | None = None,
        short_factor: Sequence[float] | None = None,
        long_factor: Sequence[float] | None = None,
        attention_factor: float | None = None,
    ) -> None:
        self.factor, self.original_len = _at_least_one(factor), _original(original_len, max_seq_len)
        self.short_factor, self.long_factor = short_factor, long_factor
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(self.original_len)) if factor > 1 else 1.0
        self.magnitude = attention_factor

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        pairs = dim // 2
        short = [1.0] * pairs if self.short_factor is None else self.short_factor
        long = [self.factor] * pairs if self.long_factor is None else self.long_factor
        for name, given in (("short_factor", short), ("long_factor", long)):
            numbers = isinstance(given, Sequence) and all(isinstance(f, (int, float)) and f > 0 for f in given)
            if not numbers or len(given) != pairs:
                raise ConfigError(
                    f"model.scaling.{name}={given} must be {pairs} numbers above 0, one per pair of dimensions"
                )
        return _plain(theta, dim) / torch.tensor(long if self.regime(length) else short, dtype=torch.float64)

    def regime(self, length: int) -> int:
        return int(length > self.original_len)


@SCALINGS.register("llama3")
class Llama3Scaling(NoScaling):
    """Llama 3.1: wavelengths above ``original_len / low_freq_factor`` are interpolated, those below ``original_len /
    high_freq_factor`` left alone, the band between is mixed by how many times a pair turns over the original length.

    Args:
        factor: new length over the old one, >= 1.
        original_len: length of training; null for model.max_seq_len.
        low_freq_factor, high_freq_factor: turns over the original length at which the band begins and ends.
    Source: Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.3; the bands are those of its published code.
    """

    def __init__(
        self,
        *,
        max_seq_len: int,
        factor: float = 8.0,
        original_len: int | None = None,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
    ) -> None:
        if not high_freq_factor > low_freq_factor > 0:
            raise ConfigError(
                f"scaling: high_freq_factor={high_freq_factor} must be above low_freq_factor={low_freq_factor}, "
                "and both above 0"
            )
        self.factor, self.original_len = _at_least_one(factor), _original(original_len, max_seq_len)
        self.low, self.high = low_freq_factor, high_freq_factor

    def frequencies(self, theta: float, dim: int, length: int) -> Tensor:
        plain_P = _plain(theta, dim)
        turns_P = self.original_len * plain_P / (2 * math.pi)
        kept_P = ((turns_P - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain_P * (kept_P + (1 - kept_P) / self.factor)


def _plain(theta: float, dim: int) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _stretched(theta: float, factor: float, dim: int) -> float:
    """A base at which the slowest of the dim/2 pairs is slower by `factor`; a single pair has no base."""
    return float(theta * factor ** (dim / (dim - 2))) if dim > 2 else theta


def _at_least_one(factor: float) -> float:
    if not factor >= 1:
        raise ConfigError(f"scaling: factor={factor} must be at least 1 (the length that rope was trained for)")
    return factor


def _original(original_len: int | None, max_seq_len: int) -> int:
    length = max_seq_len if original_len is None else original_len
    if length < 2:
        raise ConfigError(f"scaling: original_len={length} must be at least 2, or null for model.max_seq_len")
    return length
