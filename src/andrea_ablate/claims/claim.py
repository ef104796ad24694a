"""A claim, what measuring it gives, and the verdict words. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

KINDS = ("arithmetic", "identity", "init", "systems", "training", "convention")
RULES = {
    "R-EXACT": "equal, or rounding to the digits that the claim prints, or inside the stated band",
    "R-TOL": "largest error on random and adversarial inputs within the tolerance; the negative control must fail",
    "R-RATIO": "95 % t interval of the paired log-ratio over 8 or more seeds, wholly beyond the bound",
    "R-INIT": "95 % t interval over 8 or more seeds of a fitted slope, inside the stated range",
    "R-SUP": "95 % interval of the paired difference beyond delta, each side at its own best learning rate",
    "R-EQ": "two one-sided tests at 5 % against the margin",
    "R-STAB": "bootstrap 95 % interval of a ratio of instability scores, beyond the factor",
    "R-SYS": "bootstrap 95 % interval of the ratio of median times, interleaved, with an A/A control within 2 %",
    "R-CONV": "the cells of the fact table; a cell without a checked source decides nothing",
}
# What a claim needs, in increasing order; CFG is the fact table alone.
SCALES = {
    "CFG": "no compute, the fact table",
    "C0": "a CPU, seconds",
    "C1": "a CPU, at most ten minutes",
    "G1": "one GPU, at most ten minutes",
    "GD": "GPU-days",
}
MACHINES = {"cpu": ("CFG", "C0", "C1"), "gpu": ("CFG", "C0", "C1", "G1")}  # the scales that are at hand


class Verdict(StrEnum):
    """The words that are printed. INCONCLUSIVE is never NO-EFFECT: that one has an interval within the margin."""

    SUPPORTED = "SUPPORTED"
    CONTRADICTED = "CONTRADICTED"
    NO_EFFECT = "NO-EFFECT"
    INCONCLUSIVE = "INCONCLUSIVE"
    MISSTATED = "MISSTATED"  # false as worded; a corrected form holds
    UNVERIFIABLE = "UNVERIFIABLE"
    OUT_OF_SCALE = "OUT-OF-SCALE"
    NOT_MEASURED = "NOT YET MEASURED"  # nobody wrote or ran the measurement: a gap here, not a verdict


# What a later measurement may not turn into another of these without being noticed.
DECIDED = (Verdict.SUPPORTED, Verdict.CONTRADICTED, Verdict.NO_EFFECT, Verdict.MISSTATED)


@dataclass(frozen=True)
class Cell:
    """One demand on the fact table: `field` of `model` is `value`; every model that has the field for ``*``.

    Args:
        form: ``worded`` or ``corrected``, as in Measurement.
        value: a number or text, or a list of those that are allowed; None for a number from `low` to `high`.
        share: with ``*``, the share of models that must have it.
        among: with ``*``, only these models; besides: without these.
    """

    model: str
    field: str
    value: str | float | list[str | float] | None = None
    low: float = -math.inf
    high: float = math.inf
    form: str = "worded"
    share: float = 1.0
    among: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One row of the ledger: what is claimed and how it is decided, written before anything is measured.

    Args:
        id: short name; also the name of its result and the argument of ``@measures``.
        source: sections of the lesson (L1 to L8) and of the lecture summary (S0 to S10, S.sum).
        topic: the file in ``topics/`` that it stands in.
        expected: what the literature or arithmetic leads one to expect; never read by a rule.
        rule: codes of RULES; criterion: what the rule is applied to, in words; margin: its numbers.
        scale: the scales at which it can be shown, smallest first; the first is indicative where there are two.
        cells: for a convention, the demands on the fact table that decide it.
    """

    id: str
    source: str
    topic: str
    kind: str
    statement: str
    measurement: str
    expected: str
    rule: tuple[str, ...]
    scale: tuple[str, ...]
    criterion: str = ""
    margin: Mapping[str, Any] = field(default_factory=dict)
    citation: str = ""
    cells: tuple[Cell, ...] = ()

    def at_hand(self, machine: str) -> tuple[str, ...]:
        """The scales of this claim that a ``cpu`` or a ``gpu`` has."""
        return tuple(scale for scale in self.scale if scale in MACHINES[machine])

    @property
    def where(self) -> str:
        """``the lesson, sections L1 and L7; the lecture summary, section S2``."""
        names = [name.strip() for name in self.source.split(",")]
        told = []
        for letter, document in (("L", "the lesson"), ("S", "the lecture summary")):
            if own := [name for name in names if name.startswith(letter)]:
                told.append(f"{document}, section{'s' if len(own) > 1 else ''} {' and '.join(own)}")
        return "; ".join(told)


@dataclass(frozen=True)
class Finding:
    """One number and what a rule says about it, or only the number.

    Args:
        name: what was measured, as a noun phrase.
        value: the number, or text from the fact table; unit: "" for a pure number.
        low, high: the interval that decided, None where the value is exact.
        n: seeds or repeats behind it.
        verdict: of the rule; None for a number that is only reported.
        why: one clause, what the rule compared.
        needed: seeds that would settle an inconclusive one.
    """

    name: str
    value: float | str | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    verdict: Verdict | None = None
    why: str = ""
    needed: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What measuring a claim gave.

    Args:
        worded: findings on the claim as it is worded; all of them have to hold.
        corrected: findings on a corrected form of it, where the wording fails.
        controls: the same measurements of something broken; each has to come out CONTRADICTED, else the measurement
            sees nothing and decides nothing.
        reported: numbers that decide nothing.
        seeds, run_ids: what it rests on; runs are in the run store.
    """

    worded: tuple[Finding, ...] = ()
    corrected: tuple[Finding, ...] = ()
    controls: tuple[Finding, ...] = ()
    reported: tuple[Finding, ...] = ()
    seeds: tuple[int, ...] = ()
    run_ids: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """SUPPORTED where all of the wording holds; MISSTATED where it fails and a corrected form holds."""
        if not self.worded or any(control.verdict is not Verdict.CONTRADICTED for control in self.controls):
            return Verdict.INCONCLUSIVE
        found = [finding.verdict for finding in self.worded]
        for verdict in (Verdict.CONTRADICTED, Verdict.UNVERIFIABLE, Verdict.INCONCLUSIVE, Verdict.NO_EFFECT):
            if verdict in found:
                break
        else:
            return Verdict.SUPPORTED
        held = bool(self.corrected) and all(finding.verdict is Verdict.SUPPORTED for finding in self.corrected)
        return Verdict.MISSTATED if verdict is Verdict.CONTRADICTED and held else verdict
