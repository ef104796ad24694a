"""Norm types and biases: operations counted by hand, and probes that see what is broken."""

from __future__ import annotations

import pytest
import torch

from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.ledger import claim_of, measures_of
from andrea_ablate.claims.probes.counts import arithmetic
from andrea_ablate.claims.topics import norm_type


def verdict(claim_id: str) -> Verdict:
    return measures_of(claim_of(claim_id))["C0"](claim_of(claim_id)).verdict


def test_operations_by_hand() -> None:
    """A product and a sum per number, and the product once more in the backward pass; a sum reads what it adds."""
    x = torch.ones(3, 5)
    assert arithmetic(lambda x: x * 2 + 1, x) == (30, 15)
    assert arithmetic(lambda x: x.sum(-1), x)[0] == 15
    # mean, difference, square, mean, two factors and the shift: 7 per number, and two per row.
    forward, _ = arithmetic(norm_type.layer_norm, x, torch.ones(5), torch.ones(5))
    assert forward == 7 * 15 + 2 * 3
    assert arithmetic(norm_type.rms_norm, x, torch.ones(5))[0] == 4 * 15 + 2 * 3


def test_shares_by_hand() -> None:
    biases = {f.name: f.value for f in norm_type.bias_parameters(claim_of("bias-param-share")).reported}
    assert biases["all biases: parameters"] == 12 * (4 * 768 + 3072 + 768) == 82_944
    norms = {f.name: f.value for f in norm_type.norm_parameters(claim_of("norm-param-share")).reported}
    assert norms["norms with gain and bias: parameters"] == 25 * 2 * 768 == 38_400


def test_writes_that_are_not_centred_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict("rms-eq-ln-centred") is Verdict.SUPPORTED
    monkeypatch.setattr(norm_type, "centre_writes", lambda model: None)
    assert verdict("rms-eq-ln-centred") is Verdict.CONTRADICTED


def test_rmsnorm_in_place_of_layernorm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = norm_type.norm
    assert verdict("norm-invariances") is Verdict.SUPPORTED
    monkeypatch.setattr(norm_type, "norm", lambda name, eps=1e-5: norm(name.replace("layernorm", "rmsnorm"), eps))
    assert verdict("norm-invariances") is Verdict.CONTRADICTED


def test_no_gain_stands_in_for_a_bias() -> None:
    assert verdict("bias-redundant-gamma") is Verdict.MISSTATED
