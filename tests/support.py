"""Types of the fixtures in the conftest files. These cannot be imported from: two files have that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from andrea_ablate.config import RunConfig


class Answer(NamedTuple):
    """Exit status and output of one command line."""

    status: int
    out: str
    err: str


Cli = Callable[..., Answer]
Compose = Callable[..., RunConfig]  # overrides -> the configuration: the fixtures tiny and epochs
During = Callable[[int, Callable[[], object]], None]  # the fixture of that name in tests/training
