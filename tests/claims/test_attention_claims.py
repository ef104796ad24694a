"""What attention.py measures turns with the code: broken, it gives another verdict; some numbers are worked by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from broken import number, verdict
from torch import Tensor

from andrea_ablate.attention import cache, multihead
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.probes.times import WARM_UP, taking_turns
from andrea_ablate.claims.topics import attention

V = Verdict
Patch = pytest.MonkeyPatch


@pytest.mark.slow  # a second of CPU
def test_numbers_by_hand() -> None:
    assert number("kv-formula", "MHA, fp32").value == 2 * 3 * 12 * 4 * 40 * 4  # K and V, layers, heads, width, tokens
    assert number("kv-formula", "ANDREA").value == 2 * 12 * 12 * 64 * 1024 * 2 / 1e6
    assert number("swa-reach", "window i - 8 to i: farthest token seen through 3").value == 3 * 8


def kept_in_fp64(patch: Patch) -> None:
    def extend(self: Any, *new: Tensor, window: int | None = None) -> tuple[Tensor, ...]:
        both = plain(self, *new, window=window)
        self.kept = tuple(x.double() for x in self.kept)
        return both

    plain = cache.LayerCache.extend
    patch.setattr(cache.LayerCache, "extend", extend)


def kept_for_all_heads(patch: Patch) -> None:
    def kept(model: Any, length: int, batch: int = 1) -> list[Tensor]:
        return [x.repeat_interleave(12 // x.shape[2], 2) for x in plain(model, length, batch)]

    plain = attention.kept_tensors
    patch.setattr(attention, "kept_tensors", kept)


def attending(change: Callable[[Tensor, Tensor, dict[str, Any]], tuple[Tensor, dict[str, Any]]]) -> Any:
    def broken(patch: Patch) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            k, given = change(q, k, given)
            return plain(q, k, v, **given)

        plain = multihead.attend
        patch.setattr(multihead, "attend", attend)

    return broken


keys_of_the_next_group = attending(lambda q, k, given: (k.roll(1, 2) if k.shape[2] < q.shape[2] else k, given))
window_of_one_more = attending(lambda q, k, given: (k, {**given, "window": given["window"] and given["window"] + 1}))


@pytest.mark.parametrize(
    ("claim", "whole", "broken"),
    [
        pytest.param("kv-formula", V.SUPPORTED, kept_in_fp64, marks=pytest.mark.slow),
        pytest.param("kv-shrink", V.SUPPORTED, kept_for_all_heads, marks=pytest.mark.slow),
        ("gqa-interpolates", V.SUPPORTED, keys_of_the_next_group),
        pytest.param("swa-reach", V.MISSTATED, window_of_one_more, marks=pytest.mark.slow),
    ],
)
def test_a_broken_part_turns_the_verdict(
    claim: str, whole: Verdict, broken: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    assert verdict(claim) is whole
    broken(monkeypatch)
    assert verdict(claim) is V.CONTRADICTED


@pytest.mark.parametrize(
    ("long", "again", "expected"),
    [
        (16.0, 1.0, V.SUPPORTED),
        (4.0, 1.0, V.CONTRADICTED),  # linear
        (16.0, 1.1, V.INCONCLUSIVE),  # the same call took another time
    ],
)
def test_attention_is_quadratic_where_its_times_are(
    long: float, again: float, expected: Verdict, monkeypatch: Patch
) -> None:
    times = {"long": [long] * 30, "short": [1.0] * 30, "again": [again] * 30}
    monkeypatch.setattr(attention, "taking_turns", lambda calls, repeats: times)
    assert verdict("attn-quadratic") is expected


def test_calls_take_turns_after_the_warm_up() -> None:
    made: list[str] = []
    found = taking_turns({name: partial(made.append, name) for name in "ab"}, repeats=3)
    assert made == ["a", "b"] * (WARM_UP + 3)
    assert [len(times) for times in found.values()] == [3, 3]
