"""What the experiments cost at ANDREA's sizes: runs, tokens and FLOPs counted, hours on one GPU estimated from them.

usage: python experiments/gpu_plan.py > experiments/results/gpu_plan.md
"""

from __future__ import annotations

import math
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from andrea_ablate.accounting import account
from andrea_ablate.composition import compose, resource_root
from andrea_ablate.yamltext import load_yaml

SIZES = ("andrea_12m", "andrea_120m")
# One H100-class card: its dense bf16 peak, and the share of it that a training step is assumed to reach.
PEAK_FLOPS, UTILISATION = 989e12, 0.35


def points(path: Path) -> int:
    """How many runs an experiment has: every combination of its values, and the choice of each arm's learning rate."""
    plain = load_yaml(path.read_text(encoding="utf-8"))
    swept = plain["hydra"]["sweeper"]["params"]
    parsed = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in swept.items()])
    values = {override.get_key_element(): len(list(override.sweep_string_iterator())) for override in parsed}
    arms = math.prod(count for key, count in values.items() if key != "seed")
    lr_seeds = load_yaml((resource_root() / "conf" / "config.yaml").read_text(encoding="utf-8"))["lr_seeds"]
    return arms * (values["seed"] + len(plain.get("lr_grid", ())) * len(lr_seeds))


def row(path: Path, size: str) -> str:
    """A line of the table. The FLOPs are those of the experiment's first arm."""
    cfg = compose(["logger=none", f"experiments={path.stem}", f"size={size}"])
    count = points(path)
    flops = count * cfg.trainer.tokens * account(cfg.model, cfg.data.seq_len).flops_train
    hours = flops / (PEAK_FLOPS * UTILISATION) / 3600
    return f"| {path.stem} | {size} | {count} | {count * cfg.trainer.tokens:.2g} | {flops:.2g} | {hours:,.0f} |"


def main() -> None:
    here = Path(__file__).parent
    lines = [
        "# What the experiments cost on a GPU",
        "",
        "Written by `experiments/gpu_plan.py`. Runs are every arm at every seed of its file, and those that choose its",
        "learning rate or sweep it; fewer are asked for on the command line (`seed=0,1,2`). FLOPs are counted",
        "(`accounting.py`) for the first arm; the",
        "others differ little. **The hours are an estimate and no measurement**: those FLOPs on one H100-class card at",
        f"{UTILISATION:.0%} of a bf16 peak of {PEAK_FLOPS / 1e12:.0f} TFLOP/s.",
        "",
        "| experiment | size | runs | tokens in all | FLOPs in all | hours, estimated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted(here.glob("*.yaml")):
        if "# Larger: " in path.read_text(encoding="utf-8"):
            lines += [row(path, size) for size in SIZES]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
