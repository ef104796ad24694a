"""Folders in and out, and what is refused, by name. No other library needed; the families themselves: tests/parity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from andrea_ablate.convert import FAMILIES, config_from_hf, config_to_hf, weights_to_hf
from andrea_ablate.convert.__main__ import main
from andrea_ablate.convert.folder import read_hf, read_ours, write_hf, write_ours
from andrea_ablate.convert.keys import flatten, unflatten
from andrea_ablate.data.tokenizers import Bytes
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from designs import design

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 12,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
TOKENS = torch.arange(9).view(1, 9)


def llama_design(**changes: Any) -> Any:
    return design(norm_type="rmsnorm_llama", ffn="swiglu", attn="gqa2", **changes)


def write_llama(folder: Path, **changes: Any) -> TransformerLM:
    config, _ = config_from_hf({**LLAMA, **changes})
    model = TransformerLM(config)
    write_hf(folder, config, model.state_dict(), "llama")
    return model


def test_a_folder_there_and_back(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    config, weights = read_hf(tmp_path)
    again = TransformerLM(config)
    again.load_state_dict(weights)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_our_own_folder_there_and_back(tmp_path: Path) -> None:
    config = llama_design(stability=("qk_norm",), tie_embeddings=True)
    model = TransformerLM(config)
    write_ours(tmp_path, config, model.state_dict())
    found, weights = read_ours(tmp_path)
    assert found == config
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_weights_in_several_files_and_without_the_head(tmp_path: Path) -> None:
    model = write_llama(tmp_path, tie_word_embeddings=True)
    tensors = {name.removeprefix("model."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    config, weights = read_hf(tmp_path)
    again = TransformerLM(config)
    again.load_state_dict(weights)
    assert again.head is None
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_low_precision_is_read_as_fp32(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(path).items()}, path)
    _, weights = read_hf(tmp_path)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    assert torch.equal(weights["embedding"], model.embedding.bfloat16().float())


def test_the_padding_of_a_vocabulary_is_not_written(tmp_path: Path) -> None:
    config = llama_design(vocab_multiple=8)
    model = TransformerLM(config)
    write_hf(tmp_path, config, model.state_dict(), "llama")
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape == (23, 16)


def test_a_design_with_neighbours_paired_becomes_a_llama(tmp_path: Path) -> None:
    """Our default pairing is not Llama's: queries and keys are permuted, the function stays."""
    config = llama_design(vocab_multiple=8)
    model = TransformerLM(config)
    write_hf(tmp_path, config, model.state_dict(), "llama")
    found, weights = read_hf(tmp_path)
    assert (config.pos["pairing"], found.pos["pairing"]) == ("interleaved", "half")
    again = TransformerLM(found)
    again.load_state_dict(weights)
    torch.testing.assert_close(again(TOKENS), model(TOKENS))


def test_a_design_without_biases_gets_zeros_where_the_family_has_them(tmp_path: Path) -> None:
    config = design()  # what a run chooses by default: GPT-NeoX without its parallel blocks
    model = TransformerLM(config)
    write_hf(tmp_path, config, model.state_dict(), "gpt_neox")
    found, weights = read_hf(tmp_path)
    assert (found.linear_bias, found.attn["bias"]) == (True, "none")
    again = TransformerLM(found)
    again.load_state_dict(weights)
    torch.testing.assert_close(again(TOKENS), model(TOKENS))
    assert (weights["blocks.0.ffn.up_bias"] == 0).all()


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin may run code .* safetensors"):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "nothing for final_norm.gain"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "no place for model.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"final_norm.gain is \(3,\), not \(16,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    write_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_act": "gelu_10"}, "hidden_act=gelu_10 has no choice here"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type=proportional has no choice here"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale=1.0 of rope"),
        ({"model_type": "mpt"}, "config.json has no 'd_model'"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv=8.0 has no choice here, only None"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1}, "1 layers after them are mixtures of experts"),
        ({"model_type": "falcon", "alibi": True}, "alibi=True has no choice here, only False"),
    ],
)
def test_configurations_without_a_choice_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**LLAMA, **keys})


def test_everything_refused_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="hidden_act=mish .*rope_type=odd"):
        config_from_hf({**LLAMA, "hidden_act": "mish", "rope_scaling": {"type": "odd"}})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"norm_type": "layernorm"}, "model.norm.type=layernorm cannot be expressed, only rmsnorm_llama"),
        ("llama", {"norm": "post"}, "model.block.norm_position=post cannot be expressed, only pre"),
        ("llama", {"ffn": "relu2"}, "model.ffn.type=dense cannot be expressed, only gated"),
        ("llama", {"attn": {"window": 3}}, "llama cannot express model.attn.window=3"),
        ("llama", {"attn": {"sinks": True}}, "llama cannot express model.attn.sinks=True"),
        ("llama", {"stability": ("qk_norm",)}, "llama cannot express model.stability.qk_norm.eps"),
        ("llama", {"stability": ("embedding_scale",)}, "llama cannot express model.stability.embedding_scale.factor"),
        ("llama", {"scaling": "ntk"}, "model.scaling.type=ntk cannot be expressed"),
        ("qwen3", {}, "needs model.stability.qk_norm.eps, which this design does not have"),
        ("mistral", {"attn": {"window": 3}, "layer_pattern": ["local", "global"]}, "model.kinds="),
        ("gpt2", {}, "model.attn.n_kv_heads=2 cannot be expressed, only 4"),
    ],
)
def test_designs_a_family_cannot_express_are_refused_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    given = {"norm_type": "rmsnorm_llama", "ffn": "swiglu", "attn": ("gqa2", {}), **changes}
    if isinstance(given["attn"], dict):
        given["attn"] = ("gqa2", given["attn"])
    with pytest.raises(ConfigError, match=message):
        config_to_hf(design(**given), family)


def test_keys_that_nobody_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llama(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_chunk_size": 7, "use_cache": True}))
    read_hf(tmp_path)
    assert "not read: attention_chunk_size" in caplog.text


def test_the_older_form_of_rope_is_read() -> None:
    older = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3}}
    config, _ = config_from_hf({**LLAMA, **older})
    newer = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 3}
    assert config == config_from_hf({**LLAMA, "rope_parameters": newer})[0]
    assert (config.scaling["type"], config.scaling["original_len"], config.pos["theta"]) == ("yarn", 3, 500000.0)


OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # keys as in files on the Hub from before their names were unified, and what they mean
    "falcon": (
        {"model_type": "falcon", "n_embed": 16, "n_layer": 2, "n_head": 4, "multi_query": True, "alibi": False},
        {"d_model": 16, "n_layers": 2, "n_heads": 4, "attn.n_kv_heads": 1, "block.type": "parallel"},
    ),
    "bloom": (
        {"model_type": "bloom", "n_embed": 16, "num_attention_heads": 4, "n_layer": 2, "seq_length": 9},
        {"d_model": 16, "n_heads": 4, "max_seq_len": 9, "d_ff": 64, "pos.type": "alibi"},
    ),
    "gemma3_text": (
        {**LLAMA, "model_type": "gemma3_text", "rope_local_base_freq": 10.0, "sliding_window": 4, "head_dim": 4}
        | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 4, "hidden_activation": "gelu_pytorch_tanh"},
        {"pos.theta": 500000.0, "pos.local_theta": 10.0, "kinds": ["local", "global"], "attn.window": 4},
    ),
    "gpt_neox": (
        {"model_type": "gpt_neox", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"intermediate_size": 24, "max_position_embeddings": 12, "rotary_pct": 0.5, "rotary_emb_base": 100.0},
        {"pos.rotary_fraction": 0.5, "pos.theta": 100.0, "block.type": "parallel2"},
    ),
    "qwen2": (
        {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1},
        {"attn.window": None, "attn.bias": "qkv", "kinds": ["local", "local"]},
    ),
    "gptj": (
        {"model_type": "gptj", "n_embd": 88, "n_layer": 1, "n_head": 2, "n_positions": 9, "rotary_dim": 30},
        {"pos.rotary_fraction": pytest.approx(30 / 44), "head_bias": True, "attn.bias": "none"},
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_configurations_as_they_were_once_written(name: str) -> None:
    hf, meant = OLDER[name]
    config, _ = config_from_hf({"vocab_size": 23, **hf})
    flat = flatten(config)
    assert {key: flat[key] for key in meant} == meant
    TransformerLM(config)


def test_what_mup_multiplies_goes_with_the_design() -> None:
    config = llama_design(init="mup", d_model=256)
    with pytest.raises(
        ConfigError, match=r"llama cannot express model.attn.scale=0.015625.*logit_multiplier.factor=0.5"
    ):
        config_to_hf(config, "llama")
    written = config_to_hf(config, "granite")
    assert (written["attention_multiplier"], written["logits_scaling"]) == (1 / 64, 2.0)


def test_flatten_and_back_is_the_same_model() -> None:
    config = llama_design(layer_pattern=["local", "global"], linear_bias=True, n_layers=3)
    config = replace(config, attn={**config.attn, "window": 3})
    flat = flatten(config)
    assert flatten(unflatten(flat)) == flat
    assert flat["kinds"] == ["local", "global", "local"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_is_of_some_form_of_its_family(family: str) -> None:
    """Names are unique on their side, and both sides speak of layers together."""
    rules = FAMILIES[family].rules
    for rule in rules:
        assert all(("{i}" in name) == ("{i}" in rule.hf) for name in rule.ours)
    assert len({(rule.hf, rule.ours) for rule in rules}) == len(rules)


def test_the_command_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(str(Bytes().to_json()))
    assert main([str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "llama"]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert main([str(tmp_path / "ours"), str(tmp_path / "no"), "--to", "gpt2"]) == 2
    assert "gpt2" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["--list"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_a_tensor_without_a_place_is_not_lost() -> None:
    config = llama_design()
    weights = TransformerLM(config).state_dict()
    assert len(weights_to_hf(config, "llama", weights)) == len(weights)
