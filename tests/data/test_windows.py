"""The endless sequence of training windows."""

from __future__ import annotations

import numpy as np
import pytest

from andrea_ablate.data import Windows
from andrea_ablate.data.windows import permutation
from andrea_ablate.registry import ConfigError


def sequence(n_tokens: int, seq_len: int, seed: int, count: int) -> list[int]:
    windows = Windows(n_tokens, seq_len)
    return [int(windows.starts(seed, step, 1)[0]) for step in range(count)]


def epochs(n_tokens: int, seq_len: int, starts: list[int]) -> list[list[int]]:
    """The starts of one cycle, cut where the phase changes."""
    cut: list[list[int]] = []
    for start in starts:
        if not cut or cut[-1][0] % seq_len != start % seq_len:
            cut.append([])
        cut[-1].append(start)
    return cut


def test_ten_tokens_and_four_per_window() -> None:
    tokens = np.arange(10)
    starts = sequence(10, 4, seed=0, count=12)
    for cycle in (starts[:6], starts[6:]):
        assert sorted(cycle) == [0, 1, 2, 3, 4, 5]
    last = max(starts)
    assert tokens[last : last + 4].tolist() == [5, 6, 7, 8]
    assert tokens[last + 1 : last + 5].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(("n_tokens", "seq_len"), [(10, 4), (103, 7), (64, 8), (9, 8), (12, 8), (500, 1)])
def test_each_start_once_per_cycle_and_no_overlap_within_an_epoch(n_tokens: int, seq_len: int) -> None:
    n = n_tokens - seq_len
    starts = sequence(n_tokens, seq_len, seed=5, count=2 * n)
    assert sorted(starts[:n]) == sorted(starts[n:]) == list(range(n))
    cut = epochs(n_tokens, seq_len, starts[:n])
    assert len(cut) == min(seq_len, n)
    for epoch in cut:
        assert np.all(np.diff(sorted(epoch)) == seq_len)
        assert min(epoch) < seq_len and max(epoch) + seq_len >= n


def test_epochs_and_seeds_differ() -> None:
    starts = sequence(2001, 10, seed=1, count=1991)
    cut = epochs(2001, 10, starts)
    assert len({epoch[0] % 10 for epoch in cut}) == 10
    orders = {tuple(start // 10 for start in epoch) for epoch in cut}
    assert len(orders) == 10, "each epoch is shuffled anew"
    assert all(list(order) != sorted(order) for order in orders)
    assert [e[0] % 10 for e in cut] != list(range(10))
    assert starts[:50] != sequence(2001, 10, seed=2, count=50)
    phases = [epoch[0] % 10 for epoch in epochs(2001, 10, sequence(2001, 10, seed=1, count=3982)[1991:])]
    assert sorted(phases) == list(range(10)) and phases != [epoch[0] % 10 for epoch in cut]


def test_any_step_any_batch_size_any_order() -> None:
    n_tokens, seq_len = 61, 8
    reference = sequence(n_tokens, seq_len, seed=7, count=240)
    windows = Windows(n_tokens, seq_len)
    for batch_size in (1, 5, 8, 60):
        for step in reversed(range(240 // batch_size)):
            got = windows.starts(7, step, batch_size)
            assert got.dtype == np.int64
            assert got.tolist() == reference[step * batch_size : (step + 1) * batch_size]
    # Another seed in between leaves no trace.
    windows.starts(8, 0, 4)
    assert windows.starts(7, 0, 4).tolist() == reference[:4]


def test_shuffle_is_uniform() -> None:
    firsts = np.array([permutation(4, seed)[0] for seed in range(2000)])
    assert np.bincount(firsts, minlength=4) == pytest.approx([500] * 4, abs=4 * np.sqrt(2000 * 3 / 16))


def test_order_is_pinned() -> None:
    """These are part of the numerics: a change here changes every run."""
    assert sequence(20, 4, seed=0, count=16) == [7, 11, 3, 15, 10, 6, 2, 14, 13, 5, 9, 1, 8, 4, 0, 12]


def test_too_short() -> None:
    with pytest.raises(ConfigError, match="8 tokens hold no window of seq_len=8"):
        Windows(8, 8)
