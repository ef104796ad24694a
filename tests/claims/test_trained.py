"""Panels choose learning rates on their own seeds and know when they could not; runs come from the store."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from andrea_ablate.claims.claim import Finding, Verdict
from andrea_ablate.claims.ledger import claim_of, ledger, measures_of
from andrea_ablate.claims.probes import trained as probe
from andrea_ablate.claims.probes.trained import (
    BENCHES,
    SEEDS,
    SELECTION,
    Trained,
    at_scale,
    bounds,
    excess,
    fair,
    highest_stable,
    ids,
    lrs,
    tuned,
    wide,
)
from andrea_ablate.claims.topics.regularisation_trained import HELD_OUT
from andrea_ablate.composition import compose
from andrea_ablate.config import RunConfig

TOY = compose(["logger=none", "size=toy"])


def fake(loss: float, *, seed: int = 0, initial: float = 5.0, status: str = "finished") -> Trained:
    record = {"run_id": f"{loss:g}-{seed}", "status": status, "val/loss": loss, "initial_loss": initial}
    return Trained(replace(TOY, seed=seed), record)


@pytest.fixture
def bowl(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float | None]]:
    """Runs whose loss is the squared distance of log2(lr) to that of the optimum; what was asked for is noted."""
    asked: list[tuple[int, float | None]] = []

    def train(design: Sequence[str], seed: int, lr: float | None = None) -> Trained:
        assert lr is not None
        asked.append((seed, lr))
        return fake(1 + math.log2(lr / float(design[0])) ** 2 + seed / 1000, seed=seed)

    monkeypatch.setattr(probe, "trained", train)
    return asked


def test_the_best_rate_of_the_grid_is_chosen_on_the_selection_seeds(bowl: list[tuple[int, float | None]]) -> None:
    panel = tuned(("9e-3",))
    assert (panel.lr, panel.at_edge, tuple(panel.runs)) == (8e-3, False, SEEDS)
    assert {lr for seed, lr in bowl if seed in SELECTION} == {2e-3, 4e-3, 8e-3, 16e-3, 32e-3}
    assert {lr for seed, lr in bowl if seed in SEEDS} == {8e-3}
    assert not set(SELECTION) & set(SEEDS)
    assert panel.losses[3] == pytest.approx(1.003 + math.log2(8 / 9) ** 2)
    assert len(set(panel.run_ids)) == 5 * len(SELECTION) + 5


@pytest.mark.parametrize(
    ("optimum", "best", "edge"),
    [
        ("64e-3", 64e-3, False),  # two doublings on: the second shows that the first was the best
        ("1e-3", 1e-3, False),
        ("128e-3", 128e-3, True),  # the last that is tried
        ("1e-5", 5e-4, True),
    ],
)
def test_a_grid_goes_on_where_its_best_stands_at_the_end(
    bowl: list[tuple[int, float | None]], optimum: str, best: float, edge: bool
) -> None:
    panel = tuned((optimum,))
    assert (panel.lr, panel.at_edge) == (best, edge)
    finding = fair(Finding("x", 1.0, verdict=Verdict.SUPPORTED), panel)
    assert finding.verdict is (Verdict.INCONCLUSIVE if edge else Verdict.SUPPORTED)
    assert (f"{optimum} at {best:g}" in finding.why) == edge


def test_a_run_that_diverged_counts_as_one_that_learned_nothing() -> None:
    broken = fake(math.nan, status="diverged")
    assert broken.loss == 5 and not broken.trains
    assert fake(4.8).trains and not fake(4.95).trains


def test_sensitivity_and_the_largest_stable_rate() -> None:
    runs = {0.1: (fake(9.0),), 1e-3: (fake(3.0), fake(3.5)), 1e-2: (fake(2.0), fake(2.5))}
    assert excess(runs) == [3.0, 1.0, 1.5, 0.0, 0.5]  # 9 counts as the first loss, 5
    assert highest_stable(runs) == 1e-2
    assert highest_stable({1e-3: (fake(5.0),), 1e-2: (fake(2.0),)}) == 0
    assert ids(runs) == ("9-0", "3-0", "3.5-0", "2-0", "2.5-0")


def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loss: Callable[[RunConfig], float]) -> list[str]:
    """Let runs end at planted losses, without training: best at the middle of the grid, a little noise by seed; models
    stay untrained and small. Returns: the sizes that were asked for.
    """
    whole, asked = probe._design.__wrapped__, []

    @lru_cache
    def design(overrides: tuple[str, ...], scale: str) -> RunConfig:
        small = ("model.d_model=16", "model.n_heads=4", "data=synthetic", "data.seq_len=16", "model.max_seq_len=64")
        asked.append(BENCHES[scale].base[0])
        made = whole((*small, "data.n_tokens=60000", *overrides, f"paths.cache={tmp_path}"), scale)
        assert isinstance(made, RunConfig)
        return made

    def run(cfg: RunConfig, *, wait: bool) -> dict[str, object]:
        noise = 1e-4 * ((cfg.seed * 7919) % 13)
        ends = loss(cfg) + math.log2(cfg.optim["lr"] / lrs()[2]) ** 2 / 10 + noise
        bands = {
            "val_64/loss_from_8": ends,
            "val_64/loss_from_32": ends + (cfg.model.pos["type"] != "alibi") + noise,
        }
        name = f"{cfg.name} {cfg.seed} {cfg.optim['lr']:g}"
        record = {
            "run_id": name,
            "status": "finished",
            "val/loss": ends,
            "initial_loss": 5.0,
            "spikes": [],
            "params": 1,
        }
        return {**record, **bands, "data": {"unigram_entropy": 3.2}}

    monkeypatch.setattr(probe, "_design", design)
    monkeypatch.setattr(probe, "run", run)
    monkeypatch.setattr(Trained, "model", Trained.untrained)
    return asked


def verdict(claim_id: str, at: str = "") -> Verdict:
    claim = claim_of(claim_id)
    at = at or claim.scale[0]
    with at_scale(at):
        made = measures_of(claim)[at](claim)
    assert made.worded and (made.run_ids or claim_id == "swiglu-cheaper")
    return made.verdict


V = Verdict
PLANTED: dict[str, tuple[Callable[[RunConfig], float], Verdict]] = {
    "res-none-trains": (lambda cfg: 2.0 + (cfg.model.block["type"] == "no_residual"), V.SUPPORTED),
    "nonorm-nan": (lambda cfg: 2.0 + 5 * (cfg.model.block["norm_position"] == "none"), V.SUPPORTED),
    "post-needs-warmup": (
        lambda cfg: 2.0 + (cfg.model.block["norm_position"] == "post" and cfg.warmup_steps == 0),
        V.INCONCLUSIVE,  # the interaction holds, the sensitivity is the same
    ),
    "pre-no-warmup": (lambda cfg: 2.0, V.SUPPORTED),
    "pre-larger-lr": (lambda cfg: 2.0, V.INCONCLUSIVE),
    "nobias-quality": (lambda cfg: 2.0 + 0.1 * (not cfg.model.linear_bias), V.CONTRADICTED),
    "ratio-small-hurts": (lambda cfg: 2.0 + 0.2 / float(cfg.model.ffn["ratio"]), V.SUPPORTED),
    "swiglu-cheaper": (lambda cfg: 2.0, V.MISSTATED),
    "ape-extrapolates-badly": (lambda cfg: 2.0, V.SUPPORTED),
    "nope-viable": (lambda cfg: 2.0 + 0.2 * (cfg.model.pos["type"] == "none"), V.CONTRADICTED),
    "dropout-hurts": (
        lambda cfg: (
            2.0 + cfg.model.dropout * (1 if cfg.data.options["n_tokens"] - HELD_OUT == cfg.trainer.tokens else -1)
        ),
        V.SUPPORTED,
    ),
    "qknorm-stability": (lambda cfg: 2.0, V.INCONCLUSIVE),
    # read from models, here untrained ones
    "block-refines": (lambda cfg: 2.0, V.NO_EFFECT),  # no block does anything yet
    "layer1-adds-position": (lambda cfg: 2.0, V.SUPPORTED),
    "roles-from-training": (lambda cfg: 2.0, V.NO_EFFECT),
    "sin-dilutes": (lambda cfg: 2.0, V.CONTRADICTED),
    "one-epoch-no-gap": (lambda cfg: 2.0, V.SUPPORTED),
    "zloss-controls-z": (lambda cfg: 2.0, V.NO_EFFECT),
    "swa-few-global": (lambda cfg: 2.0, V.NO_EFFECT),  # as good as all global, and nothing recalls anything
}


QUICK = ("res-none-trains", "nonorm-nan", "pre-no-warmup", "swiglu-cheaper", "nope-viable", "zloss-controls-z")


@pytest.mark.parametrize(
    "claim_id", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PLANTED]
)
def test_planted_losses_give_the_planted_verdict(
    claim_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loss, expected = PLANTED[claim_id]
    plant(monkeypatch, tmp_path, loss)
    assert verdict(claim_id) is expected


TRAINED_ON_A_GPU = [
    claim.id for claim in ledger().values() if claim.kind == "training" and claim.scale[:2] == ("C1", "G1")
]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("claim_id", TRAINED_ON_A_GPU)
def test_at_the_larger_scale_the_same_measurement_trains_the_larger_size(
    claim_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loss, expected = PLANTED[claim_id]
    asked = plant(monkeypatch, tmp_path, loss)
    assert verdict(claim_id, "G1") is expected
    assert set(asked) == {"size=andrea_12m"}


def test_a_claim_that_a_gpu_decides_firmly_has_its_measurement_there() -> None:
    assert len(TRAINED_ON_A_GPU) == 13
    for name in TRAINED_ON_A_GPU:
        assert set(measures_of(claim_of(name))) == {"C1", "G1"}, name


def test_a_scale_is_a_size_a_grid_and_the_margins_of_its_own() -> None:
    claim = claim_of("ratio-small-hurts")
    assert (probe.baseline().model.d_model, lrs(), bounds(claim)["margin"]) == (64, BENCHES["C1"].lrs, 0.03)
    with at_scale("G1"):
        cfg = probe.baseline()
        assert (cfg.model.d_model, cfg.data.seq_len, cfg.trainer.accelerator) == (384, 256, "cuda")
        assert (cfg.model.pos["type"], probe._design(("pos=sine",), "G1").model.pos["type"]) == ("rope", "sine")
        assert (lrs(), wide()[-2:], bounds(claim)) == (
            BENCHES["G1"].lrs,
            (16e-3, 32e-3),
            {"delta": 0.02, "margin": 0.01},
        )
    assert lrs() == BENCHES["C1"].lrs


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_without_a_difference_nothing_is_supported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, lambda cfg: 2.0)
    assert verdict("res-none-trains") is V.NO_EFFECT
    assert verdict("nonorm-nan") is V.CONTRADICTED
    assert verdict("nope-viable") is V.SUPPORTED


@pytest.mark.slow  # trains
def test_a_run_is_trained_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("model.d_model=16", "data=synthetic", "trainer.tokens=1024", "data.val_tokens=1024")
    first = probe.trained(small, 3, 1e-3)
    assert first.finished and first.cfg.seed == first.cfg.data.seed == 3 and first.cfg.optim["lr"] == 1e-3
    record = tmp_path / "runs" / first.id / "record.json"
    stamp = record.stat().st_mtime_ns
    again = probe.trained(small, 3, 1e-3)
    assert again.record == first.record and record.stat().st_mtime_ns == stamp
    assert not torch.equal(again.model().embedding, again.untrained().embedding)
    assert probe.trained(small, 4, 1e-3).id != first.id
