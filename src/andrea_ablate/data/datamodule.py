"""Batches for the trainer: one item per optimizer step, fixed by (seed, step) alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import lightning
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from andrea_ablate.config import DataConfig
from andrea_ablate.data.files import map_tokens
from andrea_ablate.data.prepare import Corpus
from andrea_ablate.data.windows import Windows, validation_windows
from andrea_ablate.registry import ConfigError

IGNORED = -100
Item = dict[str, Any]


class TrainBatches(Dataset[Item]):
    """Item s is this rank's part of the global batch of step s."""

    def __init__(self, tokens: NDArray[Any], seq_len: int, seed: int, batch_size: int, rank: int, world: int) -> None:
        self.tokens = tokens
        self.seed, self.batch_size, self.rank, self.world = seed, batch_size, rank, world
        self.windows = Windows(len(tokens), seq_len)
        self._rows: NDArray[Any] | None = None

    def __getitem__(self, step: int) -> Item:
        if self._rows is None:
            # The plain array below the memmap: indexing the subclass costs more than the copy.
            self._rows = np.lib.stride_tricks.sliding_window_view(np.asarray(self.tokens), self.windows.seq_len + 1)
        rows = self._rows[self.windows.starts(self.seed, step, self.batch_size)]
        local = rows[self.rank :: self.world]
        return {
            "inputs": torch.from_numpy(local[:, :-1].astype(np.int64)),
            "targets": torch.from_numpy(local[:, 1:].astype(np.int64)),
            "n_tokens": self.batch_size * self.windows.seq_len,
            "digest": hashlib.blake2b(rows.astype("<u4").data, digest_size=16).digest(),
        }

    def __getstate__(self) -> dict[str, Any]:
        # A worker that starts afresh opens the file itself; pickling a memmap would copy all of its tokens.
        state = self.__dict__ | {"_rows": None, "windows": Windows(len(self.tokens), self.windows.seq_len)}
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = (self.tokens.filename, self.tokens.dtype.str, self.tokens.offset, len(self.tokens))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["tokens"], tuple):
            state["tokens"] = map_tokens(*state["tokens"])
        self.__dict__.update(state)


class ValBatches(Dataset[Item]):
    """This rank's share of the validation windows, in file order, each prediction of the split once over all ranks.

    Every rank has as many items, since sharded models compute together: a rank that has run out gets one masked row.
    """

    def __init__(self, corpus: Corpus, seq_len: int, max_tokens: int, batch_size: int, rank: int, world: int) -> None:
        self.tokens = np.asarray(corpus.val)
        self.token_bytes = corpus.token_bytes
        self.seq_len, self.batch_size, self.rank, self.world = seq_len, batch_size, rank, world
        self.n_windows = validation_windows(len(self.tokens), seq_len, max_tokens)

    def __len__(self) -> int:
        return -(-self.n_windows // (self.world * self.batch_size))

    def __getitem__(self, item: int) -> Item:
        first = item * self.batch_size
        windows = self.rank + self.world * np.arange(first, first + self.batch_size)
        windows = windows[windows < self.n_windows]
        if len(windows) == 0:
            windows = np.array([len(self.tokens)])
        at = windows[:, None] * self.seq_len + np.arange(self.seq_len)
        valid = at < len(self.tokens) - 1
        at = np.where(valid, at, 0)
        targets = self.tokens[at + 1].astype(np.int64)
        n_bytes = 0 if self.token_bytes is None else int(self.token_bytes[targets[valid]].sum(dtype=np.int64))
        return {
            "inputs": torch.from_numpy(np.where(valid, self.tokens[at], 0).astype(np.int64)),
            "targets": torch.from_numpy(np.where(valid, targets, IGNORED)),
            "n_tokens": int(valid.sum()),
            "n_bytes": n_bytes,
        }


class Steps(DistributedSampler[int]):
    """The numbers of a range in order, the same on every rank: the items themselves are sharded.

    It is a DistributedSampler in name only, because Lightning replaces every other sampler by one that deals out steps.
    """

    def __init__(self, steps: range) -> None:
        self.steps = steps
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def _as_is(item: Any) -> Any:
    return item


class DataModule(lightning.LightningDataModule):
    """Training steps ``start_step .. total_steps-1`` and the fixed validation windows of a corpus.

    Args:
        corpus: from `prepare`.
        cfg: seq_len, seed, val_tokens and num_workers are read.
        batch_size: windows of the global batch of one optimizer step.
        total_steps: optimizer steps of the whole run.
    Attributes:
        start_step: first step to read; set it before fit on resume.
    Shape: a train item has ``inputs`` and ``targets`` int64 ``(b, T)`` (rows ``rank::world_size`` of the global batch),
        ``n_tokens`` (targets of the global batch) and ``digest`` (of the global batch); a val item has ``n_tokens`` and
        ``n_bytes`` of its own valid targets, the others being -100.
    """

    def __init__(self, corpus: Corpus, cfg: DataConfig, batch_size: int, total_steps: int) -> None:
        super().__init__()
        if cfg.seed < 0:
            raise ConfigError(f"data: seed={cfg.seed} must be at least 0")
        self.corpus, self.cfg, self.batch_size, self.total_steps = corpus, cfg, batch_size, total_steps
        self.start_step = 0

    def train_dataloader(self) -> DataLoader[Item]:
        rank, world = self._place()
        if self.batch_size < world:
            raise ConfigError(f"data: a batch of {self.batch_size} windows cannot feed {world} ranks; use more")
        data = TrainBatches(self.corpus.train, self.cfg.seq_len, self.cfg.seed, self.batch_size, rank, world)
        return DataLoader(
            data,
            batch_size=None,
            sampler=Steps(range(self.start_step, self.total_steps)),
            num_workers=self.cfg.num_workers,
            collate_fn=_as_is,
            generator=torch.Generator(),
        )

    def val_dataloader(self, length: int | None = None) -> DataLoader[Item]:
        """Windows of `length` tokens, as many in a batch as hold the tokens of a training batch; None for seq_len."""
        rank, world = self._place()
        length = length or self.cfg.seq_len
        rows = max(1, self.batch_size * self.cfg.seq_len // length)
        data = ValBatches(self.corpus, length, self.cfg.val_tokens, rows, rank, world)
        # A loader without a generator of its own draws from the global one, so that evaluating would change dropout.
        steps = Steps(range(len(data)))
        return DataLoader(data, batch_size=None, sampler=steps, collate_fn=_as_is, generator=torch.Generator())

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
