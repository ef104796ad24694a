"""Measurements of position.yaml that train: position encodings within the trained length and past it."""

from __future__ import annotations

import statistics

from andrea_ablate.claims.claim import Claim, Finding, Measurement
from andrea_ablate.claims.decide import equivalent, ratio, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.inside import position_by_layer, text
from andrea_ablate.claims.probes.trained import Panel, Trained, baseline, bounds, fair, ids, trained, tuned

EIGHT = tuple(range(8))


def _panel(pos: str, *settings: str) -> Panel:
    return tuned(settings if pos == "rope" else (f"pos={pos}", *settings))


@measures("ape-extrapolates-badly")
def past_the_trained_length(claim: Claim) -> Measurement:
    """The loss at two to four times the trained length over that in the second half of it."""
    length = baseline().data.seq_len
    inside, outside = (f"val_{4 * length}/loss_from_{first}" for first in (length // 2, 2 * length))
    longer = (f"model.max_seq_len={4 * length}", f"trainer.val_lengths=[{4 * length}]")
    panels = {pos: _panel(pos, *longer) for pos in ("learned", "sine", "rope", "alibi", "none")}

    def at(band: str, panel: Panel) -> dict[int, float]:
        return panel.values(lambda run: float(run.record[band]))

    def worse_past(pos: str) -> Finding:
        within, past = at(inside, panels[pos]), at(outside, panels[pos])
        return fair(superior(f"{pos}: loss within the length - past it", within, past, **bounds(claim)), panels[pos])

    return Measurement(
        worded=(worse_past("learned"), worse_past("sine")),
        reported=tuple(worse_past(pos) for pos in ("rope", "alibi", "none")),
        seeds=tuple(panels["rope"].runs),
        run_ids=ids(*panels.values()),
    )


@measures("nope-viable")
def without_encoding(claim: Claim) -> Measurement:
    """The loss without a position encoding over that with one, within the trained length."""
    at_length = "trainer.val_lengths=[]"  # a learned table has no position past it
    none, others = _panel("none", at_length), {pos: _panel(pos, at_length) for pos in ("rope", "learned")}
    return Measurement(
        worded=tuple(
            fair(
                equivalent(
                    f"loss without encoding - {pos}", none.losses, panel.losses, worse_only=True, **claim.margin
                ),
                none,
                panel,
            )
            for pos, panel in others.items()
        ),
        reported=tuple(
            told(f"{pos}: loss", statistics.fmean(panel.losses.values()), "nats")
            for pos, panel in (("none", none), *others.items())
        ),
        seeds=tuple(none.runs),
        run_ids=ids(none, *others.values()),
    )


@measures("sin-dilutes")
def dilution(claim: Claim) -> Measurement:
    """How well a linear probe reads the position after the last block, over before the first one: sinusoids."""
    runs = {seed: trained(("pos=sine",), seed) for seed in EIGHT}

    def read(run: Trained) -> list[float]:
        return position_by_layer(run.model(), text(run))

    after = {seed: read(run) for seed, run in runs.items()}
    before = {seed: position_by_layer(run.untrained(), text(run)) for seed, run in runs.items()}

    def ends(by_seed: dict[int, list[float]], name: str) -> Finding:
        last, first = ({seed: values[at] for seed, values in by_seed.items()} for at in (-1, 0))
        return ratio(f"R2 of the position, last / first layer, {name}", last, first, above=False, **claim.margin)

    return Measurement(
        worded=(ends(after, "trained"),),
        reported=(
            ends(before, "untrained"),
            *(told(f"trained: R2 at layer {layer} (seed 0)", value) for layer, value in enumerate(after[0])),
        ),
        seeds=EIGHT,
        run_ids=ids(runs),
    )
