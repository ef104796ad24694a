"""A sweep of twelve nano designs with the compiled ops, under torch.compile and eager: seconds with every start-up.

usage: python experiments/ops_sweep.py [--norms pre ...] [override ...] > experiments/results/ops_sweep.json

The three take turns, one sweep of four designs for each norm position, so that a machine whose speed drifts slows all
alike. Every sweep is a command of its own; torch.compile starts with an empty cache on disk and keeps it between turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from andrea_ablate.machine import describe, versions

ARMS = ("ffn=gelu4x,swiglu", "norm_type=layernorm,rmsnorm")
NORMS = ("pre", "post", "double")
KINDS = {
    "compiled": ["ops=compiled"],
    "torch.compile": ["ops=reference", "trainer.compile=true"],
    "eager": ["ops=reference"],
}


def sweep(home: Path, kind: str, norm: str, overrides: list[str]) -> float:
    """Seconds of one sweep of `kind`, from the start of its process to the end; its runs are in `home`/KIND/runs."""
    command = [sys.executable, "-m", "andrea_ablate", "-m", f"norm={norm}", *ARMS, "logger=none", *KINDS[kind]]
    paths = [f"paths.{name}={home / kind / name}" for name in ("runs", "sweeps")]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(home / kind / "inductor")}
    began = time.perf_counter()
    subprocess.run(
        [*command, *paths, f"paths.cache={home / 'cache'}", *overrides],
        env=environment,
        stdout=sys.stderr,
        check=True,
    )
    return time.perf_counter() - began


def runs(folder: Path) -> list[dict[str, Any]]:
    """What the records of finished runs say, in the order of their names."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*/record.json"))]
    return [
        {key: record.get(key) for key in ("name", "status", "setup_s", "train_s", "val/loss", "paths")}
        for record in records
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norms", nargs="+", default=NORMS, help="fewer, for a trial")
    parser.add_argument("overrides", nargs="*", help="of every run, e.g. trainer.tokens=8192")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sweep(home, "eager", "pre", [*given.overrides, "plan=true"])  # prepares the data that all read
        for norm in given.norms:
            for kind in KINDS:
                seconds[kind].append(round(sweep(home, kind, norm, given.overrides), 2))
        result = {
            "arms": 4 * len(given.norms),
            "overrides": given.overrides,
            "device": describe("cpu"),
            "versions": versions(),
            "seconds": {kind: {"sum": sum(turns), "turns": turns} for kind, turns in seconds.items()},
            "ratio": {kind: sum(turns) / sum(seconds["compiled"]) for kind, turns in seconds.items()},
            "runs": {kind: runs(home / kind / "runs") for kind in KINDS},
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
