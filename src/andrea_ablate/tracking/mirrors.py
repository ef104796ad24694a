"""Views of a run elsewhere: CSV, TensorBoard, Weights & Biases. The local record never depends on them.

A logger is built from its configuration node, which checks everything that a person can get wrong; opened for a run, it
becomes a mirror that takes the run's rows. `Mirrors` switches a mirror off at its first failure, and training goes on.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import logging
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from andrea_ablate.registry import ConfigError, Registry
from andrea_ablate.tracking.store import plain, write_atomic

_log = logging.getLogger("andrea_ablate")

Row = dict[str, Any]


@dataclass(frozen=True)
class MirrorInfo:
    """What a mirror is told of its run.

    Args:
        run_id: the run's id (letters, digits, ``._-``).
        name: display name, any characters.
        group: what the runs of one sweep share.
        job_type: e.g. ``train``.
        tags: labels.
        config: resolved config, plain (see `config_payload`).
        folder: the run's folder.
        resumed: whether the run continues an earlier session.
    """

    run_id: str
    name: str
    group: str
    job_type: str
    tags: list[str]
    config: dict[str, Any]
    folder: Path
    resumed: bool


class Mirror(Protocol):
    """Takes the rows of one run; any method may raise, which ends the mirror and nothing else."""

    def log(self, row: Row) -> None:
        """Take one row; its trainer step is ``row["step"]``."""

    def finish(self, summary: dict[str, Any], status: str) -> None:
        """Take the final numbers and the run's status, and close."""


class Logger(Protocol):
    """One choice of the ``logger`` node, checked when built."""

    def open(self, info: MirrorInfo, history: Iterable[Row]) -> Mirror | None:
        """Begin to mirror a run; `history` holds the rows of its earlier sessions. None means: nothing to mirror."""


LOGGERS: Registry[Logger] = Registry("logger")


@LOGGERS.register("none")
class NoLogger:
    """No mirror: the local record only."""

    def open(self, info: MirrorInfo, history: Iterable[Row]) -> None:
        """Mirror nothing."""


# --- CSV ---


@LOGGERS.register("csv")
class CsvLogger:
    """``metrics.csv`` in the run's folder: one header, one line per row."""

    def open(self, info: MirrorInfo, history: Iterable[Row]) -> Mirror:
        """Write the history anew, which also repairs a line torn by a kill, and go on from there."""
        return _Csv(info.folder / "metrics.csv", history)


class _Csv:
    def __init__(self, path: Path, history: Iterable[Row]) -> None:
        self._path = path
        self._rewrite(history)

    def _rewrite(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if self._columns:
            writer.writeheader()
            writer.writerows(rows)
        write_atomic(self._path, text.getvalue())
        self._file = open(self._path, "a", newline="", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")

    def log(self, row: Row) -> None:
        if row.keys() <= set(self._columns):
            self._writer.writerow(row)
            self._file.flush()
            return
        # A key seen for the first time (val/loss comes later than train/loss) needs a wider header.
        self._file.close()
        with open(self._path, newline="", encoding="utf-8") as file:
            earlier: list[Row] = list(csv.DictReader(file))
        self._rewrite([*earlier, row])

    def finish(self, summary: dict[str, Any], status: str) -> None:
        self._file.close()


# --- mirrors that may be slow ---


class Background:
    """Feeds a mirror from a thread, so that a slow or hanging service costs the training loop nothing.

    Args:
        mirror: the mirror that the thread calls.
        timeout_s: longest wait for the mirror to take the rest and finish.
    """

    MAX_WAITING = 20_000  # rows, some 10 MB
    PERIOD_S = 0.2  # rows go in batches: waking a thread for each row costs more than the row

    def __init__(self, mirror: Mirror, *, timeout_s: float) -> None:
        self._mirror, self._timeout_s = mirror, timeout_s
        self._waiting: queue.SimpleQueue[Row] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._last: tuple[dict[str, Any], str] = ({}, "")
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._feed, name="andrea_ablate-mirror", daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._closing.wait(self.PERIOD_S)
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._mirror.log(self._waiting.get_nowait())
        except Exception as error:
            self._failure = error
            self._last = ({}, "failed")  # still closed: W&B refuses an id that another run of the process holds open
        try:
            self._mirror.finish(*self._last)
        except Exception as error:
            self._failure = self._failure or error

    def log(self, row: Row) -> None:
        if self._failure is not None:
            raise self._failure
        if self._waiting.qsize() >= self.MAX_WAITING:
            raise TimeoutError(f"{self.MAX_WAITING} rows wait to be taken")
        self._waiting.put(row)

    def finish(self, summary: dict[str, Any], status: str) -> None:
        if self._failure is None:
            self._last = (summary, status)
            self._closing.set()
            self._thread.join(self._timeout_s)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"not finished within {self._timeout_s:g} s")


# --- TensorBoard ---


@LOGGERS.register("tensorboard")
class TensorBoardLogger:
    """Event files in ``tensorboard/`` of the run's folder.

    Raises: ConfigError when the tensorboard package is missing.
    """

    def __init__(self) -> None:
        try:
            self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise ConfigError(
                "logger: type=tensorboard needs the tensorboard package; run `pip install tensorboard` or choose "
                "logger=csv"
            ) from None

    def open(self, info: MirrorInfo, history: Iterable[Row]) -> Mirror:
        """Append to the event files; steps after the history's last are purged, since they will come again."""
        purge = 1 + max((row["step"] for row in history if "step" in row), default=-1) if info.resumed else None
        writer = self._writer(log_dir=str(info.folder / "tensorboard"), purge_step=purge, flush_secs=5)
        return Background(_TensorBoard(writer), timeout_s=30)


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, row: Row) -> None:
        for key, value in row.items():
            if key != "step" and not isinstance(value, str | list | dict | None):
                self._writer.add_scalar(key, float(value), row.get("step"))

    def finish(self, summary: dict[str, Any], status: str) -> None:
        self._writer.close()


# --- the fan-out ---


class Mirrors:
    """Passes rows on to the mirrors of one run; a mirror that raises is dropped, with one warning.

    Attributes: ``state`` for the record: ``ok``, ``off`` (nothing to mirror) or ``degraded: <mirror>: <reason>``.
    """

    def __init__(self) -> None:
        self._mirrors: dict[str, Mirror] = {}
        self._secrets: list[str] = []
        self.state = "off"

    def start(self, name: str, logger: Logger, info: MirrorInfo, history: Iterable[Row]) -> None:
        """Open `logger` for a run and add its mirror."""
        if secret := getattr(logger, "secret", None):
            self._secrets.append(secret)
        try:
            mirror = logger.open(info, history)
        except Exception as error:
            self._drop(name, error)
            return
        if mirror is not None:
            self._mirrors[name] = mirror
            self.state = "ok"

    def log(self, row: Mapping[str, Any]) -> None:
        """Pass one row on; never raises for a mirror's sake."""
        if not self._mirrors:
            return
        copy: Row = plain(row, "")  # values of now: a tensor may change before a thread reads it
        for name, mirror in list(self._mirrors.items()):
            try:
                mirror.log(copy)
            except Exception as error:
                self._drop(name, error)

    def finish(self, summary: Mapping[str, Any], status: str) -> None:
        """Close all mirrors with the run's final numbers and status; doing it again is harmless."""
        copy: Row = plain(summary, "")
        for name, mirror in list(self._mirrors.items()):
            try:
                mirror.finish(copy, status)
            except Exception as error:
                self._drop(name, error)
        self._mirrors.clear()

    def _drop(self, name: str, error: Exception) -> None:
        self._mirrors.pop(name, None)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        reason = reason[:300]
        earlier = f"{self.state}; " if self.state.startswith("degraded") else "degraded: "
        self.state = f"{earlier}{name}: {reason}"
        _log.warning("logger %s is off for the rest of this run (%s); the local record goes on", name, reason)


def check_logger(node: Mapping[str, Any]) -> None:
    """Raise ConfigError, within seconds and without asking anybody, for a ``logger`` node that cannot work."""
    LOGGERS.build(node)


def open_mirrors(node: Mapping[str, Any], info: MirrorInfo, history: Iterable[Row] = ()) -> Mirrors:
    """Open what the ``logger`` node asks for.

    Args:
        node: ``{type: …}`` and the options of that type.
        info: the run.
        history: rows that the local record holds already (after `RunWriter.rewind`), when the run is resumed.
    Raises: ConfigError as `check_logger`; whatever fails later only degrades the mirror.
    """
    mirrors = Mirrors()
    mirrors.start(node["type"], LOGGERS.build(node), info, history)
    return mirrors
