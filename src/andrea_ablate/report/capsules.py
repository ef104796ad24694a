"""What happened in each layer before a loss spike: the capsules that `replay` writes, as maps of step by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from andrea_ablate.report.compare import Comparison
from andrea_ablate.report.parts import LOSS, Figure, StoredRun, number
from andrea_ablate.tracking.store import decode

# What `training.replay.Probe` measures in a layer, in words; the first is shown first.
QUANTITIES = {
    "out_rms": "activation RMS",
    "max_score": "largest attention score",
    "entropy": "entropy of attention, nats",
    "grad_rms": "gradient RMS",
    "update_ratio": "update / weight norm",
}
CAPTION = (
    "The steps around a loss spike, done again by andrea_ablate.replay: above, the loss; below, one value per step and "
    "layer, layer 0 first. The line is the step that was replayed. Lighter is higher."
)


def read_capsules(folder: Path) -> list[dict[str, Any]]:
    """The capsules of a run's folder, those of its own settings alone, without the tokens; by step."""
    found = []
    for path in sorted((folder / "spikes").glob("step-*.json")):
        capsule = decode(json.loads(path.read_bytes()))
        if not capsule["changes"] and not capsule["exchanged"]:
            steps = [{key: value for key, value in step.items() if key != "tokens"} for step in capsule["steps"]]
            found.append({**capsule, "steps": steps})
    return found


def capsule_figures(comparison: Comparison, runs: Mapping[str, StoredRun]) -> list[Figure]:
    """A figure per capsule; the highest spike first, as in the table of spikes."""
    found = []
    for row in comparison.rows:
        run = runs.get(row.run_id, StoredRun())
        heights = {spike.start: spike.height for spike in run.spikes}
        for capsule in run.capsules:
            step, views = capsule["step"], _views(capsule["steps"], capsule["step"])
            if views:
                title = f"Before step {step} of {row.arm} seed={row.seed}"
                said = "" if capsule["identical"] else " The losses were NOT the recorded ones: other code or machine."
                figure = Figure(
                    f"capsule-{row.run_id}-{step}", title, CAPTION + said, "heat", views, (row.arm,), (row.run_id,)
                )
                found.append((heights.get(step, -math.inf), figure))
    return [figure for _, figure in sorted(found, key=lambda pair: -pair[0])]


def _views(steps: Sequence[Mapping[str, Any]], at: int) -> list[dict[str, Any]]:
    """One view per quantity that every layer has at some step."""
    loss = [number(step["train/loss"]) for step in steps]
    views = []
    for key, words in QUANTITIES.items():
        layers = max((len(step["layers"]) for step in steps), default=0)
        values = [[number(step["layers"][layer].get(key)) for step in steps] for layer in range(layers)]
        if values and all(any(value is not None for value in row) for row in values):
            mark = {"x": at, "text": f"step {at}"}
            view = {"name": words, "x": "step", "y": words, "unit": LOSS, "steps": [step["step"] for step in steps]}
            views.append({**view, "values": values, "loss": loss, "at": mark})
    return views
