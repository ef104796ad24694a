"""Replay: the same bits from a checkpoint or from the start, one thing changed, and what is measured inside."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outcome import Outcome, Spoil

from andrea_ablate.attention import core
from andrea_ablate.data.datamodule import TrainBatches
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.replay import main
from andrea_ablate.tracking.store import Store
from andrea_ablate.training.identity import identify
from andrea_ablate.training.replay import replay
from andrea_ablate.training.run import run
from support import Compose

BAD = 50  # the step whose batch is corrupted


@pytest.fixture
def corrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step BAD reads noise in place of text."""
    original = TrainBatches.__getitem__

    def spoilt(self: TrainBatches, step: int) -> dict[str, Any]:
        item = original(self, step)
        if step == BAD - 1 and self.seed == 0:
            draw = torch.Generator().manual_seed(0)
            item["targets"] = torch.randint(0, int(self.tokens.max()) + 1, item["targets"].shape, generator=draw)
        return item

    monkeypatch.setattr(TrainBatches, "__getitem__", spoilt)


# Few ids that almost follow from one another: noise among them stands out.
LEARNABLE = (
    *("data.tokenizer.vocab_size=8", "data.sharpness=6", "optim.lr=2e-2", "model.dropout=0.0"),
    *("trainer.tokens=1920", "trainer.val_every=0"),
)


def trained(epochs: Compose, *overrides: str) -> tuple[Store, Outcome]:
    cfg = epochs(*LEARNABLE, *overrides)
    assert run(cfg)["status"] == "finished"
    return Store(Path(cfg.paths.runs)), Outcome(cfg)


@pytest.mark.usefixtures("corrupted")
def test_a_planted_spike_is_found_replayed_to_the_bit_and_gone_with_another_batch(epochs: Compose) -> None:
    store, outcome = trained(epochs)
    (spike,) = outcome.record["spikes"]
    assert spike["start"] == BAD
    kept = list((outcome.folder / "spikes").glob("*.ckpt"))
    assert [path.name for path in kept] == ["step-00000040.ckpt"]  # of 40 and 45 the older one

    capsule = replay(store, outcome.id, BAD, before=6, after=3)
    assert capsule["identical"] is True
    assert [row["step"] for row in capsule["steps"]] == list(range(BAD - 6, BAD + 4))
    for row in capsule["steps"]:
        assert row["train/loss"] == outcome.train[row["step"] - 1]["train/loss"]
    loss = {row["step"]: row["train/loss"] for row in capsule["steps"]}
    assert loss[BAD] > spike["baseline"] + 0.5 * spike["height"]

    healed = replay(store, outcome.id, BAD, before=6, after=3, exchanged=[BAD])
    assert healed["identical"] is None
    again = {row["step"]: row["train/loss"] for row in healed["steps"]}
    assert again[BAD - 1] == loss[BAD - 1]
    assert again[BAD] < spike["baseline"] + 0.2 * spike["height"]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_run_without_checkpoints_is_replayed_from_its_start_and_one_choice_may_differ(epochs: Compose) -> None:
    store, outcome = trained(epochs, "model.dropout=0.1")
    assert not list(outcome.folder.rglob("*.ckpt"))
    assert replay(store, outcome.id[:8], 3, before=9, after=0)["identical"] is True
    slower = replay(store, outcome.id, 6, {"optim.lr": 1e-4}, before=5, after=0)
    assert slower["identical"] is None and slower["changes"] == {"optim.lr": 1e-4}
    assert slower["steps"][0]["train/loss"] == outcome.train[0]["train/loss"]
    assert slower["steps"][-1]["train/loss"] > outcome.train[5]["train/loss"]
    normed = replay(store, outcome.id, 4, {"model.block.norm_position": "post"}, before=3, after=0)
    assert normed["steps"][0]["train/loss"] != outcome.train[0]["train/loss"]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_what_a_step_shows_is_what_the_model_does(epochs: Compose) -> None:
    store, outcome = trained(epochs, "model.attn.window=3", "trainer.grad_clip=null")
    (row,) = replay(store, outcome.id, 1, before=0, after=0)["steps"]
    cfg = epochs(*LEARNABLE, "model.attn.window=3")
    corpus = identify(cfg)[1]
    batch = TrainBatches(corpus.train, 8, 0, cfg.trainer.batch_size, 0, 1)[0]
    assert row["tokens"] == batch["inputs"].tolist()

    model, seen = TransformerLM(cfg.model, init_seed=cfg.seed), {}
    block = model.blocks[0]
    block.register_forward_hook(lambda m, i, out: seen.update(out=out.detach()))
    block.attn_norm["before"].register_forward_hook(lambda m, i, out: seen.update(x=out.detach()))
    logits = model(batch["inputs"])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
    layer = row["layers"][0]
    z = logits.logsumexp(-1)
    assert (row["z_mean"], row["z_max"]) == pytest.approx((z.mean().item(), z.max().item()), rel=1e-5)
    assert layer["out_rms"] == pytest.approx(seen["out"].square().mean().sqrt().item(), rel=1e-5)
    grads = torch.cat([p.grad.flatten() for p in block.parameters()])
    assert layer["grad_rms"] == pytest.approx(grads.square().mean().sqrt().item(), rel=1e-4)

    heads, width = block.attn.n_heads, block.attn.d_head
    q, k = ((seen["x"] @ w.T).unflatten(-1, (heads, width)) for w in (block.attn.w_q, block.attn.w_k))
    q, k = (t.transpose(1, 2) for t in model.pos(q, k))
    scores = (q @ k.transpose(-1, -2)).detach().numpy() / math.sqrt(width)
    i, j = np.indices(scores.shape[-2:])
    hidden = (j > i) | (j <= i - 3)
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights /= weights.sum(-1, keepdims=True)
    entropy = -(weights * np.log(np.where(hidden, 1, weights))).sum(-1).mean()
    assert layer["max_score"] == pytest.approx(scores[..., ~hidden].max(), rel=1e-5)
    assert layer["entropy"] == pytest.approx(entropy, rel=1e-5)
    # AdamW's first update moves every weight that has a gradient by about the learning rate.
    lr = row["optim/lr"]
    size = torch.cat([p.detach().flatten() for p in block.parameters()]).square().mean().sqrt().item()
    assert layer["update_ratio"] == pytest.approx(lr / size, rel=0.1)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_the_step_that_ends_a_run_is_in_its_capsule_and_nothing_watches_on(epochs: Compose, spoil: Spoil) -> None:
    cfg = epochs(*LEARNABLE, "trainer.diverged_after=1")
    spoil({12: ("nll", math.nan)})
    assert run(cfg)["status"] == "diverged"
    capsule = replay(Store(Path(cfg.paths.runs)), Outcome(cfg).id, 12, before=2)
    assert capsule["identical"] is True
    assert [row["step"] for row in capsule["steps"]] == [10, 11, 12]
    assert math.isnan(capsule["steps"][-1]["train/loss"]) and capsule["steps"][-1]["layers"][0]["max_score"] > -math.inf

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", fail)
        with pytest.raises(RuntimeError, match="disk"):
            replay(Store(Path(cfg.paths.runs)), Outcome(cfg).id, 3)
    assert core._watchers == []


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_checkpoint_that_cannot_be_kept_costs_the_run_nothing(
    epochs: Compose, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError("links are not supported")

    monkeypatch.setattr(os, "link", no_links)
    cfg = epochs(*LEARNABLE)
    spoil({50: ("nll", 32 * 9.0)})
    record = run(cfg)
    assert record["status"] == "finished" and len(record["spikes"]) == 1
    assert replay(Store(Path(cfg.paths.runs)), Outcome(cfg).id, 3, after=0)["identical"] is True


def test_what_is_not_there_is_said(epochs: Compose) -> None:
    store, outcome = trained(epochs)
    with pytest.raises(ConfigError, match="has no step 99; its steps are 1 to 60"):
        replay(store, outcome.id, 99)
    with pytest.raises(ConfigError, match="no setting 'optim.lrr'; did you mean 'lr'"):
        replay(store, outcome.id, 3, {"optim.lrr": 1.0})


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_the_command_writes_the_capsule_beside_the_run(
    epochs: Compose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, outcome = trained(epochs)
    monkeypatch.setattr("sys.argv", ["replay", outcome.id[:8], "5", "--runs", str(store.root), "--before", "2"])
    main()
    assert "the recorded losses to the last bit" in capsys.readouterr().out
    capsule = json.loads((outcome.folder / "spikes" / "step-00000005.json").read_text())
    assert capsule["identical"] is True and [row["step"] for row in capsule["steps"]] == list(range(3, 14))
    monkeypatch.setattr("sys.argv", ["replay", outcome.id[:8], "5", "oops", "--runs", str(store.root)])
    assert main() == 2 and "'oops' is not key=value" in capsys.readouterr().err
