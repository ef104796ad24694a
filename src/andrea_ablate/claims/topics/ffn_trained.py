"""Measurements of ffn.yaml that train: the width of the feed-forward part."""

from __future__ import annotations

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import equivalent, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.trained import baseline, bounds, fair, ids, tuned


@measures("ratio-small-hurts")
def narrow(claim: Claim) -> Measurement:
    """Ratios 1 and 2 against 4: at the same depth, and at the same parameters with the depth that they leave for."""
    four = tuned()
    less = {ratio: tuned((f"model.ffn.ratio={ratio}",)) for ratio in (1, 2)}
    layers = baseline().model.n_layers
    deeper = tuned(("model.ffn.ratio=1", f"model.n_layers={2 * layers}"))  # L (4 + 8) = 2 L (4 + 2) d_model^2
    margin = bounds(claim)
    return Measurement(
        worded=tuple(
            fair(superior(f"loss at ratio 4 - ratio {ratio}", four.losses, panel.losses, **margin), four, panel)
            for ratio, panel in less.items()
        ),
        reported=(
            fair(
                equivalent(
                    f"ratio 1 with {2 * layers} layers - ratio 4 with {layers}",
                    deeper.losses,
                    four.losses,
                    margin=margin["margin"],
                ),
                deeper,
                four,
            ),
            *(
                told(f"{' '.join(panel.design) or 'ratio 4'}: parameters", panel.runs[0].record["params"])
                for panel in (four, *less.values(), deeper)
            ),
        ),
        seeds=tuple(four.runs),
        run_ids=ids(four, *less.values(), deeper),
    )
