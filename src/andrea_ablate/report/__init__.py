"""Reports: what stored runs say about the arms of a sweep."""

from andrea_ablate.report.compare import ArmSummary, Comparison, Lead, RunRow, Tuned, arm_key, compare, load, save

__all__ = ["ArmSummary", "Comparison", "Lead", "RunRow", "Tuned", "arm_key", "compare", "load", "save"]
