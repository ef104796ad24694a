"""Presets: lists of choices that compose at every size, and are the models whose names they have."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
import torch
import yaml

from andrea_ablate.accounting import account
from andrea_ablate.choices import preset_names
from andrea_ablate.composition import choice_options, compose, resource_root
from andrea_ablate.config import ModelConfig, model_dims
from andrea_ablate.convert import config_to_hf
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from support import Cli

# Parameters of published checkpoints, and the sizes that a preset leaves open. Sources: parity/test_published.py, which
# counts them with the public classes.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt1": (116_534_784, {"d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 40478, "max_seq_len": 512}),
    "gpt2": (124_439_808, {"d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 50257, "max_seq_len": 1024}),
    "bloom": (176_247_271_424, {"d_model": 14336, "n_layers": 70, "n_heads": 112, "vocab_size": 250880}),
    "gpt_j": (6_050_882_784, {"d_model": 4096, "n_layers": 28, "n_heads": 16, "vocab_size": 50400}),
    "gpt_neox": (20_554_567_680, {"d_model": 6144, "n_layers": 44, "n_heads": 64, "vocab_size": 50432}),
    "llama": (6_738_415_616, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000, "multiple": 256}),
    "llama2": (68_976_648_192, {"d_model": 8192, "n_layers": 80, "n_heads": 64, "vocab_size": 32000}),
    "llama3": (8_030_261_248, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 128256}),
    "mistral": (7_241_732_096, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000}),
    "falcon_7b": (6_921_720_704, {"d_model": 4544, "n_layers": 32, "n_heads": 71, "vocab_size": 65024}),
    "falcon_40b": (41_303_293_952, {"d_model": 8192, "n_layers": 60, "n_heads": 128, "vocab_size": 65024}),
    "mpt": (6_649_286_656, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432}),
    "gemma": (2_506_172_416, {"d_model": 2048, "n_layers": 18, "n_heads": 8, "vocab_size": 256000}),
    "gemma2": (
        9_241_705_984,
        {"d_model": 3584, "n_layers": 42, "n_heads": 16, "d_head": 256, "vocab_size": 256000},
    ),
    "gemma3": (
        3_880_263_168,
        {"d_model": 2560, "n_layers": 34, "n_heads": 8, "d_head": 256, "vocab_size": 262208},
    ),
    "olmo": (6_888_095_744, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50304, "multiple": 256}),
    "olmo2": (7_298_617_344, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 100352, "multiple": 256}),
    "olmo3": (7_298_011_136, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 100278, "multiple": 256}),
    "cohere": (34_980_831_232, {"d_model": 8192, "n_layers": 40, "n_heads": 64, "vocab_size": 256000}),
    "cohere2": (111_057_580_032, {"d_model": 12288, "n_layers": 64, "n_heads": 96, "vocab_size": 256000}),
    "qwen": (7_721_324_544, {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 151936, "multiple": 256}),
    "qwen2": (7_615_616_512, {"d_model": 3584, "n_layers": 28, "n_heads": 28, "vocab_size": 152064}),
    "qwen3": (8_190_735_360, {"d_model": 4096, "n_layers": 36, "n_heads": 32, "vocab_size": 151936}),
    "phi": (1_418_270_720, {"d_model": 2048, "n_layers": 24, "n_heads": 32, "vocab_size": 51200}),
    "smollm3": (3_075_098_624, {"d_model": 2048, "n_layers": 36, "n_heads": 16, "vocab_size": 128256}),
}
# The family that a preset is exported to.
FAMILY = {
    **{
        name: name for name in ("bloom", "cohere", "cohere2", "gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral")
    },
    **{name: name for name in ("mpt", "olmo", "olmo2", "olmo3", "opt", "phi", "qwen2", "qwen3", "smollm3")},
    **{"gpt1": "openai-gpt", "gpt3": "gpt2", "gpt_j": "gptj", "gemma3": "gemma3_text", "deepseek": "llama"},
    **{"llama2": "llama", "llama3": "llama", "falcon_7b": "falcon", "falcon_40b": "falcon", "cs336_a1": "llama"},
    **{"qwen": "qwen2"},
}


@lru_cache
def preset(name: str, *overrides: str, size: str = "tiny") -> ModelConfig:
    return compose([f"preset={name}", f"size={size}", "logger=none", *overrides]).model


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_takes_a_step(name: str) -> None:
    model = TransformerLM(preset(name))
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(0))
    sums = model(tokens[:, :-1], tokens[:, 1:])
    (sums.nll / sums.n_tokens).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_chooses_in_every_group_of_the_architecture(name: str) -> None:
    plain = yaml.safe_load((resource_root() / "conf" / "preset" / f"{name}.yaml").read_text())
    groups = [key for entry in plain["defaults"] for key in entry]
    wanted = ("norm", "block", "norm_type", "ffn", "pos", "attn", "stability")
    assert groups == [f"override /{group}" for group in wanted]
    assert plain.keys() <= {"defaults", "model"}


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("name", PUBLISHED)
def test_at_its_published_size_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    params, sizes = PUBLISHED[name]
    given = [f"model.{'ffn.' if key == 'multiple' else ''}{key}={value}" for key, value in sizes.items()]
    assert account(preset(name, *given), 8).params == params


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("name", FAMILY)
def test_a_preset_is_a_model_of_its_family(name: str) -> None:
    assert config_to_hf(preset(name), FAMILY[name])["model_type"] == FAMILY[name]


@pytest.mark.parametrize(("size", "heads"), [("nano", (4, 1)), ("andrea_12m", (12, 3)), ("andrea_480m", (24, 6))])
def test_proportions_follow_the_size(size: str, heads: tuple[int, int]) -> None:
    model = preset("mistral", "data.tokenizer.vocab_size=300", size=size)
    dims = model_dims(model)
    assert (dims.n_heads, dims.n_kv_heads) == heads
    assert model.attn["window"] == dims.max_seq_len // 2
    assert model.pos["type"] == "rope"  # the andrea sizes choose learned positions; a preset comes after them


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.attn.n_kv_heads=1/2", "n_kv_heads", 2),
        ("model.attn.n_kv_heads=3/4", "n_kv_heads", 2),  # three does not divide four
        ("model.attn.n_kv_heads=1/100", "n_kv_heads", 1),
        ("model.attn.n_kv_heads=2", "n_kv_heads", 2),
        ("model.attn.window=1/4", "window", 8),
    ],
)
def test_fractions_become_whole_numbers(override: str, key: str, value: int) -> None:
    assert compose(["size=tiny", "logger=none", override]).model.attn[key] == value


@pytest.mark.parametrize("value", ["5/4", "0/4", "-1/4", "1/0"])
def test_fractions_outside_one_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"n_kv_heads={re.escape(value)} must be a whole number or a fraction"):
        compose(["size=tiny", "logger=none", f"model.attn.n_kv_heads={value}"])


def test_what_the_user_gives_wins_over_the_preset() -> None:
    assert preset("llama3", "norm=post").block["norm_position"] == "post"
    assert preset("llama3", "model.ffn.ratio=3").ffn["ratio"] == 3
    assert preset("llama3", "model.tie_embeddings=true").tie_embeddings


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_another_option_comes_with_its_own_values_not_the_presets() -> None:
    assert preset("llama3").ffn["ratio"] == "7/2"
    assert preset("llama3", "ffn=gelu4x").ffn["ratio"] == 4
    assert preset("llama3", "ffn=gelu4x", "model.ffn.ratio=5").ffn["ratio"] == 5
    assert preset("llama3", "pos=learned").pos == {"type": "learned"}
    assert preset("llama3", "attn=mha").attn["n_kv_heads"] is None
    assert preset("grok1", "stability=[]").stability == {}
    assert preset("grok1", "stability=[attn_softcap]").stability == {"attn_softcap": {"cap": 30.0}}
    assert preset("grok1", "stability=[]", "model.stability.attn_softcap.cap=5").stability["attn_softcap"]["cap"] == 5


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_sweep_over_presets_with_another_choice(cli: Cli) -> None:
    answer = cli("-m", "preset=llama3,gpt2", "ffn=relu2", "trainer.tokens=128")
    assert answer.status == 0, answer.err
    for text in ("llama3", "gpt2"):
        assert text in answer.out


def test_an_unknown_preset_is_named(cli: Cli) -> None:
    answer = cli("preset=lama3")
    assert answer.status == 2
    assert "did you mean 'llama3'" in answer.err


def test_a_preset_says_where_it_comes_from() -> None:
    for name in preset_names():
        text = (resource_root() / "conf" / "preset" / f"{name}.yaml").read_text()
        assert text.splitlines()[1].startswith("# "), name
    assert all(option.group != "preset" for option in choice_options())
