"""Reports: what stored runs say about the arms of a sweep."""

from andrea_ablate.report.compare import ArmSummary, Comparison, RunRow, arm_key, compare, save

__all__ = ["ArmSummary", "Comparison", "RunRow", "arm_key", "compare", "save"]
