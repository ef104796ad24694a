"""The comparison at the end of a sweep: ranked arms, paired effects, warnings and a verdict, from plain rows."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andrea_ablate.analysis.rules import Decision, Verdict, superiority
from andrea_ablate.analysis.stats import Effect, Estimate, holm, mean_interval, paired_effect, seeds_needed
from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.tracking.store import write_atomic

if TYPE_CHECKING:
    from rich.console import RenderableType

CONFIDENCE = 0.95
STUCK_NATS = 0.15  # an arm this close to the unigram entropy has learned token frequencies and little else
TUNED_NATS = 0.05  # an arm further above its design's best over learning rate and warm-up is not at its own
TUNING = {"lr": "learning rate", "warmup_tokens": "warm-up"}
BUDGET_TOLERANCE = 0.02
MARGIN_NATS = 0.03  # differences within it do not matter, at the smallest sizes
NAMED = 6  # arms that one warning names
STATUSES = ("finished", "diverged", "failed", "interrupted", "missing")
TITLE = "validation loss, nats per token, lower is better"
SETTLED = "this lead is settled at 95 %"
COLUMNS = ("rank", "arm", "loss", "difference to baseline", "params", "MFLOP/token", "tokens/s", "runs")


@dataclass(frozen=True)
class RunRow:
    """One run (arm x seed), planned or done; None is what is not known."""

    arm: str
    seed: int
    status: str  # one of STATUSES
    design: str = ""  # the arm without what tunes it, learning rate and warm-up; empty where the arm is its own design
    lr: float | None = None
    warmup_tokens: int | None = None
    reason: str = ""
    run_id: str = ""
    val_loss: float | None = None  # nats per token
    val_bpb: float | None = None  # bits per byte
    params: int | None = None  # in total
    non_embedding: int | None = None
    flops_per_token: float | None = None  # training: forward and backward
    tokens: int | None = None
    tokens_per_s: float | None = None
    train_s: float | None = None
    token_hash: str | None = None  # rolling hash of the tokens seen, at the end
    initial_loss: float | None = None  # nats per token
    unigram_entropy: float | None = None  # nats per token, of the corpus
    paths: Mapping[str, Any] = field(default_factory=dict)  # op -> implementation that really ran


@dataclass(frozen=True)
class ArmSummary:
    """One row of the table. Means are over the finished runs; `runs` says how many of the planned ones those are."""

    arm: str
    rank: int | None  # by mean loss, arms with equal means share it; None without a finished run
    complete: bool  # every planned run finished; otherwise the rank is shown with a '*'
    planned: int
    counts: dict[str, int]  # runs by status
    loss: Estimate
    bits_per_byte: Estimate
    effect: Effect | None  # paired difference of the loss to the baseline's; None for the baseline
    p_holm: float | None  # effect.p, adjusted over the table's comparisons
    params: int | None
    non_embedding: int | None
    flops_per_token: float | None
    tokens: int | None
    tokens_per_s: float | None  # median, as is train_s
    train_s: float | None
    initial_loss: float | None  # mean
    unigram_entropy: float | None
    design: str
    lr: float | None
    warmup_tokens: int | None
    marks: tuple[str, ...]  # why its loss does not judge its design: stuck, or not tuned (`_with_tuning_marks`)
    verdict: str | None = None  # of analysis.rules on "it is better than the baseline"; None for the baseline
    why: str | None = None  # one clause
    verdict_seeds: int | None = None  # in all, that would settle an inconclusive verdict; None where unknown

    @property
    def runs(self) -> str:
        """E.g. ``n 1 of 3, 1 diverged, 1 failed``."""
        others = [f"{count} {status}" for status, count in self.counts.items() if status != "finished"]
        return ", ".join([f"n {self.loss.n} of {self.planned}", *others])


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

    @property
    def ranked(self) -> tuple[ArmSummary, ...]:
        """Arms by rank, then in the order of the sweep; those without a finished run last."""
        return tuple(sorted(self.arms, key=lambda arm: math.inf if arm.rank is None else arm.rank))

    @property
    def losses(self) -> dict[str, dict[int, float]]:
        """Validation loss by arm and seed, of the finished runs."""
        losses: dict[str, dict[int, float]] = {arm.arm: {} for arm in self.arms}
        for row in _finished(self.rows):
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
            f"'{arm.arm}' better than '{self.baseline}': {arm.verdict}, {arm.why}"
            + (f"; about {arm.verdict_seeds} seeds in all would settle it." if arm.verdict_seeds else ".")
            for arm in self.ranked
            if arm.verdict
        ]

    @property
    def decisions_title(self) -> str:
        """What the decisions are about, or an empty string where there are none."""
        return f"Decisions, differences within {self.margin:g} nats not counting:" if self.decisions else ""

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
            "arms": [_plain(asdict(arm)) for arm in self.arms],
            "runs": [_plain(vars(row)) for row in self.rows],
        }

    def to_csv(self) -> str:
        """One line per arm, by rank, numbers in full; what does not exist is empty."""
        lines = [_csv_fields(arm) for arm in self.ranked]
        out = io.StringIO()
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_plain(lines))
        return out.getvalue()

    def to_markdown(self) -> str:
        """Title, table, verdict, decisions and warnings."""
        table = [COLUMNS, tuple("---" for _ in COLUMNS)]
        table += [tuple(re.sub(r"([|*])", r"\\\1", cell) for cell in _cells(arm)) for arm in self.ranked]
        lines = [f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in table)]
        if self.footnote:
            lines += ["", f"\\{self.footnote}"]
        lines += ["", self.verdict]
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
            rank, name, *numbers, runs = _cells(arm)
            intervals_below = (re.sub(r" (?=[±[])", "\n", number) for number in numbers)
            table.add_row(rank, ArmName(name), *map(Text, intervals_below), runs.replace(", ", "\n"))
        parts: list[RenderableType] = [Text(self.title, style="bold"), table]
        if self.footnote:
            parts.append(Text(self.footnote, style="dim"))
        parts += [Text(f"\n{self.verdict}")]
        if self.decisions:
            parts += [Text(f"\n{self.decisions_title}"), *(Text(f"- {decision}") for decision in self.decisions)]
            parts.append(Text(""))
        parts += [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        return Group(*parts)


def compare(rows: Sequence[RunRow], *, baseline: str | None = None, margin: float = MARGIN_NATS) -> Comparison:
    """Summarise each arm over its seeds and compare it with the baseline, seed by seed.

    A finished run whose loss is missing counts as failed, one whose loss is not finite as diverged. Of two runs of one
    arm and seed the first is used, and a warning says so.

    Args:
        rows: one per planned run; arms keep the order in which they appear.
        baseline: the arm that differences are taken to; the first one unless named.
        margin: differences of the loss within it do not matter, nats per token, > 0.
    Raises: ConfigError without rows, or for a baseline that is not an arm.
    """
    if not rows:
        raise ConfigError("compare: there are no runs to compare; train at least one arm")
    kept, twice = _one_per_seed(_checked(row) for row in rows)
    names = list(kept)
    base = names[0] if baseline is None else baseline
    if base not in kept:
        raise ConfigError(f"compare: baseline='{base}' is not one of the arms {names}{nearest(base, names)}")

    losses = {
        name: {row.seed: row.val_loss for row in _finished(runs) if row.val_loss is not None}
        for name, runs in kept.items()
    }
    effects = {name: paired_effect(losses[name], losses[base], CONFIDENCE) for name in names if name != base}
    p_holm = dict(zip(effects, holm([effect.p for effect in effects.values()]), strict=True))
    estimates = {name: mean_interval(losses[name].values(), CONFIDENCE) for name in names}
    means = [estimate.mean for estimate in estimates.values() if estimate.mean is not None]
    arms = _with_tuning_marks(
        [_summary(kept[name], estimates[name], means, effects.get(name), p_holm.get(name)) for name in names]
    )
    reference = next(arm for arm in arms if arm.arm == base)
    arms = tuple(arm if arm is reference else _decided(arm, reference, losses, margin) for arm in arms)
    found = Comparison(arms, base, "", (), tuple(row for runs in kept.values() for row in runs), margin)
    return replace(found, verdict=_verdict(found), warnings=(*twice, *_warnings(found, kept)))


def save(comparison: Comparison, folder: Path) -> None:
    """Write comparison.json, .csv and .md into `folder`, each in one piece."""
    text = json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "comparison.json", text + "\n")
    write_atomic(folder / "comparison.csv", comparison.to_csv())
    write_atomic(folder / "comparison.md", comparison.to_markdown())


def load(folder: Path) -> Comparison:
    """The comparison that `save` wrote, its arms computed anew from its runs.

    Raises: ConfigError where there is none that this version can read.
    """
    path = folder / "comparison.json"
    try:
        saved = json.loads(path.read_bytes())
        found = compare([RunRow(**row) for row in saved["runs"]], baseline=saved["baseline"])
        return replace(found, verdict=saved["verdict"], warnings=tuple(saved["warnings"]))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the folder of a sweep") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged or of another version ({error}); run its sweep again") from None


def arm_key(values: Mapping[str, object]) -> str:
    """Name an arm by its choices, in the order given: ``norm=pre softcap=30``.

    One value has one text, whatever type it went through: 30, 30.0 and '30.0' are ``30``, None is ``null``, a list is
    ``[a,b]``.
    """
    return " ".join(f"{key}={_value_text(value)}" for key, value in values.items())


def _value_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    # PyYAML reads 1e-3 as text and Hydra as a number.
    if isinstance(value, Real) or (
        isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value)
    ):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(_value_text(item) for item in value) + "]"
    return str(value)


def _checked(row: RunRow) -> RunRow:
    if row.status != "finished" or (row.val_loss is not None and math.isfinite(row.val_loss)):
        return row
    status = "failed" if row.val_loss is None else "diverged"
    found = "no validation loss" if row.val_loss is None else f"validation loss {row.val_loss}"
    return replace(row, status=status, reason="; ".join(filter(None, (found, row.reason))))


def _one_per_seed(rows: Iterable[RunRow]) -> tuple[dict[str, list[RunRow]], list[str]]:
    kept: dict[str, dict[int, RunRow]] = {}
    twice = []
    for row in rows:
        first = kept.setdefault(row.arm, {}).setdefault(row.seed, row)
        if first != row:
            twice.append(
                f"'{row.arm}' has two runs of seed {row.seed}: '{first.run_id}' ({first.status}) is used, "
                f"'{row.run_id}' ({row.status}) is not."
            )
    return {arm: list(by_seed.values()) for arm, by_seed in kept.items()}, twice


def _finished(runs: Sequence[RunRow]) -> list[RunRow]:
    return [row for row in runs if row.status == "finished"]


def _known(runs: Sequence[RunRow], name: str) -> list[Any]:
    values = [getattr(row, name) for row in runs]
    return [value for value in values if value is not None and math.isfinite(value)]


def _typical(runs: Sequence[RunRow], name: str, pick: Callable[[list[Any]], Any] = statistics.median_low) -> Any:
    values = _known(runs, name)
    return pick(values) if values else None


def _summary(
    runs: Sequence[RunRow], loss: Estimate, means: Sequence[float], effect: Effect | None, p_holm: float | None
) -> ArmSummary:
    counts = Counter(row.status for row in runs)
    finished = _finished(runs)
    entropy = _typical(runs, "unigram_entropy")
    # Rounded, so that 3.24 - 3.09 is 0.15.
    stuck = loss.mean is not None and entropy is not None and round(entropy - loss.mean, 9) <= STUCK_NATS
    return ArmSummary(
        arm=runs[0].arm,
        rank=None if loss.mean is None else 1 + sum(mean < loss.mean for mean in means),
        complete=len(finished) == len(runs),
        planned=len(runs),
        counts={status: counts[status] for status in (*STATUSES, *sorted(counts.keys() - STATUSES)) if counts[status]},
        loss=loss,
        bits_per_byte=mean_interval(_known(finished, "val_bpb"), CONFIDENCE),
        effect=effect,
        p_holm=p_holm,
        params=_typical(runs, "params"),
        non_embedding=_typical(runs, "non_embedding"),
        flops_per_token=_typical(runs, "flops_per_token"),
        tokens=_typical(finished, "tokens"),
        tokens_per_s=_typical(finished, "tokens_per_s", statistics.median),
        train_s=_typical(finished, "train_s", statistics.median),
        initial_loss=_typical(runs, "initial_loss", statistics.fmean),
        unigram_entropy=entropy,
        design=runs[0].design or runs[0].arm,
        lr=runs[0].lr,
        warmup_tokens=runs[0].warmup_tokens,
        marks=("stuck",) * stuck,
    )


def _designs(arms: Sequence[ArmSummary]) -> list[tuple[ArmSummary, list[ArmSummary]]]:
    """Per design with a finished run: its best arm, and its arms that ended, which differ in what tunes them alone."""
    ended: dict[str, list[ArmSummary]] = {}
    for arm in arms:
        if arm.loss.n or arm.counts.get("diverged"):
            ended.setdefault(arm.design, []).append(arm)
    grids = [grid for grid in ended.values() if any(arm.loss.n for arm in grid)]
    return [(min(grid, key=lambda arm: math.inf if arm.loss.mean is None else arm.loss.mean), grid) for grid in grids]


def _with_tuning_marks(arms: Sequence[ArmSummary]) -> tuple[ArmSummary, ...]:
    """Mark arms that their own design beats at another learning rate or warm-up, and bests at the edge of the grid."""
    marks: dict[str, list[str]] = {}
    for best, grid in _designs(arms):
        assert best.loss.mean is not None
        for arm in grid:
            if arm.loss.mean is None or arm.loss.mean - best.loss.mean > TUNED_NATS:
                differs = [words for name, words in TUNING.items() if getattr(arm, name) != getattr(best, name)]
                marks[arm.arm] = [f"{words} not its own" for words in differs[:1]]
        marks[best.arm] = [f"{TUNING[name]} at the edge" for name in TUNING if _edge(best, grid, name)]
    return tuple(replace(arm, marks=(*arm.marks, *marks.get(arm.arm, ()))) for arm in arms)


def _edge(best: ArmSummary, grid: Sequence[ArmSummary], name: str) -> str:
    """``highest of 3`` or ``lowest of 3`` where the best arm has an outermost value of its design, else nothing."""
    values = sorted({getattr(arm, name) for arm in grid} - {None})
    if len(values) < 2 or getattr(best, name) not in (values[0], values[-1]):
        return ""
    return f"{'lowest' if getattr(best, name) == values[0] else 'highest'} of {len(values)}"


def _decided(arm: ArmSummary, base: ArmSummary, losses: Mapping[str, Mapping[int, float]], margin: float) -> ArmSummary:
    """The arm with the rule's verdict; one that rests on arms that cannot be judged becomes inconclusive."""
    found = superiority(losses[arm.arm], losses[base.arm], margin=margin)
    doubts = [f"'{one.arm}' is marked {mark}" for one in (arm, base) for mark in one.marks]
    doubts += ["runs that did not finish are not in it"] * (not (arm.complete and base.complete))
    doubts += ["the difference is the same at every seed"] * (found.effect.sd == 0)
    if doubts and found.verdict is not Verdict.INCONCLUSIVE:
        found = Decision(Verdict.INCONCLUSIVE, found.effect, f"{found.why}, but {doubts[0]}")
    return replace(arm, verdict=str(found.verdict), why=found.why, verdict_seeds=found.seeds)


# --- sentences


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def _more_seeds(*arms: ArmSummary) -> str:
    return "add seed=0,1,2" if all(arm.planned == 1 for arm in arms) else "at least two seeds must finish in both arms"


def _verdict(found: Comparison) -> str:
    ranked = [arm for arm in found.ranked if arm.rank is not None]
    if not ranked:
        return "No run finished, so there is nothing to rank."
    best, *others = ranked
    lead = found.lead
    rival = lead.rival if lead else None
    base = " (the baseline)" if best.arm == found.baseline else ""
    start = (
        f"'{best.arm}'{base} has the lowest mean loss" if len(found.arms) > 1 else f"'{best.arm}' has a mean loss of"
    )
    over = f"({best.runs})" if best.complete else f"but over its finished runs only ({best.runs})"
    sentences = [f"{start}{',' * (len(found.arms) > 1)} {best.loss.mean:.4f}{',' * (not best.complete)} {over}."]
    if "stuck" in best.marks:
        sentences.append("It is stuck at the unigram entropy or above, so this says little about the designs.")
    if lead:
        runner = "runner-up" if rival is others[0] else "best of the other designs,"
        sentences.append(_lead(found, best, lead.rival, runner, lead.effect))
    else:
        if len(found.arms) > 1:
            sentences.append("No other arm has a finished run to compare it with.")
        if best.loss.n == 1:
            sentences.append(f"One seed gives no interval: {_more_seeds(best)}.")
    if best.effect is not None:
        sentences.append(_against_baseline(found, best, runner_up=rival.arm if rival else None))
    whole = next((arm for arm in others if arm.complete), None)
    if whole and not best.complete:
        sentences.append(f"Among the arms whose runs all finished '{whole.arm}' is lowest, {whole.loss.mean:.4f}.")
    return " ".join(filter(None, sentences))


def _lead(found: Comparison, best: ArmSummary, second: ArmSummary, runner: str, lead: Effect) -> str:
    """The paired lead of the best arm, positive when it is ahead on the seeds that both finished."""
    runner = f"the {runner} '{second.arm}'{' (the baseline)' if second.arm == found.baseline else ''}"
    if lead.mean is None:
        return f"No seed finished in both it and {runner}, so nothing is paired and their order is not settled."
    if lead.n == 1:
        return (
            f"Its lead over {runner} is {_signed(lead.mean)} nats on the only seed that finished in both; one seed "
            f"gives no interval, so their order is not settled: {_more_seeds(best, second)}."
        )
    start = f"Its paired lead over {runner} is {_with_interval(lead)} nats over {_seeds(lead.n)}: "
    if lead.mean <= 0:
        return f"{start}on the seeds that both finished it is not ahead, not settled at {_seeds(lead.n)}."
    if lead.sd == 0:
        return f"{start}the same at every seed, so seeds had no effect, not settled at {_seeds(lead.n)}."
    if not lead.excludes_zero:
        assert lead.sd is not None
        needed = seeds_needed(lead.sd, lead.mean / 2, CONFIDENCE)
        about = f"about {needed}" if needed <= 1000 else "more than 1000"
        return (
            f"{start}the interval includes zero, not settled at {_seeds(lead.n)}; {about} seeds would narrow the "
            "interval to plus or minus half the lead."
        )
    if not (best.complete and second.complete):
        return f"{start}the interval excludes zero, but runs that did not finish are not in it, so it is not settled."
    if "stuck" in second.marks:
        both = "both arms are stuck" if "stuck" in best.marks else "the other arm is stuck"
        return f"{start}the interval excludes zero, but {both}, so between the designs nothing is settled."
    return f"{start}the interval excludes zero, {SETTLED}."


def _against_baseline(found: Comparison, best: ArmSummary, runner_up: str | None) -> str:
    effect = best.effect
    assert effect is not None
    if effect.mean is None:
        return f"It shares no finished seed with the baseline '{found.baseline}'."
    comparisons = sum(arm.p_holm is not None for arm in found.arms)
    adjusted = ""
    if best.p_holm is not None and effect.sd != 0:
        p = "p < 0.0001" if best.p_holm < 0.0001 else f"p = {best.p_holm:.4f}"
        adjusted = f"Holm-adjusted {p} over {comparisons} comparison{'s' * (comparisons != 1)} with the baseline"
    if runner_up == found.baseline:
        return f"{adjusted}." if adjusted else ""
    tail = adjusted or ("one seed gives no interval" if effect.n == 1 else "the same at every seed")
    return (
        f"Its paired difference to the baseline '{found.baseline}' is {_with_interval(effect)} nats over "
        f"{_seeds(effect.n)} ({tail})."
    )


def _warnings(found: Comparison, kept: Mapping[str, Sequence[RunRow]]) -> list[str]:
    warnings = []
    for row in found.rows:
        if row.status != "finished":
            reason = " ".join(row.reason.split())
            run = f" (run {row.run_id})" if row.run_id else ""
            warnings.append(
                f"'{row.arm}' seed {row.seed}{run} {'is ' * (row.status == 'missing')}{row.status}"
                f"{': ' * bool(reason)}{reason}."
            )
    if len(found.arms) > 1:  # of one arm the verdict says it
        warnings += _said_of("one seed gives no interval", [arm for arm in found.arms if arm.loss.n == 1])
    warnings += _said_of(
        f"stuck at the unigram entropy or above (counted from {STUCK_NATS} nats below it): it did not train, so its "
        "design is not judged",
        [arm for arm in found.arms if "stuck" in arm.marks],
    )
    warnings += _tuning_warnings(found)
    warnings += _said_of(
        "differs from the baseline by the same amount at every seed: the seeds had no effect, and an interval of no "
        "width is no evidence",
        [arm for arm in found.arms if arm.effect and arm.effect.sd == 0 and arm.effect.mean],
    )
    warnings += _seed_warnings(found, kept)
    for name, words, text in (
        ("params", "parameters", _si),
        ("flops_per_token", "training FLOPs per token", _si),
        ("tokens", "tokens trained on", lambda n: f"{n:,}"),
    ):
        warnings += _budget_warning(found, kept, name, words, text)
    warnings += _token_warnings(found)
    warnings += _path_warnings(found)
    entropies = {arm.arm: arm.unigram_entropy for arm in found.arms if arm.unigram_entropy is not None}
    if len(set(entropies.values())) > 1:
        listed = ", ".join(f"'{arm}' {entropy:.4f}" for arm, entropy in entropies.items())
        warnings.append(
            f"arms do not share one corpus and tokenizer (unigram entropy: {listed}): their losses in nats "
            "per token cannot be compared."
        )
    return warnings


def _said_of(what: str, arms: Sequence[ArmSummary]) -> list[str]:
    """One warning for all the arms that it is true of; the table shows which, so a long list is cut short."""
    named = ", ".join(f"'{arm.arm}'" for arm in arms[:NAMED])
    more = f" and {len(arms) - NAMED} more" if len(arms) > NAMED else ""
    return [f"{named}{more}: {what}."] if arms else []


def _tuning_warnings(found: Comparison) -> list[str]:
    warnings = _said_of(
        f"diverged, or is more than {TUNED_NATS} nats worse than the same design at another learning rate or warm-up; "
        "judge a design at its best",
        [arm for arm in found.arms if any(mark.endswith("not its own") for mark in arm.marks)],
    )
    for name, words in TUNING.items():
        edges = {best.arm: _edge(best, grid, name) for best, grid in _designs(found.arms)}
        listed = ", ".join(f"'{arm}' ({edge} tried)" for arm, edge in edges.items() if edge)
        if listed:
            warnings.append(f"best at the edge of its {words}s, so a better one may lie beyond: {listed}.")
    return warnings


def _seed_warnings(found: Comparison, kept: Mapping[str, Sequence[RunRow]]) -> list[str]:
    planned = {name: sorted(row.seed for row in runs) for name, runs in kept.items()}
    others = [f"'{name}' {seeds}" for name, seeds in planned.items() if seeds != planned[found.baseline]]
    if not others:
        return []
    return [
        f"arms do not have the same seeds as the baseline {planned[found.baseline]}: {', '.join(others)}; means "
        "are over different seeds, differences over the shared ones."
    ]


def _budget_warning(
    found: Comparison, kept: Mapping[str, Sequence[RunRow]], name: str, words: str, text: Callable[[Any], str]
) -> list[str]:
    base = next(getattr(arm, name) for arm in found.arms if arm.arm == found.baseline)
    if not base:
        return []
    others = []
    for arm, runs in kept.items():
        # A run that broke off has fewer tokens: that is its failure, not the arm's budget.
        values = _known(_finished(runs) if name == "tokens" else runs, name)
        worst = max(values, key=lambda value: abs(value - base), default=base)
        if abs(worst - base) / base > BUDGET_TOLERANCE:
            others.append(f"'{arm}' {100 * (worst / base - 1):+.1f} % ({text(worst)})")
    if not others:
        return []
    return [
        f"{words} differ from the baseline's {text(base)} by more than {100 * BUDGET_TOLERANCE:g} %: "
        f"{', '.join(others)}."
    ]


def _token_warnings(found: Comparison) -> list[str]:
    finished = _finished(found.rows)
    hashes: dict[int, dict[str, str]] = {}
    for row in finished:
        if row.token_hash:
            hashes.setdefault(row.seed, {})[row.arm] = row.token_hash
    warnings = []
    for seed, by_arm in sorted(hashes.items()):
        if len(set(by_arm.values())) > 1:
            listed = ", ".join(f"'{arm}' {digest[:8]}" for arm, digest in by_arm.items())
            warnings.append(
                f"arms did not see the same tokens at seed {seed} ({listed}): their difference there is "
                "not the design's alone."
            )
    unknown = dict.fromkeys(row.arm for row in finished if not row.token_hash)
    if unknown and len(found.arms) > 1:
        listed = ", ".join(f"'{arm}'" for arm in unknown)
        warnings.append(f"whether arms saw the same tokens cannot be checked: no token hash for {listed}.")
    return warnings


def _path_warnings(found: Comparison) -> list[str]:
    taken: dict[str, dict[str, list[str]]] = {}
    for row in _finished(found.rows):
        for op, path in row.paths.items():
            arms = taken.setdefault(op, {}).setdefault(str(path), [])
            if f"'{row.arm}'" not in arms:
                arms.append(f"'{row.arm}'")
    return [
        f"op {op} did not run the same way everywhere: "
        + "; ".join(f"{path} in {', '.join(arms)}" for path, arms in by_path.items())
        + ": tokens/s compare kernels as well as designs."
        for op, by_path in taken.items()
        if len(by_path) > 1
    ]


# --- cells, shared by Markdown and rich


def _cells(arm: ArmSummary) -> tuple[str, ...]:
    half = arm.loss.half_width
    loss = "-" if arm.loss.mean is None else f"{arm.loss.mean:.4f}" + ("" if half is None else f" ±{half:.4f}")
    flops, speed = arm.flops_per_token, arm.tokens_per_s
    return (
        "-" if arm.rank is None else f"{arm.rank}{'*' * (not arm.complete)}",
        f"{arm.arm} ({'; '.join(arm.marks)})" if arm.marks else arm.arm,
        loss,
        "baseline" if arm.effect is None else _with_interval(arm.effect),
        "-" if arm.params is None else _si(arm.params),
        "-" if flops is None else f"{flops / 1e6:,.{2 if flops < 1e8 else 0}f}",
        "-" if speed is None else f"{speed:,.0f}",
        arm.runs,
    )


def _signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # adding 0.0 turns -0.0 into 0.0


def _with_interval(effect: Effect) -> str:
    if effect.mean is None:
        return "-"
    if effect.low is None or effect.high is None:
        return _signed(effect.mean)
    return f"{_signed(effect.mean)} [{_signed(effect.low)}, {_signed(effect.high)}]"


def _si(value: float) -> str:
    """Three digits with k, M, G or T: 98698752 is 98.7M."""
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            scaled = value / unit
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{suffix}"
    return f"{value:g}"


def _csv_fields(arm: ArmSummary) -> dict[str, Any]:
    effect = arm.effect or Effect(None, None, None, None, 0, None, None)
    return {
        "arm": arm.arm,
        "rank": arm.rank,
        "complete": arm.complete,
        "baseline": arm.effect is None,
        "n": arm.loss.n,
        "planned": arm.planned,
        **{status: arm.counts.get(status, 0) for status in STATUSES},
        **{f"loss_{key}": getattr(arm.loss, key) for key in ("mean", "sd", "low", "high")},
        "bits_per_byte": arm.bits_per_byte.mean,
        **{f"effect_{key}": getattr(effect, key) for key in ("mean", "sd", "low", "high", "n", "p", "p_sign")},
        "effect_p_holm": arm.p_holm,
        **{
            key: getattr(arm, key)
            for key in ("params", "non_embedding", "flops_per_token", "tokens", "tokens_per_s", "train_s")
        },
        "initial_loss": arm.initial_loss,
        "unigram_entropy": arm.unigram_entropy,
        **{key: getattr(arm, key) for key in ("design", *TUNING)},
        "marks": "; ".join(arm.marks),
        "verdict": arm.verdict,
        "verdict_seeds": arm.verdict_seeds,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)
