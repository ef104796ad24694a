"""What the tests on clusters share: a sweep of four short runs, watched from its store, against the same one here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offline_wandb import offline_files

# Long enough for somebody to interfere, short enough to wait for.
COMMAND = ("-m", "size=tiny", "seed=0,1,2,3", "trainer.tokens=38400", "trainer.val_every=100")
COMMAND += ("trainer.checkpoint_every=20", "logger=wandb", "logger.mode=offline")
RESULTS = ("status", "reason", "val/loss", "val/bpb", "initial_loss", "token_hash", "params", "run_id", "name")

PAUSE_S = 60  # between two things that a sweep writes, where nothing else was seen: processes start in it


class Sweep:
    """A sweep under way in a folder of its own, seen through what it writes; a context manager that ends it."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *arguments: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "andrea_ablate", *COMMAND, *arguments]
        with open(folder / "out", "wb") as out:
            # Its standard output would be that of every process it starts: they may live longer.
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def records(self) -> dict[str, dict[str, Any]]:
        found = {}
        for path in self.folder.glob("runs/*/record.json"):
            found[path.parent.name] = json.loads(path.read_text())
        return found

    def steps(self, run_id: str) -> list[int]:
        lines = (self.folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [row["step"] for row in rows if "train/loss" in row]

    def said(self) -> str:
        return (self.folder / "out").read_text()

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        """What the condition says once it is true, waited for while the sweep moves.

        A machine with other work slows it down at will, so the limit is to the pause between two things it writes: the
        longest that there was, many times over.
        """
        seen, since, longest = self._written(), time.monotonic(), PAUSE_S
        while True:
            ended = self.process.poll() is not None
            if found := condition():
                return found
            assert not ended, f"the sweep ended: {self.said()[-3000:]}"
            pause, now = time.monotonic() - since, self._written()
            if now != seen:
                seen, since, longest = now, time.monotonic(), max(longest, pause)
            assert pause < 10 * longest, f"nothing written for {pause:.0f} s: {self.said()[-3000:]}"
            time.sleep(0.05)

    def _written(self) -> tuple[int, ...]:
        """How much there is of every file that tells of progress."""
        files = [self.folder / "out", *sorted(self.folder.glob("runs/*/[a-z]*.json*"))]
        return tuple(path.stat().st_size for path in files)

    def under_way(self, step: int = 40) -> list[str]:
        """Runs that have come as far as `step` and are not at their end."""
        return [
            run_id
            for run_id, record in self.records().items()
            if record["status"] == "running" and len(self.steps(run_id)) >= step
        ]

    def finish(self) -> str:
        """Wait for the end; what the sweep printed."""
        self.wait_until(lambda: self.process.poll() is not None)
        assert self.process.returncode == 0, self.said()[-3000:]
        return self.said()

    def table(self) -> list[dict[str, Any]]:
        (path,) = self.folder.glob("sweeps/*/comparison.json")
        runs = json.loads(path.read_text())["runs"]
        measured = ("tokens_per_s", "train_s")
        return [{key: value for key, value in run.items() if key not in measured} for run in runs]


def here(folder: Path) -> Sweep:
    """The same sweep in one process of this machine, at its end."""
    with Sweep(folder, {**os.environ, "OMP_NUM_THREADS": "1"}) as sweep:
        sweep.finish()
    return sweep


def same_results(sweep: Sweep, reference: Sweep) -> None:
    """Nothing lost, nothing twice, and the same numbers to the last bit."""
    found, expected = sweep.records(), reference.records()
    assert len(found) == 4 and found.keys() == expected.keys()
    for run_id, record in found.items():
        assert {key: record.get(key) for key in RESULTS} == {key: expected[run_id].get(key) for key in RESULTS}
        assert sweep.steps(run_id) == list(range(1, 301)) == reference.steps(run_id)
        sessions = [path.stem for path in offline_files(sweep.folder / "runs" / run_id)]
        assert sessions == [f"run-{run_id}"] * (2 if record["resumed_from"] else 1)  # one tracker run, gone on with
    assert sweep.table() == reference.table()
