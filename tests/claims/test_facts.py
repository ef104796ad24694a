"""The fact table, and conventions decided from its cells."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from andrea_ablate.choices import _chosen
from andrea_ablate.claims import facts as module
from andrea_ablate.claims.claim import Cell, Claim, Verdict
from andrea_ablate.claims.facts import facts, measure_cells
from andrea_ablate.claims.ledger import ledger
from andrea_ablate.registry import ConfigError

V = Verdict
PLANTED = """model,field,value,source,checked
a,norm,pre,paper A,2026-01-01
b,norm,pre,paper B,2026-01-01
c,norm,post,paper C,2026-01-01
d,norm,pre,from memory,
a,ratio,2.69,config A,2026-01-01
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "facts.csv"
    path.write_text(PLANTED, encoding="utf-8")
    monkeypatch.setattr(module, "TABLE", path)
    facts.cache_clear()
    yield path
    facts.cache_clear()


def decided(*cells: Cell) -> Verdict:
    return measure_cells(Claim("x", "L1", "ffn", "convention", "", "", "", ("R-CONV",), ("CFG",), cells=cells)).verdict


@pytest.mark.parametrize(
    ("cells", "verdict"),
    [
        ([Cell("a", "norm", "pre")], V.SUPPORTED),
        ([Cell("a", "norm", ["post", "pre"])], V.SUPPORTED),
        ([Cell("c", "norm", "pre")], V.CONTRADICTED),
        ([Cell("d", "norm", "pre")], V.UNVERIFIABLE),  # the value agrees, but nobody checked it
        ([Cell("d", "norm", "post")], V.UNVERIFIABLE),
        ([Cell("a", "norm", "pre"), Cell("d", "norm", "pre")], V.UNVERIFIABLE),
        ([Cell("c", "norm", "pre"), Cell("d", "norm", "pre")], V.CONTRADICTED),
        ([Cell("a", "ratio", low=2.6, high=2.7)], V.SUPPORTED),
        ([Cell("a", "ratio", low=2.7, high=3)], V.CONTRADICTED),
        ([Cell("c", "norm", "pre"), Cell("c", "norm", "post", form="corrected")], V.MISSTATED),
        ([Cell("*", "norm", "pre", share=0.5)], V.SUPPORTED),  # two of four for certain
        ([Cell("*", "norm", "pre", share=0.6)], V.UNVERIFIABLE),  # two or three of four
        ([Cell("*", "norm", "pre", share=0.9)], V.CONTRADICTED),
        ([Cell("*", "norm", "pre", among=("a", "b"))], V.SUPPORTED),
    ],
)
def test_a_convention_from_its_cells(planted: Path, cells: list[Cell], verdict: Verdict) -> None:
    assert decided(*cells) is verdict


def test_a_cell_that_is_not_there_is_refused(planted: Path) -> None:
    with pytest.raises(ConfigError, match="no ratio of b"):
        decided(Cell("b", "ratio", 4.0))
    with pytest.raises(ConfigError, match="no norm of e"):
        decided(Cell("*", "norm", "pre", among=("a", "e")))


@pytest.mark.parametrize("row", ["a,norm,post,paper,", "e,norm,pre,,"])
def test_a_cell_twice_or_without_source_is_refused(planted: Path, row: str) -> None:
    planted.write_text(PLANTED + row + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="facts.csv"):
        facts()


def test_the_table_is_well_formed() -> None:
    for fact in facts().values():
        assert not fact.date or date.fromisoformat(fact.date)
        assert fact.source


def test_every_convention_finds_its_cells() -> None:
    for claim in ledger().values():
        if claim.cells:
            assert measure_cells(claim).worded


PRESETS = {
    "transformer2017": "transformer2017",
    "gpt2": "gpt2",
    "bert": "bert",
    "opt_175b": "opt",
    "bloom_176b": "bloom",
    "gpt_j": "gpt_j",
    "gpt_neox_20b": "gpt_neox",
    "falcon_7b": "falcon_7b",
    "falcon_40b": "falcon_40b",
    "palm_540b": "palm",
    "chinchilla": "chinchilla",
    "t5_v1_0": "t5_v1_0",
    "t5_v1_1": "t5_v1_1",
    "llama_7b": "llama",
    "llama3_8b": "llama3",
    "mistral_7b": "mistral",
    "gemma_7b": "gemma",
    "gemma2_2b": "gemma2",
    "gemma3": "gemma3",
    "grok1": "grok1",
    "olmo2_7b": "olmo2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "deepseek_67b": "deepseek",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "smollm3": "smollm3",
    "chameleon_7b": "chameleon",
    "cs336_a1": "cs336_a1",
}


@pytest.mark.parametrize("model", PRESETS)
def test_the_table_agrees_with_the_preset(model: str) -> None:
    chosen = _chosen(PRESETS[model])
    ffn = {"gelu4x": "gelu", "gelu_tanh4x": "gelu", "relu4x": "relu"}
    ours = {
        "norm_position": chosen["norm"][0],
        "norm_type": chosen["norm_type"][0].split("_")[0],
        "activation": ffn.get(chosen["ffn"][0], chosen["ffn"][0]),
        "block": chosen["block"][0].rstrip("2"),
        "qk_norm": "yes" if any(trick.startswith("qk_") for trick in chosen["stability"]) else "no",
    }
    compared = {field: fact.value for (of, field), fact in facts().items() if of == model and field in ours}
    assert compared == {field: ours[field] for field in compared}
