"""Which tokens a step reads: a pure function of (seed, step), so no worker, rank or resume can change it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from andrea_ablate.registry import ConfigError


def permutation(n: int, *key: int) -> NDArray[np.int64]:
    """A permutation of ``0..n-1`` drawn from `key`: the order of n raw 64-bit draws."""
    # numpy keeps the raw stream fixed over its versions; it does not promise that for Generator.permutation.
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(draws, kind="stable")


class Windows:
    """An endless sequence of training windows.

    A window at start s reads inputs ``[s, s+T)`` and targets ``[s+1, s+T+1)``; valid starts are ``0..n_starts-1`` with
    ``n_starts = n_tokens - T``. Epoch e reads the windows ``p, p+T, p+2T, ...`` of one phase p, shuffled by (seed, e),
    so that none of its predictions repeat. T epochs are a cycle, in which each phase, and so each start, comes once;
    the order of the phases is drawn from (seed, cycle).

    Args:
        n_tokens: length of the split.
        seq_len: T, tokens per window.
    Raises: ConfigError if the split has no whole window.
    """

    def __init__(self, n_tokens: int, seq_len: int) -> None:
        if seq_len < 1 or n_tokens < seq_len + 1:
            raise ConfigError(f"data: {n_tokens} tokens hold no window of seq_len={seq_len}, which needs seq_len + 1")
        self.n_tokens = n_tokens
        self.seq_len = seq_len
        self.n_starts = n_tokens - seq_len
        self._epoch: tuple[int, int, NDArray[np.int64]] = (0, 0, np.zeros(0, np.int64))

    def starts(self, seed: int, step: int, batch_size: int) -> NDArray[np.int64]:
        """Starts of the samples ``step * batch_size .. (step + 1) * batch_size - 1``; shape ``(B,)``."""
        out = np.empty(batch_size, np.int64)
        filled = 0
        while filled < batch_size:
            index = step * batch_size + filled
            first, order = self._epoch_of(seed, index)
            part = order[index - first : index - first + batch_size - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def _epoch_of(self, seed: int, index: int) -> tuple[int, NDArray[np.int64]]:
        """The epoch that holds sample `index`: the index of its first sample, and its starts in order."""
        cached, first, order = self._epoch
        if cached == seed and first <= index < first + len(order):
            return first, order
        cycle, within = divmod(index, self.n_starts)
        phases = permutation(self.seq_len, seed, 0, cycle)
        sizes = np.maximum(0, -((phases - self.n_starts) // self.seq_len))
        ends = np.cumsum(sizes)
        e = int(np.searchsorted(ends, within, side="right"))
        size = int(sizes[e])
        order = phases[e] + self.seq_len * permutation(size, seed, 1, cycle * self.seq_len + e)
        first = cycle * self.n_starts + int(ends[e]) - size
        self._epoch = (seed, first, order)
        return first, order


def validation_windows(n_tokens: int, seq_len: int, max_tokens: int) -> int:
    """Windows that cover the ``n_tokens - 1`` predictions once each, at most `max_tokens` of them (0 = all)."""
    everything = -(-(n_tokens - 1) // seq_len)
    if 0 < max_tokens < seq_len:
        raise ConfigError(f"data: val_tokens={max_tokens} is less than one window of seq_len={seq_len}; use 0 for all")
    return min(everything, max_tokens // seq_len) if max_tokens else everything
