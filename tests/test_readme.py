"""The README's figures are those of the sources and of the committed records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from andrea_ablate.accounting import account
from andrea_ablate.composition import compose

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", ["nano", "andrea_12m", "andrea_120m", "andrea_480m"])
def test_size_table_is_counted(size: str) -> None:
    cfg = compose([f"size={size}"])
    model, params = cfg.model, account(cfg.model, cfg.data.seq_len).params
    shape = f"{model.d_model}, {model.n_layers}, {model.n_heads}"
    assert f"| `{size}` | {params:,} | {shape} | {cfg.data.seq_len} | {model.vocab_size} |" in README


def test_result_table_is_the_committed_one() -> None:
    table = (ROOT / "experiments/results/main.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 6
    assert "\n".join(rows) in README


def test_nano_recipe_is_near_the_best_of_its_grid() -> None:
    tuned = json.loads((ROOT / "experiments/results/tune_nano.json").read_text(encoding="utf-8"))
    recipe = compose([])
    assert tuned["tokens"] == recipe.trainer.tokens
    assert len(tuned["designs"]) == 4
    for design in tuned["designs"].values():
        best = min(point["val_loss"] for point in design["grid"] if point["val_loss"] is not None)
        assert design["recipe"]["lr"] == recipe.optim["lr"]
        assert design["recipe"]["val_loss"] - best <= 0.05


def test_readme_commands_exist() -> None:
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"ablate", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
