"""docs/errata.md: where the two documents are wrong, each with the verdicts of the claims that measure it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.ledger import claim_of
from andrea_ablate.claims.report import verdict_of
from andrea_ablate.claims.results import firmest
from andrea_ablate.yamltext import load_yaml

TABLE = Path(__file__).parent / "errata.yaml"
PAGE = Path("docs/errata.md")
KINDS = ("wrong", "inconsistent", "imprecise", "unverifiable")


@dataclass(frozen=True)
class Erratum:
    """One correction.

    Args:
        where: sections of the lesson (L) and the lecture summary (S). kind: of KINDS.
        says: what the document says, in short. source: of the correction.
        claims: ids of the claims that measure it; none where there is nothing to measure.
    """

    number: int
    where: str
    kind: str
    says: str
    correction: str
    source: str
    claims: list[str]


def errata() -> list[Erratum]:
    """All of them, in order."""
    return [Erratum(**row) for row in load_yaml(TABLE.read_text(encoding="utf-8"))]


def markdown() -> str:
    """The page, one table."""
    found = errata()
    counts = Counter(erratum.kind for erratum in found)
    lines = [
        "# Errata",
        "",
        "Written by `python -m andrea_ablate.claims report` from `src/andrea_ablate/claims/errata.yaml` and the stored",
        "verdicts. A verdict is that of the claim as the document words it; see [Claims](claims.md).",
        "",
        f"{len(found)} corrections: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS) + ".",
        "",
        "| | where | kind | the document says | correction | source | measured by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for erratum in found:
        cells = (
            f"E{erratum.number}",
            erratum.where,
            erratum.kind,
            erratum.says,
            erratum.correction,
            erratum.source,
            ", ".join(f"`{claim}` {_verdict(claim)}" for claim in erratum.claims) or "nothing to measure",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _verdict(claim_id: str) -> Verdict:
    claim = claim_of(claim_id)
    return verdict_of(claim, firmest(claim))
