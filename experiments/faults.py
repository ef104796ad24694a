"""A sweep of twelve runs, broken off again and again, must end in the table of an undisturbed one, bit by bit.

    python experiments/faults.py > experiments/results/faults.json

Four designs over three seeds of a toy. The command is repeated until it ends by itself. Each time it is hit by one
signal, SIGKILL or SIGTERM, at a random row of whatever run is at it; some of those killed then find a checkpoint
damaged, some ran on a disk that takes no file above a random size (and may give up on it before the signal). The
clock is off by up to a day in either direction. Compared are the saved comparison, every record, every row and every
weight, without what measures time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

SWEEP = [
    *("-m", "norm=pre,post", "ffn=gelu4x,swiglu", "seed=0,1,2", "size=tiny", "logger=csv", "ops=reference"),
    *("model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.dropout=0.1", "trainer.val_every=40"),
    *("data=synthetic", "data.n_tokens=3000", "data.seq_len=8", "data.val_tokens=64", "trainer.batch_size=4"),
    "trainer.checkpoint_every=8",
]
TOKENS_PER_STEP = 32
# A fault, and how many of a hundred are of its kind.
FAULTS = {"SIGKILL": 60, "SIGTERM": 15, "SIGKILL, damaged checkpoint": 15, "SIGKILL, full disk": 10}
TIMES = {"wall_s", "train_s", "tokens_per_s", "setup_s", "started", "ended", "peak_mem_gib"}
TRIES = {"resumed_from", "damaged_checkpoints", "versions", "device", "tracking"}


def attempt(command: list[str], log: Path, largest_file: int | None, clock_s: float) -> None:
    """What the child process does: the command line, on a small disk perhaps and with a wrong clock."""
    import torch

    from andrea_ablate.cli import main

    torch.set_num_threads(1)
    real = time.time
    time.time = lambda: real() + clock_s
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(told, 1)
    os.dup2(told, 2)
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    main(command)


def start(folder: Path, steps: int, largest_file: int | None = None, clock_s: float = 0.0) -> ForkServerProcess:
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["andrea_ablate.training.run", "andrea_ablate.cli", "andrea_ablate.report.compare"])
    process = context.Process(target=attempt, args=(command(folder, steps), folder / "log", largest_file, clock_s))
    process.start()
    return process


def command(folder: Path, steps: int) -> list[str]:
    kept = [f"paths.{name}={folder / name}" for name in ("runs", "sweeps", "cache")]
    return [*SWEEP, f"trainer.tokens={TOKENS_PER_STEP * steps}", *kept]


def rows_written(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/metrics.jsonl"))


def wait_for_rows(process: ForkServerProcess, folder: Path, rows: int, after_s: float) -> None:
    """Until the command has written so many rows more, and a moment longer, or has ended."""
    before = rows_written(folder)
    while process.is_alive() and rows_written(folder) - before < rows:
        time.sleep(0.001)
    process.join(after_s)


def damage_newest_checkpoint(folder: Path, rng: random.Random) -> None:
    found = sorted(folder.glob("runs/*/checkpoints/*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if found:
        content = bytearray(found[-1].read_bytes())
        if rng.random() < 0.5:
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        found[-1].write_bytes(content)


def strike(folder: Path, steps: int, kind: str, rng: random.Random) -> str | None:
    """Run the command under one fault. Returns: what struck it, None if the sweep was done before."""
    day = rng.uniform(-86400, 86400)
    process = start(folder, steps, rng.randrange(200, 120_000) if "full disk" in kind else None, day)
    wait_for_rows(process, folder, rng.randrange(1, 14), rng.uniform(0, 0.02))
    (process.terminate if kind == "SIGTERM" else process.kill)()
    process.join()
    if kind.endswith("checkpoint"):
        damage_newest_checkpoint(folder, rng)
    gave_up = process.exitcode == 1  # runs failed, and the sweep ended before the signal came
    return None if process.exitcode == 0 else "full disk" if gave_up else kind


def finish(folder: Path, steps: int) -> None:
    process = start(folder, steps)
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()


def outcome(folder: Path) -> Iterator[tuple[str, Any]]:
    """Everything that the two sweeps must share, by the file that it is in."""
    for path in sorted(folder.glob("sweeps/*/comparison.json")):
        yield path.name, _without(json.loads(path.read_text()), TIMES)
    for path in sorted(folder.glob("runs/*")):
        yield f"{path.name}/record", _without(json.loads((path / "record.json").read_text()), TIMES | TRIES)
        rows = [_without(json.loads(line), TIMES) for line in (path / "metrics.jsonl").read_text().splitlines()]
        yield f"{path.name}/rows", rows
        yield f"{path.name}/weights", hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        alone, struck = Path(place, "alone"), Path(place, "struck")
        finish(alone, given.steps)
        while sum(count for kind, count in faults.items() if kind.startswith("SIG")) < given.kills:
            kind = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
            struck_by = strike(struck, given.steps, kind, rng)
            if struck_by is None:
                break
            faults[struck_by] += 1
            print(f"{sum(faults.values())}: {struck_by}, {rows_written(struck)} rows", file=sys.stderr)
        finish(struck, given.steps)
        expected, found = dict(outcome(alone)), dict(outcome(struck))
        left = len(list(struck.rglob("*.tmp")))
    different = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
    digest = hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()
    result = {
        "runs": sum(key.endswith("/record") for key in expected),
        "steps_per_run": given.steps,
        "seed": given.seed,
        "faults": dict(sorted(faults.items())),
        "compared": len(expected),
        "different": sorted(different),
        "temporary_files_left": left,
        "sha256_of_what_is_compared": digest,
    }
    print(json.dumps(result, indent=1))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
