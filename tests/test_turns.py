"""Runs of several processes on one machine: who waits, for whom, and that a killed process holds nothing."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from andrea_ablate import turns
from andrea_ablate.config import NO_LIMIT, MachineConfig
from andrea_ablate.registry import ConfigError
from andrea_ablate.turns import Need, need_of, turn
from support import Compose

CORES = MachineConfig(cores=2, memory_gib=None, gpus=None)
MEMORY = MachineConfig(cores=None, memory_gib=1.0, gpus=None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(turns, "PERIOD_S", 0.01)
    monkeypatch.setattr(turns, "claims_folder", lambda: tmp_path / "claims")
    return tmp_path / "claims"


def hold(need: Need, gpus: tuple[str, ...], budget: MachineConfig, pipe: Any) -> None:
    """In another process: take a turn, say what it got, and hold it until told to let go."""
    with turn("the other", need, budget, gpus) as own:
        pipe.send(own)
        pipe.recv()


class Other:
    """Another process that asks for a turn; `own`: the GPUs it got, once it has its turn."""

    def __init__(self, need: Need, gpus: tuple[str, ...] = (), budget: MachineConfig = NO_LIMIT) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=hold, args=(need, gpus, budget, theirs))
        self.process.start()

    @cached_property
    def own(self) -> list[str]:
        got: list[str] = self.pipe.recv()
        return got

    def let_go(self) -> None:
        self.pipe.send(None)
        self.process.join()


@pytest.fixture
def another(folder: Path) -> Iterator[Callable[..., Other]]:
    """``another(need)``: a process that has its turn; with ``has=False`` one that may still wait for it."""
    started: list[Other] = []

    def start(*args: Any, has: bool = True) -> Other:
        started.append(other := Other(*args))
        assert not has or other.own is not None
        return other

    yield start
    for other in started:
        other.process.kill()
        other.process.join()


@pytest.mark.parametrize("budget", [CORES, MEMORY])
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_waits_for_what_another_process_takes_and_says_so(
    budget: MachineConfig, killed: bool, folder: Path, another: Callable[..., Other], caplog: pytest.LogCaptureFixture
) -> None:
    need = Need(cores=1, memory_gib=0.6)
    other = another(Need(cores=2, memory_gib=0.6))
    got = threading.Event()

    def take() -> None:
        with turn("mine", need, budget):
            got.set()

    thread = threading.Thread(target=take)
    with caplog.at_level(logging.WARNING, "andrea_ablate"):
        thread.start()
        assert not got.wait(0.1)
        other.process.kill() if killed else other.let_go()
        assert got.wait(10)
    thread.join()
    (said,) = caplog.messages
    limit = "1 of machine.cores=2, of which 2" if budget is CORES else "0.6 of machine.memory_gib=1, of which 0.6"
    assert said == f"mine waits for {limit} are taken, by the other (process {other.process.pid})"
    assert list(folder.glob("*.claim")) == []


def test_what_fits_beside_another_does_not_wait(folder: Path, another: Callable[..., Other]) -> None:
    another(Need(cores=1, memory_gib=0.4))
    for budget in (CORES, MEMORY, NO_LIMIT):
        with turn("mine", Need(cores=1, memory_gib=0.6), budget):
            assert len(list(folder.glob("*.claim"))) == 2


def test_each_gets_gpus_of_its_own(another: Callable[..., Other]) -> None:
    gpus = ("3", "GPU-5", "7")
    others = [another(Need(1, 0.1, gpus=1), gpus) for _ in range(2)]
    assert [other.own for other in others] == [["3"], ["GPU-5"]]
    with turn("mine", Need(1, 0.1, gpus=1), NO_LIMIT, gpus) as own:
        assert own == ["7"]
    others[0].let_go()
    with turn("mine", Need(1, 0.1, gpus=2), NO_LIMIT, gpus) as own:
        assert own == ["3", "7"]


def test_a_large_run_is_not_overtaken_by_small_ones(another: Callable[..., Other]) -> None:
    first = another(Need(cores=1, memory_gib=0.1))
    large = another(Need(cores=2, memory_gib=0.1), (), CORES, has=False)
    assert not large.pipe.poll(0.2)
    small = another(Need(cores=1, memory_gib=0.1), (), CORES, has=False)
    assert not small.pipe.poll(0.2)  # though there is a core for it
    first.let_go()
    assert large.own == []
    assert not small.pipe.poll(0.1)
    large.let_go()
    assert small.own == []


@pytest.mark.parametrize(
    ("need", "budget", "said"),
    [
        (Need(3, 0.1), CORES, "a takes cores=3 and 2 are allowed here; raise machine.cores"),
        (Need(1, 1.5), MEMORY, "a takes memory_gib=1.5 and 1 are allowed here; raise machine.memory_gib"),
        (Need(1, 0.1, gpus=2), NO_LIMIT, "a takes gpus=2 and 1 are allowed here; lower trainer.devices"),
    ],
)
def test_what_never_fits_is_refused(need: Need, budget: MachineConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said), turn("a", need, budget, ["0"]):
        pass


def test_need_of_a_run(tiny: Compose) -> None:
    nano = tiny("size=nano")
    need = need_of(nano, threads=2, device="cpu")
    assert (need.cores, need.gpus) == (2, 0)
    assert 0.6 < need.memory_gib < 0.81  # measured: 0.59 to 0.80
    ranks = need_of(tiny("size=nano", "trainer.devices=2"), threads=2, device="cpu")
    assert ranks.cores == 4 and ranks.memory_gib > 1.2
    assert need_of(tiny("trainer.devices=2"), threads=8, device="cuda").gpus == 2
