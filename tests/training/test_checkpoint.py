"""Files that a run leaves: readable without trusting them, whole or absent, and loadable into a plain model."""

from __future__ import annotations

import copy
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from outcome import Outcome
from torch import nn

from andrea_ablate.model import TransformerLM
from andrea_ablate.tracking.store import StoreError
from andrea_ablate.training import checkpoint
from andrea_ablate.training.run import run
from support import Compose, During


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value)}, "optimizer": {}, "recorder": {}}


def test_state_comes_back_with_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(3)
    checkpoint.save(tmp_path, 7, state(0.25))
    expected = torch.rand(5)
    torch.manual_seed(4)
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None and loaded["step"] == 7
    assert torch.equal(loaded["model"]["w"], torch.full((300,), 0.25))
    checkpoint.set_rng_state(loaded["rng"])
    assert torch.equal(torch.rand(5), expected)


def test_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "absent") is None


def test_two_newest_are_kept_by_step_and_not_by_name_length_or_time(tmp_path: Path) -> None:
    for step in (9, 10, 99999998, 100):
        checkpoint.save(tmp_path, step, state())
        os.utime(tmp_path / f"step-{step:08d}.ckpt", (0, 0))
    # A run that writes step 100 has not come past 99999998: that one was left behind as damaged.
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == ["step-00000100.ckpt", "step-00000010.ckpt"]


def test_damaged_newer_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    for step in (5, 7):
        checkpoint.save(tmp_path, step, state())
    (tmp_path / "step-00000007.ckpt").write_bytes(b"torn")
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None and loaded["step"] == 5
    checkpoint.save(tmp_path, 6, state())
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == ["step-00000006.ckpt", "step-00000005.ckpt"]


@pytest.mark.parametrize("part", ["data of a tensor", "the pickled structure"])
def test_flipped_bit_is_noticed_wherever_it_is(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path, 5, state(0.5))
    checkpoint.save(tmp_path, 6, state(0.75))
    path = tmp_path / "step-00000006.ckpt"
    content = bytearray(path.read_bytes())
    needle = torch.full((300,), 0.75).numpy().tobytes() if part == "data of a tensor" else b"optimizer"
    content[bytes(content).index(needle) + 3] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "andrea_ablate"):
        loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None and loaded["step"] == 5
    assert "step-00000006.ckpt" in caplog.text


def test_disk_that_fills_up_leaves_the_old_checkpoints_and_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 5, state())

    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="No space left"):
        checkpoint.save(tmp_path, 6, state())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005.ckpt"]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_checkpoint_that_asks_for_trust_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path, 5, state())
    checkpoint.save(tmp_path, 6, {**state(), "recorder": Trap(tmp_path / "sprung")})
    with caplog.at_level(logging.WARNING, "andrea_ablate"):
        loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None and loaded["step"] == 5
    assert "step-00000006.ckpt" in caplog.text
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow  # several runs
@pytest.mark.parametrize("optim", ["adamw", "muon", "lion", "sgd"])
def test_everything_written_loads_without_trust(optim: str, epochs: Compose, during: During) -> None:
    cfg = epochs(f"optim={optim}", "stability=[qk_norm,skip_step]", "model.linear_bias=true")
    during(17, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    model = TransformerLM(cfg.model)
    files = list(Outcome(cfg).folder.rglob("*.ckpt"))
    assert len(files) == 2
    for path in files:
        content = torch.load(path, weights_only=True)
        model.load_state_dict(content["model"], strict=True)
        assert plain(content)
    run(cfg)
    weights = safetensors.torch.load_file(Outcome(cfg).folder / "model.safetensors")
    model.load_state_dict(weights, strict=True)
    assert not list(Outcome(cfg).folder.rglob("*.ckpt"))


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(plain(key) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    return value is None or type(value) in (str, int, float, bool, torch.Tensor)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_weights_give_the_recorded_validation_loss(tied: bool, epochs: Compose) -> None:
    from andrea_ablate.training.identity import identify

    cfg = epochs(f"model.tie_embeddings={tied}")
    run(cfg)
    outcome = Outcome(cfg)
    model = TransformerLM(cfg.model, init_seed=99)
    model.load_state_dict(safetensors.torch.load_file(outcome.folder / "model.safetensors"), strict=True)
    model.eval()
    tokens = torch.tensor(identify(cfg)[1].val.astype("int64"))
    nll, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 8):
            window = tokens[start : start + 9]
            logp = model(window[None, :-1]).double().log_softmax(-1)[0]
            nll -= logp.gather(1, window[1:, None]).sum().item()
            count += len(window) - 1
    assert count == outcome.record["val/tokens"] == len(tokens) - 1
    assert outcome.record["val/loss"] == pytest.approx(nll / count, rel=1e-6)


# --- compiled models ---


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch.compile traces and runs the traced graph as it is; the list receives each graph."""
    graphs: list[Any] = []
    original = nn.Module.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs, backend=backend)

    monkeypatch.setattr(nn.Module, "compile", compile)
    torch.compiler.reset()
    return graphs


@pytest.mark.slow  # torch.compile starts slowly
def test_compiled_and_plain_weights_are_the_same_files(
    eager_backend: list[Any], epochs: Compose, during: During
) -> None:
    overrides = ("trainer.tokens=320", "model.tie_embeddings=true", "model.dropout=0.0", "trainer.val_every=0")
    plain_cfg, compiled_cfg = epochs(*overrides), epochs(*overrides, "trainer.compile=true")
    run(plain_cfg)
    assert not eager_backend
    during(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run(compiled_cfg)
    assert eager_backend, "nothing was compiled"
    keys = TransformerLM(plain_cfg.model).state_dict().keys()
    newest = checkpoint.newest_first(Outcome(compiled_cfg).folder / "checkpoints")[0]
    assert torch.load(newest, weights_only=True)["model"].keys() == keys
    run(compiled_cfg)
    plain_run, compiled_run = Outcome(plain_cfg), Outcome(compiled_cfg)
    assert compiled_run.record["paths"]["compile"] is True and plain_run.record["paths"]["compile"] is False
    assert [row["train/loss"] for row in compiled_run.train] == pytest.approx(
        [row["train/loss"] for row in plain_run.train], rel=1e-6
    )
    weights = safetensors.torch.load_file(compiled_run.folder / "model.safetensors")
    assert weights.keys() == keys
    for compiled in (False, True):
        model = TransformerLM(plain_cfg.model, init_seed=5)
        if compiled:
            model.compile()
        model.load_state_dict(weights, strict=True)
        assert copy.deepcopy(model).state_dict().keys() == keys
    assert compiled_run.record["val/loss"] == pytest.approx(plain_run.record["val/loss"], rel=1e-6)
