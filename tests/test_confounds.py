"""The guard against confounds: planted differences in plain mappings, then what a command says and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from andrea_ablate.composition import declared_by
from andrea_ablate.confounds import ABSENT, Difference, differences, refuse_undeclared
from andrea_ablate.registry import ConfigError
from andrea_ablate.training.facts import facts
from support import Cli, Compose

SETTINGS: dict[str, Any] = {
    "model.d_model": 32, "model.n_layers": 2, "model.init.type": "gpt2", "model.norm.type": "layernorm",
    "model.ffn.type": "dense", "model.ffn.ratio": 4, "trainer.precision": "32-true", "data.seq_len": 32,
    "model.max_seq_len": 32, "optim.decay_embeddings": False,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "d_ff": 128, "warmup_steps": 10, "ops_path": "compiled", "versions.torch": "2.13",
    "initial_scale.blocks.0.ffn.w_down 32x128": 0.01, "decay.embedding 257x32": False,
}  # fmt: skip


def found(
    other: dict[str, Any], declared: dict[str, str] | None = None, computed: dict[str, Any] | None = None
) -> dict[str, tuple[str, ...]]:
    """The keys in which a second arm with these values differs from the first, with the factors that explain them."""
    settings = {"a": SETTINGS, "b": {**SETTINGS, **{k: v for k, v in other.items() if k not in FACTS}}}
    known = {"a": FACTS, "b": {**FACTS, **{k: v for k, v in other.items() if k in FACTS}}}
    args = (settings, known, declared or {}, *([computed] if computed is not None else []))
    return {item.key: item.factors for item in differences(*args)}


@pytest.mark.parametrize(("key", "value"), [(key, f"not {value}") for key, value in (SETTINGS | FACTS).items()])
def test_a_planted_difference_is_found_and_refused(key: str, value: Any) -> None:
    assert found({key: value}) == {key: ()}
    item = Difference(key, {"a": 1, "b": value}, ())
    with pytest.raises(ConfigError) as refusal:
        refuse_undeclared([item], [])
    assert f"differ in {key}: 1, {value}" in str(refusal.value) and f"allow_confounds=[{key}]" in str(refusal.value)
    refuse_undeclared([item], ["x", key])
    refuse_undeclared([item], [key.split(".")[0]])
    refuse_undeclared([Difference(key, item.values, ("norm",))], [])


def test_equal_arms_differ_in_nothing_and_equal_numbers_are_one_value() -> None:
    assert found({}) == {} and found({"model.ffn.ratio": 4.0}) == {}


def test_what_a_factor_declares_explains_what_is_computed_from_it_and_nothing_else() -> None:
    swiglu = {"model.ffn.type": "gated", "model.ffn.ratio": "8/3", "d_ff": 88}
    declared = dict.fromkeys(("model.ffn.type", "model.ffn.ratio", "ffn"), "ffn")
    assert found(swiglu, declared) == dict.fromkeys(swiglu, ("ffn",))
    # A smuggled learning schedule, initial scale or decay beside it stays undeclared.
    for key in ("warmup_steps", "initial_scale.blocks.0.ffn.w_down 32x128", "decay.embedding 257x32", "ops_path"):
        assert found({**swiglu, key: "other"}, declared)[key] == ()
    # So does a d_ff that changes though neither the ffn nor the width does.
    assert found({"d_ff": 88, "model.norm.type": "rmsnorm"}, {"model.norm": "norm_type"})["d_ff"] == ()


def test_a_swept_key_is_not_listed_itself_and_what_refers_to_it_is_explained() -> None:
    longer = {"data.seq_len": 64, "model.max_seq_len": 64, "warmup_steps": 5}
    declared = {"data.seq_len": "data.seq_len"}
    computed = {"model.max_seq_len": ("data.seq_len",), "warmup_steps": ("model.max_seq_len",)}
    assert found(longer, declared, computed) == {
        "model.max_seq_len": ("data.seq_len",), "warmup_steps": ("data.seq_len",),
    }  # fmt: skip
    assert found(longer, declared, {})["model.max_seq_len"] == ()
    # Keys that refer to each other explain nothing.
    assert found({"d_ff": 1, "warmup_steps": 1}, {}, {"d_ff": ("warmup_steps",), "warmup_steps": ("d_ff",)}) == {
        "d_ff": (), "warmup_steps": (),
    }  # fmt: skip


def test_two_factors_are_both_named() -> None:
    both = {"model.d_model": 64, "model.ffn.ratio": 2, "d_ff": 127}
    declared = {"model.d_model": "model.d_model", "model.ffn.ratio": "ffn"}
    assert found(both, declared)["d_ff"] == ("ffn", "model.d_model")


def test_a_setting_that_one_arm_has_is_a_difference_and_a_fact_is_none() -> None:
    (item,) = differences({"a": {}, "b": {"model.stability.z_loss.weight": 1e-4}}, {"a": {}, "b": {"d_ff": 1}}, {})
    assert item.key == "model.stability.z_loss.weight" and item.values == {"a": ABSENT, "b": 1e-4}


def test_long_lists_of_values_are_cut() -> None:
    item = Difference("optim.lr", {str(n): n % 6 for n in range(9)}, ())
    assert str(item) == "optim.lr: 0, 1, 2, 3, 2 more"


def test_the_facts_are_those_of_the_formulas(tiny: Compose) -> None:
    known = facts(tiny("init=gpt2", "model.n_layers=3", "optim.decay_embeddings=true"))
    scale = {key: value for key, value in known.items() if key.startswith("initial_scale.")}
    assert scale["initial_scale.embedding 257x32"] == 0.02
    assert scale["initial_scale.blocks.0.ffn.w_down 32x128"] == pytest.approx(0.02 / 6**0.5)
    assert scale["initial_scale.blocks.0.ffn.w_up 128x32"] == 0.02
    assert known["decay.embedding 257x32"] and known["decay.blocks.0.ffn.w_up 128x32"]
    assert not any(value for key, value in known.items() if key.startswith("decay.") and key.endswith("gain 32"))
    assert (known["d_ff"], known["d_head"], known["total_steps"], known["warmup_steps"]) == (128, 8, 10, 1)
    assert not any(".blocks.1." in key for key in known)


def test_an_option_declares_its_own_keys_and_those_of_the_options_it_chooses() -> None:
    assert declared_by("norm", ["pre", "post"]) == ["model.block.norm_position"] * 2
    assert set(declared_by("ffn", ["swiglu"])) == {
        f"model.ffn.{k}" for k in ("type", "activation", "ratio", "multiple")
    }
    assert declared_by("stability", ["qk_norm"]) == ["model.stability.qk_norm.eps", "model.stability.qk_norm.cast"]
    nano = declared_by("size", ["nano"])
    assert {"model.d_model", "optim.lr", "trainer.tokens", "model.init.type"} <= set(nano)
    assert declared_by("optim.lr", ["1e-3"]) == []


# --- the command line


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_the_plan_lists_what_follows_from_the_factors(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea_ablate.sweep.AblateSweeper._launch", lambda *_: {})
    answer = cli("-m", "ffn=gelu4x,swiglu", "stability=[],[z_loss]", "data.seq_len=16,32")
    listed = answer.out[answer.out.index("The arms differ") : answer.out.index("validation loss")].splitlines()[1:]
    assert answer.status == 1 and "not declared" not in answer.out
    assert "  d_ff: 128, 88 (from ffn)" in listed and "  model.max_seq_len: 16, 32 (from data.seq_len)" in listed
    assert any(line.startswith("  model.stability.z_loss.") and "absent" in line for line in listed)
    assert any(line.startswith("  total_steps: ") and line.endswith("(from data.seq_len)") for line in listed)
    assert not any(line.startswith("  data.seq_len:") for line in listed)


def test_a_matched_size_is_declared_by_the_match(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea_ablate.sweep.AblateSweeper._launch", lambda *_: {})
    answer = cli("-m", "attn=mha,mqa", "match=params")
    assert "  d_ff: 128, 152 (from match=params)" in answer.out.splitlines()


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_arms_trained_with_other_versions_are_not_compared_unasked(tmp_path: Path, cli: Cli) -> None:
    short = "trainer.tokens=128"
    assert cli("norm=pre", "seed=0", short).status == 0
    (path,) = tmp_path.glob("runs/*/record.json")
    record = json.loads(path.read_text())
    current = record["versions"]["torch"]
    record["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(record))
    refused = cli("-m", "norm=pre,post", short)
    assert refused.status == 2 and len(list(tmp_path.glob("runs/*"))) == 1
    assert f"the arms differ in versions.torch: 1.0, {current}, which nothing that is swept declares" in refused.err
    assert "allow_confounds=[versions.torch]" in refused.err
    assert f"  versions.torch: 1.0, {current} (not declared)" in refused.out.splitlines()
    assert cli("-m", "norm=pre,post", short, "allow_confounds=[versions]").status == 0
