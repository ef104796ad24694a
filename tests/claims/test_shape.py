"""Heads, shape and vocabulary: numbers by hand, and probes that see what is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from andrea_ablate.attention import core
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.facts import facts
from andrea_ablate.claims.ledger import claim_of, measures_of
from andrea_ablate.claims.topics import shape
from andrea_ablate.data.corpora import StandardLibrary
from andrea_ablate.data.tokenizers import TrainedBPE


def verdict(claim_id: str) -> Verdict:
    claim = claim_of(claim_id)
    return measures_of(claim)[claim.scale[0]](claim).verdict


def test_rows_minus_columns_by_hand() -> None:
    assert shape.unsquare(20) == 4 * 20 - 64
    assert shape.unsquare(16, "attn=mqa", name="w_k") == 16 - 64


def test_scores_that_are_not_a_product_of_narrow_matrices_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = core._scores

    def shifted(*given: Any) -> Tensor:
        found = scores(*given)
        return found + torch.eye(found.shape[-1], dtype=found.dtype)

    assert shape.score_ranks(8) == (8, 8)
    monkeypatch.setattr(core, "_scores", shifted)
    assert shape.score_ranks(8)[1] > 8


def test_another_width_of_gpt3_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(facts())
    assert verdict("gpt3-shape") is Verdict.SUPPORTED
    table["gpt3_175b", "d_model"] = replace(table["gpt3_175b", "d_model"], value=12289.0)
    monkeypatch.setattr(shape, "facts", lambda: table)
    assert verdict("gpt3-shape") is Verdict.CONTRADICTED


@pytest.mark.slow  # ten vocabularies, each composed
def test_tied_weights_cost_half_of_the_claim() -> None:
    assert verdict("vocab-cost") is Verdict.MISSTATED


def test_a_vocabulary_that_shortens_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of a few words in another order each; the broken tokenizer answers with one id per byte."""
    rng = np.random.default_rng(0)
    words = [b"alpha ", b"beta ", b"gamma ", b"delta ", b"epsilon ", b"zeta "]
    texts = [b"".join(words[i] for i in rng.integers(0, 6, 30)) + b"%d" % n for n in range(600)]

    def bytewise(self: TrainedBPE, documents: Sequence[bytes]) -> np.ndarray[Any, Any]:
        return np.zeros(sum(map(len, documents)), dtype=np.uint16)

    monkeypatch.setattr(StandardLibrary, "documents", lambda self: texts)
    monkeypatch.setattr(shape, "LEARNT", (257, 262, 275))
    assert verdict("vocab-shorter") is Verdict.SUPPORTED
    monkeypatch.setattr(TrainedBPE, "encode", bytewise)
    assert verdict("vocab-shorter") is not Verdict.SUPPORTED
