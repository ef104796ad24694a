"""A sweep on a real SLURM of one node: a task pre-empted midway, another requeued by hand, and nothing is lost."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import OneNodeSlurm, missing

from cluster import Sweep, here, same_results

no_plugin = "" if importlib.util.find_spec("submitit") else "submitit not found; pip install 'andrea-ablate[slurm]'"
pytestmark = [
    pytest.mark.slow,  # daemons, and processes that import torch
    pytest.mark.skipif(bool(missing() or no_plugin), reason=missing() or no_plugin),
]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneNodeSlurm]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Not in tmp_path: the daemons make sockets there, whose paths have at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, OneNodeSlurm(Path(folder)) as found:
        yield found


def array_task(sweep: Sweep, run_id: str) -> str:
    """The task of the array that trains the run, found by the process that holds its lock."""
    pid = json.loads((sweep.folder / "runs" / run_id / "lock").read_text())["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    known = dict(entry.partition("=")[::2] for entry in environment)
    return f"{known['SLURM_ARRAY_JOB_ID']}_{known['SLURM_ARRAY_TASK_ID']}"


def test_tasks_are_requeued_singly_and_end_in_the_same_numbers(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    with Sweep(tmp_path / "sweep", slurm.environment, "launcher=submitit_slurm") as sweep:
        first = sweep.wait_until(sweep.under_way)[0]
        # As SLURM does before the time is over: the task writes a checkpoint and asks to be requeued.
        slurm.answer("scancel", "--signal=USR2", array_task(sweep, first))
        sweep.wait_until(lambda: sweep.records()[first]["status"] == "interrupted")
        assert sweep.records()[first]["reason"].startswith("SIGUSR2 after step")
        # As an operator or a job of higher priority does: SIGTERM, then the queue again.
        second = sweep.wait_until(lambda: [run_id for run_id in sweep.under_way() if run_id != first])[0]
        slurm.answer("scontrol", "requeue", array_task(sweep, second))
        said = sweep.finish()
    assert "n 4 of 4" in said
    resumed = {run_id for run_id, record in sweep.records().items() if record["resumed_from"] > 0}
    assert resumed == {first, second}  # and the other two were left alone
    same_results(sweep, here(tmp_path / "here"))
