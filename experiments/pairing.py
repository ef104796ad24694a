"""What pairing is worth on real runs: the 95 % interval of a difference between two arms, with and without it.

    python experiments/pairing.py

trains the sweeps below, a shortened nano each (what is finished is reused), and writes results/pairing.json and .md.

*Paired*: both arms at seeds 0 to 7, the t interval of the differences at equal seeds, which share initial values and
order of data. *Welch, same runs*: those runs as if nobody knew which share a seed. *Unpaired*: the treatment at seeds 8
to 15, so that nothing is shared, and Welch's interval.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy.stats import pearsonr, ttest_ind

from andrea_ablate.analysis import mean_interval, paired_effect

RESULTS = Path(__file__).parent / "results"
RECIPE = ("trainer.tokens=102400", "schedule.warmup_tokens=20480", "logger=none")
SEEDS = range(8)
OTHERS = range(8, 16)
# Key of the sweep, its baseline and its treatment.
PAIRS = (("norm", "pre", "post"), ("optim.lr", "4e-3", "2e-3"))

Losses = Mapping[int, float]


def train(key: str, value: str, seeds: range) -> Losses:
    """Validation loss by seed of one arm, trained by the product's own sweep."""
    command = [sys.executable, "-m", "andrea_ablate", "-m", f"{key}={value}", f"seed={','.join(map(str, seeds))}"]
    told = subprocess.run([*command, *RECIPE], check=True, capture_output=True, text=True).stdout
    folder = next(line for line in told.splitlines() if line.startswith("Saved in ")).split()[2].rstrip(";")
    saved = json.loads((Path(folder) / "comparison.json").read_text(encoding="utf-8"))
    return {run["seed"]: run["val_loss"] for run in saved["runs"]}


def welch(treatment: Losses, baseline: Losses) -> dict[str, float]:
    t, b = list(treatment.values()), list(baseline.values())
    interval = ttest_ind(t, b, equal_var=False).confidence_interval(0.95)
    return _line(statistics.fmean(t) - statistics.fmean(b), interval.low, interval.high)


def _line(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": float(mean), "low": float(low), "high": float(high), "half_width": float(high - low) / 2}


def measure(key: str, baseline: str, treatment: str) -> dict[str, Any]:
    base, arm, apart = (
        train(key, value, seeds) for value, seeds in ((baseline, SEEDS), (treatment, SEEDS), (treatment, OTHERS))
    )
    effect = paired_effect(arm, base)
    assert effect.mean is not None and effect.low is not None and effect.high is not None
    lines = {
        "paired": _line(effect.mean, effect.low, effect.high),
        "Welch, same runs": welch(arm, base),
        "unpaired, other seeds": welch(apart, base),
    }
    for line in lines.values():
        line["ratio"] = line["half_width"] / lines["paired"]["half_width"]
    return {
        "baseline": f"{key}={baseline}",
        "treatment": f"{key}={treatment}",
        "sd over seeds": {"baseline": mean_interval(base.values()).sd, "treatment": mean_interval(arm.values()).sd},
        "sd of the paired difference": effect.sd,
        "correlation over seeds": float(pearsonr(list(base.values()), [arm[seed] for seed in base]).statistic),
        "intervals": lines,
        "losses": {"baseline": base, "treatment": {**arm, **apart}},
    }


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report as a table: one line per way to make the interval."""
    lines = [
        "# Paired against unpaired, on real runs",
        "",
        f"`nano` with `{' '.join(report['recipe'][:2])}`, {report['seeds']} seeds an arm; validation loss in nats per",
        "token, treatment minus baseline, 95 % intervals. The last column is the half-width over the paired one's; its",
        "square is about how many times as many seeds the same width takes. Made by `experiments/pairing.py`.",
        "",
        "| comparison | interval | difference | half-width | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for pair in report["pairs"]:
        for name, line in pair["intervals"].items():
            lines.append(
                f"| {pair['treatment']} against {pair['baseline']} | {name} | "
                f"{line['mean']:+.4f} [{line['low']:+.4f}, {line['high']:+.4f}] | {line['half_width']:.4f} | "
                f"{line['ratio']:.2f} |"
            )
    lines.append("")
    for pair in report["pairs"]:
        sd = pair["sd over seeds"]
        lines.append(
            f"- {pair['treatment']} against {pair['baseline']}: sd over seeds {sd['baseline']:.4f} and "
            f"{sd['treatment']:.4f}, of the paired difference {pair['sd of the paired difference']:.4f}; the two arms "
            f"correlate over seeds with {pair['correlation over seeds']:+.2f}."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    report = {"recipe": RECIPE, "seeds": len(SEEDS), "pairs": [measure(*pair) for pair in PAIRS]}
    (RESULTS / "pairing.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "pairing.md").write_text(to_markdown(report), encoding="utf-8")
    print(to_markdown(report), end="")


if __name__ == "__main__":
    main()
