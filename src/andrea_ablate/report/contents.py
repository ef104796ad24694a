"""All that a report says of one sweep, as plain values: the page, Markdown, images and a tracker's report show it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from andrea_ablate.analysis.stats import Effect
from andrea_ablate.report.compare import Comparison, load
from andrea_ablate.report.figures import command, figures, read_runs
from andrea_ablate.report.parts import Figure, StoredRun, Table
from andrea_ablate.report.tables import tables
from andrea_ablate.tracking.plans import PLAN, load_plan
from andrea_ablate.tracking.store import Store


@dataclass(frozen=True)
class Lead:
    """An effect of the headline: how large, which way, against what and how sure; `firm` where it is settled."""

    size: str
    way: str
    against: str
    interval: str
    doubt: str
    firm: bool


@dataclass(frozen=True)
class Contents:
    """One sweep as a report shows it.

    Args:
        runs: the stored ones by id; missing: a warning for each that could not be read.
        commands: what was typed: for the sweep, where its plan is kept, and for this report.
    """

    name: str
    comparison: Comparison
    runs: Mapping[str, StoredRun]
    missing: list[str]
    figures: list[Figure]
    tables: list[Table]
    commands: tuple[str, ...]

    @property
    def winner(self) -> str:
        """The headline."""
        best = next((arm for arm in self.comparison.ranked if arm.rank is not None), None)
        if best is None:
            return "No run finished"
        return f"{best.arm} has the lowest loss" if len(self.comparison.arms) > 1 else best.arm

    @property
    def leads(self) -> list[Lead]:
        """The best arm against the runner-up and, where that is another one, against the baseline."""
        lead = self.comparison.lead
        if lead is None or lead.effect.mean is None:
            return []
        base, rival, best = self.comparison.baseline, lead.rival.arm, lead.best
        named = f"the baseline '{rival}'" if rival == base else f"the next best '{rival}'"
        settled = self.comparison.settled
        found = [_lead(lead.effect, 1, named, "settled" if settled else "not settled", settled)]
        if best.effect is not None and best.effect.mean is not None and rival != base:
            word = f"better: {best.verdict}"
            found.append(_lead(best.effect, -1, f"the baseline '{base}'", word, best.verdict == "supported"))
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.comparison.warnings, *self.missing)

    def run_ids(self, figure: Figure) -> list[str]:
        """The runs that a figure is made from."""
        if figure.runs is not None:
            return list(figure.runs)
        return [row.run_id for row in self.comparison.rows if row.arm in figure.arms and row.run_id]

    def commits(self, figure: Figure) -> list[str]:
        """The commits of the code that trained them."""
        records = (self.runs.get(run_id, StoredRun()).record for run_id in self.run_ids(figure))
        return list(dict.fromkeys(record["commit"] for record in records if record.get("commit")))

    def commands_of(self, figure: Figure) -> list[str]:
        """The commands that train the runs of a figure and draw it."""
        return [*(command(self.comparison, arm, self.runs) for arm in figure.arms), *self.commands[-1:]]


def _lead(effect: Effect, sign: int, named: str, doubt: str, firm: bool) -> Lead:
    """`sign` is 1 where a positive effect means that the best arm has the lower loss."""
    assert effect.mean is not None
    ahead = sign * effect.mean >= 0
    shown = sign if ahead else -sign
    interval = "no interval"
    if effect.low is not None and effect.high is not None:
        low, high = sorted((shown * effect.low, shown * effect.high))
        interval = f"95 % [{low:+.4f}, {high:+.4f}]"
    seeds = f"paired over {effect.n} seed{'s' * (effect.n != 1)}"
    against = f"than {named}, {seeds}"
    return Lead(f"{abs(effect.mean):.4f}", "lower" if ahead else "higher", against, interval, doubt, firm)


def contents(name: str, comparison: Comparison, store: Store, *commands: str) -> Contents:
    """Read the runs of a comparison and make its figures and tables; `commands` as in `Contents`."""
    runs, missing = read_runs(comparison, store)
    return Contents(
        name,
        comparison,
        runs,
        missing,
        figures(comparison, runs),
        tables(comparison, runs, store),
        tuple(filter(None, commands)),
    )


def read(folder: Path, store: Store, made_by: str) -> Contents:
    """What a sweep's folder holds. Raises: ConfigError for one without a comparison that can be read."""
    comparison = load(folder)
    asked = ""
    if (folder / PLAN).is_file():
        asked = shlex.join(["python", "-m", "andrea_ablate", *load_plan(folder).command])
    return contents(folder.resolve().name, comparison, store, asked, made_by)
