"""Loss spikes: found online, counted with their exposure, and compared between arms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 64  # steps that location and scale are taken from
FEWEST = 16  # before that many are seen nothing is flagged
OPEN, CLOSE = 6.0, 3.0  # scales above the location at which a spike starts and ends
SMALLEST = 1e-3  # nats, of a scale: where the loss hardly moves, its last digits are no spikes
LONGEST = 128  # flagged steps after which it is a new level, not a spike


@dataclass
class Spike:
    """One spike. `end` is the first step back in range; None for a run that ended in it or stayed on a new level."""

    start: int  # step
    peak: int  # step of the highest loss
    baseline: float  # location before it, nats per token
    height: float  # highest loss minus baseline, nats; infinite for a loss that was not finite
    lost: float  # sum over its steps of loss minus baseline, nats; finite losses only
    end: int | None = None

    @property
    def recovery_steps(self) -> int | None:
        """Steps from start to end."""
        return None if self.end is None else self.end - self.start


class SpikeDetector:
    """Flags steps whose loss is far above the recent ones. It never learns from a step that it flagged.

    Location is the median of the last WINDOW losses that were not flagged, scale is 1.4826 times their median absolute
    deviation, at least SMALLEST. A spike opens above location + OPEN scales and closes at or below location + CLOSE
    scales; a loss that is not finite always opens or prolongs one. Both stay as they were while it lasts. After LONGEST
    flagged steps the spike is closed as a new level, and the window starts anew.
    """

    def __init__(self) -> None:
        self.window: list[float] = []
        self.current: Spike | None = None
        self.flagged = 0  # steps of the current spike
        self.scale = 0.0

    def update(self, step: int, loss: float) -> Spike | None:
        """Take the loss of the next step; return the spike when one opens at this step.

        It goes on to change, in `current`, until it closes.
        """
        if self.current is not None:
            self._prolong(step, loss)
            return None
        known = len(self.window) >= FEWEST
        location = statistics.median(self.window) if self.window else loss
        if known:
            self.scale = max(SMALLEST, 1.4826 * statistics.median(abs(x - location) for x in self.window))
        if math.isfinite(loss) and not (known and loss > location + OPEN * self.scale):
            self.window = [*self.window[1 - WINDOW :], loss]
            return None
        if not math.isfinite(location):
            location = math.nan  # the run began with it
        self.current, self.flagged = Spike(step, step, location, -math.inf, 0.0), 0
        opened = self.current
        self._prolong(step, loss)
        return opened

    def _prolong(self, step: int, loss: float) -> None:
        spike = self.current
        assert spike is not None
        if math.isfinite(loss) and self.window and loss <= spike.baseline + CLOSE * self.scale:
            spike.end, self.current = step, None
            self.window = [*self.window[1 - WINDOW :], loss]
            return
        self.flagged += 1
        height = loss - spike.baseline if math.isfinite(loss) else math.inf
        if height > spike.height:
            spike.peak, spike.height = step, height
        if math.isfinite(height):
            spike.lost += height
        if self.flagged >= LONGEST:
            self.current, self.window = None, []

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` goes on exactly."""
        current = None if self.current is None else asdict(self.current)
        return {"window": list(self.window), "current": current, "flagged": self.flagged, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        current = state["current"]
        self.window, self.flagged, self.scale = list(state["window"]), state["flagged"], state["scale"]
        self.current = None if current is None else Spike(**current)


def find_spikes(losses: Iterable[tuple[int, float]]) -> list[Spike]:
    """The spikes of a whole run, from its (step, loss) pairs in order."""
    detector = SpikeDetector()
    return [spike for step, loss in losses if (spike := detector.update(step, loss)) is not None]


@dataclass(frozen=True)
class RateRatio:
    """Spikes per step of a treatment over those of a baseline, with its exact interval."""

    ratio: float | None  # None where neither side has a spike
    low: float
    high: float  # infinite where the baseline has none


def spike_rate_ratio(treatment: tuple[int, int], baseline: tuple[int, int], confidence: float = 0.95) -> RateRatio:
    """Ratio of two Poisson rates: given the total, the treatment's count is binomial (Clopper-Pearson interval).

    Args:
        treatment, baseline: (spikes, steps), steps > 0.
    Raises: ValueError for counts below 0 or without steps.
    Source: Przyborowski & Wilenski 1940, Biometrika 31; Clopper & Pearson 1934, Biometrika 26.
    """
    (k, exposure), (m, other) = treatment, baseline
    if min(k, m) < 0 or min(exposure, other) <= 0:
        raise ValueError(f"spike_rate_ratio: {treatment} and {baseline} must be (spikes >= 0, steps > 0)")
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(k, m + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, m, 1 - tail)) if m else 1.0

    def rate_ratio(share: float) -> float:
        return math.inf if share == 1 else share / (1 - share) * other / exposure

    seen = None if k == m == 0 else rate_ratio(k / (k + m))
    return RateRatio(seen, rate_ratio(low), rate_ratio(high))
