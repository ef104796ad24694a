"""The verdict: who leads, by how much, and whether that is settled, in sentences."""

from __future__ import annotations

from andrea_ablate.analysis.rules import FEWEST_SEEDS, STRONG, enough_seeds
from andrea_ablate.analysis.stats import Effect, seeds_needed
from andrea_ablate.report.compare.comparison import SETTLED, Comparison
from andrea_ablate.report.compare.rows import CONFIDENCE, ArmSummary
from andrea_ablate.report.compare.text import signed, with_interval


def verdict_of(found: Comparison) -> str:
    ranked = [arm for arm in found.ranked if arm.rank is not None]
    if not ranked:
        return "No run finished, so there is nothing to rank."
    best, *others = ranked
    lead = found.lead
    rival = lead.rival if lead else None
    base = " (the baseline)" if best.arm == found.baseline else ""
    start = (
        f"'{best.arm}'{base} has the lowest mean loss" if len(found.arms) > 1 else f"'{best.arm}' has a mean loss of"
    )
    over = f"({best.runs})" if best.complete else f"but over its finished runs only ({best.runs})"
    sentences = [f"{start}{',' * (len(found.arms) > 1)} {best.loss.mean:.4f}{',' * (not best.complete)} {over}."]
    if "stuck" in best.marks:
        sentences.append("It is stuck at the unigram entropy or above, so this says little about the designs.")
    if lead:
        runner = "runner-up" if rival is others[0] else "best of the other designs,"
        sentences.append(_lead(found, best, lead.rival, runner, lead.effect))
    else:
        if len(found.arms) > 1:
            sentences.append("No other arm has a finished run to compare it with.")
        if best.loss.n == 1:
            sentences.append(f"One seed gives no interval: {_more_seeds(best)}.")
    if best.effect is not None:
        sentences.append(_against_baseline(found, best, runner_up=rival.arm if rival else None))
    whole = next((arm for arm in others if arm.complete), None)
    if whole and not best.complete:
        sentences.append(f"Among the arms whose runs all finished '{whole.arm}' is lowest, {whole.loss.mean:.4f}.")
    return " ".join(filter(None, sentences))


def _lead(found: Comparison, best: ArmSummary, second: ArmSummary, runner: str, lead: Effect) -> str:
    """The paired lead of the best arm, positive when it is ahead on the seeds that both finished."""
    runner = f"the {runner} '{second.arm}'{' (the baseline)' if second.arm == found.baseline else ''}"
    if lead.mean is None:
        return f"No seed finished in both it and {runner}, so nothing is paired and their order is not settled."
    if lead.n == 1:
        return (
            f"Its lead over {runner} is {signed(lead.mean)} nats on the only seed that finished in both; one seed "
            f"gives no interval, so their order is not settled: {_more_seeds(best, second)}."
        )
    start = f"Its paired lead over {runner} is {with_interval(lead)} nats over {_seeds(lead.n)}: "
    if lead.mean <= 0:
        return f"{start}on the seeds that both finished it is not ahead, not settled at {_seeds(lead.n)}."
    if lead.sd == 0:
        return f"{start}the same at every seed, so seeds had no effect, not settled at {_seeds(lead.n)}."
    if not lead.excludes_zero:
        assert lead.sd is not None
        needed = seeds_needed(lead.sd, lead.mean / 2, CONFIDENCE)
        about = f"about {needed}" if needed <= 1000 else "more than 1000"
        return (
            f"{start}the interval includes zero, not settled at {_seeds(lead.n)}; {about} seeds would narrow the "
            "interval to plus or minus half the lead."
        )
    if not (best.complete and second.complete):
        return f"{start}the interval excludes zero, but runs that did not finish are not in it, so it is not settled."
    if "stuck" in second.marks:
        both = "both arms are stuck" if "stuck" in best.marks else "the other arm is stuck"
        return f"{start}the interval excludes zero, but {both}, so between the designs nothing is settled."
    if not enough_seeds(lead):
        return (
            f"{start}the interval excludes zero, but a verdict takes {FEWEST_SEEDS} seeds, or three where the lead is "
            f"above {STRONG:g} standard deviations, so it is not settled."
        )
    return f"{start}the interval excludes zero, {SETTLED}."


def _against_baseline(found: Comparison, best: ArmSummary, runner_up: str | None) -> str:
    effect = best.effect
    assert effect is not None
    if effect.mean is None:
        return f"It shares no finished seed with the baseline '{found.baseline}'."
    comparisons = sum(arm.p_holm is not None for arm in found.arms)
    adjusted = ""
    if best.p_holm is not None and effect.sd != 0:
        p = "p < 0.0001" if best.p_holm < 0.0001 else f"p = {best.p_holm:.4f}"
        adjusted = f"Holm-adjusted {p} over {comparisons} comparison{'s' * (comparisons != 1)} with the baseline"
    if runner_up == found.baseline:
        return f"{adjusted}." if adjusted else ""
    tail = adjusted or ("one seed gives no interval" if effect.n == 1 else "the same at every seed")
    return (
        f"Its paired difference to the baseline '{found.baseline}' is {with_interval(effect)} nats over "
        f"{_seeds(effect.n)} ({tail})."
    )


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def _more_seeds(*arms: ArmSummary) -> str:
    return "add seed=0,1,2" if all(arm.planned == 1 for arm in arms) else "at least two seeds must finish in both arms"
