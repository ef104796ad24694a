"""Sum up the sweep of tune_nano.yaml: how far each arm is, at the nano recipe, from its best learning rate and warm-up.

usage: python experiments/tune_nano.py sweeps/NAME/comparison.json > experiments/results/tune_nano.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from andrea_ablate.composition import compose
from andrea_ablate.report.compare import TUNED_NATS


def summarise(comparison: dict[str, Any]) -> dict[str, Any]:
    """Per design: its grid, its best point, the recipe's point and the distance in nats per token."""
    recipe = compose([])
    designs: dict[str, list[dict[str, Any]]] = {}
    for row in comparison["runs"]:
        point = {key: row[key] for key in ("lr", "warmup_tokens", "val_loss")}
        choices = [choice for choice in row["design"].split() if not choice.startswith("experiments=")]
        designs.setdefault(" ".join(choices), []).append(point)
    warmup_tokens = recipe.warmup_steps * recipe.tokens_per_step
    summary = {}
    for design, points in designs.items():
        best = min((p for p in points if p["val_loss"] is not None), key=lambda p: p["val_loss"])
        ours = next(p for p in points if p["lr"] == recipe.optim["lr"] and p["warmup_tokens"] == warmup_tokens)
        gap = ours["val_loss"] - best["val_loss"]
        near = gap <= TUNED_NATS
        summary[design] = {"best": best, "recipe": ours, "gap": round(gap, 4), "near": near, "grid": points}
    return {"tokens": recipe.trainer.tokens, "seed": recipe.seed, "designs": summary}


if __name__ == "__main__":
    print(json.dumps(summarise(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), indent=1))
