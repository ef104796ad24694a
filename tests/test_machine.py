"""What is measured of this machine, and the settings made once per process."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from andrea_ablate import machine

LINUX = os.access("/proc/self/clear_refs", os.W_OK)
needs_reset = pytest.mark.skipif(not LINUX, reason="the peak can be reset on Linux only")


@needs_reset
def test_peak_is_that_since_the_reset() -> None:
    machine.reset_peak_memory("cpu")
    before = machine.peak_memory_gib("cpu")
    block = np.ones(64 << 20, np.uint8)
    after = machine.peak_memory_gib("cpu")
    assert before is not None and after is not None
    assert 0.9 / 16 < after - before < 1.5 / 16  # 64 MiB are a sixteenth of a GiB
    del block
    kept = machine.peak_memory_gib("cpu")
    assert kept is not None and kept > after - 0.1 / 16  # a peak stays; Linux counts pages in batches per thread
    machine.reset_peak_memory("cpu")
    again = machine.peak_memory_gib("cpu")
    assert again is not None and again < before + 0.3 / 16


@needs_reset
def test_reset_gives_unused_memory_back() -> None:
    tensors = [torch.ones(1 << 18) for _ in range(64)]  # 64 MiB in blocks that glibc keeps
    held = machine.peak_memory_gib("cpu")
    del tensors
    machine.reset_peak_memory("cpu")
    released = machine.peak_memory_gib("cpu")
    assert held is not None and released is not None and released < held - 0.6 / 16


def test_peak_that_cannot_be_reset_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CLEAR_REFS", tmp_path / "absent")
    machine.reset_peak_memory("cpu")
    assert machine.peak_memory_gib("cpu") is None


def test_settings_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    machine.settle.cache_clear()
    machine.settle()
    machine.settle()
    assert calls == [1]


def test_versions_are_those_installed() -> None:
    found = machine.versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__ == importlib.metadata.version("torch")
    assert found["lightning"] == importlib.metadata.version("lightning")
    assert all(found.values())


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_named_device_is_taken_at_its_word(accelerator: str) -> None:
    assert machine.device_type(accelerator) == accelerator


@pytest.mark.parametrize("available", [True, False])
def test_auto_takes_a_gpu_if_there_is_one(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert machine.device_type("auto") == ("cuda" if available else "cpu")


def test_description_is_of_this_process() -> None:
    described = machine.describe("cpu")
    assert described["type"] == "cpu" and described["name"]
    assert described["threads"] == torch.get_num_threads() and described["cores"] == os.cpu_count()
