"""What a sweep looks like now: its comparison, made anew from the records for as long as it is not complete."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from andrea_ablate.registry import ConfigError
from andrea_ablate.report.compare import MARGIN_NATS, Comparison, compare, load, row_from_record
from andrea_ablate.tracking.plans import PLAN, Plan, load_plan
from andrea_ablate.tracking.store import FINAL, Store

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Sweep:
    """A folder of a sweep. plan: None for one from before plans were kept; store: of its runs."""

    folder: Path
    plan: Plan | None
    store: Store

    @property
    def version(self) -> str:
        """Changes with every record, row or comparison of the sweep."""
        paths = [self.folder / COMPARISON]
        for run_id in self.plan.runs if self.plan else ():
            paths += [self.store.path(run_id) / name for name in ("record.json", "metrics.jsonl")]
        stamps = [(path.name, stat.st_mtime_ns, stat.st_size) for path in paths if (stat := _stat(path))]
        return hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()

    def progress(self) -> tuple[int, int]:
        """Runs that have ended, of all."""
        if self.plan is None:
            runs = load(self.folder).rows
            return len(runs), len(runs)
        ended = sum((self.store.record(run_id) or {}).get("status") in FINAL for run_id in self.plan.runs)
        return ended, len(self.plan.runs)

    def comparison(self) -> Comparison:
        """The stored one where it is complete, else one of the runs as they are. Raises: ConfigError without either."""
        ended, planned = self.progress()
        if self.plan is None or (ended == planned and (self.folder / COMPARISON).is_file()):
            return load(self.folder)
        rows = []
        for run_id, run in self.plan.runs.items():
            known = {key: value for key, value in run.items() if key != "tokens"}
            rows.append(row_from_record(self.store.current(run_id), run_id=run_id, **known))
        return compare(rows, margin=self.plan.margin or MARGIN_NATS)


def sweeps(root: Path, runs: Path) -> dict[str, Sweep]:
    """Every sweep under a folder, the newest first. `runs` is the store of those that do not name theirs."""
    found = {}
    folders = {path.parent for name in (PLAN, COMPARISON) for path in root.glob(f"*/{name}")}
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        plan = load_plan(folder) if (folder / PLAN).is_file() else None
        found[folder.name] = Sweep(folder, plan, Store(Path(plan.store) if plan else runs))
    return found


def find(name: str, root: Path, runs: Path) -> Sweep:
    """The sweep of that name. Raises: ConfigError where there is none."""
    known = sweeps(root, runs)
    if name not in known:
        raise ConfigError(f"'{name}' names no sweep in {root}")
    return known[name]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
