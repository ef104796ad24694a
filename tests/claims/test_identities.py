"""An identity's probe sees what it is to see: its control fails, and a broken model flips the verdict."""

from __future__ import annotations

import pytest
from torch import Tensor

from andrea_ablate import blocks
from andrea_ablate.claims.claim import Claim, Verdict
from andrea_ablate.claims.ledger import claim_of, ledger, measures_of

IDENTITIES = [claim for claim in ledger().values() if claim.kind == "identity" and measures_of(claim)]


def verdict(claim_id: str) -> Verdict:
    claim = claim_of(claim_id)
    return measures_of(claim)[claim.scale[0]](claim).verdict


@pytest.mark.slow  # every identity once
@pytest.mark.parametrize("claim", IDENTITIES, ids=lambda claim: claim.id)
def test_controls_fail(claim: Claim) -> None:
    made = measures_of(claim)[claim.scale[0]](claim)
    assert made.controls
    assert all(control.verdict is Verdict.CONTRADICTED for control in made.controls), made.controls


@pytest.mark.parametrize("claim", ["res-identity-jac", pytest.param("res-delta-sum", marks=pytest.mark.slow)])
def test_residual_removed(monkeypatch: pytest.MonkeyPatch, claim: str) -> None:
    def wire(x: Tensor, f: blocks.Branch, n: blocks.Norms) -> Tensor:
        return f(n["before"](x))

    assert verdict(claim) is Verdict.SUPPORTED
    monkeypatch.setattr(blocks.PreNorm, "wire", staticmethod(wire))
    assert verdict(claim) is Verdict.CONTRADICTED
