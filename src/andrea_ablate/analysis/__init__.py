"""Statistics of runs: numbers in, frozen dataclasses out; knows nothing of models, files or configuration."""

from andrea_ablate.analysis.rules import (
    Decision,
    Sensitivity,
    Verdict,
    enough_seeds,
    equivalence,
    factorial_effects,
    lr_sensitivity,
    ratio,
    seeds_for_equivalence,
    seeds_for_power,
    sequential_level,
    stability,
    superiority,
)
from andrea_ablate.analysis.spikes import RateRatio, Spike, SpikeDetector, find_spikes, spike_rate_ratio
from andrea_ablate.analysis.stats import Effect, Estimate, holm, mean_interval, paired_effect, seeds_needed

__all__ = [
    "Decision",
    "Effect",
    "Estimate",
    "RateRatio",
    "Sensitivity",
    "Spike",
    "SpikeDetector",
    "Verdict",
    "enough_seeds",
    "equivalence",
    "factorial_effects",
    "find_spikes",
    "holm",
    "lr_sensitivity",
    "mean_interval",
    "paired_effect",
    "ratio",
    "seeds_for_equivalence",
    "seeds_for_power",
    "seeds_needed",
    "sequential_level",
    "spike_rate_ratio",
    "stability",
    "superiority",
]
