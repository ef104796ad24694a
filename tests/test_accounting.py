"""Counts from the configuration against published numbers, the built model, and torch's own FLOP counter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from andrea_ablate import ops
from andrea_ablate.accounting import account
from andrea_ablate.attention import LatentAttention
from andrea_ablate.composition import compose
from andrea_ablate.config import ModelConfig
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from designs import NODES, design, options


@lru_cache
def of_size(*overrides: str) -> ModelConfig:
    return compose(["logger=none", *overrides]).model


def params(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(config: ModelConfig) -> TransformerLM:
    with torch.device("meta"):
        return TransformerLM(config)


# ---------------------------------------------------------------------------------------------------------------------
# numbers worked by hand


def test_andrea_120m_has_its_published_counts() -> None:
    counts = account(of_size("size=andrea_120m"), 1024)
    norms = (12 * 2 + 1) * 2 * 768  # two per layer and the last, with gain and bias
    assert counts.block_matrices == 12 * 12 * 768**2 == 84_934_656
    assert counts.embedding_params == 2 * 6_488_832 + 1024 * 768
    assert counts.params - norms == 98_698_752
    assert counts.params == 98_737_152
    assert counts.non_embedding_params == 84_934_656 + norms
    tied = account(of_size("size=andrea_120m", "model.tie_embeddings=true"), 1024)
    assert tied.params - norms == 92_209_920
    assert counts.params - tied.params == 8449 * 768 == 6_488_832


@pytest.mark.parametrize(
    ("size", "blocks", "total"),
    [
        ("andrea_12m", 12 * 6 * 384**2, 10_616_832 + 2 * 2305 * 384 + 1024 * 384 + 13 * 2 * 384),
        ("andrea_120m", 84_934_656, 98_737_152),
        ("andrea_480m", 12 * 16 * 1536**2, 452_984_832 + 2 * 8449 * 1536 + 1024 * 1536 + 33 * 2 * 1536),
    ],
)
def test_sizes_by_hand_and_as_built(size: str, blocks: int, total: int) -> None:
    config = of_size(f"size={size}")
    counts = account(config, 1024)
    assert (counts.block_matrices, counts.params) == (blocks, total)
    assert params(on_meta(config)) == total


def test_nano_has_about_a_million_parameters() -> None:
    config = of_size("size=nano")
    assert account(config, 128).params == params(on_meta(config))
    assert 0.7e6 < account(config, 128).params < 1.3e6


def test_a_gated_ffn_of_the_same_ratio_is_half_as_large_again_and_of_8_3_equal() -> None:
    size = ("size=andrea_120m",)

    def ffn_matrices(*overrides: str) -> int:
        return account(of_size(*size, *overrides), 1024).block_matrices - 12 * 4 * 768**2

    dense = ffn_matrices("ffn=gelu4x")
    assert dense == 12 * 8 * 768**2
    assert 2 * ffn_matrices("ffn=swiglu", "model.ffn.ratio=4") == 3 * dense
    assert ffn_matrices("ffn=swiglu") == dense
    flops = [account(of_size(*size, ffn), 1024).flops_forward for ffn in ("ffn=gelu4x", "ffn=geglu")]
    assert flops[0] == flops[1]


def test_flops_by_hand() -> None:
    """Per token: two per weight of the blocks and of the head, and two for each of q k and weights v per position."""
    counts = account(of_size("size=andrea_120m"), 1024)
    assert counts.flops_forward == 2 * (84_934_656 + 6_488_832) + 12 * 2 * (2 * 768 * 1024)
    assert counts.flops_train == 3 * counts.flops_forward


def test_cache_bytes_by_hand() -> None:
    """Keys and values, 12 layers, 12 heads of 64, 1024 positions, 2 bytes: 36 MiB; a fourth of it with three heads."""
    full = account(of_size("size=andrea_120m"), 1024)
    assert full.kv_cache_bytes() == 2 * 12 * 12 * 64 * 1024 * 2 == 36 * 2**20
    assert full.kv_cache_bytes(bytes_per_element=4, batch=5) == 10 * full.kv_cache_bytes()
    for heads in (1, 3, 4):
        shared = account(of_size("size=andrea_120m", f"model.attn.n_kv_heads={heads}"), 1024)
        assert shared.kv_cache_bytes() * 12 == full.kv_cache_bytes() * heads


def test_a_window_bounds_keys_and_cache_by_hand() -> None:
    """Two of three layers see 128 of 1024 tokens: 4 layers of 1024 and 8 of 128, a sixth less than half of all."""
    pattern = "model.layer_pattern=[local,local,global]"
    full = account(of_size("size=andrea_120m"), 1024)
    windowed = account(of_size("size=andrea_120m", pattern, "model.attn.window=128"), 1024)
    assert full.flops_forward - windowed.flops_forward == 8 * 2 * 2 * 768 * (1024 - 128)
    assert windowed.kv_cache_bytes() == 2 * 768 * (4 * 1024 + 8 * 128) * 2 == full.kv_cache_bytes() * 5 // 12
    short = account(of_size("size=andrea_120m", pattern, "model.attn.window=128"), 64)
    assert short == account(of_size("size=andrea_120m"), 64)


def test_the_cache_of_deepseek_v2_by_hand() -> None:
    """512 numbers of latent and 64 of shared key per token and layer, for 128 heads of 128 (its section 2.1.4)."""
    config = design(d_model=5120, n_heads=128, d_head=128, n_layers=60, attn=("mla", {"q_lora_rank": 1536}))
    assert account(config, 10).kv_cache_elements == 60 * 10 * 576
    assert account(design(d_model=5120, n_heads=128, d_head=128, n_layers=60), 10).kv_cache_elements == 60 * 10 * 32768


# ---------------------------------------------------------------------------------------------------------------------
# the built model

DESIGNS: list[dict[str, Any]] = [
    *({group: option} for group in NODES if group != "stability" for option in options(group)),
    *({"stability": (trick,)} for trick in options("stability")),
    {"stability": tuple(options("stability")), "norm": "post", "norm_type": "rmsnorm"},
    {"stability": ("layerscale", "qk_norm_full"), "block": "parallel2", "attn": "gqa2"},
    {"stability": {"qk_layernorm": {"bias": True, "gains": "per_head"}, "layerscale": {}}, "attn": "gqa2"},
    {"tie_embeddings": True, "pos": "learned", "vocab_multiple": 16},
    {"linear_bias": True, "ffn": "swiglu", "attn": "gqa2"},
    {"linear_bias": True, "d_head": 7, "pos": "none", "attn": "mqa", "norm": "double"},
    {"norm_type": "rmsnorm", "norm": {"bias": True}, "stability": ("qk_norm",)},
    {"norm": {"bias": False}, "block": "parallel", "n_layers": 1},
    {"norm": "none", "block": "parallel", "n_layers": 3, "d_model": 24, "n_heads": 3},
    {"attn": {"window": 3}, "ffn": {"ratio": "7/3", "multiple": 5}},
    {"attn": {"window": 3}, "layer_pattern": ["local", "local", "global"], "n_layers": 4},
    {"attn": {"gate": "headwise", "bias": "qkv", "sinks": True}, "pos": ("t5", {"buckets": 8})},
    {"attn": {"gate": "elementwise", "n_kv_heads": 2}, "linear_bias": True, "d_head": 6},
    {"attn": ("mla", {"q_lora_rank": 7, "v_head_dim": 3}), "linear_bias": True, "d_head": 8, "n_heads": 3},
]


@pytest.mark.parametrize("changes", DESIGNS, ids=str)
def test_counts_are_those_of_the_built_model(changes: dict[str, Any]) -> None:
    config = design(**changes)
    model, counts = TransformerLM(config), account(config, 10)
    named = dict(model.named_parameters())
    assert counts.params == params(model)
    embedding = [p for name, p in named.items() if name in ("embedding", "head", "pos.vectors", "pos.bucket_bias")]
    assert counts.embedding_params == sum(p.numel() for p in embedding)
    matrices = [p for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2]
    assert counts.block_matrices == sum(p.numel() for p in matrices)


@pytest.mark.parametrize("changes", DESIGNS, ids=str)
def test_cache_bytes_are_those_of_the_keys_and_values(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the core is given as keys and values in one pass is what a cache would hold."""
    kept: list[torch.Tensor] = []

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if changes.get("attn") != "mla" and not isinstance(changes.get("attn"), tuple):
            kept.extend(t[:, -(kwargs["window"] or 9) :] for t in (k, v))
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))

    def keep_latent(self: LatentAttention, *latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept.extend(latent)
        return expand(self, *latent)

    expand = LatentAttention.expand
    monkeypatch.setattr(LatentAttention, "expand", keep_latent)
    for module in ("multihead", "latent"):
        monkeypatch.setattr(f"andrea_ablate.attention.{module}.attend", watch)
    config = design(**changes)
    TransformerLM(config)(torch.zeros(3, 9, dtype=torch.long))
    stored = sum(t.numel() * t.element_size() for t in kept)
    assert account(config, 9).kv_cache_bytes(bytes_per_element=4, batch=3) == stored


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("changes", DESIGNS, ids=str)
def test_flops_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    config = design(**changes)
    model = TransformerLM(config)
    outside = 0  # scores beyond a window, which eager computes for nothing
    for block in model.blocks:
        block.attn.backend = "eager"  # torch counts matrix products of its own operations only
        window = getattr(block.attn, "window", None)
        if window is not None:
            outside += 2 * 2 * config.n_heads * model.dims.d_head * (11 - window)
    tokens = torch.zeros(3, 11, dtype=torch.long)
    counts = account(config, 11)
    with ops.using("reference"), FlopCounterMode(display=False) as forward:
        sums = model(tokens, tokens)
    assert forward.get_total_flops() == 33 * (counts.flops_forward + outside)
    with FlopCounterMode(display=False) as backward:
        (sums.nll + sums.penalty).backward()
    assert forward.get_total_flops() + backward.get_total_flops() == 33 * (counts.flops_train + 3 * outside)


def test_padding_the_vocabulary_adds_parameters_and_no_flops() -> None:
    plain, padded = account(design(), 8), account(design(vocab_multiple=16), 8)
    assert padded.params - plain.params == 2 * (32 - 23) * 16
    assert padded.flops_forward == plain.flops_forward


@pytest.mark.parametrize("changes", [{"n_heads": 3}, {"attn": {"n_kv_heads": 3}}, {"ffn": {"ratio": 0}}], ids=str)
def test_sizes_that_do_not_fit_cannot_be_counted(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must"):
        account(design(**changes), 8)


def test_counting_takes_neither_memory_nor_time() -> None:
    """A hundred billion parameters, counted from the configuration alone."""
    counts = account(design(d_model=12288, n_layers=96, n_heads=96, vocab_size=50257, max_seq_len=2048), 2048)
    assert counts.block_matrices == 12 * 96 * 12288**2
