"""The git commit of the code that runs, where it runs from a checkout."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of a checkout; of an installed wheel a folder above site-packages, which has no .git
SOURCES = ("src", "conf", "csrc")


@cache
def commit(root: Path = ROOT) -> str | None:
    """The first twelve digits of the commit, ``+`` behind them where the sources have changes; None without a checkout.

    Asked once per process, of one `git`: what is edited while a process runs is not what it runs.
    """
    if not (root / ".git").exists():  # a file in a work tree
        return None
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--", *SOURCES]
    # Of another repository, where a hook of its own starts us, git would read these.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        said = subprocess.run(
            command,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    head, changes = None, False
    for line in said.stdout.splitlines():
        if line.startswith("# branch.oid "):
            head = line.split()[2]
        elif not line.startswith("#"):
            changes = True
    return None if head in (None, "(initial)") else f"{head[:12]}{'+' * changes}"
