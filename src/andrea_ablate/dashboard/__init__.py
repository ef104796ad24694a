"""The report's page over the run store while a sweep runs: ``python -m andrea_ablate.dashboard``."""
