"""Equal budgets: one size of an arm is changed until its count is that of the baseline, before its runs are named."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from andrea_ablate.accounting import Account, account
from andrea_ablate.config import KNOBS, ModelConfig, RunConfig, SweepConfig, model_dims
from andrea_ablate.registry import ConfigError


def match_model(arm: RunConfig, baseline: RunConfig, sweep: SweepConfig) -> tuple[ModelConfig, str | None]:
    """The arm's model with the size ``match_knob`` at which its count is nearest to the baseline's, counted alike.

    d_ff goes in steps of the arm's own ``model.ffn.multiple`` and is given as the ratio ``d_ff / d_model``. Between two
    sizes that are equally near, the smaller is taken.

    Returns: the model, and the override that makes it, None for an arm that stays as it is: one that is nearest
        already, or cannot be counted (training refuses it and says why).
    Raises: ConfigError where the baseline's own sizes do not fit together.
    """
    model, knob = arm.model, sweep.match_knob
    try:
        target = count(account(baseline.model, baseline.data.seq_len), sweep.match)
    except ConfigError as error:
        raise ConfigError(f"match={sweep.match} takes its count from the first arm, but {error}") from error
    try:
        now = getattr(model_dims(model), knob)
        account(model, arm.data.seq_len)
    except ConfigError:
        return model, None

    def count_at(size: int) -> int:
        return count(account(_sized(model, knob, size), arm.data.seq_len), sweep.match)

    step = model.ffn["multiple"] if knob == "d_ff" else 1
    most = step
    while count_at(most) < target:
        most *= 2
    sizes = range(step, most + 1, step)
    above = bisect_left(sizes, target, key=count_at)
    best = min(sizes[max(0, above - 1) : above + 1], key=lambda size: abs(count_at(size) - target))
    if best == now:
        return model, None
    sized = _sized(model, knob, best)
    return sized, f"{KNOBS[knob]}={sized.ffn['ratio'] if knob == 'd_ff' else best}"


def count(counted: Account, match: str) -> int:
    """What `match` holds equal: a number of parameters, or of training FLOPs per token."""
    return {
        "params": counted.params,
        "nonembedding": counted.non_embedding_params,
        "flops": counted.flops_train,
    }[match]


def mismatch(arm: RunConfig, baseline: RunConfig, match: str) -> float:
    """``count / count of the baseline - 1``. Raises ConfigError for sizes that do not fit."""
    mine, its = (count(account(cfg.model, cfg.data.seq_len), match) for cfg in (arm, baseline))
    return mine / its - 1


def unmatched(arms: Mapping[str, RunConfig], sweep: SweepConfig, tolerance: float) -> str | None:
    """One sentence that names the arms whose count stays further than `tolerance` from the first one's, or None."""
    baseline = next(iter(arms.values()))
    left = {}
    for arm, cfg in arms.items():
        with suppress(ConfigError):  # it has no count, and the plan says why
            left[arm] = mismatch(cfg, baseline, sweep.match)
    far = [f"'{arm}' {100 * residual:+.1f} %" for arm, residual in left.items() if abs(residual) > tolerance]
    if not far:
        return None
    finer = "a smaller model.ffn.multiple" if sweep.match_knob == "d_ff" else "match_knob=d_ff"
    return (
        f"match={sweep.match}: no {sweep.match_knob} comes within {100 * tolerance:g} % of the first arm for "
        f"{', '.join(far)}; {finer} is a finer step."
    )


def _sized(model: ModelConfig, knob: str, size: int) -> ModelConfig:
    if knob == "n_layers":
        return replace(model, n_layers=size)
    ratio = Fraction(size, model.d_model)
    # In lowest terms, and whole where it is whole: the same size asked for by hand is the same run.
    return replace(model, ffn={**model.ffn, "ratio": int(ratio) if ratio.denominator == 1 else str(ratio)})
