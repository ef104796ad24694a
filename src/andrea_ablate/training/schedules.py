"""Learning-rate schedules: each gives the factor on the peak at step 1 … total, after a linear warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from andrea_ablate.registry import ConfigError, Registry

Shape = Callable[[float], float]
SCHEDULES: Registry[Shape] = Registry("schedule")


@SCHEDULES.register("cosine")
def cosine(*, min_ratio: float) -> Shape:
    """Half a cosine from 1 to min_ratio. Source: Loshchilov & Hutter 2017, arXiv:1608.03983."""
    _check_ratio(min_ratio)
    return lambda u: min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * u))


@SCHEDULES.register("linear")
def linear(*, min_ratio: float) -> Shape:
    """A straight line from 1 to min_ratio. Source: Defazio et al. 2023, arXiv:2310.07831."""
    _check_ratio(min_ratio)
    return lambda u: 1 - (1 - min_ratio) * u


@SCHEDULES.register("constant")
def constant() -> Shape:
    """1 throughout. Source: Hägele et al. 2024, arXiv:2405.18392, section 2, where it stands before the decay."""
    return lambda u: 1.0


@SCHEDULES.register("wsd")
def wsd(*, decay_fraction: float, min_ratio: float) -> Shape:
    """Warm-up, stable, decay: 1, then a line to min_ratio over the last decay_fraction of what follows the warm-up.

    Source: Hu et al. 2024 (MiniCPM), arXiv:2404.06395, section 4.
    """
    _check_ratio(min_ratio)
    if not 0 < decay_fraction <= 1:
        raise ConfigError(f"schedule: decay_fraction={decay_fraction} must be above 0 and at most 1; or use constant")
    return lambda u: 1 - (1 - min_ratio) * max(0.0, u - (1 - decay_fraction)) / decay_fraction


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(*, warmup: int, total: int) -> Shape:
    """``sqrt(warmup / step)``: does not know how long the run will be. Source: Vaswani et al. 2017, equation 3.

    Args:
        warmup, total: in steps; without a warm-up it is ``1 / sqrt(step)``.
    """
    return lambda u: math.sqrt(max(1, warmup) / max(1, warmup + u * (total - warmup)))


def _check_ratio(min_ratio: float) -> None:
    if not 0 <= min_ratio <= 1:
        raise ConfigError(f"schedule: min_ratio={min_ratio} must be between 0 and 1")


def schedule(node: Mapping[str, Any], warmup: int, total: int) -> Callable[[int], float]:
    """The factor at optimizer step s (1 … total): ``s / warmup`` up to the peak at s = warmup, then the chosen shape.

    Args:
        node: choice node; warmup, total: in steps. The last step gets the shape's last value.
    """
    options = {key: value for key, value in node.items() if key != "warmup_tokens"}
    shape = SCHEDULES.build(options, warmup=warmup, total=total)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return shape((step - warmup) / max(1, total - warmup))

    return factor
