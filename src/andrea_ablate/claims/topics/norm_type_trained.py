"""Measurements of norm_type.yaml that train: biases."""

from __future__ import annotations

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import equivalent, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.trained import bounds, fair, ids, tuned


@measures("nobias-quality")
def without_biases(claim: Claim) -> Measurement:
    """The loss without the biases of the linear maps, and without those of the norms, over the loss with them."""
    base, linear, plain = tuned(), tuned(("model.linear_bias=true",)), tuned(("norm_type=layernorm_nobias",))
    margin = bounds(claim)["margin"]
    found = (
        (equivalent("no linear bias - with", base.losses, linear.losses, margin=margin, worse_only=True), linear),
        (equivalent("no norm bias - with", plain.losses, base.losses, margin=margin, worse_only=True), plain),
    )
    return Measurement(
        worded=tuple(fair(finding, base, other) for finding, other in found),
        reported=tuple(
            told(f"{' '.join(panel.design) or 'baseline'}: learning rate", panel.lr) for panel in (base, linear, plain)
        ),
        seeds=tuple(base.runs),
        run_ids=ids(base, linear, plain),
    )
