"""What may be deleted, found first and deleted only when asked; a run whose lock is held is never touched.

Lock files stay: the lock is the process's, the file only its place, and a place that is deleted while somebody waits
at it would let in two.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from andrea_ablate.tracking.plans import plans
from andrea_ablate.tracking.store import RunBusy, Store, StoreError

TEMPORARY_S = 3600  # a temporary file of this age is nobody's: writing one takes seconds


@dataclass(frozen=True)
class Item:
    """A file or folder that nothing refers to. run_id: the run that it belongs to, None for a sweep's."""

    path: Path
    why: str
    run_id: str | None

    @property
    def size(self) -> int:
        files = [self.path] if self.path.is_file() else self.path.rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())


def garbage(store: Store, sweeps: Path, unnamed_days: float | None = None) -> Iterator[Item]:
    """Yield what may go: temporary files, checkpoints of finished runs, folders in which no run ever began.

    Args:
        unnamed_days: also whole runs that no sweep names and nothing has written to for so many days.
    """
    now = time.time()
    named = set(_named(sweeps)) if unnamed_days is not None else set()
    for path in sweeps.glob("*/.*.tmp"):
        if now - path.stat().st_mtime > TEMPORARY_S:
            yield Item(path, "left by a write that was killed", None)
    for run_id in store.ids():
        folder = store.path(run_id)
        if store.run_is_active(run_id):
            continue
        try:
            status = (store.record(run_id) or {}).get("status")
        except StoreError:
            continue  # damaged: for a person to look at
        if status is None and not (folder / "config.yaml").exists():
            yield Item(folder, "no run began here", run_id)
            continue
        if unnamed_days is not None and run_id not in named and now - _last_written(folder) > 86400 * unnamed_days:
            yield Item(folder, f"in no sweep, and untouched for {unnamed_days:g} days", run_id)
            continue
        for path in (*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")):
            yield Item(path, "left by a write that was killed", run_id)
        if status == "finished":
            for path in folder.glob("checkpoints/step-*.ckpt"):
                yield Item(path, "checkpoint of a finished run", run_id)


def delete(store: Store, items: Iterable[Item]) -> Iterator[Item]:
    """Delete what is still nobody's, holding each run's lock meanwhile, and yield it."""
    for item in items:
        if item.run_id is None:
            item.path.unlink(missing_ok=True)
            yield item
            continue
        try:
            with store.open(item.run_id) as writer:
                if item.path == writer.folder:
                    shutil.rmtree(item.path)
                else:
                    item.path.unlink(missing_ok=True)
                yield item
        except RunBusy:
            continue


def _named(sweeps: Path) -> Iterator[str]:
    """Ids of the runs that some sweep's plan or comparison names."""
    for plan in plans(sweeps):
        yield from plan.runs
    for path in sweeps.glob("*/comparison.json"):
        yield from (row["run_id"] for row in json.loads(path.read_bytes())["runs"])


def _last_written(folder: Path) -> float:
    return max((os.stat(path).st_mtime for path in folder.rglob("*")), default=os.stat(folder).st_mtime)
