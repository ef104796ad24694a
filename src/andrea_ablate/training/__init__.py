"""Training: optimizers, schedules, the Lightning module, checkpoints, and one run from start to finish."""
