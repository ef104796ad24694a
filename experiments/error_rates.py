"""Error rates of every decision rule on simulated sweeps whose truth is known, at 3, 5 and 8 seeds.

    python experiments/error_rates.py

writes results/error_rates.json and .md. A simulated run is 3 nats, plus what its seed does to every arm (sd 0.02), plus
noise of its own (sd 0.005), plus its arm's effect: pairing must remove the first. SIMULATIONS sweeps per line; the
standard error of a rate of 5 % is 0.22 points.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from andrea_ablate.analysis import (
    Decision,
    equivalence,
    factorial_effects,
    holm,
    paired_effect,
    ratio,
    sequential_level,
    spike_rate_ratio,
    stability,
    superiority,
)

RESULTS = Path(__file__).parent / "results"
SIMULATIONS = 10_000
SEEDS = (3, 5, 8)
SHARED, OWN = 0.02, 0.005
MARGIN = 0.01
LOG_SD = 0.1  # of a log-ratio, for the rule on ratios
LOOKS = (3, 5, 8)
TOLERANCE = 0.01  # one point off nominal is reported

Losses = Mapping[int, float]


@dataclass(frozen=True)
class Line:
    """One rate by number of seeds. `nominal` is what it should be, or at most be, or None for a power."""

    rule: str
    kind: str  # "false positives", "coverage" or "power"
    case: str
    nominal: float | None
    at_most: bool
    rates: Mapping[int, float | None]  # None where the rule gives no answer

    @property
    def off(self) -> list[int]:
        """The numbers of seeds at which the rule errs more than it says, or covers less, by more than a point."""
        if self.nominal is None:
            return []
        sign = -1 if self.kind == "coverage" else 1
        return [n for n, rate in self.known if sign * (rate - self.nominal) > TOLERANCE]

    @property
    def cautious(self) -> list[int]:
        """Where it errs less, or covers more, by more than a point, though its rate is not an upper bound."""
        if self.nominal is None or self.at_most:
            return []
        return [n for n, rate in self.known if abs(rate - self.nominal) > TOLERANCE and n not in self.off]

    @property
    def known(self) -> list[tuple[int, float]]:
        return [(n, rate) for n, rate in self.rates.items() if rate is not None]


def losses(n: int, arms: int, effect: float, heavy: bool = False) -> list[list[Losses]]:
    """SIMULATIONS sweeps of `arms` arms and n seeds; all arms but the first have the effect."""
    rng = np.random.default_rng([n, arms, heavy])
    shape = (SIMULATIONS, arms, n)
    noise = rng.standard_t(5, shape) / np.sqrt(5 / 3) if heavy else rng.standard_normal(shape)
    found = 3 + SHARED * rng.standard_normal((SIMULATIONS, 1, n)) + OWN * noise
    found[:, 1:] += effect
    return [[dict(enumerate(arm)) for arm in sweep] for sweep in found.tolist()]


def line(
    rule: str,
    kind: str,
    case: str,
    hit: Callable[[Any], bool | None],
    sweeps: Callable[[int], Sequence[Any]],
    nominal: float | None = None,
    at_most: bool = False,
) -> Line:
    """The share of simulated sweeps that `hit` is true of, at each number of seeds; None where it is None of them."""
    rates: dict[int, float | None] = {}
    for n in SEEDS:
        hits = [hit(sweep) for sweep in sweeps(n)]
        rates[n] = None if None in hits else float(np.mean(hits))  # type: ignore[arg-type]
    return Line(rule, kind, case, nominal, at_most, rates)


def covers(low: float | None, high: float | None, truth: float) -> bool | None:
    return None if low is None or high is None else low <= truth <= high


def effect_of(sweep: list[Losses]) -> Any:
    return paired_effect(sweep[1], sweep[0])


def intervals() -> Iterator[Line]:
    """The paired interval and the tests beside it."""
    null, at_margin = (lambda n: losses(n, 2, 0.0)), (lambda n: losses(n, 2, MARGIN))

    def covered(sweep: list[Losses]) -> bool | None:
        effect = effect_of(sweep)
        return covers(effect.low, effect.high, MARGIN)

    name = "paired t interval"
    yield line(name, "coverage", "normal noise", covered, at_margin, 0.95)
    yield line(name, "coverage", "noise with tails of t(5)", covered, lambda n: losses(n, 2, MARGIN, heavy=True), 0.95)
    yield line(name, "false positives", "p < 0.05 without effect", lambda s: effect_of(s).p < 0.05, null, 0.05)
    yield line(name, "power", f"p < 0.05, effect {MARGIN}", lambda s: effect_of(s).p < 0.05, at_margin)
    name = "sign flips"
    yield line(
        name, "false positives", "p < 0.05 without effect", lambda s: effect_of(s).p_sign < 0.05, null, 0.05, True
    )
    yield line(name, "power", f"p < 0.05, effect {MARGIN}", lambda s: effect_of(s).p_sign < 0.05, at_margin)

    def any_found(sweep: list[Losses]) -> bool:
        return min(p for p in holm([paired_effect(arm, sweep[0]).p for arm in sweep[1:]]) if p is not None) < 0.05

    name = "Holm, 3 arms"
    yield line(
        name, "false positives", "any p < 0.05 without effect", any_found, lambda n: losses(n, 4, 0.0), 0.05, True
    )
    yield line(name, "power", f"any p < 0.05, effect {MARGIN}", any_found, lambda n: losses(n, 4, MARGIN))

    def interaction(sweep: list[Losses]) -> Any:
        arms = dict(zip((("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")), sweep, strict=True))
        return factorial_effects(arms, ("x", "y"))["x x y"]

    # The baseline alone lacks the effect: of the four arms' contrast that leaves minus half of it.
    name, four = "interaction of 2 x 2", lambda n: losses(n, 4, MARGIN)
    yield line(
        name,
        "coverage",
        "normal noise",
        lambda s: covers((e := interaction(s)).low, e.high, -MARGIN / 2),
        four,
        0.95,
    )
    yield line(
        name,
        "false positives",
        "p < 0.05 without effect",
        lambda s: interaction(s).p < 0.05,
        lambda n: losses(n, 4, 0.0),
        0.05,
    )
    yield line(name, "power", f"p < 0.05, interaction {MARGIN / 2}", lambda s: interaction(s).p < 0.05, four)


def said(decide: Callable[..., Decision], *verdicts: str, **options: Any) -> Callable[[list[Losses]], bool]:
    return lambda sweep: decide(sweep[1], sweep[0], margin=MARGIN, **options).verdict in verdicts


def verdicts() -> Iterator[Line]:
    """Superiority, equivalence and non-inferiority."""
    null, at_margin = (lambda n: losses(n, 2, 0.0)), (lambda n: losses(n, 2, MARGIN))
    better, far_better = (lambda n: losses(n, 2, -MARGIN)), (lambda n: losses(n, 2, -2 * MARGIN))
    name, false, power = "superiority", "false positives", "power"
    decided = said(superiority, "supported", "contradicted")
    yield line(name, false, "decided without effect (3 seeds: above 5 sd only)", decided, null, 0.05, True)
    past = said(superiority, "supported", delta=MARGIN)
    yield line(name, false, f"supported beyond {MARGIN} at an effect of it", past, better, 0.025, True)
    none = said(superiority, "no-effect")
    yield line(name, false, "no-effect at an effect of the margin", none, at_margin, 0.05, True)
    yield line(name, power, f"supported, effect {MARGIN}", said(superiority, "supported"), better)
    yield line(name, power, f"supported beyond {MARGIN}, effect {2 * MARGIN}", past, far_better)
    yield line(name, power, f"no-effect, margin {MARGIN}, without effect", none, null)
    name, same = "equivalence", said(equivalence, "supported")
    yield line(name, false, "supported at an effect of the margin", same, at_margin, 0.05, True)
    yield line(
        name,
        false,
        "contradicted at an effect of the margin",
        said(equivalence, "contradicted"),
        at_margin,
        0.025,
        True,
    )
    yield line(name, power, f"supported, margin {MARGIN}, without effect", same, null)
    name, not_worse = "non-inferiority", said(equivalence, "supported", worse_only=True)
    yield line(name, false, "supported at an effect of the margin", not_worse, at_margin, 0.05)
    yield line(name, power, f"supported, margin {MARGIN}, without effect", not_worse, null)


def ratios() -> Iterator[Line]:
    """The rule on ratios, whose bound is 2 here."""

    def pairs(true: float) -> Callable[[int], list[Losses]]:
        def drawn(n: int) -> list[Losses]:
            logs = math.log(true) + LOG_SD * np.random.default_rng(n).standard_normal((SIMULATIONS, n))
            return [dict(enumerate(row)) for row in np.exp(logs).tolist()]

        return drawn

    def judged(values: Losses) -> Decision:
        return ratio(values, dict.fromkeys(values, 1.0), bound=2.0)

    def decided(values: Losses) -> bool:
        return judged(values).verdict != "inconclusive"

    def covered(values: Losses) -> bool | None:
        effect = judged(values).effect
        return covers(effect.low, effect.high, math.log(2))

    yield line("ratio", "coverage", f"normal log-ratios, sd {LOG_SD}", covered, pairs(2.0), 0.95)
    yield line("ratio", "false positives", "decided at the bound (from 8 seeds on)", decided, pairs(2.0), 0.05, True)
    yield line("ratio", "power", "decided, ratio 2.3 against a bound of 2", decided, pairs(2.3))


def counts() -> Iterator[Line]:
    """Rules on counts: the bootstrap of scores per run, and the exact ratio of two rates."""

    def panels(wild: float, calm: float, shares: bool = False) -> Callable[[int], list[tuple[Any, Any]]]:
        def drawn(n: int) -> list[tuple[Any, Any]]:
            rng = np.random.default_rng([n, zlib.crc32(f"{wild} {calm}".encode())])
            shape = (SIMULATIONS, n)
            w, c = (rng.binomial(20, x, shape) / 20 if shares else rng.poisson(x, shape) for x in (wild, calm))
            return list(zip(c, w, strict=True))

        return drawn

    def judged(panel: tuple[Any, Any]) -> Decision:
        return stability(*panel, draws=2000)

    def covered(true: float) -> Callable[[tuple[Any, Any]], bool | None]:
        return lambda panel: covers((e := judged(panel).effect).low, e.high, true)

    def supported(panel: tuple[Any, Any]) -> bool:
        return judged(panel).verdict == "supported"

    name = "stability"
    yield line(name, "coverage", "spikes, Poisson of means 4 and 2", covered(2.0), panels(4.0, 2.0), 0.95)
    yield line(name, "coverage", "spikes, Poisson of means 20 and 10", covered(2.0), panels(20.0, 10.0), 0.95)
    yield line(
        name, "coverage", "diverged shares 0.5 and 0.25 of 20 rates", covered(2.0), panels(0.5, 0.25, True), 0.95
    )
    yield line(
        name, "false positives", "supported at the factor, means 4 and 2", supported, panels(4.0, 2.0), 0.025, True
    )
    yield line(
        name,
        "false positives",
        "supported without difference, means 2 and 2",
        supported,
        panels(2.0, 2.0 + 1e-9),
        0.025,
        True,
    )
    yield line(name, "power", "supported, means 16 and 2", supported, panels(16.0, 2.0))

    def rates(panel: tuple[Any, Any]) -> Any:
        calm, wild = panel
        return spike_rate_ratio((int(wild.sum()), len(wild)), (int(calm.sum()), len(calm)))

    name = "spike-rate ratio"
    yield line(
        name, "coverage", "Poisson of means 4 and 2", lambda p: covers((r := rates(p)).low, r.high, 2.0),
        panels(4.0, 2.0), 0.95, True,
    )  # fmt: skip
    yield line(
        name,
        "false positives",
        "interval excludes 1 without difference",
        lambda p: not covers((r := rates(p)).low, r.high, 1.0),
        panels(2.0, 2.0 + 1e-9),
        0.05,
        True,
    )
    yield line(name, "power", "interval excludes 1, means 4 and 2", lambda p: rates(p).low > 1, panels(4.0, 2.0))


def looks() -> Iterator[Line]:
    """Sequential stopping at LOOKS, counted at the number of seeds reached: a sweep stops at most once."""
    level = sequential_level(LOOKS)

    def stopped(sweep: list[Losses]) -> bool:
        base, arm = sweep
        reached = [n for n in LOOKS if n <= len(base)]
        return any(paired_effect({s: arm[s] for s in range(n)}, base).p < level for n in reached)  # type: ignore[operator]

    name = f"sequential, looks at {', '.join(map(str, LOOKS))}"
    yield line(
        name, "false positives", "stopped so far, without effect", stopped, lambda n: losses(n, 2, 0.0), 0.05, True
    )
    yield line(name, "power", f"stopped so far, effect {MARGIN}", stopped, lambda n: losses(n, 2, MARGIN))


def to_markdown(report: Mapping[str, Any]) -> str:
    """A table per kind of rate, and a paragraph on what is off."""
    lines = [Line(**entry) for entry in report["lines"]]
    text = [
        "# Error rates of the decision rules",
        "",
        f"{report['simulations']:,} simulated sweeps per number, in per cent; made by `experiments/error_rates.py`. "
        f"A run is 3 nats, plus what its seed does to every arm (sd {report['sd']['seed']}), plus noise of its own "
        f"(sd {report['sd']['run']}), plus its arm's effect.",
        "",
        paragraph(lines),
    ]
    for kind in ("false positives", "coverage", "power"):
        text += [
            "",
            f"## {kind.capitalize()}",
            "",
            f"| rule | case | nominal | {' | '.join(f'n = {n}' for n in SEEDS)} |",
            f"| --- | --- | --- |{' --- |' * len(SEEDS)}",
        ]
        for entry in lines:
            if entry.kind == kind:
                bound = "at least " if kind == "coverage" else "at most "
                nominal = "" if entry.nominal is None else f"{bound * entry.at_most}{100 * entry.nominal:g}"
                rates = [
                    "-" if rate is None else f"{100 * rate:.1f}{' !' if n in entry.off else ''}"
                    for n, rate in entry.rates.items()
                ]
                text.append(f"| {entry.rule} | {entry.case} | {nominal} | {' | '.join(rates)} |")
    return "\n".join(text) + "\n"


def paragraph(lines: Sequence[Line]) -> str:
    """What is off nominal by more than a point, from the numbers."""

    def listed(name: str) -> str:
        return "; ".join(
            f"{entry.rule}, {entry.case}: "
            + ", ".join(f"{100 * rate:.1f} % at n = {n}" for n, rate in entry.known if n in getattr(entry, name))
            for entry in lines
            if getattr(entry, name)
        )

    judged = sum(len(entry.known) for entry in lines if entry.nominal is not None)
    worse = sum(len(entry.off) for entry in lines)
    said = [
        f"Of {judged} rates with a nominal value {judged - worse} are no worse than it by more than one point"
        + (f"; worse, and marked with !: {listed('off')}." if worse else ".")
    ]
    if cautious := listed("cautious"):
        said.append(f"More cautious than nominal by over a point: {cautious}.")
    said.append(
        "The tests are exact for normal noise, so what is measured there is the code; how far the noise of real "
        "training is from normal these simulations cannot say, and the line with tails of t(5) only bounds it."
    )
    return " ".join(said)


def main() -> None:
    lines = [asdict(entry) for part in (intervals, verdicts, ratios, counts, looks) for entry in part()]
    report = {"simulations": SIMULATIONS, "sd": {"seed": SHARED, "run": OWN}, "lines": lines}
    (RESULTS / "error_rates.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "error_rates.md").write_text(to_markdown(report), encoding="utf-8")


if __name__ == "__main__":
    main()
