"""What is stored: ``python -m andrea_ablate.runs status | resume | gc | export | query``."""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from andrea_ablate.command import command
from andrea_ablate.registry import ConfigError
from andrea_ablate.runs.garbage import delete, garbage
from andrea_ablate.runs.index import export_metrics, export_runs, first_line, open_runs
from andrea_ablate.runs.status import runs_table, states, sweeps_table
from andrea_ablate.tracking.plans import find_plan, plans
from andrea_ablate.tracking.store import FINAL, Store


@command
def main(argv: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(argv)
    given.do(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.runs", description=__doc__)
    places = argparse.ArgumentParser(add_help=False)
    places.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    places.add_argument("--sweeps", type=Path, default=Path("sweeps"), help="folder of the sweeps (default: sweeps)")
    commands = parser.add_subparsers(required=True, metavar="status | resume | gc | export | query")

    status = commands.add_parser("status", parents=[places], help="sweeps, and the runs that are not finished")
    status.add_argument("sweep", nargs="?", help="all runs of this sweep: its name, or the beginning of it")
    status.set_defaults(do=_status)

    resume = commands.add_parser("resume", parents=[places], help="go on with what a sweep still lacks")
    resume.add_argument("sweep", nargs="?", help="its name or the beginning of it; may be left out if there is one")
    resume.set_defaults(do=_resume)

    gc = commands.add_parser("gc", parents=[places], help="what nothing refers to: leftover files and checkpoints")
    gc.add_argument("--unnamed-days", type=float, metavar="DAYS", help="also runs in no sweep, untouched for DAYS")
    gc.add_argument("--yes", action="store_true", help="delete it; otherwise it is only listed")
    gc.set_defaults(do=_gc)

    export = commands.add_parser("export", parents=[places], help="a row per run: settings and final numbers")
    export.add_argument("file", type=Path, help="ends in .parquet or .csv")
    export.add_argument("sweep", nargs="?", help="the runs of this sweep only")
    export.add_argument("--metrics", action="store_true", help="a row per step instead")
    export.set_defaults(do=_export)

    query = commands.add_parser("query", parents=[places], help="SQL over the table runs (DuckDB)")
    query.add_argument("sql", help="""e.g. 'SELECT "optim.lr", avg("val/loss") FROM runs GROUP BY ALL'""")
    query.set_defaults(do=_query)
    return parser


def _status(given: argparse.Namespace) -> None:
    console, store = Console(), Store(given.runs)
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe has no width of its own
    known = [find_plan(given.sweeps, given.sweep)] if given.sweep else plans(given.sweeps)
    labels = {run_id: f"{run['arm']} seed={run['seed']}" for plan in known for run_id, run in plan.runs.items()}
    found = states(store, dict.fromkeys([*labels, *(() if given.sweep else store.ids())]))
    if not found:
        raise ConfigError(
            f"{given.runs} holds no runs and {given.sweeps} no sweeps; give them with --runs and --sweeps"
        )
    console.print(sweeps_table(known, found))
    shown = [run_id for run_id, state in found.items() if given.sweep or state["status"] != "finished"]
    if shown:
        console.print(runs_table(labels, found, shown))


def _resume(given: argparse.Namespace) -> None:
    plan = find_plan(given.sweeps, given.sweep)
    found = states(Store(Path(plan.store)), plan.runs)
    left = sum(state["status"] not in FINAL for state in found.values())
    command = ["-m", "andrea_ablate", *plan.command]
    print(f"{plan.name}: {left} of {len(found)} runs left.\n{shlex.join(['python', *command])}", flush=True)
    os.chdir(plan.started_in)
    os.execv(sys.executable, [sys.executable, *command])


def _gc(given: argparse.Namespace) -> None:
    store = Store(given.runs)
    items = list(garbage(store, given.sweeps, given.unnamed_days))
    sizes = {item: item.size for item in items}
    if given.yes:
        items = list(delete(store, items))
    for item in items:
        print(f"{item.path} ({_mebibytes(sizes[item])}): {item.why}")
    total = _mebibytes(sum(sizes[item] for item in items))
    if given.yes:
        print(f"Deleted: {len(items)}, {total}.")
    else:
        print(f"{len(items)} to delete, {total}{'; --yes deletes them' if items else ''}.")


def _export(given: argparse.Namespace) -> None:
    ids = list(find_plan(given.sweeps, given.sweep).runs) if given.sweep else None
    write = export_metrics if given.metrics else export_runs
    print(f"{given.file}: {write(Store(given.runs), given.file, ids)} rows")


def _query(given: argparse.Namespace) -> None:
    database = open_runs(Store(given.runs))
    import duckdb

    try:
        answer = database.sql(given.sql)
        names, rows = (answer.columns, answer.fetchall()) if answer is not None else ([], [])
    except duckdb.Error as error:
        raise ConfigError(f'{first_line(error)} (names with dots or slashes are written "in quotes")') from None
    if not sys.stdout.isatty():
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *rows])
        return
    table = Table(*map(str, names))
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table, markup=False)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
