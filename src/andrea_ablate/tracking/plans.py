"""What a sweep's folder keeps of its plan, from before the first run trains: its command and its runs."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.tracking.store import StoreError, write_atomic

PLAN = "plan.json"


@dataclass(frozen=True)
class Plan:
    """A sweep as it was asked for.

    Args:
        name: of the sweep's folder.
        command: the arguments after ``python -m andrea_ablate``; started_in: the folder that relative paths begin in.
        store: folder of the runs.
        runs: run id -> its arm and seed, as they are shown, its budget in tokens, and what `row_from_record` takes.
        margin: nats per token, of the arms' verdicts; None in plans from before it was kept.
    """

    name: str
    command: Sequence[str]
    started_in: str
    store: str
    runs: Mapping[str, Mapping[str, Any]]
    margin: float | None = None

    def save(self, sweeps: Path) -> None:
        """Write it into the sweep's folder, unless it is there already."""
        path = sweeps / self.name / PLAN
        text = json.dumps({key: value for key, value in asdict(self).items() if key != "name"}, indent=1) + "\n"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomic(path, text)


def load_plan(folder: Path) -> Plan:
    """The plan that a sweep's folder keeps. Raises: StoreError where it is damaged."""
    path = folder / PLAN
    try:
        return Plan(name=folder.name, **json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise StoreError(errno.EIO, f"{path} is damaged ({error}); repeat the sweep's command") from None


def plans(sweeps: Path) -> list[Plan]:
    """Every sweep under a folder that keeps its plan, by name."""
    return [load_plan(path.parent) for path in sorted(sweeps.glob(f"*/{PLAN}"))]


def find_plan(sweeps: Path, name: str | None) -> Plan:
    """The sweep of that name, or the only one that begins with it; without a name the only one there is.

    Raises: ConfigError when there is not exactly one.
    """
    known = {plan.name: plan for plan in plans(sweeps)}
    found = [name] if name in known else [other for other in known if other.startswith(name or "")]
    if len(found) == 1:
        return known[found[0]]
    if name is None:
        raise ConfigError(f"{sweeps} holds {len(known)} sweeps ({', '.join(known) or 'none'}); name one of them")
    what = f"several sweeps ({', '.join(found[:4])}); give more letters" if found else "no sweep with a plan"
    raise ConfigError(f"'{name}' names {what}{'' if found else nearest(name, known)} in {sweeps}")
