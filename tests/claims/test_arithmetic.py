"""Counts of whole models, worked by hand, and probes that see what is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from andrea_ablate.accounting import account
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.facts import facts
from andrea_ablate.claims.ledger import claim_of
from andrea_ablate.claims.probes.counts import LENGTH, bare, designs, matmul_flops, parameters, variants
from andrea_ablate.claims.topics import arithmetic
from andrea_ablate.model import TransformerLM

TRUNK, TABLE, POSITIONS = 12 * 12 * 768**2, 8449 * 768, 1024 * 768


def test_the_audit_by_hand() -> None:
    counted = {design.parts: design.params for design in designs("andrea_120m")}
    assert len(counted) == 2 * 5 * 3 * 2
    plain = ("no biases", "norms without parameters")
    assert counted["untied", *plain, "position table"] == TRUNK + 2 * TABLE + POSITIONS == 98_698_752
    assert counted["tied", *plain, "position table"] == 92_209_920
    assert counted["tied", *plain, "no position table"] == TRUNK + TABLE
    full = ("all biases", "norms with gain and bias", "position table")
    assert counted["untied", *full] == 98_698_752 + 12 * (4 * 768 + 3072 + 768) + 25 * 2 * 768 == 98_820_096
    mlp = ("biases of the MLP", "norms with gain", "position table")
    assert counted["untied", *mlp] == 98_698_752 + 12 * (3072 + 768) + 25 * 768


def test_the_published_digits_leave_one_layout_and_seven_designs_of_it() -> None:
    made = arithmetic.total(claim_of("andrea-total-120m"))
    told = {finding.name: finding.value for finding in made.reported}
    # By hand: 25 norms of 768, biases of 12 MLPs 3072 and 768 wide, of 12 attentions with four projections of 768.
    gain, mlp, qkv, out = 25 * 768, 12 * (3072 + 768), 12 * 3 * 768, 12 * 768
    beyond = sorted([0, gain, 2 * gain, mlp, qkv, qkv + gain, qkv + out])
    assert max(beyond) + 98_698_752 < 98_750_000 <= 98_698_752 + min(mlp + gain, qkv + 2 * gain, qkv + out + gain)
    matches = {name: value for name, value in told.items() if name.startswith("rounds to it: ")}
    assert list(matches.values()) == [98_698_752 + extra for extra in beyond]
    assert all(": untied, " in name and ", position table, " in name for name in matches)
    assert told["designs that round to the published 98.7 million, of 60"] == 7
    assert told["output projection and positions of these"] == "untied, position table"
    # 98,744,832 and 98,745,600 are the closest two: 98.745 and 98.746.
    assert told["digits that would tell these apart"] == 5
    plain = "untied, no biases, norms without parameters, position table"
    assert told[f"nearest: {plain}"] == 98_698_752 and f"rounds to it: {plain}, -1,248 from it" in matches
    assert told["of these, with the fewest of the lesson's statements given up (2)"] == (
        f"untied, no biases, norms with gain and bias, position table ({98_698_752 + 2 * gain:,})"
    )
    (named,) = [value for name, value in told.items() if "microgpt" in name]
    assert named == f"{plain} (98,698,752)"
    assert made.verdict is Verdict.CONTRADICTED


def test_the_audit_by_hand_of_what_the_documents_leave_open() -> None:
    plain = bare("andrea_120m", tied=False)
    counted = {name: design.params for name, design in variants(plain).items()}
    assert list(counted.values()) == [
        98_698_752 + 8449,
        98_698_752 + 2 * (8512 - 8449) * 768,
        98_698_752 + 2 * (8576 - 8449) * 768,
        98_698_752,  # three matrices of 2048 as two of 3072
    ]
    told = {finding.name: finding.value for finding in arithmetic.total(claim_of("andrea-total-120m")).reported}
    padded = [value for name, value in told.items() if name.startswith("with the vocabulary padded")]
    assert padded == [0, 0]


@pytest.mark.parametrize(("published", "verdict"), [((12.8, 98.7), "CONTRADICTED"), ((11.9, 92.2), "SUPPORTED")])
def test_tied_weights_are_found_where_the_size_is_theirs(
    published: tuple[float, float], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = dict(facts())
    for model, value in zip(("andrea_12m", "andrea_120m"), published, strict=True):
        table[model, "params_millions"] = replace(table[model, "params_millions"], value=value)
    monkeypatch.setattr(arithmetic, "facts", lambda: table)
    assert arithmetic.tied_output(claim_of("andrea-tied")).verdict == verdict


def test_a_projection_cut_off_from_the_tied_matrix_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def head(self: TransformerLM) -> Tensor:
        return self.embedding.detach() if self.head is None else self.head

    claim = claim_of("tied-grad")
    assert arithmetic.tied_gradient(claim).verdict is Verdict.SUPPORTED
    monkeypatch.setattr(TransformerLM, "_head", head)
    assert arithmetic.tied_gradient(claim).worded[0].verdict is Verdict.CONTRADICTED


def test_torch_counts_the_flops_of_the_account() -> None:
    model = bare("andrea_12m", tied=False).config
    forward, backward = matmul_flops(model, 16)
    assert forward == 16 * account(model, 16).flops_forward
    assert backward == 2 * forward


def test_parameters_by_part() -> None:
    model = bare("andrea_120m", tied=False).config
    assert parameters(model, "blocks.0.ffn.w_up") == 3072 * 768
    assert parameters(model, "embedding", "head") == 2 * TABLE
    assert parameters(model, "") == account(model, LENGTH).params
