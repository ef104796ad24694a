"""What the store holds, as tables: sweeps by how their runs stand, and runs that need a look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from andrea_ablate.tracking.plans import Plan
from andrea_ablate.tracking.store import STATUSES, Store, StoreError

SHOWN = ("finished", "running", "interrupted", "diverged", "failed", "missing", "damaged")
assert {*STATUSES} <= {*SHOWN}


def states(store: Store, run_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`Store.current` of each run, with ``tokens_done``; a record that cannot be read has the status ``damaged``."""
    found = {}
    for run_id in run_ids:
        try:
            state = store.current(run_id)
            state["tokens_done"] = state.get("tokens", 0) if state["status"] == "finished" else _tokens(store, run_id)
        except StoreError as error:
            state = {"status": "damaged", "reason": str(error), "tokens_done": 0}
        found[run_id] = state
    return found


def _tokens(store: Store, run_id: str) -> int:
    return int((store.last_row(run_id) or {}).get("tokens", 0))


def sweeps_table(plans: Sequence[Plan], found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line per sweep, and one for the runs that belong to none."""
    table = Table(title="Sweeps", title_justify="left")
    lines = {plan.name: list(plan.runs) for plan in plans}
    named = {run_id for plan in plans for run_id in plan.runs}
    lines["(in no sweep)"] = [run_id for run_id in found if run_id not in named]
    counts = {name: Counter(found[run_id]["status"] for run_id in ids) for name, ids in lines.items()}
    columns = [status for status in SHOWN if any(count[status] for count in counts.values())]
    for column in ("sweep", "runs", *columns, "tokens"):
        table.add_column(column, justify="left" if column == "sweep" else "right", overflow="fold")
    budgets = {run_id: run["tokens"] for plan in plans for run_id, run in plan.runs.items()}
    for name, ids in lines.items():
        if ids:
            done = sum(found[run_id]["tokens_done"] for run_id in ids)
            total = sum(budgets.get(run_id) or found[run_id].get("tokens", 0) for run_id in ids)
            numbers = [str(counts[name][column] or "-") for column in columns]
            table.add_row(name, str(len(ids)), *numbers, f"{done:,} of {total:,}")
    return table


def runs_table(labels: Mapping[str, str], found: Mapping[str, Mapping[str, Any]], ids: Sequence[str]) -> Table:
    """A line per run. labels: what a run is called in its sweep."""
    table = Table(title="Runs", title_justify="left")
    for column in ("run", "name", "status", "tokens", "validation loss", "reason"):
        right = column in ("tokens", "validation loss")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for run_id in ids:
        state = found[run_id]
        loss = state.get("val/loss")
        table.add_row(
            run_id,
            Text(labels.get(run_id) or state.get("name") or "-"),
            state["status"],
            f"{state['tokens_done']:,} of {state['tokens']:,}" if "tokens" in state else "-",
            "-" if loss is None else f"{loss:.4f}",
            Text(state.get("reason") or "-"),
        )
    return table
