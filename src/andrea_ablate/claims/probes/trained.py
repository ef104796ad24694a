"""Designs trained through the run store: a run that exists is read, an interrupted one is gone on with.

A design is what is typed on the command line, ``("norm=post", "schedule.warmup_tokens=0")``; the scale at which a claim
is measured says what size it is a change of. Its learning rate is chosen on seeds that decide nothing; the seeds that
decide are shared by all designs, and so are the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from andrea_ablate.claims.claim import Claim, Finding, Verdict
from andrea_ablate.composition import compose
from andrea_ablate.config import RunConfig
from andrea_ablate.generate import load
from andrea_ablate.model import TransformerLM
from andrea_ablate.tracking.store import Store
from andrea_ablate.training.run import run

SEEDS = (0, 1, 2, 3, 4)  # they decide
SELECTION = (100,)  # they choose the learning rate
FURTHER = 2  # how often the grid may be doubled past each end, while the best stands there


@dataclass(frozen=True)
class Bench:
    """What is trained at a scale: the baseline that designs are changes of, and the grid of learning rates."""

    base: tuple[str, ...]
    lrs: tuple[float, ...]


BENCHES = {
    "C1": Bench(("size=toy", "trainer.accelerator=cpu"), (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)),
    # A twelfth of the size's budget: a claim trains some fifty runs. A quarter of its context, to evaluate past it.
    "G1": Bench(
        (
            "size=andrea_12m",
            "pos=rope",
            "data.seq_len=256",
            "data.val_tokens=262144",
            "trainer.accelerator=cuda",
            "trainer.precision=bf16-mixed",
            "trainer.tokens=20_000_000",
            "trainer.val_lengths=[1024]",
            "trainer.val_every=0",
            "trainer.checkpoint_every=0",
        ),
        (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    ),
}
_SCALE: ContextVar[str] = ContextVar("scale", default="C1")


@contextmanager
def at_scale(scale: str) -> Iterator[None]:
    """Within the block designs are trained at that scale; at one that trains nothing, as at C1."""
    token = _SCALE.set(scale if scale in BENCHES else "C1")
    try:
        yield
    finally:
        _SCALE.reset(token)


def lrs() -> tuple[float, ...]:
    """The grid of learning rates at this scale."""
    return BENCHES[_SCALE.get()].lrs


def wide() -> tuple[float, ...]:
    """The grid, and past where anything trains, so that a largest stable rate can be seen."""
    return (*lrs(), 2 * lrs()[-1], 4 * lrs()[-1])


def baseline() -> RunConfig:
    """The configuration that designs are changes of, at this scale."""
    return _design((), _SCALE.get())


def bounds(claim: Claim) -> dict[str, Any]:
    """The margins of a claim at this scale: ``margin_toy`` is its ``margin`` at C1."""
    found = dict(claim.margin)
    toy = found.pop("margin_toy", None)
    return found if toy is None or _SCALE.get() != "C1" else {**found, "margin": toy}


@dataclass(frozen=True)
class Trained:
    """One finished or diverged run."""

    cfg: RunConfig
    record: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.record["run_id"])

    @property
    def loss(self) -> float:
        """The last validation loss in nats; that of the untrained model where the run diverged."""
        return float(self.record["val/loss"] if self.finished else self.record["initial_loss"])

    @property
    def finished(self) -> bool:
        return self.record["status"] == "finished"  # type: ignore[no-any-return]

    @property
    def trains(self) -> bool:
        """It did not diverge and ended at least 0.1 nats below its first loss."""
        return self.finished and self.loss < self.record["initial_loss"] - 0.1

    def model(self) -> TransformerLM:
        """The trained model."""
        return load(Store(Path(self.cfg.paths.runs)), self.id)[0].eval()

    def untrained(self) -> TransformerLM:
        """The same model before its first step."""
        return TransformerLM(self.cfg.model, init_seed=self.cfg.seed).eval()


@lru_cache
def _design(design: tuple[str, ...], scale: str) -> RunConfig:
    changed = {text.partition("=")[0] for text in design}
    base = [text for text in BENCHES[scale].base if text.partition("=")[0] not in changed]
    return compose(["logger=none", *base, *design])


def trained(design: Sequence[str], seed: int, lr: float | None = None) -> Trained:
    """The run of a design with that seed and learning rate; None is that of the scale's size."""
    cfg = _design(tuple(design), _SCALE.get())
    optim = cfg.optim if lr is None else {**cfg.optim, "lr": lr}
    data = replace(cfg.data, seed=seed)
    cfg = replace(cfg, seed=seed, data=data, optim=optim, name=" ".join(design) or "baseline", group="claims")
    record = run(cfg, wait=True)
    if record["status"] not in ("finished", "diverged"):
        raise RuntimeError(f"run {record['run_id']} of {cfg.name} {record['status']}: {record['reason']}")
    return Trained(cfg, record)


@dataclass(frozen=True)
class Panel:
    """A design at its own best learning rate.

    Args:
        runs: by seed, at that rate. grid: the runs of the selection seeds by learning rate. at_edge: the best rate is
            the lowest or highest that was tried, so that a better one may lie outside.
    """

    design: tuple[str, ...]
    lr: float
    at_edge: bool
    grid: Mapping[float, tuple[Trained, ...]]
    runs: Mapping[int, Trained]

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run.loss for seed, run in self.runs.items()}

    def values(self, metric: Callable[[Trained], float]) -> dict[int, float]:
        """Any number read from the run of each seed."""
        return {seed: metric(run) for seed, run in self.runs.items()}

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.id for runs in (*self.grid.values(), tuple(self.runs.values())) for run in runs)


def grid(design: Sequence[str], rates: Sequence[float]) -> dict[float, tuple[Trained, ...]]:
    """The runs of the selection seeds by learning rate."""
    return {lr: tuple(trained(design, seed, lr) for seed in SELECTION) for lr in rates}


def selected(design: Sequence[str] = ()) -> tuple[float, dict[float, tuple[Trained, ...]]]:
    """The best learning rate on the selection seeds and its grid, doubled outwards while the best stands at an end."""
    tried = grid(design, lrs())

    def loss(lr: float) -> float:
        return math.fsum(run.loss for run in tried[lr]) / len(SELECTION)

    for _ in range(FURTHER):
        best, low, high = min(tried, key=loss), min(tried), max(tried)
        if best not in (low, high):
            break
        tried |= grid(design, [low / 2 if best == low else high * 2])
    return min(tried, key=loss), dict(sorted(tried.items()))


def tuned(design: Sequence[str] = (), seeds: Sequence[int] = SEEDS) -> Panel:
    """Choose the learning rate of a design on the selection seeds, then train it at the seeds that decide."""
    best, tried = selected(design)
    runs = {seed: trained(design, seed, best) for seed in seeds}
    return Panel(tuple(design), best, best in (min(tried), max(tried)), tried, runs)


def fair(finding: Finding, *panels: Panel) -> Finding:
    """The finding, INCONCLUSIVE where the best learning rate of a side stands at the end of its grid."""
    edges = [f"{' '.join(panel.design) or 'the baseline'} at {panel.lr:g}" for panel in panels if panel.at_edge]
    if not edges:
        return finding
    why = f"the best learning rate is the last one tried: {', '.join(edges)}"
    return replace(finding, verdict=Verdict.INCONCLUSIVE, why=why, needed=None)


def excess(runs: Mapping[float, Sequence[Trained]]) -> list[float]:
    """Learning-rate sensitivity, run by run: how far each is above the best of the grid, at most at its first loss."""
    best = min(run.loss for row in runs.values() for run in row)
    return [max(0.0, min(run.loss, run.record["initial_loss"]) - best) for row in runs.values() for run in row]


def highest_stable(runs: Mapping[float, Sequence[Trained]]) -> float:
    """The largest learning rate up to which every run of the grid trains; 0 where the lowest does not."""
    found = 0.0
    for lr, row in sorted(runs.items()):
        if not all(run.trains for run in row):
            break
        found = lr
    return found


def ids(*sources: Panel | Mapping[float, Sequence[Trained]] | Mapping[int, Trained]) -> tuple[str, ...]:
    """The ids of all runs that a measurement rests on, each once."""
    found: dict[str, None] = {}
    for source in sources:
        if isinstance(source, Panel):
            found |= dict.fromkeys(source.run_ids)
        else:
            for row in source.values():
                found |= dict.fromkeys(run.id for run in (row if isinstance(row, tuple) else (row,)))
    return tuple(found)


def unigram(trained: Trained) -> float:
    """The loss of guessing by frequency alone: what a run that learned nothing of order ends at."""
    return float(trained.record["data"]["unigram_entropy"])
