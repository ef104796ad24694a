"""The errata: all 66 are there, and what is said to measure them exists."""

from __future__ import annotations

from collections import Counter

import pytest

from andrea_ablate.claims import errata as module
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.errata import KINDS, Erratum, errata, markdown
from andrea_ablate.claims.ledger import ledger


def test_all_are_there() -> None:
    assert [erratum.number for erratum in errata()] == list(range(1, 67))
    assert Counter(erratum.kind for erratum in errata()) == {
        "wrong": 17,
        "inconsistent": 5,
        "imprecise": 41,
        "unverifiable": 3,
    }


@pytest.mark.parametrize("erratum", errata(), ids=lambda erratum: f"E{erratum.number}")
def test_each_is_whole(erratum: Erratum) -> None:
    assert erratum.kind in KINDS
    assert erratum.where and erratum.says and erratum.correction and erratum.source
    assert {*erratum.claims} <= {*ledger()}
    assert "|" not in "".join((erratum.says, erratum.correction, erratum.source))  # a cell of a table


def test_the_page_has_a_row_for_each_with_its_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "verdict_of", lambda claim, result: Verdict.MISSTATED)
    rows = [line for line in markdown().splitlines() if line.startswith("| E")]
    assert len(rows) == 66
    assert "`swa-reach` MISSTATED" in rows[-1]
