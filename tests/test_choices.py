"""The list of choices is made from the registries and YAML files, and the page in docs/ is that list."""

from __future__ import annotations

from pathlib import Path

import pytest

from andrea_ablate.choices import PAGE, choices, diff, main, markdown, registries
from andrea_ablate.registry import ConfigError
from designs import options

ROOT = Path(__file__).parents[1]


def test_every_option_is_listed_once_with_its_formula() -> None:
    listed = [(choice.group, choice.name) for choice in choices()]
    assert sorted(listed) == sorted((group, name) for group in registries() for name in options(group))
    assert len(listed) >= 75
    assert all(choice.formula for choice in choices())


def test_every_registered_class_has_an_option() -> None:
    for group, registry in registries().items():
        if group == "stability":
            assert registry.names() == options(group)
    assert {"attn_softcap", "z_loss"} <= {choice.name for choice in choices()}


def test_sources_are_read_from_the_class_or_its_base() -> None:
    by_name = {f"{choice.group}={choice.name}": choice for choice in choices()}
    assert "arXiv:2408.00118" in by_name["stability=attn_softcap"].source
    assert by_name["norm=post"].source == "arXiv:1706.03762"
    assert by_name["schedule=cosine"].source == "Loshchilov & Hutter 2017, arXiv:1608.03983"


def test_users_are_the_presets_that_choose_it() -> None:
    by_name = {f"{choice.group}={choice.name}": choice.users for choice in choices()}
    assert {"bloom", "mpt"} == {*by_name["pos=alibi"]}
    assert "gemma2" in by_name["stability=attn_softcap"]


def test_a_diff_names_the_choices_then_the_values() -> None:
    rows = diff("gpt2", "llama3")
    assert rows[:3] == [
        ("norm_type", "layernorm", "rmsnorm_llama"),
        ("ffn", "gelu_tanh4x", "swiglu"),
        ("pos", "learned", "rope"),
    ]
    assert ("model.ffn.ratio", "4", "7/2") in rows
    assert ("model.tie_embeddings", "True", "False") in rows
    assert diff("llama2", "mistral") == [("model.attn.n_kv_heads", "1/8", "1/4"), ("model.attn.window", "None", "1/2")]
    assert diff("gpt2", "gpt3") == []
    with pytest.raises(ConfigError, match="did you mean 'llama3'"):
        diff("gpt2", "lama3")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "norm=post" in out and f"{len(choices())} choices" in out
    assert main(["diff", "gpt2", "opt"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["ffn", "gelu_tanh4x", "relu4x"]
    assert main(["diff", "gpt2", "gpt22"]) == 2


def test_what_the_page_says_is_current() -> None:
    """`make lint` writes it anew; a choice that is not on it yet is no fault."""
    page = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    assert set(page) <= set(markdown().splitlines()), "run python -m andrea_ablate.choices --markdown"
    assert len(page) > 75
