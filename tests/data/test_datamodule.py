"""Batches by step: independent of workers, ranks, resumes and batch sizes."""

from __future__ import annotations

import hashlib
import pickle
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from andrea_ablate.config import DataConfig
from andrea_ablate.data import Corpus, Windows
from andrea_ablate.data.datamodule import DataModule, TrainBatches
from andrea_ablate.registry import ConfigError


def config(**changes: Any) -> DataConfig:
    fields: dict[str, Any] = {"type": "stdlib", "options": {}, "tokenizer": {"type": "bytes"}, "seq_len": 8, "seed": 0}
    return DataConfig(**fields | {"val_fraction": 0.1, "val_tokens": 0, "num_workers": 0} | changes)


def corpus(n_train: int = 200, n_val: int = 41, **changes: Any) -> Corpus:
    """Token i of train is i and of val is 1000 + i, so that a token tells its place."""
    ids = {"train": np.arange(n_train, dtype=np.uint16), "val": np.arange(1000, 1000 + n_val, dtype=np.uint16)}
    return Corpus(
        **ids | {"fingerprint": "x", "vocab_size": 2000, "token_bytes": None, "unigram_entropy": 0.0} | changes
    )


def module(
    data: Corpus | None = None,
    batch_size: int = 4,
    steps: int = 30,
    place: tuple[int, int] | None = None,
    **changes: Any,
) -> DataModule:
    found = DataModule(data or corpus(), config(**changes), batch_size, steps)
    if place:
        found.trainer = SimpleNamespace(global_rank=place[0], world_size=place[1])  # type: ignore[assignment]
    return found


def rows(items: Any) -> list[tuple[list[list[int]], list[list[int]], int, bytes]]:
    return [(i["inputs"].tolist(), i["targets"].tolist(), i["n_tokens"], i["digest"]) for i in items]


def test_items_are_the_windows_of_their_step() -> None:
    items = list(module().train_dataloader())
    windows = Windows(200, 8)
    assert len(items) == 30
    for step, item in enumerate(items):
        starts = windows.starts(0, step, 4)
        assert item["inputs"].tolist() == [list(range(s, s + 8)) for s in starts]
        assert item["targets"].tolist() == [list(range(s + 1, s + 9)) for s in starts]
        assert item["inputs"].dtype == item["targets"].dtype == torch.int64
        assert item["inputs"].is_contiguous() and item["n_tokens"] == 32
        by_hand = b"".join(int(t).to_bytes(4, "little") for s in starts for t in range(s, s + 9))
        assert item["digest"] == hashlib.blake2b(by_hand, digest_size=16).digest()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_change_nothing(num_workers: int) -> None:
    # 13 steps of 16 windows in 193: more than one epoch of 24 windows.
    reference = rows(module(batch_size=16, steps=13).train_dataloader())
    assert rows(module(batch_size=16, steps=13, num_workers=num_workers).train_dataloader()) == reference
    assert len({digest for *_, digest in reference}) == 13


@pytest.mark.slow  # starts a Python
def test_spawned_worker_opens_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.arange(1_000_000, dtype="<u4").tofile(path)
    data = corpus(train=np.memmap(path, dtype="<u4", mode="r", offset=400, shape=(999_000,)))
    batches = TrainBatches(data.train, 8, 0, 4, 0, 1)
    reference = batches[3]
    assert reference["inputs"].min() >= 100
    sent = pickle.dumps(batches)
    assert len(sent) < 2_000
    assert torch.equal(pickle.loads(sent)[3]["inputs"], reference["inputs"])
    loader = module(data, steps=3, num_workers=1).train_dataloader()
    loader.multiprocessing_context = "spawn"
    assert rows(loader) == rows(module(data, steps=3).train_dataloader())


def test_start_step_continues_the_same_sequence() -> None:
    reference = rows(module().train_dataloader())
    for start in (0, 1, 6, 17, 30):  # an epoch of 24 windows is 6 steps
        resumed = module()
        resumed.start_step = start
        assert rows(resumed.train_dataloader()) == reference[start:]
        assert len(resumed.train_dataloader()) == 30 - start


def test_seeds_differ_and_epochs_differ() -> None:
    first, second = rows(module().train_dataloader()), rows(module(seed=1).train_dataloader())
    assert not {digest for *_, digest in first} & {digest for *_, digest in second}


@pytest.mark.parametrize("world", [2, 4, 3])
def test_ranks_share_out_the_global_batch(world: int) -> None:
    alone = rows(module(batch_size=8, steps=5).train_dataloader())
    parts = [rows(module(batch_size=8, steps=5, place=(r, world)).train_dataloader()) for r in range(world)]
    for step, (inputs, targets, n_tokens, digest) in enumerate(alone):
        for r in range(world):
            assert parts[r][step] == (inputs[r::world], targets[r::world], n_tokens, digest)
    with pytest.raises(ConfigError, match="8 windows cannot feed 9 ranks"):
        module(batch_size=8, place=(0, 9)).train_dataloader()


@pytest.mark.parametrize(("n_val", "predictions"), [(41, 40), (44, 43), (9, 8)])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_every_validation_prediction_once(n_val: int, predictions: int, batch_size: int) -> None:
    token_bytes = 1 + np.arange(2000) % 7
    data = corpus(n_val=n_val, token_bytes=token_bytes)
    items = list(module(data, batch_size=batch_size).val_dataloader())
    pairs = [
        (int(x), int(y))
        for item in items
        for x, y in zip(item["inputs"].flatten(), item["targets"].flatten(), strict=True)
        if y != -100
    ]
    assert pairs == [(1000 + i, 1001 + i) for i in range(predictions)]
    assert sum(item["n_tokens"] for item in items) == predictions
    assert sum(item["n_bytes"] for item in items) == sum(1 + (1001 + i) % 7 for i in range(predictions))
    for item in items:
        assert item["inputs"].shape[1] == 8 and (item["inputs"][item["targets"] == -100] == 0).all()
        assert item["inputs"].dtype == item["targets"].dtype == torch.int64


def test_validation_windows_keep_their_context() -> None:
    first, *_ = module(batch_size=2).val_dataloader()
    assert first["inputs"].tolist() == [list(range(1000, 1008)), list(range(1008, 1016))]
    assert first["n_bytes"] == 0


@pytest.mark.parametrize(
    ("val_tokens", "counted"), [(0, 43), (8, 8), (20, 16), (40, 40), (43, 40), (48, 43), (10**9, 43)]
)
def test_validation_limit_is_whole_windows(val_tokens: int, counted: int) -> None:
    items = module(corpus(n_val=44), val_tokens=val_tokens).val_dataloader()
    assert sum(item["n_tokens"] for item in items) == counted


def test_validation_limit_below_a_window() -> None:
    with pytest.raises(ConfigError, match="val_tokens=7 is less than one window of seq_len=8"):
        module(val_tokens=7).val_dataloader()


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_ten_validation_windows_on_four_ranks(batch_size: int) -> None:
    data = corpus(n_val=81)
    ranks = [list(module(data, batch_size=batch_size, place=(r, 4)).val_dataloader()) for r in range(4)]
    assert len({len(items) for items in ranks}) == 1, "sharded models need as many items on each rank"
    firsts = [
        [int(x) for item in items for x in item["inputs"][item["targets"][:, 0] != -100][:, 0]] for items in ranks
    ]
    assert firsts == [[1000 + 8 * w for w in range(r, 10, 4)] for r in range(4)]
    assert [sum(item["n_tokens"] for item in items) for items in ranks] == [24, 24, 16, 16]


def test_reading_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    data = module()
    list(data.val_dataloader())
    list(islice(data.train_dataloader(), 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], before_numpy)  # type: ignore[index]


class Recorder(lightning.LightningModule):
    """Keeps what the trainer hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.seen += rows([batch])
        return self.weight * float(batch["n_tokens"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_reads_each_step_once() -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=6, accelerator="cpu", enable_model_summary=False, barebones=False, **quiet)
    recorder = Recorder()
    trainer.fit(recorder, datamodule=module(steps=6))
    assert recorder.seen == rows(module(steps=6).train_dataloader())
