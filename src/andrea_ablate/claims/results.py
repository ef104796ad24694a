"""Results: one small JSON file per claim, and one more for each further scale, with all it takes to repeat it.

A result belongs to the code that made it. `code_of` hashes the claim's row, the function that measures it and what that
uses of this package, so that a result of other code is known as stale. Not covered: numerics deeper in the model, which
have `config.NUMERICS_VERSION`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from andrea_ablate.claims.claim import Claim, Finding, Measurement, Verdict
from andrea_ablate.claims.ledger import Measure
from andrea_ablate.composition import resource_root
from andrea_ablate.config import NUMERICS_VERSION
from andrea_ablate.tracking.store import decode, encode, write_atomic

FORMS = ("worded", "corrected", "controls", "reported")


@dataclass(frozen=True)
class Result:
    """What was measured, when, by which code.

    Args:
        at: the scale it was measured at. cpu_s: CPU seconds that it took, for the plan of the next time.
        commit: of the checkout, with ``+`` for one with changes; empty outside of a checkout.
    """

    claim: str
    at: str
    verdict: Verdict
    measurement: Measurement
    code: str
    cpu_s: float
    date: str
    commit: str
    versions: dict[str, str]

    @property
    def command(self) -> str:
        return (
            f"python -m andrea_ablate.claims run {self.claim} --scale {'gpu' if self.at[0] == 'G' else 'cpu'} --again"
        )


def folder() -> Path:
    """Where the results are kept: with the experiments."""
    return resource_root() / "experiments" / "results" / "claims"


def path_of(claim: Claim, at: str) -> Path:
    return folder() / (f"{claim.id}.json" if at == claim.scale[0] else f"{claim.id}.{at}.json")


def read(claim: Claim, at: str) -> Result | None:
    """The stored result of a claim at one scale, None without one."""
    path = path_of(claim, at)
    if not path.is_file():
        return None
    plain = decode(json.loads(path.read_bytes()))
    forms = {form: tuple(_finding(row) for row in plain["findings"] if row["form"] == form) for form in FORMS}
    measurement = Measurement(**forms, seeds=tuple(plain["seeds"]), run_ids=tuple(plain["run_ids"]))
    kept = {key: plain[key] for key in ("claim", "at", "code", "cpu_s", "date", "commit", "versions")}
    return Result(**kept, verdict=Verdict(plain["verdict"]), measurement=measurement)


def firmest(claim: Claim) -> Result | None:
    """The result at the largest scale that has one."""
    return next((found for at in reversed(claim.scale) if (found := read(claim, at))), None)


def write(claim: Claim, result: Result) -> Path:
    """Store a result. Returns: its file."""
    measurement = result.measurement
    plain = {
        "claim": result.claim,
        "at": result.at,
        "verdict": str(result.verdict),
        "rule": list(claim.rule),
        "margin": dict(claim.margin),
        "findings": [
            {"form": form, **{key: value for key, value in asdict(finding).items() if value not in (None, "")}}
            for form in FORMS
            for finding in getattr(measurement, form)
        ],
        "seeds": list(measurement.seeds),
        "run_ids": list(measurement.run_ids),
        "command": result.command,
        "code": result.code,
        "cpu_s": round(result.cpu_s, 1),
        "date": result.date,
        "commit": result.commit,
        "versions": result.versions,
    }
    path = path_of(claim, result.at)
    write_atomic(path, json.dumps(encode(plain), indent=1, ensure_ascii=False) + "\n")
    return path


def _finding(row: dict[str, Any]) -> Finding:
    finding = Finding(**{key: value for key, value in row.items() if key != "form"})
    return finding if finding.verdict is None else replace(finding, verdict=Verdict(finding.verdict))


def code_of(claim: Claim, measure: Measure) -> str:
    """Hash of the claim's row, of its measurement and of what that uses from this package."""
    from andrea_ablate.codehash import code_hash

    row = json.dumps({**asdict(claim), "expected": "", "citation": ""}, sort_keys=True, default=str)
    used = sorted(f"{item.__module__}.{item.__qualname__} {code_hash(item)}" for item in uses(measure))
    if claim.cells:
        from andrea_ablate.claims.facts import facts

        fields = {cell.field for cell in claim.cells}
        used += [repr(fact) for (_, field), fact in sorted(facts().items()) if field in fields]
    return hashlib.blake2b("\n".join([row, *used, str(NUMERICS_VERSION)]).encode(), digest_size=8).hexdigest()


def uses(measure: Measure) -> list[Any]:
    """The functions and classes of ours that a measurement is made of, through the claims' own code."""
    found: dict[str, Any] = {}
    waiting: list[Any] = [measure]
    while waiting:
        item = waiting.pop()
        module = str(getattr(item, "__module__", ""))
        if not isinstance(item, types.FunctionType | type):
            continue
        if item is not measure and not module.startswith("andrea_ablate."):
            continue
        name = f"{module}.{item.__qualname__}"
        if name not in found:
            found[name] = item
            if module.startswith("andrea_ablate.claims."):
                names = set().union(*(set(code.co_names) for code in codes(item)))
                waiting += [vars(sys.modules[module])[used] for used in names if used in vars(sys.modules[module])]
    return list(found.values())


def codes(item: Any) -> Iterator[types.CodeType]:
    """The code of a function, or of the methods of a class, with that of what they define."""
    waiting = [v.__code__ for v in (item, *vars(item).values()) if isinstance(v, types.FunctionType)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
