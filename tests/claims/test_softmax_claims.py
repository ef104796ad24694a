"""What softmax.py measures turns with the code: broken, it gives another verdict; some numbers are worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken import number, verdict
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.topics import softmax
from andrea_ablate.loss import LossSums
from andrea_ablate.stability import QKNorm

V = Verdict
Patch = pytest.MonkeyPatch


def test_numbers_by_hand() -> None:
    assert number("qknorm-bound", "gains of 3").value == pytest.approx(3 * 3 - 1, rel=1e-4)
    # Two logits 100 apart: the smaller weight is e^-100, and -p ln p of it is all of the entropy but e^-100 again.
    assert number("softcap-overflow", "entropy").value == pytest.approx(101 * math.exp(-100))
    # tanh rounds to 1 in fp64 from about 19 on: at 30 times that.
    assert 30 * 18 < number("softcap-bound", "fp64, cap 30: smallest").value < 30 * 20
    # torch's own operations have the slope as 1 - tanh^2, which rounds at 2^-24.
    slope = number("softcap-bound", "cap 30: slope at 300").value
    assert slope == pytest.approx(1 / math.cosh(10) ** 2, rel=0.05, abs=2**-24)


def capped_loss(patch: Patch) -> None:
    plain = softmax.lm_loss
    patch.setattr(softmax, "lm_loss", lambda *given, **more: plain(*given, **{**more, "softcap": 5.0}))


def z_in_the_loss(patch: Patch) -> None:
    def lm_loss(*given: Any, **more: Any) -> LossSums:
        found = plain(*given, **{"z_weight": 0.1, **more})
        return found._replace(nll=found.nll + found.penalty)

    plain = softmax.lm_loss
    patch.setattr(softmax, "lm_loss", lm_loss)


def unit_queries(patch: Patch) -> None:
    def attend(q: Tensor, k: Tensor, *given: Any, **more: Any) -> Tensor:
        return plain(q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), *given, **more)

    plain = softmax.attend
    patch.setattr(softmax, "attend", attend)


def no_qk_norm(patch: Patch) -> None:
    patch.setattr(QKNorm, "forward", lambda self, q, k: (q, k))


def no_cap(patch: Patch) -> None:
    patch.setattr(ops, "softcap", lambda x, cap: x)


def exponentials_as_they_are(patch: Patch) -> None:
    """A loss that does not take the largest logit off."""

    def lm_loss(x: Tensor, weight: Tensor, targets: Tensor, **given: Any) -> LossSums:
        logits = x @ weight.T
        nll = (logits.exp().sum(-1).log() - logits.gather(1, targets[:, None])[:, 0]).sum()
        return LossSums(nll, torch.zeros(()), torch.tensor(len(x)))

    patch.setattr(softmax, "lm_loss", lm_loss)


@pytest.mark.parametrize(
    ("claim", "whole", "broken"),
    [
        ("ce-shift", V.MISSTATED, z_in_the_loss),
        ("zloss-free", V.SUPPORTED, capped_loss),
        pytest.param("attn-saturation", V.SUPPORTED, unit_queries, marks=pytest.mark.slow),
        pytest.param("qknorm-bound", V.SUPPORTED, no_qk_norm, marks=pytest.mark.slow),
        ("softcap-bound", V.MISSTATED, no_cap),
        ("softcap-overflow", V.MISSTATED, exponentials_as_they_are),
    ],
)
def test_a_broken_part_turns_the_verdict(
    claim: str, whole: Verdict, broken: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    assert verdict(claim) is whole
    broken(monkeypatch)
    assert verdict(claim) is V.CONTRADICTED
