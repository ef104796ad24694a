"""One optimizer step and one validation, against sums written out in float64 and against runs that must agree."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from outcome import Outcome, Straight
from torch import Tensor, nn

from andrea_ablate.config import RunConfig
from andrea_ablate.data.datamodule import DataModule, TrainBatches
from andrea_ablate.loss import LossSums
from andrea_ablate.model import TransformerLM
from andrea_ablate.training.identity import identify
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import run
from support import Compose


def attach(module: LanguageModule) -> LanguageModule:
    """Give the module what it asks a trainer for, without one."""
    strategy = SimpleNamespace(backward=lambda loss, optimizer, *args, **kwargs: loss.backward(*args, **kwargs))
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        world_size=1, strategy=strategy, precision_plugin=SimpleNamespace(val_step_context=nullcontext)
    )
    module.setup("fit")
    return module


def batch_of(targets: Tensor, vocab: int = 64) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = torch.randint(0, vocab, targets.shape)
    return {"inputs": inputs, "targets": targets, "n_tokens": int((targets != -100).sum())}


def masked(*kept: int) -> Tensor:
    """Targets of one row of eight per number, with that many of them predicted."""
    torch.manual_seed(2)
    targets = torch.randint(0, 64, (len(kept), 8))
    for row, n in zip(targets, kept, strict=True):
        row[n:] = -100
    return targets


# --- the step ---


def test_ten_steps_of_four_micro_batches_are_ten_updates_and_forty_forwards(
    epochs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"forward": 0, "update": 0}
    forward, update = TransformerLM.forward, torch.optim.AdamW.step

    def counted_forward(self: TransformerLM, *args: Any, **kwargs: Any) -> Any:
        calls["forward"] += self.training
        return forward(self, *args, **kwargs)

    def counted_update(self: torch.optim.AdamW, closure: Any = None) -> Any:
        calls["update"] += 1
        return update(self, closure)

    monkeypatch.setattr(TransformerLM, "forward", counted_forward)
    monkeypatch.setattr(torch.optim.AdamW, "step", counted_update)
    cfg = epochs("trainer.accumulate=4", "trainer.tokens=320")
    run(cfg)
    assert calls == {"forward": 40, "update": 10}
    outcome = Outcome(cfg)
    assert [row["step"] for row in outcome.train] == list(range(1, 11))
    assert [row["tokens"] for row in outcome.train] == [32 * step for step in range(1, 11)]
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 1) / 9)) for step in range(1, 11)]  # 1 of warm-up
    assert [row["optim/lr"] for row in outcome.train] == pytest.approx([cfg.optim["lr"] * by for by in cosine])
    assert [row["step"] for row in outcome.val] == [6, 10]
    assert (outcome.record["total_steps"], outcome.record["tokens"]) == (10, 320)


@pytest.mark.slow  # several runs
def test_intervals_count_updates_whatever_the_accumulation(epochs: Compose) -> None:
    for accumulate in (1, 4):
        cfg = epochs(f"trainer.accumulate={accumulate}", "trainer.val_every=4", "trainer.checkpoint_every=10")
        with pytest.MonkeyPatch.context() as patch:
            written: list[int] = []
            from andrea_ablate.training import checkpoint

            patch.setattr(checkpoint, "save", lambda folder, step, state, to=written: to.append(step))
            run(cfg)
        assert written == [10, 20]
        assert [row["step"] for row in Outcome(cfg).val] == [4, 8, 12, 16, 20, 24]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_nothing_but_rounding(accumulate: int, epochs: Compose, straight: Straight) -> None:
    whole = straight("model.dropout=0.0", "stability=[z_loss]")
    parts = straight("model.dropout=0.0", "stability=[z_loss]", f"trainer.accumulate={accumulate}")
    assert whole.id != parts.id and whole.record["token_hash"] == parts.record["token_hash"]
    for key in ("train/loss", "train/penalty", "train/grad_norm"):
        a, b = ([row[key] for row in outcome.train] for outcome in (whole, parts))
        assert a == pytest.approx(b, rel=1e-4)
    assert whole.record["val/loss"] == pytest.approx(parts.record["val/loss"], rel=1e-5)


@pytest.mark.parametrize("kept", [(6, 1, 8, 3), (8, 0, 0, 1), (0, 0, 0, 7)])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_micro_batches_of_unequal_token_counts_give_the_gradient_of_the_whole(
    accumulate: int, kept: tuple[int, ...], epochs: Compose
) -> None:
    cfg = epochs("model.dropout=0.0", f"trainer.accumulate={accumulate}")
    module = attach(LanguageModule(cfg).double())
    batch = batch_of(masked(*kept))
    sums = module._backward(batch)
    ours = {name: parameter.grad for name, parameter in module.model.named_parameters()}

    oracle = TransformerLM(cfg.model).double()
    logits = oracle(batch["inputs"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    loss.backward()
    assert int(sums.n_tokens) == sum(kept)
    assert float(sums.nll / sum(kept)) == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-9, atol=1e-12)


class Losses(nn.Module):
    """Stands in for a model: row i of the batch has the loss per token that its first input names."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor, targets: Tensor) -> LossSums:
        kept = targets != -100
        nll = (kept * inputs[:, :1] * self.gain).sum()
        return LossSums(nll, nll.new_zeros(()), kept.sum())


def test_six_tokens_at_one_and_one_token_at_seven_make_thirteen_sevenths(epochs: Compose) -> None:
    cfg = epochs("trainer.accumulate=2", "trainer.grad_clip=null")
    module = LanguageModule(cfg)
    module.model = Losses()  # type: ignore[assignment]
    attach(module)
    targets = masked(6, 1)
    inputs = torch.tensor([[1.0] * 8, [7.0] * 8], dtype=torch.float64)
    sums = module._backward({"inputs": inputs, "targets": targets, "n_tokens": 7})
    assert sums.nll.item() / 7 == pytest.approx(13 / 7) != pytest.approx(4.0)
    assert module.model.gain.grad.item() == pytest.approx(13 / 7)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_step_without_a_single_target_is_a_step_of_zeros(accumulate: int, epochs: Compose) -> None:
    module = attach(LanguageModule(epochs("stability=[z_loss]", f"trainer.accumulate={accumulate}")))
    sums = module._backward(batch_of(masked(0, 0, 0, 0)))
    assert (sums.nll.item(), sums.penalty.item(), int(sums.n_tokens)) == (0.0, 0.0, 0)
    assert all(not p.grad.any() for p in module.model.parameters())
    assert module._clip().item() == 0.0
    assert all(bool(p.grad.isfinite().all()) for p in module.model.parameters())


@pytest.mark.parametrize("empty", [0, 3])
def test_run_with_a_step_without_a_single_target_goes_on(
    empty: int, epochs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainBatches.__getitem__

    def item(self: TrainBatches, step: int) -> dict[str, Any]:
        found = original(self, step)
        return found | {"targets": found["targets"].fill_(-100), "n_tokens": 0} if step == empty else found

    monkeypatch.setattr(TrainBatches, "__getitem__", item)
    outcome = after(epochs("trainer.tokens=256", "trainer.diverged_after=2", "stability=[z_loss,skip_step]"))
    assert outcome.record["status"] == "finished" and outcome.record["initial_loss"] == pytest.approx(4.16, abs=0.1)
    for step, row in enumerate(outcome.train):
        found = [row[key] for key in ("train/loss", "train/penalty", "train/grad_norm")]
        assert found == [0.0, 0.0, 0.0] if step == empty else min(found) > 0


# --- clipping ---


def norms_at_the_optimizer(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[float]]:
    """Gradient norms in float64, right after backward and as the optimizer receives them."""
    before: list[float] = []
    after: list[float] = []
    clip, update = LanguageModule._clip, torch.optim.AdamW.step

    def norm(parameters: Iterator[nn.Parameter]) -> float:
        return math.sqrt(math.fsum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))

    def seen_clip(self: LanguageModule) -> Tensor:
        before.append(norm(self.model.parameters()))
        return clip(self)

    def seen_update(self: torch.optim.AdamW, closure: Any = None) -> Any:
        after.append(norm(p for group in self.param_groups for p in group["params"]))
        return update(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "_clip", seen_clip)
        patch.setattr(torch.optim.AdamW, "step", seen_update)
        run(cfg)
    return before, after


def test_optimizer_receives_the_clipped_norm_and_the_record_the_unclipped(
    epochs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = epochs("trainer.grad_clip=0.1", "trainer.accumulate=2")
    before, after = norms_at_the_optimizer(cfg, monkeypatch)
    assert min(before) > 0.2
    assert max(after) <= 0.1 * (1 + 1e-4)
    assert min(after) > 0.1 * (1 - 1e-3)
    assert [row["train/grad_norm"] for row in Outcome(cfg).train] == pytest.approx(before, rel=1e-5)


@pytest.mark.slow  # several runs
def test_no_clipping_changes_no_gradient(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = epochs("trainer.grad_clip=null")
    before, after = norms_at_the_optimizer(cfg, monkeypatch)
    assert before == after
    outcome = Outcome(cfg)
    assert [row["train/grad_norm"] for row in outcome.train] == pytest.approx(before, rel=1e-5)
    out_of_reach = epochs("trainer.grad_clip=1e9")
    run(out_of_reach)
    assert Outcome(out_of_reach).weights == outcome.weights


# --- validation ---


def test_same_weights_give_the_same_validation_loss_to_the_last_bit(epochs: Compose) -> None:
    cfg = epochs()
    module = attach(LanguageModule(cfg))
    data = DataModule(identify(cfg)[1], cfg.data, 4, 1)
    first, second = (module.evaluate(data.val_dataloader()) for _ in range(2))
    assert first == second and module.training


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_validating_does_not_change_training(epochs: Compose) -> None:
    often, never = (after(epochs(f"trainer.val_every={every}")) for every in (2, 0))
    assert [row["step"] for row in often.val] == list(range(2, 25, 2)) and [row["step"] for row in never.val] == [24]
    assert often.train == never.train and often.weights == never.weights
    assert often.val[-1] == never.val[-1]


def after(cfg: RunConfig) -> Outcome:
    run(cfg)
    return Outcome(cfg)


@pytest.mark.parametrize("n_tokens", [41, 44])  # whole windows, and a last one of three predictions
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_validation_loss_does_not_depend_on_the_batch_size(batch_size: int, n_tokens: int, epochs: Compose) -> None:
    cfg = epochs()
    corpus = identify(cfg)[1]
    corpus = replace(corpus, val=np.asarray(corpus.train[:n_tokens]))
    module = attach(LanguageModule(cfg))
    metrics = module.evaluate(DataModule(corpus, cfg.data, batch_size, 1).val_dataloader())
    assert metrics["val/tokens"] == n_tokens - 1

    module.eval()
    tokens, nll = torch.tensor(corpus.val.astype(np.int64)), 0.0
    with torch.no_grad():
        for window in (tokens[start : start + 9] for start in range(0, n_tokens - 1, 8)):
            logp = module.model(window[None, :-1])[0].double().log_softmax(-1)
            nll -= logp.gather(-1, window[1:, None]).sum().item()
    assert math.exp(metrics["val/loss"]) == pytest.approx(math.exp(nll / (n_tokens - 1)), rel=1e-6)


@pytest.mark.parametrize(("length", "edges"), [(8, [0, 8]), (20, [0, 16, 20]), (40, [0, 16, 32, 40])])
def test_the_loss_at_other_lengths_is_that_of_the_logits(length: int, edges: list[int], epochs: Compose) -> None:
    """Forty predictions, which windows of 8, 20 and 40 tokens cover once each."""
    cfg = epochs()
    corpus = identify(cfg)[1]
    corpus = replace(corpus, val=np.asarray(corpus.train[:41]))
    module = attach(LanguageModule(cfg))
    found = module.evaluate_at(length, DataModule(corpus, cfg.data, 4, 1).val_dataloader(length))
    tokens, want = torch.tensor(corpus.val.astype(np.int64)), torch.zeros(40, dtype=torch.float64)
    module.eval()
    for first in range(0, 40, length):
        with torch.no_grad():
            logp = module.model(tokens[None, first : first + length][:, : 40 - first]).double().log_softmax(-1)[0]
        want[first : first + len(logp)] = -logp.gather(-1, tokens[first + 1 : first + 1 + len(logp), None])[:, 0]
    position = torch.arange(40) % length
    bands = {
        f"val_{length}/loss_from_{a}": want[(a <= position) & (position < b)].mean().item() for a, b in pairwise(edges)
    }
    assert found == pytest.approx({f"val_{length}/loss": want.mean().item(), **bands}, rel=1e-5)


def test_lengths_beyond_training_are_in_the_last_row_and_the_record(epochs: Compose) -> None:
    """A corpus that is shorter than the length leaves no positions at its end, and nothing is said of them."""
    longer = after(epochs("trainer.val_lengths=[8,24,100]", "trainer.val_every=12"))
    *_, first, last = longer.val
    assert "val_24/loss" not in first
    assert last["val_8/loss"] == pytest.approx(last["val/loss"], rel=1e-6)
    assert {key for key in last if key.startswith("val_24/")} == {
        f"val_24/loss{at}" for at in ("", "_from_0", "_from_16")
    }
    assert "val_100/loss_from_64" not in last
    assert longer.record["val_24/loss"] == last["val_24/loss"]
    assert longer.weights == after(epochs("trainer.val_every=12")).weights


def test_validation_batch_without_targets_counts_for_nothing(epochs: Compose) -> None:
    module = attach(LanguageModule(epochs()))
    full = {**batch_of(masked(8, 8, 5)), "n_bytes": 30}
    empty = {**batch_of(masked(0, 0, 0)), "n_bytes": 0}
    assert module.evaluate([full, empty]) == module.evaluate([full])
    assert module.evaluate([full])["val/tokens"] == 21
    assert module.evaluate([empty]) == {"val/loss": 0.0, "val/tokens": 0.0}


def test_bits_per_byte_are_the_nats_over_the_bytes(epochs: Compose) -> None:
    module = attach(LanguageModule(epochs()))
    metrics = module.evaluate([{**batch_of(masked(8, 8)), "n_bytes": 50}])
    assert metrics["val/bpb"] == pytest.approx(metrics["val/loss"] * 16 / 50 / math.log(2), rel=1e-12)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_penalties_train_and_are_not_in_a_reported_loss(epochs: Compose) -> None:
    plain, heavy = (
        after(epochs("model.dropout=0.0", "trainer.tokens=64", *extra))
        for extra in ((), ("stability=[z_loss]", "model.stability.z_loss.alpha=0.5"))
    )
    assert heavy.train[0]["train/loss"] == plain.train[0]["train/loss"]  # same weights, same loss
    assert heavy.train[0]["train/penalty"] == pytest.approx(0.5 * math.log(64) ** 2, rel=0.05)
    assert heavy.train[0]["train/grad_norm"] > 1.1 * plain.train[0]["train/grad_norm"]
    batch = {**batch_of(masked(8, 8, 5)), "n_bytes": 30}
    modules = [attach(LanguageModule(epochs(*extra))) for extra in ((), ("stability=[z_loss]",))]
    assert len({str(module.evaluate([batch])) for module in modules}) == 1
    assert len({str(module.evaluate_at(8, [batch])) for module in modules}) == 1


# --- what arms share ---


@pytest.fixture
def first_weights(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The weights with which each run began."""
    seen: list[dict[str, Tensor]] = []
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if self.step == 0:
            seen.append({name: value.clone() for name, value in self.model.state_dict().items()})
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return seen


ARMS = [
    (),
    ("norm=post",),
    ("pos=learned",),
    ("norm_type=rmsnorm",),
    ("ffn=swiglu",),
    ("stability=[qk_norm]",),
    ("trainer.accumulate=4",),
]


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_arms_of_a_seed_share_batches_and_the_weights_they_have_in_common(
    epochs: Compose, digests: list[tuple[int, str]], first_weights: list[dict[str, Tensor]]
) -> None:
    batches, hashes = [], []
    for arm in ARMS:
        digests.clear()
        cfg = epochs(*arm, "trainer.val_every=0", "trainer.tokens=640")
        hashes.append(run(cfg)["token_hash"])
        batches.append(list(digests))
    assert all(other == batches[0] for other in batches) and len(set(hashes)) == 1
    base = first_weights[0]
    for arm, weights in zip(ARMS, first_weights, strict=True):
        common = [name for name in base if name in weights and base[name].shape == weights[name].shape]
        assert len(common) >= 8, arm
        assert all(torch.equal(base[name], weights[name]) for name in common), arm


@pytest.mark.slow  # several runs
def test_another_seed_changes_batches_and_weights_and_a_data_seed_the_batches_only(
    epochs: Compose, digests: list[tuple[int, str]], first_weights: list[dict[str, Tensor]]
) -> None:
    batches = []
    for overrides in ((), ("seed=1",), ("data.seed=1",), ("seed=1", "data.seed=0")):
        digests.clear()
        run(epochs(*overrides, "trainer.val_every=0", "trainer.tokens=320"))
        batches.append([digest for _, digest in digests])
    assert batches[0] == batches[3] and batches[1] == batches[2]
    assert not set(batches[0]) & set(batches[1])
    embeddings = [weights["embedding"] for weights in first_weights]
    assert torch.equal(embeddings[0], embeddings[2]) and torch.equal(embeddings[1], embeddings[3])
    assert not torch.equal(embeddings[0], embeddings[1])


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_change_nothing(straight: Straight) -> None:
    alone, helped = straight(), straight("trainer.val_every=6", "data.num_workers=3")
    assert helped.id == alone.id and helped.folder != alone.folder
    assert helped.final == alone.final


def test_token_hash_chains_the_batches_in_order(epochs: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    chained = ""
    original = LanguageModule.training_step

    def training_step(self: LanguageModule, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        nonlocal chained
        rows = torch.cat((batch["inputs"], batch["targets"][:, -1:]), dim=1).numpy().astype("<u4")
        digest = hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
        chained = hashlib.blake2b(chained.encode() + digest, digest_size=16).hexdigest()
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    assert run(epochs())["token_hash"] == chained


# --- names and precision ---


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    ("logger", "extra"),
    [
        ("none", ()),
        ("csv", ("stability=[z_loss,skip_step]", "trainer.accumulate=2")),
        ("tensorboard", ()),
    ],
)
def test_metric_names_do_not_depend_on_flags(logger: str, extra: tuple[str, ...], epochs: Compose, tiny: Any) -> None:
    cfg = tiny(f"logger={logger}", *extra)
    run(cfg)
    outcome = Outcome(cfg)
    chosen = {"train/penalty", "optim/skipped"} if extra else set()
    for row in outcome.train:
        assert row.keys() == {"step", "tokens", "train/loss", "train/grad_norm", "optim/lr", "spike/count"} | chosen
    for row in outcome.val:
        assert row.keys() == {"step", "val/loss", "val/tokens", "val/bpb"}
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in readme for key in {*outcome.train[0], *outcome.val[0]})
    assert len(outcome.train) == 10 and len(outcome.val) == 2
    if logger == "csv":
        header = (Path(outcome.folder) / "metrics.csv").read_text().splitlines()[0].split(",")
        assert set(header) == set(outcome.train[0]) | set(outcome.val[0]) | {"wall_s"}


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_bf16_trains_keeps_fp32_weights_and_is_recorded(straight: Straight) -> None:
    wide, narrow = straight(), straight("trainer.precision=bf16-mixed")
    assert (wide.record["precision"], narrow.record["precision"]) == ("32-true", "bf16-mixed")
    assert narrow.record["status"] == "finished" and narrow.id != wide.id
    losses = [[row["train/loss"] for row in outcome.train] for outcome in (wide, narrow)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    from safetensors.torch import load_file

    assert {value.dtype for value in load_file(narrow.folder / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow  # several runs
def test_bf16_run_resumes_to_the_same_bits(epochs: Compose, straight: Straight, during: Any) -> None:
    import os
    import signal

    cfg = epochs("trainer.precision=bf16-mixed")
    during(11, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    run(cfg)
    assert Outcome(cfg).final == straight("trainer.precision=bf16-mixed").final
