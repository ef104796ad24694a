"""The ledger: every claim by id, from the YAML file of its topic, and the functions that measure them.

Reading the claims imports no torch; `measures_of` does, because measurements are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from andrea_ablate.claims.claim import KINDS, RULES, SCALES, Cell, Claim, Measurement
from andrea_ablate.registry import ConfigError, Registry, nearest
from andrea_ablate.yamltext import load_yaml

TOPICS = {
    "residual": "Residual stream",
    "norm_position": "Normalisation: what it does, where it sits",
    "norm_type": "LayerNorm or RMSNorm, and biases",
    "ffn": "Feed-forward: size, activation, gating",
    "arithmetic": "Whole-model arithmetic",
    "block": "Serial or parallel block",
    "position": "Position encoding",
    "shape": "Heads, shape, vocabulary",
    "regularisation": "Regularisation",
    "softmax": "Softmax stability",
    "attention": "KV cache and attention pattern",
    "defaults": "Reference defaults",
}
Measure = Callable[[Claim], Measurement]
MEASURES: Registry[Measurement] = Registry("measurement")


def measures(claim_id: str, at: str | None = None) -> Callable[[Measure], Measure]:
    """Decorator: the function measures this claim, at the claim's smallest scale or at the one named."""
    added: Callable[[Measure], Measure] = MEASURES.register(claim_id if at is None else f"{claim_id}@{at}")
    return added


@lru_cache
def ledger() -> dict[str, Claim]:
    """Every claim by id, topic by topic. Raises ConfigError for a row that is not well formed."""
    found: dict[str, Claim] = {}
    for topic in TOPICS:
        path = Path(__file__).parent / "topics" / f"{topic}.yaml"
        for row in load_yaml(path.read_text(encoding="utf-8")):
            claim = _claim(topic, row)
            if claim.id in found:
                raise ConfigError(f"claim '{claim.id}' stands twice in the ledger; the second is in {path.name}")
            found[claim.id] = claim
    return found


def claim_of(claim_id: str) -> Claim:
    """The claim of that id. Raises ConfigError with the nearest id."""
    claims = ledger()
    if claim_id not in claims:
        raise ConfigError(
            f"'{claim_id}' is none of the {len(claims)} claims{nearest(claim_id, claims)}; "
            "`python -m andrea_ablate.claims list` prints them"
        )
    return claims[claim_id]


def measures_of(claim: Claim) -> dict[str, Measure]:
    """What measures this claim, by scale; empty where nobody wrote it yet."""
    from andrea_ablate.claims import topics  # noqa: F401 (importing it registers the measurements)

    if claim.cells:
        from andrea_ablate.claims.facts import measure_cells

        return {claim.scale[0]: measure_cells}
    names = {scale: claim.id if scale == claim.scale[0] else f"{claim.id}@{scale}" for scale in claim.scale}
    written = set(MEASURES.names())
    found = {scale: MEASURES.get(name) for scale, name in names.items() if name in written}
    if claim.kind == "training" and "G1" in claim.scale and "C1" in found:
        found.setdefault("G1", found["C1"])  # it trains what the scale says, see probes/trained.py
    return found


def _claim(topic: str, row: Mapping[str, Any]) -> Claim:
    given = {**row, "topic": topic, "rule": tuple(row.get("rule", ())), "scale": tuple(row.get("scale", ()))}
    try:
        claim = Claim(**{**given, "cells": tuple(map(_cell, row.get("cells", ())))})
    except TypeError as error:
        raise ConfigError(f"claim '{row.get('id')}' in {topic}.yaml: {error}") from error
    for what, values, allowed in (
        ("kind", (claim.kind,), KINDS),
        ("rule", claim.rule, RULES),
        ("scale", claim.scale, SCALES),
    ):
        for value in values or (None,):
            if value not in allowed:
                raise ConfigError(f"claim '{claim.id}': {what}={value} is not one of {', '.join(allowed)}")
    return claim


def _cell(row: Mapping[str, Any]) -> Cell:
    given: dict[str, Any] = {key: tuple(value) if key in ("among", "besides") else value for key, value in row.items()}
    return Cell(**given)
