"""The assembled model against a float64 NumPy transformer, and what must hold for any design."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from andrea_ablate.config import ModelConfig
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from designs import NODES, design, options
from oracles import transformer as oracle


def random_model(config: ModelConfig) -> TransformerLM:
    """In fp64, with gains and biases that are not one and zero."""
    model = TransformerLM(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.dim() > 1
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * (0.4 if wide else 0.5) + (0 if wide else 1))
    return model


def arrays(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


MLA = {"q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 3}
PARTS = [{group: option} for group in NODES if group not in ("stability", "init") for option in options(group)]
DESIGNS: list[dict[str, Any]] = [
    *PARTS,
    *({"stability": (trick,)} for trick in options("stability")),
    {"tie_embeddings": True, "linear_bias": True, "head_bias": True, "vocab_multiple": 8},
    {"d_head": 6, "attn": "gqa2", "vocab_multiple": 16},
    {"attn": {"window": 3, "scale": 0.1}, "pos": {"theta": 30.0, "pairing": "half"}},
    {"attn": {"window": 2, "backend": "eager"}, "norm": "double", "ffn": "swiglu", "linear_bias": True},
    {"norm": "none", "block": "parallel", "ffn": "geglu", "attn": "mqa", "pos": "none"},
    {"norm": "post", "norm_type": "rmsnorm", "pos": "sine", "stability": {"qk_norm": {}, "output_softcap": {"cap": 1}}},
    {"norm": "output", "pos": "learned", "stability": {"qk_norm": {}, "attn_softcap": {"cap": 1.5}}, "attn": "gqa2"},
    {"layer_pattern": ["local", "global"], "attn": {"window": 3}, "n_layers": 3, "pos": {"rotated": "local"}},
    {
        "layer_pattern": ["local", "local", "global"],
        "n_layers": 5,
        "attn": {"window": 4},
        "pos": {"theta": 1e6, "local_theta": 20.0, "scaled": "global", "rotary_fraction": 0.5, "pairing": "half"},
        "scaling": ("yarn", {"original_len": 5}),
        "d_head": 8,
    },
    {"pos": "alibi", "n_heads": 6, "d_head": 4, "attn": {"window": 4, "n_kv_heads": 2}, "stability": ("attn_softcap",)},
    {"pos": ("t5", {"buckets": 4, "max_distance": 5}), "attn": {"scale": 1.0, "sinks": True}},
    {"pos": ("t5", {"buckets": 8, "max_distance": 5}), "attn": {"causal": False}},
    {"attn": {"causal": False, "gate": "headwise"}, "linear_bias": True},
    {"attn": {"sinks": True, "gate": "elementwise", "bias": "qkv", "n_kv_heads": 2}, "d_head": 6},
    {"attn": {"bias": "none"}, "linear_bias": True, "norm": "post"},
    {
        "norm": "deepnorm",
        "pos": "sine",
        "stability": ("embedding_scale", "embedding_norm", "qk_norm_full"),
        "attn": "gqa2",
    },
    {"block": "parallel2", "linear_bias": True, "stability": {"qk_layernorm": {"bias": True}, "layerscale": {}}},
    {"block": "no_residual", "linear_bias": True, "stability": {"residual_multiplier": {}}},
    {
        "block": "parallel",
        "stability": {"residual_multiplier": {}, "logit_multiplier": {}, "output_softcap": {"cap": 1}},
    },
    {"attn": ("mla", MLA), "linear_bias": True, "n_heads": 3, "d_head": 5, "pos": {"pairing": "half"}},
    {"attn": ("mla", {"v_head_dim": 6, "scale": 0.3}), "pos": "learned", "stability": ("attn_softcap",)},
    {
        "attn": ("mla", {"backend": "fused", "v_head_dim": 6}),
        "pos": {"rotated": "global"},
        "layer_pattern": ["local", "global"],
    },
    {"d_model": 15, "n_heads": 3, "d_head": 4, "ffn": {"ratio": "7/3"}, "n_layers": 3},
]


@pytest.mark.parametrize("changes", DESIGNS, ids=str)
def test_logits_match_a_float64_transformer(changes: dict[str, Any]) -> None:
    config = design(**changes)
    model = random_model(config)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 23, (2, 7), generator=generator)
    key_mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    for mask in (None, key_mask):
        want = oracle.logits(arrays(model), asdict(config), tokens.numpy(), None if mask is None else mask.numpy())
        torch.testing.assert_close(model(tokens, None, mask), torch.from_numpy(want), rtol=1e-9, atol=1e-9)


def test_with_targets_the_model_returns_its_loss() -> None:
    model = TransformerLM(design(("z_loss",)))
    tokens, targets = torch.randint(0, 23, (2, 2, 7))
    logits, got = model(tokens).double(), model(tokens, targets)
    z = logits.logsumexp(-1)
    nll = (z - logits.gather(-1, targets[..., None]).squeeze(-1)).sum()
    assert got.nll.item() == pytest.approx(nll.item(), rel=1e-6)
    assert got.penalty.item() == pytest.approx(1e-4 * z.square().sum().item(), rel=1e-6)
    assert got.n_tokens == 14


@pytest.mark.parametrize("block", options("block"))
def test_dropout_acts_in_training_only_and_at_the_configured_places(block: str) -> None:
    dropped, plain = TransformerLM(design(block=block, dropout=0.5)), TransformerLM(design(block=block))
    tokens = torch.arange(10).view(1, 10)
    assert not torch.equal(dropped(tokens), dropped(tokens))
    dropped.eval()
    assert torch.equal(dropped(tokens), dropped(tokens))
    assert torch.equal(dropped(tokens), plain(tokens))
    assert dropped.blocks[0].attn.dropout == 0.5
    dropped.train()
    for place in ("embedding", "attention", "branches"):  # one at a time
        dropped.dropout = 0.5 * (place == "embedding")
        for each in dropped.blocks:
            each.attn.dropout, each.drop.p = 0.5 * (place == "attention"), 0.5 * (place == "branches")
        assert not torch.equal(dropped(tokens), dropped(tokens)), place


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", options("norm"))
@pytest.mark.parametrize("norm_type", options("norm_type"))
def test_autocast_stays_close_to_full_precision(dtype: torch.dtype, norm: str, norm_type: str) -> None:
    model = TransformerLM(design(("qk_norm",), norm=norm, norm_type=norm_type))
    tokens = torch.arange(10).view(1, 10)
    with torch.autocast("cpu", dtype):
        low = model(tokens, tokens)
    assert low.nll.dtype == torch.float32
    assert low.nll.item() == pytest.approx(model(tokens, tokens).nll.item(), rel=1e-3)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {"pos": "alibi", "attn": {"gate": "elementwise"}},
        {"pos": "t5", "attn": {"sinks": True}},
        {"pos": "t5", "attn": {"backend": "sdpa"}},
        {"attn": {"causal": False}},
        {"attn": ("mla", {"q_lora_rank": 8}), "scaling": "yarn"},
    ],
    ids=str,
)
def test_autocast_stays_close_for_every_kind_of_attention(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model = TransformerLM(design(**changes))
    tokens = torch.arange(10).view(1, 10)
    with torch.autocast("cpu", dtype):
        low = model(tokens, tokens)
    low.nll.backward()
    assert low.nll.item() == pytest.approx(model(tokens, tokens).nll.item(), rel=1e-3)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    "changes",
    [
        {"stability": ("qk_norm",), "ffn": "swiglu", "norm": "double", "norm_type": "rmsnorm"},
        {"pos": {"rotated": "local", "local_theta": 50.0}, "layer_pattern": ["local", "global"], "attn": {"window": 3}},
        {"pos": "alibi", "attn": {"gate": "headwise"}},
        {"pos": "t5", "attn": {"sinks": True}},
        {"attn": {"causal": False}},
        {"attn": "mla", "scaling": "dynamic_ntk", "max_seq_len": 6},
        {
            "stability": ("qk_norm_full", "embedding_norm", "layerscale"),
            "ffn": "glu",
            "norm": "deepnorm",
            "init": "mup",
        },
        {"stability": ("qk_layernorm", "logit_multiplier"), "norm": "depth_scaled", "norm_type": "scalenorm"},
        {"stability": ("embedding_scale", "residual_multiplier"), "block": "parallel2", "norm_type": "dyt"},
    ],
    ids=str,
)
def test_the_model_is_one_graph_for_the_compiler(changes: dict[str, Any]) -> None:
    torch._dynamo.reset()  # forms of the cases before count towards its limit
    model = TransformerLM(design(**changes))
    names = set(model.state_dict())
    tokens = torch.randint(0, 23, (2, 8))
    want = model(tokens, tokens)
    torch.compiler.reset()  # it counts the graphs of all tests, and stops at eight
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(tokens, tokens).nll, want.nll)
    assert set(model.state_dict()) == names


# ---------------------------------------------------------------------------------------------------------------------
# tied embeddings


def is_tied(model: TransformerLM) -> bool:
    """Whether a change of the embedding alone changes the output projection, with nothing left over."""
    x = torch.ones(1, 1, 16, dtype=model.embedding.dtype)
    before = model.logits(x)
    with torch.no_grad():
        model.embedding.add_(1)
    moved = bool((model.logits(x) - before > 10).all())
    with torch.no_grad():
        model.embedding.sub_(1)
    return moved and not any("head" in name for name in (*model.state_dict(), *dict(model.named_parameters())))


def test_tied_weights_are_one_parameter_whatever_happens_to_the_model() -> None:
    config = design(tie_embeddings=True)
    model = TransformerLM(config)
    assert is_tied(model)
    assert not is_tied(TransformerLM(design()))
    assert is_tied(copy.deepcopy(model))
    compiled = TransformerLM(config)
    compiled.compile(backend="eager")
    tokens = torch.arange(10).view(1, 10)
    compiled(tokens, tokens).nll.backward()
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    assert is_tied(compiled)

    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    for assign in (False, True):
        loaded = TransformerLM(config, init_seed=1)
        loaded.load_state_dict(state, strict=True, assign=assign)
        assert is_tied(loaded)
        assert torch.equal(loaded.embedding, model.embedding)

    with torch.device("meta"):
        empty = TransformerLM(config)
    empty.to_empty(device="cpu")
    empty.load_state_dict(state, strict=True)
    assert is_tied(empty)
    assert torch.equal(empty(tokens), model(tokens))


def test_a_step_moves_tied_weights_by_the_gradients_of_both_uses() -> None:
    tied, untied = TransformerLM(design(tie_embeddings=True)).double(), TransformerLM(design()).double()
    with torch.no_grad():
        untied.load_state_dict({**tied.state_dict(), "head": tied.embedding})
    tokens = torch.arange(10).view(1, 10)
    for model in (tied, untied):
        model(tokens, tokens.roll(1)).nll.backward()
    assert untied.head is not None
    both = untied.embedding.grad + untied.head.grad  # type: ignore[operator]
    torch.testing.assert_close(tied.embedding.grad, both, rtol=1e-10, atol=1e-12)
    torch.optim.SGD(tied.parameters(), lr=0.1).step()
    assert is_tied(tied)


def test_tied_and_untied_weights_do_not_load_into_each_other_in_silence() -> None:
    tied, untied = TransformerLM(design(tie_embeddings=True)), TransformerLM(design())
    with pytest.raises(RuntimeError, match="head"):
        tied.load_state_dict(untied.state_dict())
    with pytest.raises(RuntimeError, match="head"):
        untied.load_state_dict(tied.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# padded vocabulary


class Ones(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_pad_the_vocabulary_are_never_predicted(tied: bool) -> None:
    model = TransformerLM(design(vocab_size=50, vocab_multiple=64, tie_embeddings=tied))
    table = model.embedding if model.head is None else model.head
    assert table.shape == (64, 16)
    tokens = torch.arange(10).view(1, 10)

    with torch.no_grad():
        table.zero_()
    assert model(tokens, tokens).mean().item() == pytest.approx(math.log(50), abs=1e-6)

    with torch.no_grad():
        table[:50] = -5 / 16  # with a stream of ones every real logit is -5, below the zeros of the padding
    final_norm, model.final_norm = model.final_norm, Ones()
    torch.testing.assert_close(model(tokens), torch.full((1, 10, 50), -5.0))
    model.final_norm = final_norm

    with torch.no_grad():
        table.copy_(torch.randn(64, 16))
    model(tokens, tokens).nll.backward()
    assert table.grad is not None
    assert (table.grad[50:] == 0).all()
    assert (table.grad[:50].abs().sum(-1) > 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": 520, "n_heads": 8}, "even head width, not 65"),
        ({"d_model": 15, "n_heads": 3, "pos": "sine"}, "even model.d_model, not 15"),
        ({"d_model": 128, "n_heads": 3}, "n_heads=3 must divide model.d_model=128"),
        ({"n_heads": 8, "attn": {"n_kv_heads": 3}}, "n_kv_heads=3 must divide model.n_heads=8"),
        ({"ffn": {"ratio": 0}}, "ffn.ratio=0 must be a positive number or fraction"),
        ({"attn": {"backend": "sdpa"}, "stability": ("attn_softcap",)}, "backend=sdpa cannot apply"),
        ({"block": "parallel", "norm": "post"}, "block=parallel"),
        ({"norm": "output", "stability": ("layerscale",)}, "stability=layerscale .*norm=output normalises.*norm=pre"),
        ({"attn": "mla", "pos": "alibi"}, "pos=alibi has no agreed meaning with attn=mla"),
        ({"attn": "mla", "pos": "t5"}, "pos=t5 has no agreed meaning with attn=mla"),
        ({"attn": "mla", "stability": ("qk_norm",)}, "attn=mla norms its latents already"),
        ({"attn": ("mla", {"n_kv_heads": 2})}, "attn=mla has a latent in place of key/value heads"),
        ({"attn": ("mla", {"backend": "fused"})}, "values as wide as queries, not 4 and 6"),
        ({"attn": ("mla", {"kv_lora_rank": 0})}, "kv_lora_rank=0 must be at least 1"),
        ({"attn": ("mla", {"eps": 0.0})}, "attn.eps=0.0 must be positive"),
        ({"attn": ("mla", {"qk_rope_head_dim": 3})}, "even head width, not 3"),
        ({"attn": {"causal": False}, "pos": "alibi"}, "pos=alibi needs model.attn.causal=true"),
        ({"attn": {"causal": False}, "pos": "none"}, "pos=none needs model.attn.causal=true"),
        ({"norm": {"type": "rmsnrom"}}, "did you mean 'rmsnorm'"),
        ({"block": {"norm_position": "prenorm"}}, "norm_position.*double, none, output, post, pre"),
        ({"stability": {"qk_norm": {"epsilon": 1}}}, "'epsilon' is not an option of 'qk_norm'"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_before_memory_is_taken(changes: dict[str, Any], words: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        TransformerLM(design(**changes))


def test_a_model_on_the_meta_device_takes_no_memory_and_keeps_its_names() -> None:
    with torch.device("meta"):
        empty = TransformerLM(design(linear_bias=True))
    shapes: dict[str, Tensor] = TransformerLM(design(linear_bias=True)).state_dict()
    assert {name: value.shape for name, value in empty.state_dict().items()} == {n: v.shape for n, v in shapes.items()}
    assert all(value.is_meta for value in empty.state_dict().values())
