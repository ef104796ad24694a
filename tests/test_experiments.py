"""Every experiment file: what it decides is written in it, it names claims of the ledger, and each arm can train."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from andrea_ablate import conduct, sweep
from andrea_ablate.claims.ledger import ledger
from andrea_ablate.composition import compose, resource_root
from andrea_ablate.confounds import refuse_undeclared
from andrea_ablate.jobs import Factors, Job
from andrea_ablate.tracking.store import Store
from support import Cli

FILES = sorted((resource_root() / "experiments").glob("*.yaml"))
SECTIONS = [path for path in FILES if path.stem not in ("norm_ffn", "tune_nano")]  # those are about the product itself


def plain_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def params(path: Path) -> dict[str, list[str]]:
    """The swept values of each key, as they are typed."""
    plain = plain_of(path)
    parsed = OverridesParser.create().parse_overrides(
        [f"{key}={value}" for key, value in plain["hydra"]["sweeper"]["params"].items()]
    )
    return {override.get_key_element(): list(override.sweep_string_iterator()) for override in parsed}


def larger(path: Path) -> dict[str, list[str]]:
    """The values that a file names for ANDREA's sizes, where they are others."""
    comment = re.sub(r"\n# ", " ", path.read_text(encoding="utf-8"))
    found = re.search(r"Larger: size=andrea_12m or size=andrea_120m (.*?);", comment)
    typed = [part.strip("'").split("=") for part in found[1].split()] if found else []
    return {key: values.strip("[]").split(",") for key, values in typed}


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.stem)
def test_the_decision_is_written_before_the_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    plain, swept = plain_of(path), params(path)
    assert "\n# Rule: " in text and "\n# Larger: size=andrea_12m or size=andrea_120m" in text
    assert plain["tags"] and set(plain["tags"]) <= set(ledger())
    # A rate is chosen on seeds that decide nothing; R-STAB is about the whole grid, at every seed.
    assert ("R-STAB" in text) == ("optim.lr" in swept) == ("lr_grid" not in plain)
    rates = [float(lr) for lr in swept.get("optim.lr") or plain["lr_grid"]]
    assert len(rates) >= 5 and rates == sorted(rates)
    assert {"lr_grid" if "lr_grid" in plain else "optim.lr"} <= set(larger(path))
    assert len(swept["seed"]) >= 5
    assert any(len(values) > 1 for key, values in swept.items() if key not in ("optim.lr", "seed"))


@pytest.mark.slow  # composes and builds some hundred designs
@pytest.mark.parametrize("size", ["nano", "andrea_12m", "andrea_120m"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_arm_can_train(path: Path, size: str) -> None:
    from andrea_ablate.training.identity import check

    swept = params(path) | (larger(path) if size != "nano" else {})
    arms = {key: values for key, values in swept.items() if key not in ("optim.lr", "lr_grid", "seed")}
    for values in product(*arms.values()):
        design = [f"{key}={value}" for key, value in zip(arms, values, strict=True)]
        check(compose(["logger=none", f"experiments={path.stem}", f"size={size}", *design]))


@pytest.mark.slow  # plans every sweep
@pytest.mark.parametrize("path", [path for path in SECTIONS if path.stem != "vocabulary"], ids=lambda path: path.stem)
def test_arms_differ_in_nothing_that_is_not_swept(path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """As the sweep itself asks before it trains. Not for the vocabularies: theirs would have to be learned first."""
    planned: list[tuple[Sequence[Job], Factors]] = []
    monkeypatch.setattr(sweep, "conduct", lambda jobs, name, launch, factors: planned.append((list(jobs), factors)))
    monkeypatch.setattr(sweep, "end", lambda found, folder: None)
    answer = cli(f"experiments={path.stem}", "lr_grid=[]", "optim.lr=1e-3", "seed=0", "data.val_tokens=4096")
    assert answer.status == 0, answer.err
    jobs, factors = planned[0]
    assert len(jobs) > 1 and len({job.run_id for job in jobs}) == len(jobs)
    found = conduct.arm_differences(jobs, jobs, Store(Path(jobs[0].cfg.paths.runs)), factors)
    refuse_undeclared(found, factors.settings.allow_confounds)
