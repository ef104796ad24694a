"""What Weights & Biases wrote for an offline run."""

from __future__ import annotations

import importlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_files(folder: Path) -> list[Path]:
    """The .wandb files below the folder of a run, one for each of its sessions, in the order in which they began."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def offline_run(path: Path) -> dict[str, Any]:
    """Id, name, config, history and exit code of an offline run that has been finished.

    W&B's service closes the file after `finish` has returned, so this waits for the exit record, which is the last one.
    """
    deadline = time.monotonic() + 60
    while "exit" not in (run := _content(path)):
        assert time.monotonic() < deadline, f"{path} has no exit record"
        time.sleep(0.01)
    return run


def _content(path: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"history": [], "summary": {}, "x_axis": None}
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            out |= {"id": run.run_id, "name": run.display_name, "group": run.run_group, "host": run.host}
            out |= {"tags": list(run.tags), "job_type": run.job_type, "project": run.project}
            out["config"] = {item.key: json.loads(item.value_json) for item in run.config.update}
            out["config"].pop("_wandb")
        elif kind == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            out["history"].append({key: value for key, value in row.items() if not key.startswith("_")})
        elif kind == "summary":
            for item in record.summary.update:
                out["summary"]["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        elif kind == "metric":
            out["x_axis"] = record.metric.glob_name, record.metric.step_metric
        elif kind == "exit":
            out["exit"] = record.exit.exit_code
    return out


def _records(path: Path) -> Iterator[Any]:
    """The whole records of a .wandb file: a header of 7 bytes, then a LevelDB log in blocks of 32 KiB."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield messages.Record.FromString(record)
            record = b""
