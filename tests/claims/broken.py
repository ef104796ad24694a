"""The verdict of a claim as the code stands now, for tests that break the code first."""

from __future__ import annotations

from andrea_ablate.claims.claim import Finding, Verdict
from andrea_ablate.claims.ledger import claim_of, measures_of


def verdict(claim_id: str) -> Verdict:
    """At the claim's smallest scale."""
    claim = claim_of(claim_id)
    return measures_of(claim)[claim.scale[0]](claim).verdict


def number(claim_id: str, name: str) -> Finding:
    """The one finding whose name begins so."""
    claim = claim_of(claim_id)
    made = measures_of(claim)[claim.scale[0]](claim)
    (found,) = [f for f in (*made.worded, *made.corrected, *made.controls, *made.reported) if f.name.startswith(name)]
    return found
