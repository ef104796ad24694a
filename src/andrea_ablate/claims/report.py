"""docs/claims.md: every claim with its verdict and what was measured, from the ledger and the stored results alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from andrea_ablate.claims.claim import SCALES, Claim, Finding, Verdict
from andrea_ablate.claims.facts import facts
from andrea_ablate.claims.ledger import TOPICS, ledger
from andrea_ablate.claims.results import Result, firmest

PAGE = Path("docs/claims.md")
COLUMNS = ("claim", "says", "verdict", "measured", "commit, runs")


def verdict_of(claim: Claim, result: Result | None) -> Verdict:
    """The stored verdict. Without one: OUT-OF-SCALE where it takes a GPU, and a gap of ours where it does not."""
    if result:
        return result.verdict
    return Verdict.OUT_OF_SCALE if claim.scale[0][0] == "G" else Verdict.NOT_MEASURED


def markdown() -> str:
    """The page, one table per topic."""
    found = [(claim, firmest(claim)) for claim in ledger().values()]
    dates = [fact.date for fact in facts().values()]
    counts = Counter(verdict_of(claim, result) for claim, result in found)
    lines = [
        "# Claims",
        "",
        "Written by `python -m andrea_ablate.claims report` from the ledger (`src/andrea_ablate/claims/topics/`), the",
        "fact table (`facts.csv`) and the stored measurements (`experiments/results/claims/`). Sections: L of",
        "the lesson, S of the lecture summary. `python -m andrea_ablate.claims show ID` prints all that was measured,",
        "with the ids of the runs.",
        "",
        f"{len(found)} claims: " + ", ".join(f"{counts[word]} {word}" for word in Verdict if counts[word]) + ".",
        f"Fact table: {len(dates)} cells, {dates.count('')} UNVERIFIED, last checked {max(dates)}.",
        "",
    ]
    for topic, title in TOPICS.items():
        lines += [f"## {title}", "", f"| {' | '.join(COLUMNS)} |", f"| {' | '.join(['---'] * len(COLUMNS))} |"]
        for claim, result in found:
            if claim.topic == topic:
                cells = (
                    f"`{claim.id}`",
                    f"{claim.statement} ({claim.source})",
                    verdict_of(claim, result),
                    sentence(claim, result),
                    made_by(result),
                )
                lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def made_by(result: Result | None) -> str:
    """The commit that measured it, and how many runs it rests on."""
    if result is None:
        return ""
    count = len(result.measurement.run_ids)
    return f"`{result.commit}`" + (f", {count} run{'s' * (count != 1)}" if count else "")


def sentence(claim: Claim, result: Result | None) -> str:
    """What was measured, in one sentence; why there is nothing where nothing was."""
    if result is None:
        at = claim.scale[0]
        return f"needs {SCALES[at]}" if at[0] == "G" else "no measurement yet"
    measurement = result.measurement
    parts = ["; ".join(map(number, measurement.worded))]
    if measurement.corrected:
        parts.append("corrected: " + "; ".join(map(number, measurement.corrected)))
    if broken := [number(c) for c in measurement.controls if c.verdict is not Verdict.CONTRADICTED]:
        parts.append("the control did not fail, so this decides nothing: " + "; ".join(broken))
    indicative = ", indicative" if result.at == claim.scale[0] != claim.scale[-1] else ""
    return f"{'. '.join(parts)} [{result.at}{indicative}]"


def number(finding: Finding) -> str:
    """``name 1.23 x [1.1, 1.4] (n 8)``, with the verdict where it is not SUPPORTED."""
    value = (
        finding.value if isinstance(finding.value, str) else "none" if finding.value is None else figure(finding.value)
    )
    text = f"{finding.name} {value}{f' {finding.unit}' if finding.unit else ''}"
    if finding.low is not None and finding.high is not None:
        text += f" [{figure(finding.low)}, {figure(finding.high)}]"
    if finding.n is not None:
        text += f" (n {finding.n})"
    if finding.verdict not in (None, Verdict.SUPPORTED):
        text += f": {finding.verdict} ({finding.why}"
        text += (
            f"; {finding.needed} seeds would settle it)"
            if finding.needed and finding.verdict is Verdict.INCONCLUSIVE
            else ")"
        )
    return text


def figure(value: float) -> str:
    """Three digits; a whole number in full."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"
