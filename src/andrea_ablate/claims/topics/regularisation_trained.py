"""Measurements of regularisation.yaml that train: repeated data and dropout, on a corpus of chosen size."""

from __future__ import annotations

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import equivalent, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.inside import loss, text
from andrea_ablate.claims.probes.trained import SEEDS, Trained, baseline, bounds, fair, ids, trained, tuned

HELD_OUT = 65_536  # so many that the gap's own noise is a quarter of its margin


def passes(epochs: int, dropout: float = 0.0) -> tuple[str, ...]:
    """The same budget of tokens over a Markov chain's text that it reads so many times."""
    text = baseline().trainer.tokens // epochs
    return (
        "data=synthetic",
        f"data.n_tokens={text + HELD_OUT}",
        f"data.val_fraction={HELD_OUT / (text + HELD_OUT)!r}",
        f"model.dropout={dropout}",
    )


def gap(run: Trained) -> float:
    """Validation loss less the loss on the text that it was trained on."""
    model = run.model()
    held_out, seen = (text(run, HELD_OUT, part) for part in ("val", "train"))
    return loss(model, held_out) - loss(model, seen)


@measures("one-epoch-no-gap")
def gaps(claim: Claim) -> Measurement:
    runs = {epochs: {seed: trained(passes(epochs), seed) for seed in SEEDS} for epochs in (1, 2, 4, 8)}
    found = {epochs: {seed: gap(run) for seed, run in row.items()} for epochs, row in runs.items()}
    none = dict.fromkeys(SEEDS, 0.0)
    return Measurement(
        worded=(equivalent("validation - training loss after one pass", found[1], none, **bounds(claim)),),
        reported=tuple(
            superior(f"gap after 1 pass - after {epochs}", found[1], found[epochs], **bounds(claim))
            for epochs in (2, 4, 8)
        ),
        seeds=SEEDS,
        run_ids=ids(*runs.values()),
    )


@measures("dropout-hurts")
def dropout(claim: Claim) -> Measurement:
    """What dropout does to the validation loss after one pass, and less what it does after eight."""
    plain, dropped = ({epochs: tuned(passes(epochs, p)) for epochs in (1, 8)} for p in (0.0, 0.1))
    cost = {
        epochs: {seed: dropped[epochs].losses[seed] - plain[epochs].losses[seed] for seed in plain[1].runs}
        for epochs in (1, 8)
    }
    panels = (*plain.values(), *dropped.values())
    return Measurement(
        worded=(
            fair(
                superior("one pass: loss without dropout - with", plain[1].losses, dropped[1].losses, **bounds(claim)),
                plain[1],
                dropped[1],
            ),
            fair(superior("cost of dropout, 8 passes - 1 pass", cost[8], cost[1], **bounds(claim)), *panels),
        ),
        reported=tuple(
            told(f"dropout {p:g}, {epochs} passes: learning rate", panel.lr)
            for p, by_epochs in ((0.0, plain), (0.1, dropped))
            for epochs, panel in by_epochs.items()
        ),
        seeds=SEEDS,
        run_ids=ids(*panels),
    )
