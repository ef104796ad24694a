"""Serial and parallel blocks: norms counted by hand, and probes that see an FFN that reads what attention added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from andrea_ablate.blocks import ParallelBlock
from andrea_ablate.claims.claim import Verdict
from andrea_ablate.claims.ledger import claim_of, measures_of
from andrea_ablate.claims.topics import block


def verdict(claim_id: str) -> Verdict:
    return measures_of(claim_of(claim_id))["C0"](claim_of(claim_id)).verdict


def test_norms_by_hand() -> None:
    assert block.norms() == 12 * 2 + 1
    assert block.norms("norm=double") == 12 * 4 + 1
    assert block.norms("block=parallel", "norm_type=rmsnorm") == 12 + 1


def test_an_ffn_that_reads_what_attention_added_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: ParallelBlock, x_BLD: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        h_BLD = self.norm["before"](x_BLD)
        added_BLD = attend(self.attn, h_BLD)
        out_BLD: Tensor = x_BLD + added_BLD + self.ffn(h_BLD + added_BLD)
        return out_BLD

    for claim_id in ("parallel-blind-mlp", "parallel-fuse"):
        assert verdict(claim_id) is Verdict.SUPPORTED
    monkeypatch.setattr(ParallelBlock, "forward", forward)
    for claim_id in ("parallel-blind-mlp", "parallel-fuse"):
        assert verdict(claim_id) is Verdict.CONTRADICTED
