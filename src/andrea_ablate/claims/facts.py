"""The pinned fact table, facts.csv: what published models do, cell by cell, with source and date. R-CONV reads it.

A cell is ``checked`` where someone compared it with the source that it names; any other is printed as UNVERIFIED and
decides nothing.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from andrea_ablate.claims.claim import Cell, Claim, Finding, Measurement, Verdict
from andrea_ablate.registry import ConfigError, nearest

TABLE = Path(__file__).parent / "facts.csv"


@dataclass(frozen=True)
class Fact:
    """One cell of the table.

    Args:
        model, field: where it stands; value: a number, or text.
        source: paper with section or table, configuration file, or class of a library with its version.
        date: when it was compared with the source, empty for never.
    """

    model: str
    field: str
    value: str | float
    source: str
    date: str

    @property
    def checked(self) -> bool:
        return bool(self.date)

    def __str__(self) -> str:
        return f"{self.model} {self.field} {_text(self.value)}{'' if self.checked else ' (UNVERIFIED)'}"


@lru_cache
def facts() -> dict[tuple[str, str], Fact]:
    """Every cell by model and field. Raises ConfigError for a cell that stands twice or has no source."""
    found: dict[tuple[str, str], Fact] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            fact = Fact(row["model"], row["field"], _value(row["value"]), row["source"], row["checked"])
            key = (fact.model, fact.field)
            if key in found or not fact.source:
                raise ConfigError(f"facts.csv: {' '.join(key)} {'stands twice' if key in found else 'has no source'}")
            found[key] = fact
    return found


def measure_cells(claim: Claim) -> Measurement:
    """R-CONV: a claim from the cells that its row demands. Raises ConfigError for one not in the table."""
    worded, corrected = (
        tuple(_one(c) if c.model != "*" else _prevalence(c) for c in claim.cells if c.form == form)
        for form in ("worded", "corrected")
    )
    return Measurement(worded, corrected)


def _one(cell: Cell) -> Finding:
    table = facts()
    if (cell.model, cell.field) not in table:
        models = sorted({model for model, field in table if field == cell.field})
        raise ConfigError(
            f"facts.csv has no {cell.field} of {cell.model}{nearest(cell.model, models)}; models with {cell.field}: "
            f"{', '.join(models) or 'none'}"
        )
    fact = table[cell.model, cell.field]
    why = f"claimed {_asked(cell)}; {fact.source}" + ("" if fact.checked else "; UNVERIFIED")
    return Finding(f"{fact.model} {fact.field}", fact.value, verdict=_verdict(fact, cell), why=why)


def _prevalence(cell: Cell) -> Finding:
    """The share of models that have the value. An unchecked cell could go either way: it decides where it must not."""
    cells = [fact for fact in facts().values() if fact.field == cell.field and fact.model not in cell.besides]
    cells = [fact for fact in cells if not cell.among or fact.model in cell.among]
    if missing := set(cell.among) - {fact.model for fact in cells}:
        raise ConfigError(f"facts.csv has no {cell.field} of {', '.join(sorted(missing))}")
    found = [_verdict(fact, cell) for fact in cells]
    yes, no = found.count(Verdict.SUPPORTED), found.count(Verdict.CONTRADICTED)
    least, most = yes / len(cells), (len(cells) - no) / len(cells)
    if least >= cell.share:
        verdict = Verdict.SUPPORTED
    else:
        verdict = Verdict.CONTRADICTED if most < cell.share else Verdict.UNVERIFIABLE
    others = ", ".join(f"{f.model} {_text(f.value)}" for f, v in zip(cells, found, strict=True) if v != "SUPPORTED")
    unchecked = len(cells) - yes - no
    why = f"claimed {100 * cell.share:g} % or more; {yes} models"
    why += (f", {unchecked} UNVERIFIED" if unchecked else "") + (f"; others: {others}" if others else "")
    name = f"share of {len(cells)} models with {cell.field} {_asked(cell)}"
    return Finding(name, least, verdict=verdict, why=why)


def _verdict(fact: Fact, cell: Cell) -> Verdict:
    if not fact.checked:
        return Verdict.UNVERIFIABLE
    if cell.value is None:
        holds = not isinstance(fact.value, str) and cell.low <= fact.value <= cell.high
    else:
        holds = fact.value in (cell.value if isinstance(cell.value, list) else [cell.value])
    return Verdict.SUPPORTED if holds else Verdict.CONTRADICTED


def _asked(cell: Cell) -> str:
    if cell.value is None:
        return f"{cell.low:g} to {cell.high:g}"
    return " or ".join(map(_text, cell.value)) if isinstance(cell.value, list) else _text(cell.value)


def _value(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.10g}"
