"""All runs as one table for DuckDB, kept beside them in a Parquet file that is brought up to date before each use.

One row per run: the settings under their dotted keys (``"optim.lr"``), and what its record holds (``"val/loss"``,
``status`` …; the record's ``data`` is ``corpus`` here). The file is replaced as a whole, so two processes may do it at
once; it may be deleted at any time. Lists are texts in JSON; NaN and the infinities are those of DuckDB's DOUBLE.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andrea_ablate.confounds import flat
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import Store, StoreError, encode

if TYPE_CHECKING:
    import duckdb

INDEX = ".index.parquet"
FORMATS = {".parquet": "FORMAT parquet", ".csv": "FORMAT csv, HEADER"}
Row = Mapping[str, Any]


def connect() -> duckdb.DuckDBPyConnection:
    """An empty database in memory. Raises: ConfigError without DuckDB."""
    try:
        import duckdb
    except ImportError:
        raise ConfigError("this needs DuckDB; install it with `pip install 'andrea-ablate[analysis]'`") from None
    return duckdb.connect()


def open_runs(store: Store) -> duckdb.DuckDBPyConnection:
    """A database with the view ``runs``, as the records are now."""
    database = connect()
    index = _update(database, store)
    running = database.sql(f"SELECT run_id FROM {_parquet(index)} WHERE status = 'running'").fetchall()
    dead = [run_id for (run_id,) in running if not store.run_is_active(run_id)]
    status = f"if(run_id IN ({_texts(dead)}), 'interrupted', status)" if dead else "status"
    database.execute(
        f"CREATE VIEW runs AS SELECT * EXCLUDE (stamp) REPLACE ({status} AS status) FROM {_parquet(index)}"
    )
    return database


def export_runs(store: Store, target: Path, run_ids: Sequence[str] | None = None) -> int:
    """Write a row per run to a .parquet or .csv file; all runs, or those. Returns: the number of rows."""
    only = "" if run_ids is None else f"WHERE run_id IN ({_texts(run_ids)})"
    return _copy(open_runs(store), f"SELECT * FROM runs {only} ORDER BY run_id", target)


def export_metrics(store: Store, target: Path, run_ids: Sequence[str] | None = None) -> int:
    """Write the rows of every step of these runs to a .parquet or .csv file, in the order they were logged."""
    database = connect()
    ids = store.ids() if run_ids is None else run_ids
    rows = [{"run_id": run_id, **row} for run_id in ids for row in store.metrics(run_id)]
    with _as_table(store.root, rows) as table:
        return _copy(database, f"SELECT * FROM {table}", target)


def _update(database: duckdb.DuckDBPyConnection, store: Store) -> Path:
    """Read the records that are new or changed since the index was written, and write it anew if there are any."""
    import duckdb

    index, now = store.root / INDEX, dict(_stamps(store))
    if not now:
        raise ConfigError(f"{store.root} holds no runs; give their folder with --runs")
    known: dict[str, str] = {}
    with contextlib.suppress(duckdb.Error):  # there is none, or it is damaged, or of another version
        known = dict(database.sql(f"SELECT run_id, stamp FROM {_parquet(index)}").fetchall())
    changed = [run_id for run_id, stamp in now.items() if known.get(run_id) != stamp]
    if not changed and len(known) == len(now):
        return index
    with _as_table(store.root, [{"stamp": now[run_id], **_row(store, run_id)} for run_id in changed]) as table:
        parts = [f"SELECT * FROM {table}"] if changed else []
        kept = [run_id for run_id in known if run_id in now and run_id not in set(changed)]
        if kept:
            parts.insert(0, f"SELECT * FROM {_parquet(index)} WHERE run_id IN ({_texts(kept)})")
        _copy(database, " UNION ALL BY NAME ".join(parts), index)
    return index


def _stamps(store: Store) -> Iterator[tuple[str, str]]:
    """What tells that a record changed: a record is always replaced by a new file."""
    for run_id in os.listdir(store.root) if store.root.is_dir() else ():
        with contextlib.suppress(OSError):
            found = os.stat(f"{store.root}/{run_id}/record.json")
            yield run_id, f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}"


def _row(store: Store, run_id: str) -> dict[str, Any]:
    try:
        record, config = store.record(run_id) or {}, store.config(run_id)
    except StoreError as error:
        return {"run_id": run_id, "status": "damaged", "reason": str(error)}
    if "data" in record:
        record["corpus"] = record.pop("data")
    return {**dict(flat(config)), **dict(flat(record)), "run_id": run_id}


@contextlib.contextmanager
def _as_table(folder: Path, rows: Sequence[Row]) -> Iterator[str]:
    """SQL that reads `rows`, by way of a file of JSON lines with a type stated for every column."""
    types: dict[str, set[type]] = {}
    for row in rows:
        for key, value in row.items():
            types.setdefault(key, set()).add(type(value))
    columns = ", ".join(f"{_text(key)}: {_text(_column(found))}" for key, found in types.items())
    path = folder / f".rows.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
    texts = {key for key, found in types.items() if _column(found) == "VARCHAR"}
    try:
        with open(path, "w", encoding="utf-8") as file:
            for row in rows:
                plain = {key: _as_text(value) if key in texts else encode(value) for key, value in row.items()}
                file.write(json.dumps(plain, allow_nan=False) + "\n")
        source = f"read_json({_text(str(path))}, format = 'newline_delimited', columns = {{{columns}}})"
        yield source
    finally:
        path.unlink(missing_ok=True)


def _column(found: set[type]) -> str:
    kinds = found - {type(None)}
    if not kinds or kinds == {bool}:
        return "BOOLEAN"  # what is empty everywhere joins with any type that it has later
    return "BIGINT" if kinds == {int} else "DOUBLE" if kinds <= {int, float} else "VARCHAR"


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(encode(value))


def _copy(database: duckdb.DuckDBPyConnection, query: str, target: Path) -> int:
    """Write a query's rows to a file of the format that its ending names, whole or not at all."""
    ending = target.suffix.lower()
    if ending not in FORMATS:
        raise ConfigError(f"{target}: write to a file that ends in {' or '.join(FORMATS)}")
    temp = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        ((rows,),) = database.execute(f"COPY ({query}) TO {_text(str(temp))} ({FORMATS[ending]})").fetchall()
        os.replace(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    return int(rows)


def _parquet(path: Path) -> str:
    return f"read_parquet({_text(str(path))})"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _texts(values: Iterable[str]) -> str:
    return ", ".join(map(_text, values)) or "NULL"


def first_line(error: Exception) -> str:
    """DuckDB's message without its drawing of the query."""
    return re.split(r"\n\s*\n|\nLINE ", str(error).strip())[0].replace("\n", " ")
