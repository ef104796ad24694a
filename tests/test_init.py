"""Initial values: their distribution, and what they may depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_ablate.attention import ATTENTIONS
from andrea_ablate.ffn import FFNS
from andrea_ablate.init import INITS
from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import named_roles
from designs import NODES, design, options

# Wide enough that a standard deviation is known to about one percent.
WIDE: dict[str, Any] = {"d_model": 96, "n_layers": 8, "vocab_size": 300, "max_seq_len": 200, "pos": "learned"}


def gpt2(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    """Standard deviation, and whether the distribution is uniform."""
    return (0.02 / math.sqrt(16) if role == "out" else 0.02), False


def xavier(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    if role in ("embedding", "position"):
        return 1 / math.sqrt(96), False
    return math.sqrt(2 / (shape[0] + shape[1])), True


def fan_in(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    return 1 / math.sqrt(96 if role in ("embedding", "position") else shape[1]), False


def zero_out(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    return (0.0, False) if role == "out" else fan_in(role, shape)


def small_init(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    return (2 / (8 * math.sqrt(96)) if role == "out" else math.sqrt(2 / (5 * 96))), False


def deepnorm(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    """Eight layers: beta is the fourth root of 1/64."""
    if role in ("embedding", "position"):
        return 1 / math.sqrt(96), False
    return xavier(role, shape)[0] / (1 if role in ("query", "head") else math.sqrt(8)), False


def mup(role: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    return 1 / math.sqrt(128 if role in ("embedding", "position", "head") else shape[1]), False


ORACLES = {"gpt2": gpt2, "xavier": xavier, "fan_in": fan_in, "zero_out": zero_out, "small_init": small_init}
ORACLES |= {"deepnorm": deepnorm, "mup": mup}


@pytest.mark.parametrize("name", INITS.names())
@pytest.mark.parametrize("ffn", ["gelu4x", "swiglu"])
def test_each_parameter_has_the_distribution_of_its_role(name: str, ffn: str) -> None:
    model = TransformerLM(design(("qk_norm",), init=name, ffn=ffn, linear_bias=True, **WIDE))
    for path, parameter, role in named_roles(model):
        values = parameter.detach().double()
        if role in ("gain", "bias"):
            assert (values == (1.0 if role == "gain" else 0.0)).all(), path
            continue
        std, uniform = ORACLES[name](role, tuple(values.shape))
        if std == 0:
            assert (values == 0).all(), path
            continue
        assert values.std().item() == pytest.approx(std, rel=0.05), path
        assert abs(values.mean().item()) < 5 * std / math.sqrt(values.numel()), path
        kurtosis = (values**4).mean().item() / std**4
        assert kurtosis == pytest.approx(1.8 if uniform else 3.0, rel=0.15), path
        if uniform:
            assert values.abs().max().item() == pytest.approx(math.sqrt(3) * std, rel=0.01), path


@pytest.mark.parametrize("ffn", FFNS.names())
@pytest.mark.parametrize("attn", ATTENTIONS.names())
def test_projections_to_the_stream_shrink_with_depth(ffn: str, attn: str) -> None:
    """Eight layers: 0.02 / sqrt(16) for the two that write to the stream, 0.02 for all others, gates among them."""
    nodes = {"dense": "gelu4x", "gated": "swiglu", "multihead": ("mha", {"gate": "elementwise"}), "mla": "mla"}
    model = TransformerLM(design(ffn=nodes[ffn], attn=nodes[attn], init="gpt2", **WIDE))
    writers = {"attn": ["w_o"], "ffn": ["w_down"]}
    for block in model.blocks:
        for part, names in writers.items():
            for name, parameter in block.get_submodule(part).named_parameters():
                want = 0.005 if name in names else 0.02
                assert parameter.dim() < 2 or parameter.std().item() == pytest.approx(want, rel=0.05), f"{part}.{name}"


def test_options_of_the_schemes() -> None:
    model = TransformerLM(design(init={"std": 0.5}, **WIDE))
    assert model.embedding.std().item() == pytest.approx(0.5, rel=0.05)
    config = design(init="xavier", **WIDE)
    config.init["embedding_std"] = 0.3
    assert TransformerLM(config).embedding.std().item() == pytest.approx(0.3, rel=0.05)
    for name in ("fan_in", "zero_out"):
        config = design(init=name, **WIDE)
        config.init["embedding_std"] = 0.3
        assert TransformerLM(config).embedding.std().item() == pytest.approx(0.3, rel=0.05)


def test_queries_and_keys_are_told_from_other_matrices() -> None:
    roles = {path.removeprefix("blocks.0."): role for path, _, role in named_roles(TransformerLM(design(ffn="swiglu")))}
    assert {name for name, role in roles.items() if role == "query"} >= {"attn.w_q", "attn.w_k"}
    assert {name for name, role in roles.items() if role == "matrix"} >= {"attn.w_v", "ffn.w_up", "ffn.w_gate"}


def test_a_tied_embedding_starts_as_an_embedding() -> None:
    tied = TransformerLM(design(init="xavier", tie_embeddings=True, **WIDE))
    assert tied.embedding.std().item() == pytest.approx(1 / math.sqrt(96), rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# what initial values depend on


def weights(seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    return dict(TransformerLM(design(**changes), seed).named_parameters())


AXES = [(group, option) for group in NODES if group not in ("stability", "init") for option in options(group)]
CHANGES = [
    *({group: option} for group, option in AXES),
    *({"stability": (trick,)} for trick in options("stability")),
    {"tie_embeddings": True},
    {"linear_bias": True},
    {"dropout": 0.5},
    {"attn": {"window": 3}},
    {"attn": {"backend": "eager"}},
    {"attn": {"gate": "elementwise", "sinks": True, "bias": "qkv"}},
    {"attn": {"causal": False}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_arms_share_every_weight_that_they_have_in_common(change: dict[str, Any]) -> None:
    base, arm = weights(), weights(**change)
    common = [name for name in base if name in arm and arm[name].shape == base[name].shape]
    w_q = {"blocks.0.attn.w_q"} if change != {"attn": "mla"} else set()  # its queries are wider
    assert {"embedding", *w_q, "blocks.1.attn.w_o"} <= set(common)
    for name in common:
        assert torch.equal(base[name], arm[name]), name


@pytest.mark.parametrize("init", INITS.names())
def test_depth_does_not_shift_the_values_of_a_layer(init: str) -> None:
    shallow, deep = weights(init=init, n_layers=1), weights(init=init, n_layers=4)
    outputs, inner = ("w_o", "w_down"), ("w_v", "w_up")
    # Of the depth scaling, from one layer to four.
    ratio = {"gpt2": dict.fromkeys(outputs, 2.0), "small_init": dict.fromkeys(outputs, 4.0)}
    ratio["deepnorm"] = dict.fromkeys((*outputs, *inner), math.sqrt(2))
    for name, value in shallow.items():
        scale = ratio.get(init, {}).get(name.rpartition(".")[2], 1.0)
        torch.testing.assert_close(value, deep[name] * scale)


def test_values_do_not_depend_on_the_state_of_torch() -> None:
    before = weights()
    state = torch.get_rng_state()
    default = torch.get_default_dtype()
    torch.manual_seed(1234)
    torch.rand(7)
    try:
        torch.set_default_dtype(torch.float64)
        after = weights()
    finally:
        torch.set_default_dtype(default)
        torch.set_rng_state(state)
    for name, value in before.items():
        assert torch.equal(value.double(), after[name]), name


def test_building_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    weights()
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("init", INITS.names())
def test_another_seed_changes_every_drawn_value(init: str) -> None:
    a, b = weights(0, init=init), weights(1, init=init)
    for name, value in a.items():
        drawn = not name.endswith(("gain", "bias", *(("w_o", "w_down") if init == "zero_out" else ())))
        assert torch.equal(value, b[name]) != drawn
        assert not drawn or (value == b[name]).double().mean() < 0.01


def test_parameters_of_one_model_are_all_different() -> None:
    """A generator seeded by anything less than the whole name would repeat itself."""
    drawn = [v.flatten()[:64] for n, v in weights().items() if not n.endswith(("gain", "bias"))]
    corner = torch.stack([v / v.std() for v in drawn])
    correlation = torch.corrcoef(corner).fill_diagonal_(0)
    assert correlation.abs().max() < 0.6


def test_values_of_a_seed_stay_what_they_were() -> None:
    """Anything that moves these numbers must raise config.NUMERICS_VERSION, or old and new runs would be compared."""
    normal = weights()["blocks.0.attn.w_q"].flatten()[:3]
    uniform = weights(init="xavier")["blocks.1.ffn.w_down"].flatten()[:3]
    assert normal.tolist() == pytest.approx([0.0150432, 0.0186407, 0.0118585], rel=1e-5)
    assert uniform.tolist() == pytest.approx([0.1689653, 0.0248583, 0.1855833], rel=1e-5)
