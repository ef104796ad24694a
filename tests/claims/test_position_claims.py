"""What position.py measures turns with the code: broken, it gives another verdict; some numbers are worked by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken import number, verdict
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.attention import MultiHeadAttention, multihead
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.probes.scores import diagonal_change, gap, values_turned
from andrea_ablate.positions import LearnedPosition, RotaryPosition, SinePosition, scaling

V = Verdict
Patch = pytest.MonkeyPatch


def test_gap_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0], [10.0, -torch.inf]]), torch.tensor([[1.0, 4.0], [9.0, -torch.inf]])
    assert gap(a, b) == 2 / 4
    assert gap(a[:1], b[:1]) == 2 / 4
    assert gap(a[1:], b[1:]) == pytest.approx(1 / 9)
    assert gap(b, b) == 0


def test_diagonal_change_by_hand() -> None:
    distance_LM = torch.arange(4)[:, None] - torch.arange(4)
    assert diagonal_change(distance_LM[None, None]) == 0
    assert (
        diagonal_change((distance_LM + torch.arange(4))[None, None]) == 1 / 2
    )  # a step of 1, where the largest of the first three is 2


def test_numbers_by_hand() -> None:
    assert number("ntk-base", "base").value == pytest.approx(10000 * 8 ** (128 / 126))
    assert number("rope-spectrum", "wavelength, longest").value == pytest.approx(2 * math.pi * 10000 ** (62 / 64))
    assert number("rope-spectrum", "pairs").value == 18  # 2 pi 10000^(i/32) < 1024 up to i = 17
    assert number("pi-range", "PI: farthest").value == pytest.approx(1023 / 4)
    assert number("yarn-parts", "pairs kept").value == 11  # 4096 10000^(-i/32) / 2 pi > 32 up to i = 10


def not_turned(patch: Patch) -> None:
    patch.setattr(RotaryPosition, "forward", lambda self, q, k, kind="local", start=0: (q, k))


def turned_twice(patch: Patch) -> None:
    """Queries alone by twice the angle."""

    def qk_rope(q: Tensor, k: Tensor, *tables: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        return plain(plain(q, k, *tables, **given)[0], k, *tables, **given)[0], plain(q, k, *tables, **given)[1]

    plain = ops.qk_rope
    patch.setattr(ops, "qk_rope", qk_rope)


def lengthened(patch: Patch) -> None:
    plain = ops.qk_rope
    patch.setattr(ops, "qk_rope", lambda *given, **more: tuple(1.001 * x for x in plain(*given, **more)))


def values_too(patch: Patch) -> None:
    def forward(self: MultiHeadAttention, x: Tensor, rotate: Any = None, **given: Any) -> Tensor:
        if rotate is None:
            return plain(self, x, rotate, **given)
        with values_turned(rotate):
            return plain(self, x, rotate, **given)

    plain = MultiHeadAttention.forward
    patch.setattr(MultiHeadAttention, "forward", forward)


def no_mask(patch: Patch) -> None:
    plain = multihead.attend
    patch.setattr(multihead, "attend", lambda *given, **more: plain(*given, **{**more, "causal": False}))


def rows_again(patch: Patch) -> None:
    """A table that starts anew at its end."""

    def forward(self: LearnedPosition, x: Tensor, start: int = 0) -> Tensor:
        return x + self.vectors[torch.arange(start, start + x.shape[1]) % len(self.vectors)]

    patch.setattr(LearnedPosition, "forward", forward)


def nothing_added(patch: Patch) -> None:
    patch.setattr(SinePosition, "forward", lambda self, x, start=0: x)


def another_theta(patch: Patch) -> None:
    plain = scaling._plain
    patch.setattr(scaling, "_plain", lambda theta, dim: plain(50 * theta, dim))


def not_squeezed(patch: Patch) -> None:
    patch.setattr(scaling.LinearScaling, "frequencies", scaling.NoScaling.frequencies)


def base_times_factor(patch: Patch) -> None:
    patch.setattr(scaling, "_stretched", lambda theta, factor, dim: theta * factor)


def no_temperature(patch: Patch) -> None:
    def changed(self: scaling.YarnScaling, **given: Any) -> None:
        plain(self, **given)
        self.magnitude = 1.0

    plain = scaling.YarnScaling.__init__
    changed.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    patch.setattr(scaling.YarnScaling, "__init__", changed)


@pytest.mark.parametrize(
    ("claim", "whole", "broken"),
    [
        pytest.param("ape-no-params", V.SUPPORTED, rows_again, marks=pytest.mark.slow),
        ("sinusoid-cross-terms", V.SUPPORTED, nothing_added),
        pytest.param("rope-relative", V.SUPPORTED, turned_twice, marks=pytest.mark.slow),
        ("rope-norm", V.SUPPORTED, lengthened),
        ("rope-qk-only", V.SUPPORTED, values_too),
        ("rope-spectrum", V.SUPPORTED, another_theta),
        pytest.param("rope-fresh", V.SUPPORTED, not_turned, marks=pytest.mark.slow),
        ("pi-range", V.SUPPORTED, not_squeezed),
        ("ntk-base", V.MISSTATED, base_times_factor),
        ("yarn-parts", V.SUPPORTED, no_temperature),
        pytest.param("nope-mask-leak", V.SUPPORTED, no_mask, marks=pytest.mark.slow),
    ],
)
def test_a_broken_part_turns_the_verdict(
    claim: str, whole: Verdict, broken: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    assert verdict(claim) is whole
    broken(monkeypatch)
    assert verdict(claim) is V.CONTRADICTED
