"""Statistics of runs: numbers in, frozen dataclasses out; knows nothing of models, files or configuration."""

from andrea_ablate.analysis.stats import Effect, Estimate, holm, mean_interval, paired_effect, seeds_needed

__all__ = ["Effect", "Estimate", "holm", "mean_interval", "paired_effect", "seeds_needed"]
