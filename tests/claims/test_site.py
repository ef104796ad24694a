"""The pages hold every claim with its verdict, and advice says what the verdict says."""

from __future__ import annotations

import re

import pytest

from andrea_ablate.claims import intervals, site
from andrea_ablate.claims.claim import Claim, Finding, Measurement, Verdict
from andrea_ablate.claims.decide import exact
from andrea_ablate.claims.ledger import claim_of, ledger
from andrea_ablate.claims.report import verdict_of
from andrea_ablate.claims.results import Result, firmest

CLAIM = Claim("a", "S9.1, L2", "softmax", "identity", "It is four.", "m", "e", ("R-EXACT",), ("C0",))


def result(measurement: Measurement) -> Result:
    return Result("a", "C0", measurement.verdict, measurement, "hash", 1.0, "2026-01-01", "abc", {})


def test_a_claim_stands_on_the_pages_of_its_sections() -> None:
    assert site.sections_of(CLAIM) == ["S9", "L2"]
    assert site.sections_of(claim_of("attn-quadratic")) == ["S10"]
    assert all(section in site.SECTIONS for claim in ledger().values() for section in site.sections_of(claim))


def test_advice_is_made_of_the_verdict() -> None:
    four, five = exact("it", 4, equals=4), exact("it", 5, equals=4)
    other = exact("the other", 5, equals=5)
    head = "“It is four” ([`a`](s09.md#a)): "
    assert site.advice(CLAIM, None) == head + "no measurement yet."
    assert site.advice(CLAIM, result(Measurement((four,)))) == head + "it 4; exact, whatever is trained."
    contradicted = site.advice(CLAIM, result(Measurement((four, five))))
    assert contradicted == head + "it 5: CONTRADICTED (claimed 4); exact, whatever is trained."
    misstated = site.advice(CLAIM, result(Measurement((five,), (other,))))
    assert misstated == head + "in the corrected form the other 5; exact, whatever is trained."
    many = tuple(Finding(f"f{i}", 1.0, verdict=Verdict.SUPPORTED) for i in range(5))
    assert "f0 1; f1 1; f2 1 and 2 more;" in site.advice(CLAIM, result(Measurement(many)))


def test_the_decision_page_begins_with_how_far_its_verdicts_reach() -> None:
    exact_one, unmeasured = (CLAIM, result(Measurement((exact("it", 4, equals=4),)))), (CLAIM, None)
    head = site._choose([exact_one, exact_one, unmeasured]).split("## ")[0]
    assert "What the 3 claims say" in head
    assert f"- 2 reach so far: exact, whatever is trained; {site.LIMITS['C0']}." in head
    assert "- 1 are not measured here" in head and "at toy size" not in head
    assert site.LIMITS.keys() == site.REACH.keys()


def test_a_claim_names_the_experiments_that_bear_its_id() -> None:
    assert site.experiments()["ratio-small-hurts"] == ["ffn_basin", "ffn_ratio"]
    assert set(site.experiments()) <= set(ledger())
    page = "\n".join(site._claim(claim_of("mqa-loses"), None))
    assert "- *Experiment*: `python -m andrea_ablate experiments=kv_heads` (`experiments/kv_heads.yaml`)" in page


def test_intervals_are_drawn_to_scale() -> None:
    pair = (Finding("a <b>", 2.0, low=1.0, high=3.0), Finding("c", 5.0, low=4.0, high=5.0), Finding("no interval", 1.0))
    drawn = intervals.svg(pair)
    assert re.findall(r'x1="([\d.]+)" x2="([\d.]+)"', drawn) == [("8.0", "280.0"), ("416.0", "552.0")]  # 1..5 on 8..552
    assert re.findall(r'cx="([\d.]+)"', drawn) == ["144.0", "552.0"]
    assert "a &lt;b&gt;" in drawn and "no interval" not in drawn and "(log)" not in drawn
    wide = intervals.svg((Finding("a", 10.0, low=1.0, high=100.0),))
    assert 'cx="280.0"' in wide and "100 (log)" in wide
    assert intervals.svg(pair[2:]) == ""


@pytest.mark.slow  # seconds: it hashes nothing, but imports and reads all that is measured
def test_every_claim_is_there_with_its_verdict_and_every_link_leads_somewhere() -> None:
    pages = site.pages()
    for claim in ledger().values():
        for section in site.sections_of(claim):
            page = pages[f"lecture/{site._file(section)}"]
            assert f"{{ #{claim.id} }}\n\n**{verdict_of(claim, firmest(claim))}**" in page
        assert f"#{claim.id})" in pages["lecture/choose.md"]
    for name, text in pages.items():
        for target, anchor in re.findall(r"\]\(([\w/]+\.md)#?([\w-]*)\)", text):
            linked = pages[target if name == "index.md" else f"lecture/{target}"]
            assert not anchor or f"#{anchor} " in linked


@pytest.mark.slow  # as above
def test_the_code_that_was_measured_is_named() -> None:
    lines = site.code_lines(claim_of("sinusoid-cross-terms"))
    assert any("src/andrea_ablate/positions/absolute.py" in line and "`SinePosition`" in line for line in lines)
    assert any("`watching`" in line and "attention/core.py" in line for line in lines)
    assert not any("claims/" in line for line in lines)
    assert any("`LatentAttention`" in line for line in site.code_lines(claim_of("kv-formula")))  # named as attn=mla
