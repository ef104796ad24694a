"""Measurements of residual.yaml that train: what residual connections are for, and what a trained trunk holds."""

from __future__ import annotations

import math
import statistics

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import shares, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.inside import (
    between_layers,
    position_by_layer,
    profile,
    skip_losses,
    step_cosines,
    text,
)
from andrea_ablate.claims.probes.trained import Trained, bounds, fair, ids, trained, tuned, unigram

DEEP = ("model.n_layers=12",)
CUT = (*DEEP, "block=no_residual")
EIGHT = tuple(range(8))
ENCODINGS = ("learned", "sine", "rope", "none")


@measures("res-none-trains")
def trainable(claim: Claim) -> Measurement:
    """Twelve layers with residual connections and without, each at its own best learning rate."""
    whole, cut = tuned(DEEP), tuned(CUT)
    found = superior("loss with residuals - without", whole.losses, cut.losses, **claim.margin)
    stuck = unigram(cut.runs[0])
    return Measurement(
        worded=(fair(found, whole, cut),),
        reported=(
            told("learning rate with residuals", whole.lr),
            told("learning rate without", cut.lr),
            told("loss with residuals", statistics.fmean(whole.losses.values()), "nats"),
            told("loss without", statistics.fmean(cut.losses.values()), "nats"),
            told("loss of guessing by frequency", stuck, "nats"),
        ),
        seeds=tuple(whole.runs),
        run_ids=ids(whole, cut),
    )


@measures("block-refines")
def refines(claim: Claim) -> Measurement:
    """Leave out each middle block of a trained trunk, and of one without residual connections."""
    whole, cut = tuned(DEEP), tuned(CUT)

    def losses(run: Trained) -> list[float]:
        return skip_losses(run.model(), text(run))

    def middle(values: list[float]) -> float:
        return statistics.median(values[1:-1])

    by_block = {seed: losses(run) for seed, run in whole.runs.items()}
    cosine = whole.values(lambda run: middle(step_cosines(run.model(), text(run))))
    margin = bounds(claim)
    return Measurement(
        worded=(
            superior(
                "rise of the loss without a middle block (median), with residuals - without",
                {seed: middle(values) for seed, values in by_block.items()},
                cut.values(lambda run: middle(losses(run))),
                delta=margin["delta"],
                margin=margin["margin"],
            ),
            superior(
                f"cosine over a middle block (median) - {margin['cosine']:g}",
                cosine,
                dict.fromkeys(cosine, margin["cosine"]),
                margin=0.01,
                larger=True,
                unit="",
            ),
        ),
        reported=(
            told(
                "rise of the loss without the first block",
                statistics.fmean(values[0] for values in by_block.values()),
                "nats",
            ),
            told("without the last block", statistics.fmean(values[-1] for values in by_block.values()), "nats"),
            told(
                "cosine over a middle block, untrained",
                middle(step_cosines(whole.runs[0].untrained(), text(whole.runs[0]))),
            ),
        ),
        seeds=tuple(whole.runs),
        run_ids=ids(whole, cut),
    )


@measures("layer1-adds-position")
def where_position_comes(claim: Claim) -> Measurement:
    """How well a linear probe reads the position before the first block and after it."""
    found: dict[str, dict[int, list[float]]] = {}
    runs = {
        pos: {seed: trained((f"pos={pos}",), seed) for seed in EIGHT} for pos in ("learned", "sine", "rope", "none")
    }
    for pos, by_seed in runs.items():
        found[pos] = {seed: position_by_layer(run.model(), text(run)) for seed, run in by_seed.items()}

    def at(pos: str, layer: int) -> dict[int, float]:
        return {seed: values[layer] for seed, values in found[pos].items()}

    margin = claim.margin
    before = {pos: f"{pos}: R2 of the position before layer 1" for pos in runs}
    return Measurement(
        worded=(shares(before["learned"], at("learned", 0), bound=margin["r2"], above=False),),
        corrected=(
            *(shares(before[pos], at(pos, 0), bound=margin["absent"], above=False) for pos in ("rope", "none")),
            *(shares(f"{pos}: after layer 1", at(pos, 1), bound=margin["present"]) for pos in ("rope", "none")),
        ),
        reported=(
            shares(before["sine"], at("sine", 0), bound=margin["r2"], above=False),
            *(
                told(f"{pos}: R2 after layer {layer}", statistics.fmean(at(pos, layer).values()))
                for pos in runs
                for layer in range(1, len(found[pos][0]))
            ),
        ),
        seeds=EIGHT,
        run_ids=ids(*runs.values()),
    )


@measures("roles-from-training")
def roles(claim: Claim) -> Measurement:
    """How much linear probes differ between layers after training, and before the first step."""
    runs = {seed: trained(("pos=learned",), seed) for seed in EIGHT}
    after = {seed: profile(run.model(), text(run)) for seed, run in runs.items()}
    before = {seed: profile(run.untrained(), text(run)) for seed, run in runs.items()}

    def spread(profiles: dict[int, dict[str, list[float]]]) -> dict[int, float]:
        return {seed: math.log(between_layers(by_layer)) for seed, by_layer in profiles.items()}

    return Measurement(
        worded=(
            superior(
                "log of the variance between layers, trained - untrained",
                spread(after),
                spread(before),
                larger=True,
                unit="",
                **claim.margin,
            ),
        ),
        reported=tuple(
            told(f"{when}: R2 of the {name}, layer {layer} (seed 0)", value)
            for when, profiles in (("trained", after), ("untrained", before))
            for name, values in profiles[0].items()
            for layer, value in enumerate(values, start=1)
        ),
        seeds=EIGHT,
        run_ids=ids(runs),
    )
