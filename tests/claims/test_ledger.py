"""The ledger is whole, and what it says can be found."""

from __future__ import annotations

from collections import Counter

import pytest

from andrea_ablate.claims.claim import Cell, Claim, Finding, Measurement, Verdict
from andrea_ablate.claims.ledger import MEASURES, claim_of, ledger, measures_of
from andrea_ablate.registry import ConfigError

V = Verdict


def test_all_rows_are_there() -> None:
    kinds = Counter(claim.kind for claim in ledger().values())
    assert kinds == {"arithmetic": 20, "identity": 38, "init": 7, "systems": 14, "training": 45, "convention": 26}
    first = Counter(claim.scale[0] for claim in ledger().values())
    assert sum(first.values()) == 150
    assert all(claim.statement and claim.measurement and claim.expected for claim in ledger().values())


def test_every_measurement_is_of_a_claim_at_one_of_its_scales() -> None:
    written = {(claim.id, at) for claim in ledger().values() for at in measures_of(claim)}
    for name in MEASURES.names():
        claim_id, _, at = name.partition("@")
        assert (claim_id, at or claim_of(claim_id).scale[0]) in written


def test_sections_are_told_in_words() -> None:
    assert claim_of("res-delta-sum").where == "the lesson, sections L1 and L7"
    assert claim_of("res-identity-jac").where == "the lesson, section L1; the lecture summary, section S2.2"


def test_an_unknown_claim_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'res-delta-sum'"):
        claim_of("res-delta-sun")


def finding(verdict: Verdict | None) -> Finding:
    return Finding("x", 1.0, verdict=verdict)


@pytest.mark.parametrize(
    ("worded", "corrected", "controls", "verdict"),
    [
        ([V.SUPPORTED, V.SUPPORTED], [], [], V.SUPPORTED),
        ([V.SUPPORTED, V.CONTRADICTED], [], [], V.CONTRADICTED),
        ([V.SUPPORTED, V.INCONCLUSIVE], [], [], V.INCONCLUSIVE),
        ([V.CONTRADICTED, V.INCONCLUSIVE], [], [], V.CONTRADICTED),
        ([V.SUPPORTED, V.NO_EFFECT], [], [], V.NO_EFFECT),
        ([V.SUPPORTED, V.UNVERIFIABLE], [], [], V.UNVERIFIABLE),
        ([V.CONTRADICTED], [V.SUPPORTED], [], V.MISSTATED),
        ([V.CONTRADICTED], [V.SUPPORTED, V.INCONCLUSIVE], [], V.CONTRADICTED),
        ([V.SUPPORTED], [V.SUPPORTED], [], V.SUPPORTED),
        ([V.SUPPORTED], [], [V.CONTRADICTED], V.SUPPORTED),
        ([V.SUPPORTED], [], [V.SUPPORTED], V.INCONCLUSIVE),  # the control passes: the probe sees nothing
        ([V.CONTRADICTED], [], [V.CONTRADICTED, V.INCONCLUSIVE], V.INCONCLUSIVE),
        ([], [], [], V.INCONCLUSIVE),
    ],
)
def test_verdict_of_a_measurement(
    worded: list[Verdict], corrected: list[Verdict], controls: list[Verdict], verdict: Verdict
) -> None:
    made = Measurement(*(tuple(map(finding, form)) for form in (worded, corrected, controls)))
    assert made.verdict is verdict


def test_scales_at_hand() -> None:
    claim = Claim("a", "L1", "residual", "systems", "", "", "", ("R-SYS",), ("C1", "G1"))
    assert claim.at_hand("cpu") == ("C1",)
    assert claim.at_hand("gpu") == ("C1", "G1")
    assert Cell("m", "f", 1.0).form == "worded"
