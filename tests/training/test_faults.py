"""A sweep that is struck by fault after fault ends in the table of an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "faults.py"


@pytest.mark.slow  # some twenty starts of the command line
def test_a_sweep_that_is_broken_off_at_random_ends_in_the_same_bits() -> None:
    command = [sys.executable, str(SCRIPT), "--kills=12", "--steps=24", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    result = json.loads(done.stdout)
    assert result["runs"] == 12 and result["compared"] == 37 and result["different"] == []
    assert sum(result["faults"].values()) >= 5 and result["temporary_files_left"] == 0
