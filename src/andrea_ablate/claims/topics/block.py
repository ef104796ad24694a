"""Measurements of block.yaml: attention and FFN one after the other or side by side."""

# Shapes: B batch, L length, D d_model
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import exact, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.models import built, config, zipf_tokens
from andrea_ablate.model import TransformerLM

ONE = ("model.d_model=48", "model.n_layers=1")


def norms(*overrides: str) -> int:
    """Norm modules of ANDREA-120M with these choices; nothing is given memory."""
    with torch.device("meta"):
        model = TransformerLM(config("size=andrea_120m", *overrides))
    kind = type(model.final_norm)
    return sum(isinstance(module, kind) for module in model.modules())


@measures("parallel-norm-count")
def norm_count(claim: Claim) -> Measurement:
    serial, parallel = norms("block=serial"), norms("block=parallel")
    layers = config("size=andrea_120m").n_layers
    return Measurement(
        worded=(
            exact("norms of the parallel model", parallel, equals=layers + 1),
            exact("norms saved", serial - parallel, equals=layers),
        ),
        reported=(
            told("norms of the serial model", serial),
            told("parallel with a norm for each branch, as GPT-NeoX-20B and Falcon-40B", norms("block=parallel2")),
        ),
    )


def watched(model: TransformerLM) -> dict[str, tuple[Tensor, Tensor]]:
    """What attention and FFN of the first block read and return, in one forward pass."""
    passed: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Any:
        return lambda module, args, out: passed.__setitem__(name, (args[0], out))

    block: Any = model.blocks[0]
    handles = [getattr(block, name).register_forward_hook(note(name)) for name in ("attn", "ffn")]
    try:
        model(zipf_tokens(model, seed=0))
    finally:
        for handle in handles:
            handle.remove()
    return passed


def fused_error(kind: str) -> float:
    """Queries, keys, values and the FFN's first product, each alone, against one product with all four matrices."""
    model = built(*ONE, f"block={kind}", dtype=torch.float64)
    with torch.no_grad():
        passed = watched(model)
        block: Any = model.blocks[0]
        attn, ffn = block.attn, block.ffn
        read_by_attn, read_by_ffn = passed["attn"][0], passed["ffn"][0]
        apart = [*(F.linear(read_by_attn, w) for w in (attn.w_q, attn.w_k, attn.w_v)), F.linear(read_by_ffn, ffn.w_up)]
        together = F.linear(read_by_attn, torch.cat((attn.w_q, attn.w_k, attn.w_v, ffn.w_up)))
    return float((together - torch.cat(apart, -1)).abs().max() / together.abs().max())


@measures("parallel-fuse")
def one_product(claim: Claim) -> Measurement:
    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=(within("parallel block: |fused - apart|", fused_error("parallel"), tolerance, "relative"),),
        controls=(within("serial block: |fused - apart|", fused_error("serial"), tolerance, "relative"),),
        seeds=(0,),
    )


def seen_by_ffn(block: str) -> float:
    """Largest gradient of the FFN's output with respect to the output matrix of the same block's attention."""
    model = built(*ONE, f"block={block}", dtype=torch.float64)
    out_BLD = watched(model)["ffn"][1]
    attn: Any = model.blocks[0].attn
    (gradient,) = torch.autograd.grad(out_BLD.square().sum(), attn.w_o, allow_unused=True)
    return 0.0 if gradient is None else float(gradient.abs().max())


@measures("parallel-blind-mlp")
def blind_ffn(claim: Claim) -> Measurement:
    return Measurement(
        worded=(exact("parallel block: gradient of the FFN with respect to W_o", seen_by_ffn("parallel"), equals=0),),
        controls=(exact("serial block", seen_by_ffn("serial"), equals=0),),
        seeds=(0,),
    )
