"""Measurement of attention.yaml that trains: windows in most layers, the whole context in a few."""

from __future__ import annotations

import statistics

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import equivalent, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.inside import recall, text
from andrea_ablate.claims.probes.trained import Panel, baseline, bounds, fair, ids, tuned


@measures("swa-few-global")
def few_global(claim: Claim) -> Measurement:
    """Windows whose reach through all layers is half the context; every 2nd, 4th or 6th layer sees all, or none."""
    length, layers = baseline().data.seq_len, baseline().model.n_layers
    window = length // (2 * layers)

    def windowed(local: int, whole: int) -> Panel:
        pattern = ",".join(["local"] * local + ["global"] * whole)
        return tuned((f"model.attn.window={window}", f"model.layer_pattern=[{pattern}]"))

    full, none = tuned(), windowed(1, 0)
    few = {f"{local}:1": windowed(local, 1) for local in (1, 3, 5) if local < layers}
    again = {
        name: panel.values(lambda run: recall(run.model(), text(run)))
        for name, panel in {"all global": full, "all local": none, **few}.items()
    }
    margin = bounds(claim)
    return Measurement(
        worded=(
            *(
                fair(
                    equivalent(
                        f"{name}: loss, few global - all global",
                        panel.losses,
                        full.losses,
                        margin=margin["margin"],
                        worse_only=True,
                    ),
                    panel,
                    full,
                )
                for name, panel in few.items()
            ),
            *(
                fair(
                    superior(
                        f"{name}: gain from a text seen before, few global - none",
                        again[name],
                        again["all local"],
                        larger=True,
                        **margin,
                    ),
                    panel,
                    none,
                )
                for name, panel in few.items()
            ),
        ),
        reported=(
            fair(
                equivalent("loss, all local - all global", none.losses, full.losses, margin=margin["margin"]),
                none,
                full,
            ),
            *(
                told(f"{name}: gain from a text seen before", statistics.fmean(gains.values()), "nats")
                for name, gains in again.items()
            ),
            told("window, tokens", window),
            told("reach of the windows, tokens", layers * (window - 1) + 1),
        ),
        seeds=tuple(full.runs),
        run_ids=ids(full, none, *few.values()),
    )
