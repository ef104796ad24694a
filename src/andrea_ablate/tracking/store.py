"""The record of every run: one folder per run, from which a kill at any instant takes at most the last row.

A run's folder holds ``config.yaml``, ``record.json``, ``metrics.jsonl`` (one JSON object per line), ``checkpoints/``,
``error.txt`` after a failure, and ``lock``. All JSON here is strict: NaN and the infinities are written as the strings
"NaN", "Infinity" and "-Infinity" and read back as floats (so those three texts cannot be stored as texts).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.yamltext import load_yaml

STATUSES = ("running", "finished", "diverged", "failed", "interrupted")
FINAL = ("finished", "diverged")  # a repeated command reuses these; the others are tried again
KILLED = "its process ended without a word, as when it is killed"

# No leading dot: "..", and folders that a file browser hides. 128 is the longest id that W&B takes.
_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,128}")
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class StoreError(OSError):
    """The disk refused, or a stored file is damaged; the message is one sentence that names the path."""

    def __str__(self) -> str:
        return str(self.strerror)


class RunBusy(RuntimeError):  # noqa: N818 (a state, not an error)
    """Another process is writing this run.

    Args:
        run_id: the run.
        pid: process id of the writer, None if the lock file does not say.
        host: machine of the writer, None likewise.
    """

    def __init__(self, run_id: str, pid: int | None, host: str | None) -> None:
        super().__init__(run_id, pid, host)
        self.run_id, self.pid, self.host = run_id, pid, host

    def __str__(self) -> str:
        return (
            f"run {self.run_id} is being written by process {self.pid or 'unknown'} on {self.host or 'unknown'}; "
            "wait for it or stop it"
        )


def _refused(doing: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        error.errno, f"cannot {doing} {path}: {error.strerror or error}; free space or choose another folder"
    )


def write_atomic(path: Path, data: str | bytes | memoryview) -> None:
    """Write a whole file so that a reader, or a kill, sees the old content or the new one and nothing between.

    Args:
        path: the file; missing parent folders are made.
        data: the content; text is written as UTF-8.
    Raises: StoreError naming the path when the disk refuses; nothing is left behind then.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temp.unlink()
        if isinstance(error, OSError):
            raise _refused("write", path, error) from error
        raise


def plain(value: Any, where: str) -> Any:
    """Copy `value` as dicts, lists and Python scalars; raise TypeError naming `where` for anything else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays alike
        return plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(f"{where}={value!r} is a {type(value).__name__}; a record takes numbers, texts, lists and mappings")


def encode(value: Any) -> Any:
    """Replace the non-finite floats of a plain value by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, scalar) for every scalar, and (dotted key, empty container) for every empty one."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def _count_nonfinite(row: Mapping[str, Any]) -> int:
    return sum(isinstance(value, float) and not math.isfinite(value) for _, value in _leaves(row))


def config_payload(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return `cfg` as nested dicts, lists and Python scalars that keep their types.

    Paths become texts, tuples lists, numpy and torch scalars Python numbers, keys texts.
    Raises: ConfigError for a value of another type, or one that is still missing (``???``), naming the dotted key.
    """
    try:
        payload: dict[str, Any] = plain(cfg, "")
    except TypeError as error:
        raise ConfigError(f"config: {error}") from None
    for key, value in _leaves(payload):
        if value == "???":
            raise ConfigError(f"config: {key} has no value yet (???); give it one, e.g. {key}=…")
    return payload


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # The text 1e-4 is a text in YAML 1.1 but a float in YAML 1.2 and for OmegaConf: quotes make it a text for all.
    # Floats need no such care: PyYAML writes 0.0001 and 1.0e-05, which both versions read as floats.
    style = None
    with contextlib.suppress(ValueError):
        float(text)
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise StoreError(errno.EIO, f"{path} is damaged ({str(error).splitlines()[0]})") from error
    return content


def _lines(path: Path) -> list[bytes]:
    """The complete lines of a row file; what follows the last newline is a row that a kill tore, and is left out."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error


def _may_be_nonfinite(line: bytes) -> bool:
    return b'NaN"' in line or b'Infinity"' in line


def _parse(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise StoreError(errno.EIO, f"{path} is damaged: line {number} is not a JSON object") from None
        rows.append(decode(row) if _may_be_nonfinite(line) else row)
    return rows


def _load_record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = decode(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(errno.EIO, f"{path} is damaged ({error})") from None
    return record


# A lock belongs to the open file, which a forked child shares: a data worker that outlives its killed parent would
# keep the run locked. Children therefore close their copy (which does not release the parent's lock); O_CLOEXEC
# does the same for programs that are started.
_HELD: set[int] = set()


def _close_held_in_child() -> None:
    for fd in _HELD:
        os.close(fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_held_in_child)


class RunWriter:
    """The one writer of a run; holds the run's lock from construction to `close` (or the end of the process).

    Args:
        folder: the run's folder; its name is the run id.
        blocking: wait for the lock instead of raising RunBusy.
    Raises: RunBusy; StoreError when the folder cannot be written.

    Attributes: ``id``, ``folder``, ``record`` (what record.json holds) and ``nonfinite`` (non-finite values in the rows
    of metrics.jsonl, those of earlier sessions included).
    """

    def __init__(self, folder: Path, *, blocking: bool = False) -> None:
        self.folder, self.id = folder, folder.name
        self._metrics = folder / "metrics.jsonl"
        self._rows = -1
        self._open_lock()
        try:
            self._acquire(blocking)
            while not self._lock_is_in_place():
                self.close()
                self._open_lock()
                self._acquire(blocking)
            for temp in (*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")):
                temp.unlink(missing_ok=True)  # left by a kill; nobody else writes here
            self.record = _load_record(folder / "record.json") or {}
            self._open_rows()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise _refused("write", folder, error) from error
            raise

    def _open_lock(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _refused("write", self.folder, error) from error
        _HELD.add(self._lock)

    def _lock_is_in_place(self) -> bool:
        """Whether the file that we have locked is still the run's: its folder may have been deleted meanwhile."""
        try:
            found = os.stat(self.folder / "lock")
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def _acquire(self, blocking: bool) -> None:
        deadline = time.monotonic() + 0.2  # longer than `Store.run_is_active` holds the lock while it looks
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    try:
                        holder = json.loads(os.pread(self._lock, 4096, 0))
                    except ValueError:
                        holder = {}
                    raise RunBusy(self.id, holder.get("pid"), holder.get("host")) from None
                time.sleep(0.01)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, _JSON.encode({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _open_rows(self) -> None:
        lines = _lines(self._metrics)
        rows = zip(lines, _parse(self._metrics, lines), strict=True)
        self.nonfinite = sum(_count_nonfinite(row) for line, row in rows if _may_be_nonfinite(line))
        self._rows = os.open(self._metrics, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        # A row appended to a torn line would be lost with it.
        os.ftruncate(self._rows, sum(map(len, lines)) + len(lines))

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml once; the same config again is fine and leaves the file as it is.

        Raises: ConfigError when the folder holds another config, since a folder belongs to one config.
        """
        payload, path = config_payload(config), self.folder / "config.yaml"
        if path.exists():
            old, new = dict(_leaves(encode(_load_yaml(path)))), dict(_leaves(encode(payload)))
            for key in old | new:
                if key not in old or key not in new or (type(old[key]), old[key]) != (type(new[key]), new[key]):
                    raise ConfigError(
                        f"{self.folder} holds a run with another config ({key} is {old.get(key, 'absent')!r} there, "
                        f"{new.get(key, 'absent')!r} here); resume it with its own config, or delete the folder"
                    )
            return
        write_atomic(path, yaml.dump(payload, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))

    def update(self, **fields: Any) -> None:
        """Set top-level fields of record.json, atomically; the rows logged so far reach the disk before it does."""
        assert fields.get("status", "running") in STATUSES, fields["status"]
        merged = self.record | plain(fields, "")
        try:
            os.fsync(self._rows)
        except OSError as error:
            raise _refused("write", self._metrics, error) from error
        write_atomic(self.folder / "record.json", json.dumps(encode(merged), allow_nan=False, indent=1) + "\n")
        self.record = merged

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row. Numpy and torch scalars become numbers, arrays lists; non-finite values are kept and counted.

        Raises: StoreError when the disk refuses; the file then ends with the last whole row.
        """
        nonfinite = 0
        try:
            text = _JSON.encode(row)
        except (TypeError, ValueError):  # a scalar of numpy or torch, or a non-finite float
            copy = plain(row, "")
            text, nonfinite = _JSON.encode(encode(copy)), _count_nonfinite(copy)
        line = text.encode() + b"\n"
        try:
            # One write call per row, so that a kill can tear the last row only.
            written = os.write(self._rows, line)
            if written < len(line):
                os.ftruncate(self._rows, os.fstat(self._rows).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _refused("write", self._metrics, error) from error
        self.nonfinite += nonfinite

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps (``row["step"] > step``), so that steps done again are recorded once."""
        lines = _lines(self._metrics)
        rows = _parse(self._metrics, lines)
        kept = [line + b"\n" for line, row in zip(lines, rows, strict=True) if row.get("step", step) <= step]
        write_atomic(self._metrics, b"".join(kept))
        os.close(self._rows)
        self._open_rows()

    def reload(self) -> None:
        """Read record.json again, after a process of ours that trained wrote to it."""
        self.record = _load_record(self.folder / "record.json") or {}

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a training process that this one waits for: it writes rows under the lock that is held here.
        return {"folder": self.folder, "id": self.id, "record": self.record}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._metrics, self._rows, self._lock = self.folder / "metrics.jsonl", -1, -1
        self._open_rows()

    def error(self, text: str) -> None:
        """Write error.txt, the full account of a failure."""
        write_atomic(self.folder / "error.txt", text)

    def close(self) -> None:
        """Close the files and release the lock; harmless when done already, and in a forked child."""
        if self._rows >= 0:
            os.close(self._rows)
            self._rows = -1
        if self._lock in _HELD:
            _HELD.remove(self._lock)
            os.close(self._lock)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store:
    """All runs under one folder.

    Args:
        root: the folder; made when the first run is opened.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def ids(self) -> list[str]:
        """Ids of all runs, sorted."""
        if not self.root.is_dir():
            return []
        marks = ("record.json", "config.yaml", "lock")
        return sorted(
            folder.name
            for folder in self.root.iterdir()
            if _ID.fullmatch(folder.name) and any((folder / mark).exists() for mark in marks)
        )

    def find(self, name: str) -> str:
        """The id that is `name`, or the only one that begins with it. Raises ConfigError when there is not one."""
        ids = self.ids()
        found = [name] if name in ids else [run_id for run_id in ids if run_id.startswith(name)]
        if len(found) != 1:
            what = f"several runs ({', '.join(found[:4])}); give more letters" if found else "no run"
            raise ConfigError(f"'{name}' names {what}{'' if found else nearest(name, ids)} in {self.root}")
        return found[0]

    def path(self, run_id: str) -> Path:
        """The run's folder, made or not; raise ConfigError for an id that cannot name one."""
        if not _ID.fullmatch(run_id):
            raise ConfigError(
                f"run id {run_id!r} is not allowed; use 1 to 128 letters, digits, '.', '_' and '-', not starting with "
                "'.' (a display name may hold any character)"
            )
        return self.root / run_id

    def record(self, run_id: str) -> dict[str, Any] | None:
        """Content of record.json, None when there is none."""
        return _load_record(self.path(run_id) / "record.json")

    def current(self, run_id: str) -> dict[str, Any]:
        """The record with its status of now: ``missing`` without a record, ``interrupted`` where its writer is gone."""
        active = self.run_is_active(run_id)  # asked first: the writer may end between the two
        record = self.record(run_id) or {"status": "missing", "reason": ""}
        if record["status"] == "running" and not active:
            return {**record, "status": "interrupted", "reason": KILLED}
        if active and record["status"] not in FINAL:  # its lock is held, so somebody is at it
            return {**record, "status": "running", "reason": ""}
        return record

    def config(self, run_id: str) -> dict[str, Any]:
        """Content of config.yaml; StoreError when there is none."""
        return _load_yaml(self.path(run_id) / "config.yaml")

    def metrics(self, run_id: str) -> list[dict[str, Any]]:
        """All rows in the order logged, without a torn last line; empty when there are none."""
        path = self.path(run_id) / "metrics.jsonl"
        return _parse(path, _lines(path))

    def open(self, run_id: str, *, blocking: bool = False) -> RunWriter:
        """Lock the run and return its writer, a context manager; see `RunWriter`."""
        return RunWriter(self.path(run_id), blocking=blocking)

    def run_is_active(self, run_id: str) -> bool:
        """Whether some process (this one included) holds the run's lock right now."""
        try:
            lock = os.open(self.path(run_id) / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def last_row(self, run_id: str) -> dict[str, Any] | None:
        """The newest complete row, None when there is none yet; reads the end of the file only."""
        path = self.path(run_id) / "metrics.jsonl"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        return _parse(path, lines[-1:])[0] if lines else None
