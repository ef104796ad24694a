"""What a comparison is made of: one row per run, one summary per arm, and the limits that they are judged by."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from andrea_ablate.analysis.stats import Effect, Estimate

CONFIDENCE = 0.95
STUCK_NATS = 0.15  # an arm this close to the unigram entropy has learned token frequencies and little else
TUNED_NATS = 0.05  # an arm further above its design's best over learning rate and warm-up is not at its own
TUNING = {"lr": "learning rate", "warmup_tokens": "warm-up"}
BUDGET_TOLERANCE = 0.02
MARGIN_NATS = 0.03  # differences within it do not matter, at the smallest sizes
NAMED = 6  # arms that one warning names
STATUSES = ("finished", "diverged", "failed", "interrupted", "missing")


@dataclass(frozen=True)
class RunRow:
    """One run (arm x seed), planned or done; None is what is not known."""

    arm: str
    seed: int
    status: str  # one of STATUSES, or running
    design: str = ""  # the arm without what tunes it, learning rate and warm-up; empty where the arm is its own design
    lr: float | None = None
    warmup_tokens: int | None = None
    reason: str = ""
    run_id: str = ""
    val_loss: float | None = None  # nats per token
    val_bpb: float | None = None  # bits per byte
    params: int | None = None  # in total
    non_embedding: int | None = None
    flops_per_token: float | None = None  # training: forward and backward
    tokens: int | None = None
    tokens_per_s: float | None = None
    train_s: float | None = None
    token_hash: str | None = None  # rolling hash of the tokens seen, at the end
    initial_loss: float | None = None  # nats per token
    unigram_entropy: float | None = None  # nats per token, of the corpus
    paths: Mapping[str, Any] = field(default_factory=dict)  # op -> implementation that really ran


def row_from_record(
    record: Mapping[str, Any],
    *,
    arm: str,
    seed: int,
    run_id: str,
    design: str = "",
    lr: float | None = None,
    warmup_tokens: int | None = None,
) -> RunRow:
    """The row of a run from its record (`Store.current`) and from what its sweep knows of it."""
    loss, seconds = record.get("val/loss"), record.get("train_s")
    return RunRow(
        arm=arm,
        seed=seed,
        status=record["status"],
        design=design,
        lr=lr,
        warmup_tokens=warmup_tokens,
        reason=record.get("reason", ""),
        run_id=run_id,
        val_loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
        val_bpb=record.get("val/bpb"),
        params=record.get("params"),
        non_embedding=record.get("non_embedding_params"),
        flops_per_token=record.get("flops_per_token"),
        tokens=record.get("tokens"),
        tokens_per_s=record["tokens"] / seconds if seconds else None,
        train_s=seconds,
        token_hash=record.get("token_hash"),
        initial_loss=record.get("initial_loss"),
        unigram_entropy=(record.get("data") or {}).get("unigram_entropy"),
        paths=record.get("paths") or {},
    )


@dataclass(frozen=True)
class ArmSummary:
    """One row of the table. Means are over the finished runs; `runs` says how many of the planned ones those are."""

    arm: str
    rank: int | None  # by mean loss, arms with equal means share it; None without a finished run
    complete: bool  # every planned run finished; otherwise the rank is shown with a '*'
    planned: int
    counts: dict[str, int]  # runs by status
    loss: Estimate
    bits_per_byte: Estimate
    effect: Effect | None  # paired difference of the loss to the baseline's; None for the baseline
    p_holm: float | None  # effect.p, adjusted over the table's comparisons
    params: int | None
    non_embedding: int | None
    flops_per_token: float | None
    tokens: int | None
    tokens_per_s: float | None  # median, as is train_s
    train_s: float | None
    initial_loss: float | None  # mean
    unigram_entropy: float | None
    design: str
    lr: float | None
    warmup_tokens: int | None
    marks: tuple[str, ...]  # why its loss does not judge its design: stuck, or not tuned (`_with_tuning_marks`)
    verdict: str | None = None  # of analysis.rules on "it is better than the baseline"; None for the baseline
    why: str | None = None  # one clause
    verdict_seeds: int | None = None  # in all, that would settle an inconclusive verdict; None where unknown

    @property
    def runs(self) -> str:
        """E.g. ``n 1 of 3, 1 diverged, 1 failed``."""
        others = [f"{count} {status}" for status, count in self.counts.items() if status != "finished"]
        return ", ".join([f"n {self.loss.n} of {self.planned}", *others])


def arm_key(values: Mapping[str, object]) -> str:
    """Name an arm by its choices, in the order given: ``norm=pre softcap=30``.

    One value has one text, whatever type it went through: 30, 30.0 and '30.0' are ``30``, None is ``null``, a list is
    ``[a,b]``.
    """
    return " ".join(f"{key}={_value_text(value)}" for key, value in values.items())


def _value_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    # PyYAML reads 1e-3 as text and Hydra as a number.
    if isinstance(value, Real) or (
        isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value)
    ):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(_value_text(item) for item in value) + "]"
    return str(value)


def finished_runs(runs: Sequence[RunRow]) -> list[RunRow]:
    return [row for row in runs if row.status == "finished"]


def known(runs: Sequence[RunRow], name: str) -> list[Any]:
    values = [getattr(row, name) for row in runs]
    return [value for value in values if value is not None and math.isfinite(value)]


def typical(runs: Sequence[RunRow], name: str, pick: Callable[[list[Any]], Any] = statistics.median_low) -> Any:
    values = known(runs, name)
    return pick(values) if values else None
