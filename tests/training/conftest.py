"""A run of 24 steps in three epochs of 8, so that a stop can fall on, before and after an epoch's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
import torch
from outcome import Outcome, Spoil, Straight, digest_of, fresh

from andrea_ablate.composition import compose
from andrea_ablate.config import RunConfig
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import run
from support import Compose, During

# 264 tokens for training: 32 windows of 8 in each epoch, at every phase.
EPOCHS = (
    *("size=tiny", "logger=none", "data=synthetic", "data.n_tokens=300", "data.val_fraction=0.12"),
    *("data.seq_len=8", "data.val_tokens=0", "model.d_model=16", "model.n_heads=2", "model.n_layers=1"),
    *("model.dropout=0.1", "trainer.tokens=768", "trainer.val_every=6", "trainer.checkpoint_every=5"),
)


@pytest.fixture(scope="session")
def epochs(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Compose:
    """``epochs("optim=muon")``: that run with these overrides, in a folder of its own."""

    @cached
    def composed(*overrides: str) -> RunConfig:
        return compose([*EPOCHS, f"paths.cache={cache}", *overrides])

    def make(*overrides: str) -> RunConfig:
        return fresh(composed(*overrides), tmp_path_factory.mktemp("runs"))

    return make


@pytest.fixture(scope="session")
def straight(epochs: Compose) -> Straight:
    """``straight("optim=muon")``: the outcome of the undisturbed run with these overrides; each is trained once."""
    known: dict[tuple[str, ...], Outcome] = {}

    def outcome(*overrides: str) -> Outcome:
        if overrides not in known:
            cfg = epochs(*overrides)
            run(cfg)
            known[overrides] = Outcome(cfg)
        return known[overrides]

    return outcome


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> During:
    """``during(7, action)``: call `action` once, when step 7 has updated the weights and its row is not yet written."""
    actions: dict[int, Callable[[], object]] = {}
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        outputs = original(self, batch, batch_idx)
        if self.step in actions:
            actions.pop(self.step)()
        return outputs

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return actions.__setitem__


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """``spoil({7: ("nll", nan)})``: what steps report instead of their own numbers."""
    original = LanguageModule.training_step
    wrong: dict[int, tuple[str, float]] = {}

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        outputs = original(self, batch, batch_idx)
        if self.step in wrong:
            key, value = wrong[self.step]
            outputs[key] = torch.tensor(value)
        return outputs

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return wrong.update


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Step number and hash of each batch, in the order in which they are trained on."""
    seen: list[tuple[int, str]] = []
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        seen.append((self.step + 1, digest_of(batch)))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return seen


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models of this size gain nothing from threads, and tests that run side by side lose much to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
