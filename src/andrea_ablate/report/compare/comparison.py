"""The comparison of a sweep's arms, and its forms: dictionary, CSV, Markdown, a rich table."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from andrea_ablate.analysis.stats import Effect, Estimate, paired_effect
from andrea_ablate.report.compare.effects import (
    FACTORIAL_TITLE,
    factorial,
    factorial_sentences,
    noise_floor,
    noise_sentence,
)
from andrea_ablate.report.compare.rows import CONFIDENCE, ArmSummary, RunRow, finished_runs
from andrea_ablate.report.compare.text import cells, csv_fields, plain
from andrea_ablate.report.compare.tuned import TUNED_COLUMNS, TUNED_TITLE, Tuned, tuned_cells

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLE = "validation loss, nats per token, lower is better"
SETTLED = "this lead is settled at 95 %"
COLUMNS = ("rank", "arm", "loss", "difference to baseline", "params", "MFLOP/token", "tokens/s", "runs")


@dataclass(frozen=True)
class Lead:
    """The best arm, its nearest rival, and how far it is ahead of it."""

    best: ArmSummary
    rival: ArmSummary
    effect: Effect  # loss of the rival minus that of the best, paired


@dataclass(frozen=True)
class Comparison:
    """What a sweep says; the same content as a dictionary, CSV, Markdown or a rich table."""

    arms: tuple[ArmSummary, ...]  # in the order of the sweep; `ranked` sorts them
    baseline: str
    verdict: str
    warnings: tuple[str, ...]
    rows: tuple[RunRow, ...]
    margin: float  # nats, of the arms' verdicts
    tuned: tuple[Tuned, ...] = ()  # where each arm has its own learning rate

    @property
    def ranked(self) -> tuple[ArmSummary, ...]:
        """Arms by rank, then in the order of the sweep; those without a finished run last."""
        return tuple(sorted(self.arms, key=lambda arm: math.inf if arm.rank is None else arm.rank))

    @property
    def losses(self) -> dict[str, dict[int, float]]:
        """Validation loss by arm and seed, of the finished runs."""
        losses: dict[str, dict[int, float]] = {arm.arm: {} for arm in self.arms}
        for row in finished_runs(self.rows):
            if row.val_loss is not None:
                losses[row.arm][row.seed] = row.val_loss
        return losses

    @property
    def lead(self) -> Lead | None:
        """None with fewer than two arms that have a finished run. A rival is another design where there is one."""
        ranked = [arm for arm in self.ranked if arm.rank is not None]
        if len(ranked) < 2:
            return None
        best = ranked[0]
        rival = next((arm for arm in ranked if arm.design != best.design), ranked[1])
        losses = self.losses
        return Lead(best, rival, paired_effect(losses[rival.arm], losses[best.arm], CONFIDENCE))

    @property
    def settled(self) -> bool:
        """Whether the verdict calls the lead settled."""
        return SETTLED in self.verdict

    @property
    def title(self) -> str:
        """Metric, unit, direction and, where it is known and the same for all, the unigram entropy."""
        entropies = {arm.unigram_entropy for arm in self.arms if arm.unigram_entropy is not None}
        return f"{TITLE} (unigram entropy {entropies.pop():.4f})" if len(entropies) == 1 else TITLE

    @property
    def footnote(self) -> str:
        """What the '*' means, or an empty string when no arm has one."""
        starred = any(arm.rank is not None and not arm.complete for arm in self.arms)
        return "* mean of the finished runs only, not of all planned ones" if starred else ""

    @property
    def decisions(self) -> list[str]:
        """A sentence per arm: whether it is better than the baseline, and what would settle it; by rank."""
        return [
            f"'{arm.arm}' better than '{self.baseline}': {arm.verdict}, {arm.why}{_holm(arm)}{_power(arm)}."
            for arm in self.ranked
            if arm.verdict
        ]

    @property
    def decisions_title(self) -> str:
        """What the decisions are about, or an empty string where there are none."""
        return f"Decisions, differences within {self.margin:g} nats not counting:" if self.decisions else ""

    @property
    def noise(self) -> Estimate | None:
        """The baseline against itself, see `noise_floor`."""
        return noise_floor(self.losses[self.baseline])

    @property
    def factorial(self) -> dict[str, Effect]:
        """Main effects and interactions where the arms are a full factorial of two levels each, else nothing."""
        return factorial(self.losses)

    def _beyond_pairs(self) -> list[tuple[str, list[str]]]:
        """Titles with the lines below them: the noise floor, and the effects of a full factorial."""
        found: list[tuple[str, list[str]]] = [(said, []) for said in (noise_sentence(self.noise),) if said]
        if effects := self.factorial:
            found.append((FACTORIAL_TITLE, factorial_sentences(effects)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values that strict JSON takes; a number that is not finite is None, its run's status says why."""
        return {
            "metric": "val/loss",
            "unit": "nats per token",
            "confidence": CONFIDENCE,
            "baseline": self.baseline,
            "margin": self.margin,
            "verdict": self.verdict,
            "warnings": list(self.warnings),
            "noise": None if self.noise is None else plain(asdict(self.noise)),
            "factorial": {name: plain(asdict(effect)) for name, effect in self.factorial.items()},
            "arms": [plain(asdict(arm)) for arm in self.arms],
            "runs": [plain(vars(row)) for row in self.rows],
            "tuned": [plain(asdict(one)) for one in self.tuned],
        }

    def to_csv(self) -> str:
        """One line per arm, by rank, numbers in full; what does not exist is empty."""
        lines = [csv_fields(arm) for arm in self.ranked]
        out = io.StringIO()
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(plain(lines))
        return out.getvalue()

    def to_markdown(self) -> str:
        """Title, table, learning rates, verdict, decisions and warnings."""
        lines = [f"**{self.title}**", "", *markdown_table(COLUMNS, map(cells, self.ranked))]
        if self.footnote:
            lines += ["", f"\\{self.footnote}"]
        if self.tuned:
            lines += ["", f"{TUNED_TITLE}:", "", *markdown_table(TUNED_COLUMNS, tuned_cells(self.tuned))]
        lines += ["", self.verdict]
        for title, below in self._beyond_pairs():
            lines += ["", title, *([""] * bool(below)), *(f"- {line}" for line in below)]
        if self.decisions:
            lines += ["", self.decisions_title, "", *(f"- {decision}" for decision in self.decisions)]
        if self.warnings:
            lines += ["", "Warnings:", "", *(f"- {warning}" for warning in self.warnings)]
        return "\n".join(lines) + "\n"

    def render(self) -> RenderableType:
        """A rich table that fits in 80 columns, then the verdict, the decisions and the warnings."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from andrea_ablate.report.cells import ArmName

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in COLUMNS:
            left = column in ("rank", "arm", "runs")
            table.add_column(
                re.sub(r" (?=to )|(?=/)", "\n", column),
                justify="left" if left else "right",
                no_wrap=column != "arm",
                overflow="fold",
            )
        for arm in self.ranked:
            rank, name, *numbers, runs = cells(arm)
            intervals_below = (re.sub(r" (?=[±[])", "\n", number) for number in numbers)
            table.add_row(rank, ArmName(name), *map(Text, intervals_below), runs.replace(", ", "\n"))
        parts: list[RenderableType] = [Text(self.title, style="bold"), table]
        if self.footnote:
            parts.append(Text(self.footnote, style="dim"))
        if self.tuned:
            rates = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            for column in TUNED_COLUMNS:
                rates.add_column(column, justify="left" if column in ("arm", "edge") else "right", overflow="fold")
            for name, *facts in tuned_cells(self.tuned):
                rates.add_row(ArmName(name), *facts)
            parts += [Text(f"\n{TUNED_TITLE}", style="bold"), rates]
        parts += [Text(f"\n{self.verdict}")]
        for title, below in self._beyond_pairs():
            parts += [Text(f"\n{title}"), *(Text(f"- {line}") for line in below)]
        if self.decisions:
            parts += [Text(f"\n{self.decisions_title}"), *(Text(f"- {decision}") for decision in self.decisions)]
            parts.append(Text(""))
        parts += [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        return Group(*parts)


def _holm(arm: ArmSummary) -> str:
    if arm.p_holm is None or arm.effect is None or arm.effect.sd == 0:
        return ""
    return f" (Holm-adjusted {'p < 0.0001' if arm.p_holm < 0.0001 else f'p = {arm.p_holm:.4f}'})"


def _power(arm: ArmSummary) -> str:
    if arm.verdict_seeds is None or arm.effect is None or arm.verdict_seeds <= arm.effect.n:
        return ""
    more = arm.verdict_seeds - arm.effect.n
    return f"; about {more} more seed{'s' * (more != 1)} would settle it"


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, its cells escaped."""
    table = [columns, ["---"] * len(columns)]
    table += [[re.sub(r"([|*])", r"\\\1", cell) for cell in line] for line in lines]
    return [f"| {' | '.join(line)} |" for line in table]
