"""A sweep on a Ray of two nodes on this machine, one of them killed midway: its jobs go on from their checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Sweep, here, same_results

no_plugin = "" if importlib.util.find_spec("ray") else "ray not found; pip install 'andrea-ablate[ray]'"
pytestmark = [
    pytest.mark.slow,  # daemons, and processes that import torch
    pytest.mark.skipif(bool(no_plugin), reason=no_plugin),
]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def node_of(sweep: Sweep, run_id: str) -> str:
    """The Ray node whose worker trains the run: the store's socket in the worker's arguments names it."""
    pid = json.loads((sweep.folder / "runs" / run_id / "lock").read_text())["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in environment)["RAY_RAYLET_PID"]


def test_a_killed_node_loses_nothing(ray: Any, tmp_path: Path) -> None:
    lost = ray.add_node(num_cpus=1)
    raylet = str(lost.all_processes["raylet"][0].process.pid)
    with Sweep(tmp_path / "sweep", {**os.environ, "RAY_ADDRESS": ray.address}, "launcher=ray") as sweep:
        there = sweep.wait_until(lambda: [run for run in sweep.under_way() if node_of(sweep, run) == raylet])[0]
        ray.remove_node(lost, allow_graceful=False)
        said = sweep.finish()
    assert "n 4 of 4" in said
    assert sweep.records()[there]["resumed_from"] > 0
    same_results(sweep, here(tmp_path / "here"))
