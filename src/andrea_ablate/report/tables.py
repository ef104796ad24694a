"""The tables of a report, as texts: ranking, decisions, main effects, learning rates, spikes, confounds and runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from andrea_ablate.confounds import differences, flat
from andrea_ablate.report.compare import ArmSummary, Comparison
from andrea_ablate.report.compare.comparison import COLUMNS
from andrea_ablate.report.compare.effects import FACTORIAL_TITLE, noise_sentence
from andrea_ablate.report.compare.text import cells, with_interval
from andrea_ablate.report.compare.tuned import TUNED_COLUMNS, TUNED_TITLE, tuned_cells
from andrea_ablate.report.parts import StoredRun, Table
from andrea_ablate.tracking.store import Store

# Settings that are no part of a design: names, places, and the seed, in which the runs of an arm differ.
_NO_DESIGN = ("name", "group", "tags", "logger", "paths", "seed")
_SHOWN = 4  # values of one difference


def tables(comparison: Comparison, runs: Mapping[str, StoredRun], store: Store) -> list[Table]:
    """All tables that there is something to write in."""
    found = (
        _ranking(comparison),
        _decisions(comparison),
        _factorial(comparison),
        _tuned(comparison),
        _confounds(comparison, runs),
        _spikes(comparison, runs, store),
        _runs(comparison, runs),
    )
    return [table for table in found if table.lines or table.note]


def _ranking(comparison: Comparison) -> Table:
    lines = [cells(arm) for arm in comparison.ranked]
    note = f"{comparison.title}; {comparison.footnote}" if comparison.footnote else comparison.title
    return Table("Ranking", COLUMNS, lines, note=note)


def _decisions(comparison: Comparison) -> Table:
    heads = ("arm", "difference to baseline", "p, Holm", "better?", "why", "seeds to settle it")
    judged = [arm for arm in comparison.ranked if arm.verdict]
    lines = [
        (
            arm.arm,
            "-" if arm.effect is None else with_interval(arm.effect),
            _p(arm),
            arm.verdict or "-",
            arm.why or "-",
            "-" if arm.verdict_seeds is None else f"about {arm.verdict_seeds}",
        )
        for arm in judged
    ]
    note = (
        f"Is the arm better than the baseline '{comparison.baseline}'? Differences within {comparison.margin:g} nats "
        "do not count."
    )
    return Table("Effects and verdicts", heads, lines, note=note if lines else "")


def _p(arm: ArmSummary) -> str:
    if arm.p_holm is None or arm.effect is None or arm.effect.sd == 0:
        return "-"
    return "< 0.0001" if arm.p_holm < 0.0001 else f"{arm.p_holm:.4f}"


def _factorial(comparison: Comparison) -> Table:
    lines = [(name, with_interval(effect), str(effect.n)) for name, effect in comparison.factorial.items()]
    heads = ("choice", "effect, nats", "seeds")
    return Table("Main effects and interactions", heads, lines, note=FACTORIAL_TITLE.rstrip(":") + "." if lines else "")


def _tuned(comparison: Comparison) -> Table:
    title = TUNED_TITLE[0].upper() + TUNED_TITLE[1:]
    return Table(title, TUNED_COLUMNS, tuned_cells(comparison.tuned))


def _confounds(comparison: Comparison, runs: Mapping[str, StoredRun]) -> Table:
    """The noise floor, and everything in which the arms' records and settings differ."""
    lines = [
        (kind, item.key, _values(item.values))
        for kind, found in _differing(comparison, runs).items()
        for item in differences(*found, declared={})
    ]
    differ = (
        "What the arms differ in, from the records of their runs. A setting comes from what is swept, or the sweep's "
        "command allowed it; anything else may be why an arm is ahead."
        if lines
        else "The records of the arms differ in nothing."
    )
    note = " ".join(filter(None, (noise_sentence(comparison.noise), differ if len(comparison.arms) > 1 else "")))
    return Table("Noise floor and confounds", ("kind", "what", "values"), lines, code=(1,), note=note)


def _differing(
    comparison: Comparison, runs: Mapping[str, StoredRun]
) -> dict[str, tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]]:
    """Settings and facts by arm, as `differences` takes them, by what kind of difference they would be."""
    settings: dict[str, dict[str, Any]] = {}
    seen: dict[str, dict[str, dict[str, None]]] = {}  # arm -> fact -> its values over the runs of the arm
    for row in comparison.rows:
        if (run := runs.get(row.run_id)) is None:
            continue
        plain = {key: value for key, value in run.config.items() if key not in _NO_DESIGN}
        settings.setdefault(row.arm, dict(flat(plain)))
        for key, value in _facts(run.record):
            seen.setdefault(row.arm, {}).setdefault(key, {})[str(value)] = None
    facts = {arm: {key: " and ".join(values) for key, values in by_key.items()} for arm, by_key in seen.items()}
    return {"how it was trained": ({}, facts), "setting": (settings, {})}


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a record has of how its run was trained."""
    if record.get("status") != "finished":
        return
    for key in ("commit", "numerics", "precision", "world_size"):
        if key in record:
            yield key, record[key]
    for key in ("versions", "paths"):
        yield from flat(record.get(key) or {}, f"{key}.")
    for top, names in (("device", ("type", "name", "threads")), ("data", ("fingerprint",))):
        for name in names:
            if name in (record.get(top) or {}):
                yield f"{top}.{name}", record[top][name]


def _values(by_arm: Mapping[str, Any]) -> str:
    arms: dict[str, list[str]] = {}
    for arm, value in by_arm.items():
        arms.setdefault(str(value), []).append(arm)
    said = [f"{value} ({names[0] if len(names) == 1 else f'{len(names)} arms'})" for value, names in arms.items()]
    more = [f"{len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
    return "; ".join([*said[:_SHOWN], *more])


def _spikes(comparison: Comparison, runs: Mapping[str, StoredRun], store: Store) -> Table:
    found = [(row, spike) for row in comparison.rows for spike in runs.get(row.run_id, StoredRun()).spikes]
    found.sort(key=lambda pair: -pair[1].height)
    lines = [
        (
            row.run_id,
            f"{row.arm} seed={row.seed}",
            f"{spike.start}",
            "not finite" if math.isinf(spike.height) else f"{spike.height:.3f}",
            "none"
            if spike.recovery_steps is None
            else f"{spike.recovery_steps} step{'s' * (spike.recovery_steps != 1)}",
            f"{spike.lost:.3f}",
            "shown" if spike.start in {capsule["step"] for capsule in runs[row.run_id].capsules} else "-",
            shlex.join(
                ["python", "-m", "andrea_ablate.replay", row.run_id, str(spike.start), "--runs", str(store.root)]
            ),
        )
        for row, spike in found
    ]
    heads = ("run", "arm", "step", "height, nats", "recovery", "loss lost, nats", "layers", "look inside")
    title = f"Loss spikes ({len(found)})" if found else "Loss spikes"
    return Table(title, heads, lines, code=(0, 7), note="" if found else "None in the runs read.")


def _runs(comparison: Comparison, runs: Mapping[str, StoredRun]) -> Table:
    lines = [
        (
            row.run_id or "-",
            f"{row.arm} seed={row.seed}",
            row.status,
            "-" if row.val_loss is None else f"{row.val_loss:.4f}",
            "-" if row.tokens is None else f"{row.tokens:,}",
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            runs.get(row.run_id, StoredRun()).record.get("commit") or "-",
            row.reason or "-",
        )
        for row in comparison.rows
    ]
    heads = ("run", "arm", "status", "validation loss", "tokens", "tokens/s", "commit", "reason")
    note = "commit: of the code that trained the run, + for one whose sources had changed, - where there was none."
    return Table(f"Runs ({len(lines)})", heads, lines, code=(0, 6), note=note)
