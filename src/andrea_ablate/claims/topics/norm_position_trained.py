"""Measurements of norm_position.yaml that train: norms, warm-up and learning rates."""

from __future__ import annotations

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import equivalent, exact, steadier, superior, told
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.trained import (
    Panel,
    bounds,
    excess,
    fair,
    grid,
    highest_stable,
    ids,
    lrs,
    selected,
    tuned,
    wide,
)

COLD = "schedule.warmup_tokens=0"


@measures("nonorm-nan")
def without_norms(claim: Claim) -> Measurement:
    """Learning rates near the baseline's best at which a stack without norms trains."""
    best, base = selected()
    factor = claim.margin["factor"]
    near = [lr for lr in sorted({1e-3, *wide(), *base}) if best / factor <= lr <= best * factor]
    arms = {init: grid(("norm=none", f"init={init}"), near) for init in ("gpt2", "xavier")}
    pre = grid((), near)
    return Measurement(
        worded=tuple(
            exact(
                f"no norm, {init}: learning rates within {factor:g}x of {best:g} at which it trains",
                sum(all(run.trains for run in row) for row in arm.values()),
                equals=0,
            )
            for init, arm in arms.items()
        ),
        reported=tuple(
            told(f"{name}: loss in nats at {lr:g}", row[0].loss if row[0].finished else "diverged")
            for name, arm in (("pre-norm", pre), *((f"no norm, {init}", arm) for init, arm in arms.items()))
            for lr, row in sorted(arm.items())
        ),
        seeds=tuple(run.cfg.seed for run in pre[near[0]]),
        run_ids=ids(base, pre, *arms.values()),
    )


def _cost_of_no_warmup(norm: str) -> tuple[dict[int, float], Panel, Panel]:
    warm, cold = tuned(() if norm == "pre" else (f"norm={norm}",)), tuned((f"norm={norm}", COLD))
    return {seed: cold.losses[seed] - warm.losses[seed] for seed in warm.runs}, warm, cold


@measures("post-needs-warmup")
def post_needs_warmup(claim: Claim) -> Measurement:
    """What leaving the warm-up out costs post-norm, less what it costs pre-norm."""
    pre, pre_warm, pre_cold = _cost_of_no_warmup("pre")
    post, post_warm, post_cold = _cost_of_no_warmup("post")
    panels, margin = (pre_warm, pre_cold, post_warm, post_cold), bounds(claim)
    interaction = superior(
        "cost of no warm-up, pre-norm - post-norm", pre, post, delta=margin["delta"], margin=margin["margin"]
    )
    return Measurement(
        worded=(
            fair(interaction, *panels),
            steadier(
                "post-norm: sensitivity to the learning rate, no warm-up / warm-up",
                excess(post_warm.grid),
                excess(post_cold.grid),
                factor=margin["factor"],
            ),
        ),
        reported=tuple(
            told(f"{name}: mean loss at {panel.lr:g}", sum(panel.losses.values()) / len(panel.runs), "nats")
            for name, panel in zip(("pre", "pre, no warm-up", "post", "post, no warm-up"), panels, strict=True)
        ),
        seeds=tuple(pre_warm.runs),
        run_ids=ids(*panels),
    )


@measures("pre-no-warmup")
def pre_without_warmup(claim: Claim) -> Measurement:
    _, warm, cold = _cost_of_no_warmup("pre")
    found = equivalent("pre-norm: loss without warm-up - with it", cold.losses, warm.losses, **claim.margin)
    return Measurement(
        worded=(fair(found, warm, cold),),
        reported=(told("learning rate with warm-up", warm.lr), told("without", cold.lr)),
        seeds=tuple(warm.runs),
        run_ids=ids(warm, cold),
    )


@measures("pre-larger-lr")
def larger_learning_rates(claim: Claim) -> Measurement:
    pre, post = grid((), wide()), grid(("norm=post",), wide())
    return Measurement(
        worded=(
            steadier(
                "sensitivity to the learning rate, post-norm / pre-norm", excess(pre), excess(post), **claim.margin
            ),
        ),
        reported=(
            told("pre-norm: largest learning rate that trains", highest_stable(pre)),
            told("post-norm: largest learning rate that trains", highest_stable(post)),
        ),
        seeds=tuple(run.cfg.seed for run in pre[lrs()[0]]),
        run_ids=ids(pre, post),
    )
