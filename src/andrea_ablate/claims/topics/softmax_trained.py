"""Measurements of softmax.yaml that train: z-loss and QK-norm."""

from __future__ import annotations

import statistics

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import steadier, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.inside import log_z, text
from andrea_ablate.claims.probes.trained import SEEDS, Trained, excess, grid, highest_stable, ids, lrs, trained, wide


@measures("zloss-controls-z")
def controls_z(claim: Claim) -> Measurement:
    """``|log Z|`` on validation text after training, without z-loss and with it; tied and untied."""

    def z(run: Trained) -> float:
        return log_z(run.model(), text(run))

    def runs(*design: str) -> dict[int, Trained]:
        return {seed: trained(design, seed) for seed in SEEDS}

    tie = "model.tie_embeddings=true"
    arms = {
        "untied": (runs(), runs("stability=[z_loss]")),
        "tied": (runs(tie), runs(tie, "stability=[z_loss]")),
    }
    strong = runs("stability=[z_loss]", "model.stability.z_loss.alpha=1e-3")
    found = {name: tuple({s: z(r) for s, r in arm.items()} for arm in pair) for name, pair in arms.items()}
    return Measurement(
        worded=tuple(
            superior(f"{name}: |log Z|, z-loss 1e-4 - without", on, off, unit="", **claim.margin)
            for name, (off, on) in found.items()
        ),
        reported=(
            superior(
                "untied: |log Z|, z-loss 1e-3 - without",
                {seed: z(run) for seed, run in strong.items()},
                found["untied"][0],
                unit="",
                **claim.margin,
            ),
            *(
                told(f"{name}: |log Z| {how}", statistics.fmean(values.values()))
                for name, pair in found.items()
                for how, values in zip(("without z-loss", "with z-loss 1e-4"), pair, strict=True)
            ),
            told("|log Z| before the first step", log_z(arms["untied"][0][0].untrained(), text(arms["untied"][0][0]))),
        ),
        seeds=SEEDS,
        run_ids=ids(*(arm for pair in arms.values() for arm in pair), strong),
    )


@measures("qknorm-stability")
def wider_range(claim: Claim) -> Measurement:
    plain, normed = grid((), wide()), grid(("stability=[qk_norm]",), wide())
    return Measurement(
        worded=(
            steadier(
                "sensitivity to the learning rate, without QK-norm / with it",
                excess(normed),
                excess(plain),
                **claim.margin,
            ),
        ),
        reported=(
            told("without: largest learning rate that trains", highest_stable(plain)),
            told("with QK-norm: largest learning rate that trains", highest_stable(normed)),
            *(
                told(f"{name}: spikes at {lr:g}", len(row[0].record["spikes"]))
                for name, arm in (("without", plain), ("with QK-norm", normed))
                for lr, row in sorted(arm.items())
            ),
        ),
        seeds=tuple(run.cfg.seed for run in plain[lrs()[0]]),
        run_ids=ids(plain, normed),
    )
