"""The figures of a report, from a comparison and the records of its runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from andrea_ablate.registry import ConfigError
from andrea_ablate.report.capsules import capsule_figures, read_capsules
from andrea_ablate.report.compare import Comparison
from andrea_ablate.report.curves import not_finite, over_seeds, points, thin
from andrea_ablate.report.parts import LOSS, Figure, StoredRun, number, numbers
from andrea_ablate.report.positions import positions
from andrea_ablate.report.rates import learning_rates
from andrea_ablate.tracking.store import Store, StoreError

CURVES = {"train/loss": "training loss", "val/loss": "validation loss"}
COSTS = (
    ("params", "parameters"),
    ("flops_per_token", "training FLOPs per token"),
    ("tokens_per_s", "tokens per second (median over seeds)"),
)


def read_runs(comparison: Comparison, store: Store) -> tuple[dict[str, StoredRun], list[str]]:
    """The stored runs by id, and a warning for each that is not there or cannot be read."""
    runs, warnings = {}, []
    for row in comparison.rows:
        if not row.run_id:
            continue
        try:
            record = store.record(row.run_id)
            if record is None:
                warnings.append(f"run {row.run_id} is not in {store.root}: it has no curve and no spikes here.")
                continue
            rows = store.metrics(row.run_id)
            curves = {key: points(rows, key) for key in CURVES}
            capsules = read_capsules(store.path(row.run_id))
            runs[row.run_id] = StoredRun(record, store.config(row.run_id), curves, capsules)
        except (ConfigError, StoreError, ValueError, KeyError) as error:
            warnings.append(f"run {row.run_id} is left out of curves and spikes: {error}.")
    return runs, warnings


def figures(comparison: Comparison, runs: Mapping[str, StoredRun]) -> list[Figure]:
    """All figures that there is something to draw in."""
    styles = {arm.arm: index for index, arm in enumerate(comparison.arms)}
    found = (
        _forest(comparison, styles),
        _curves(comparison, runs, styles),
        learning_rates(comparison, styles),
        positions(comparison, runs, styles),
        _costs(comparison, styles),
        *capsule_figures(comparison, runs),
    )
    return [figure for figure in found if figure is not None]


def command(comparison: Comparison, arm: str, runs: Mapping[str, StoredRun]) -> str:
    """The command that trains the runs of an arm, or finds them trained."""
    rows = [row for row in comparison.rows if row.arm == arm]
    first = rows[0]
    design = first.design or first.arm
    words = [] if design == "default" else re.split(r" (?=[+~]*[\w./@]+=)", design)
    if first.lr is not None:
        words.append(f"optim.lr={first.lr!r}")
    warmup = runs.get(first.run_id, StoredRun()).config.get("schedule", {}).get("warmup_tokens")
    if warmup is not None:
        words.append(f"schedule.warmup_tokens={warmup}")
    seeds = ",".join(str(row.seed) for row in rows)
    return shlex.join(["python", "-m", "andrea_ablate", "-m", *words, f"seed={seeds}"])


def _curves(comparison: Comparison, runs: Mapping[str, StoredRun], styles: Mapping[str, int]) -> Figure | None:
    views = []
    drawn: dict[str, None] = {}
    for key, name in CURVES.items():
        series = []
        for arm in comparison.ranked:  # of many arms the page shows the first ones until asked for more
            ids = [row.run_id for row in comparison.rows if row.arm == arm.arm and row.run_id in runs]
            seeds = {run_id: runs[run_id].curves[key] for run_id in ids}
            if not any(seeds.values()):
                continue
            curve = thin(over_seeds(list(seeds.values())))
            marks = [mark for run_id in ids for mark in _marks(run_id, runs[run_id], seeds[run_id], key)]
            series.append(
                {
                    "name": arm.arm,
                    "style": styles[arm.arm],
                    "x": curve.steps.tolist(),
                    **{side: numbers(getattr(curve, side).tolist()) for side in ("mean", "low", "high")},
                    "marks": marks,
                }
            )
            drawn[arm.arm] = None
        if series:
            last = max(one["x"][-1] for one in series)
            zooms = [
                {"name": "whole run"},
                {"name": "last half", "x0": last / 2},
                {"name": "last tenth", "x0": 0.9 * last},
            ]
            start = max((one["high"][0] for one in series if one["high"][0] is not None), default=None)
            if (
                start is not None
                and max(high for one in series for high in one["high"] if high is not None) > 1.5 * start
            ):
                zooms.insert(0, {"name": "up to the first loss", "y1": start})
            view = {"name": name, "x": "step", "y": f"{name}, {LOSS}", "band": "area", "zooms": zooms}
            views.append({**view, "series": series})
    caption = (
        "Line: mean over the seeds that reached the step; band: lowest to highest seed. Triangles are spikes, crosses "
        "steps whose loss was not finite, squares the last step of a run that did not finish."
    )
    return Figure("curves", "Loss curves", caption, "xy", views, tuple(drawn)) if views else None


def _marks(run_id: str, run: StoredRun, seed: Sequence[tuple[int, float]], key: str) -> list[dict[str, Any]]:
    marks: list[dict[str, Any]] = [
        {
            "kind": "not finite",
            "x": first,
            "y": None,
            "text": f"{run_id}: not finite, step {first}" + f" to {last}" * (last > first),
        }
        for first, last in not_finite(seed)
    ]
    if key == "train/loss":
        marks += [
            {
                "kind": "spike",
                "x": spike.peak,
                "y": number(spike.baseline + spike.height),
                "text": f"{run_id}: spike at step {spike.start}, height {spike.height:.3f}",
            }
            for spike in run.spikes
        ]
        status = run.record.get("status", "")
        if seed and status != "finished":
            step, value = seed[-1]
            marks.append(
                {"kind": "end", "x": step, "y": number(value), "text": f"{run_id}: {status} after step {step}"}
            )
    return marks


def _forest(comparison: Comparison, styles: Mapping[str, int]) -> Figure | None:
    rows: list[dict[str, Any]] = [
        {
            "name": arm.arm,
            "style": styles[arm.arm],
            **{side: number(getattr(arm.effect, side)) for side in ("mean", "low", "high")},
            "n": arm.effect.n,
            "p_holm": number(arm.p_holm),
            "verdict": arm.verdict,
        }
        for arm in comparison.ranked
        if arm.effect is not None
    ]
    if not rows:
        return None
    if (noise := comparison.noise) is not None:
        sides = {side: number(getattr(noise, side)) for side in ("mean", "low", "high")}
        name = "noise floor: the baseline against itself, not paired"
        rows.append({"name": name, "noise": True, **sides, "n": noise.n, "p_holm": None})
    caption = (
        f"Paired difference of the validation loss to the baseline '{comparison.baseline}', seed by seed, with its "
        f"95 % interval; left of zero is better. Shaded: the margin, ±{comparison.margin:g} nats, within which a "
        "difference does not matter. The verdict is on 'better than the baseline'; p is adjusted by Holm's method."
    )
    view = {"name": "", "x": f"difference to '{comparison.baseline}', {LOSS}", "margin": comparison.margin}
    arms = tuple(arm.arm for arm in comparison.arms)
    return Figure("effects", "Effects against the baseline", caption, "forest", [{**view, "rows": rows}], arms)


def _costs(comparison: Comparison, styles: Mapping[str, int]) -> Figure | None:
    views = []
    for name, words in COSTS:
        known = [arm for arm in comparison.arms if getattr(arm, name) and arm.loss.mean is not None]
        series = [
            {
                "name": arm.arm,
                "style": styles[arm.arm],
                "x": [getattr(arm, name)],
                **{side: numbers([getattr(arm.loss, side)]) for side in ("mean", "low", "high")},
                "marks": [],
            }
            for arm in known
        ]
        if series:
            zooms = [{"name": "all"}]
            view = {"name": words, "x": words, "y": f"validation loss, {LOSS}", "band": "bar", "zooms": zooms}
            views.append({**view, "series": series})
    caption = "Mean over the finished seeds with its 95 % interval; down is better, and left but for tokens per second."
    arms = tuple(arm.arm for arm in comparison.arms if arm.loss.mean is not None)
    return Figure("costs", "Cost against loss", caption, "xy", views, arms) if views else None
