"""Two ranks that hold half of the weights each, against one process: the same losses, one record, whole checkpoints."""

from __future__ import annotations

import pytest
import torch
from outcome import Outcome, Straight
from safetensors.torch import load_file
from test_ddp import WHOLE, MaskedData, agree, stop_at_step

from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.training import run as run_module
from andrea_ablate.training.identity import check
from andrea_ablate.training.run import run
from support import Compose

FSDP = ("trainer.devices=2", "trainer.strategy=fsdp")


@pytest.mark.slow  # each rank is a new process that imports Lightning anew
@pytest.mark.parametrize("others", [(), ("model.tie_embeddings=true", "pos=t5", "optim=lion")])
def test_two_sharded_ranks_train_as_one_process(
    others: tuple[str, ...], epochs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "DataModule", MaskedData)
    lengths = ("trainer.val_lengths=[16]",) if not others else ()
    one, two = epochs(*WHOLE, *others, *lengths), epochs(*WHOLE, *others, *lengths, *FSDP, "trainer.accumulate=2")
    run(one)
    run(two)
    assert Outcome(two).record["reason"] == ""
    agree(Outcome(one), Outcome(two))
    for key in (key for key in Outcome(one).record if key.startswith("val_")):
        assert Outcome(two).record[key] == pytest.approx(Outcome(one).record[key], rel=1e-5)
    ours, theirs = (load_file(Outcome(cfg).folder / "model.safetensors") for cfg in (one, two))
    TransformerLM(two.model).load_state_dict(theirs, strict=True)
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=1e-5)
    left = [{path.name for path in Outcome(cfg).folder.iterdir()} for cfg in (one, two)]
    assert left[0] == left[1]


@pytest.mark.slow  # likewise
def test_sharded_ranks_stop_and_go_on_from_a_whole_checkpoint(
    epochs: Compose, monkeypatch: pytest.MonkeyPatch, straight: Straight
) -> None:
    cfg = epochs(*WHOLE, *FSDP)
    stop_at_step(cfg, 7, monkeypatch)
    stopped = Outcome(cfg)
    at = stopped.checkpoints()[-1]
    state = torch.load(stopped.folder / "checkpoints" / f"step-{at:08d}.ckpt", weights_only=True)
    assert all(type(weight) is torch.Tensor for weight in state["model"].values())
    TransformerLM(cfg.model).load_state_dict(state["model"], strict=True)
    run(cfg)
    assert Outcome(cfg).record["resumed_from"] == at
    agree(straight(*WHOLE), Outcome(cfg))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("optim=muon",), "trainer.strategy=fsdp with optim=muon, whose update needs whole matrices; use optim=adamw"),
        (("trainer.compile=true",), "trainer.strategy=fsdp with trainer.compile=true is not tested"),
    ],
)
def test_what_parts_cannot_do_is_refused(overrides: tuple[str, ...], said: str, epochs: Compose) -> None:
    with pytest.raises(ConfigError, match=said):
        check(epochs(*FSDP, *overrides))


def test_one_device_has_nothing_to_shard(epochs: Compose) -> None:
    assert Outcome(epochs("trainer.strategy=fsdp")).id == Outcome(epochs()).id
    assert Outcome(epochs(*FSDP)).id != Outcome(epochs("trainer.devices=2")).id
