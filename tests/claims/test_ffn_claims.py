"""What an FFN computes and costs, by hand, and probes that see what is broken."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.ledger import claim_of, measures_of
from andrea_ablate.claims.topics import ffn
from andrea_ablate.ffn import DenseFFN


def verdict(claim_id: str) -> Verdict:
    return measures_of(claim_of(claim_id))["C0"](claim_of(claim_id)).verdict


def test_costs_by_hand() -> None:
    assert ffn.ffn_cost("ffn=gelu4x") == (2 * 768 * 3072, 4 * 768 * 3072)
    assert ffn.ffn_cost("ffn=swiglu") == (3 * 768 * 2048, 6 * 768 * 2048)
    assert ffn.ffn_cost("ffn=swiglu", "model.ffn.ratio=4") == (7_077_888, 14_155_776)


def test_jumps_by_hand() -> None:
    assert ffn.jump(torch.abs, 1) == 2
    assert ffn.jump(lambda x: x * x.abs(), 1) == 0  # its derivative, 2 |x|, is even
    assert ffn.jump(lambda x: x * x.abs(), 2) == pytest.approx(4)


def test_the_error_of_a_phi_that_is_off_by_a_hundredth() -> None:
    def off(x: Tensor) -> Tensor:
        return x * (0.5 * torch.erfc(-x / math.sqrt(2)) + 0.01)

    assert ffn.phi_error(F.gelu) < 1e-15
    assert ffn.phi_error(off) == pytest.approx(0.01)


@pytest.mark.parametrize("claim_id", ["gelu-negative-leak", "relu-kink"])
def test_relu_in_place_of_gelu_is_seen(claim_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    activation = ffn.activation
    assert verdict(claim_id) is Verdict.SUPPORTED
    monkeypatch.setattr(ffn, "activation", lambda kind: activation("relu" if kind == "gelu" else kind))
    assert verdict(claim_id) is Verdict.CONTRADICTED


@pytest.mark.slow  # ANDREA's own width, in float64
def test_a_residual_inside_the_mlp_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DenseFFN.forward
    assert verdict("mlp-two-linear") is Verdict.SUPPORTED
    monkeypatch.setattr(DenseFFN, "forward", lambda self, x: x + forward(self, x))
    assert verdict("mlp-two-linear") is Verdict.CONTRADICTED


def test_gating_at_8_3_costs_the_same() -> None:
    assert verdict("glu-1.5x") is verdict("glu-8-3-match") is Verdict.SUPPORTED
    assert verdict("swiglu-cheaper") is Verdict.MISSTATED
