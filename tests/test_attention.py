"""Attention on its backends against float64 NumPy that visits the allowed keys one by one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.attention import ATTENTIONS, attend, causal_mask
from andrea_ablate.model import TransformerLM
from andrea_ablate.ops import library
from andrea_ablate.positions import POSITIONS
from andrea_ablate.registry import ConfigError
from designs import design, options
from oracles import attention as oracle

NO_TRANSFORMERS = "transformers, an extra for tests, is not installed"
BACKENDS = ["fused", "sdpa", "eager"]
CAPPING = ["fused", "eager"]


def qkv(length: int = 6, heads: int = 4, kv_heads: int = 2, width: int = 3, batch: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(length * 100 + heads)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def build(backend: str = "auto", d_model: int = 12, **options: Any) -> Any:
    """Attention with 4 query heads of width 3 and random weights, in fp64."""
    sizes: dict[str, Any] = {"d_model": d_model, "n_heads": 4, "n_kv_heads": 4, "d_head": 3, "linear_bias": False}
    sizes |= {key: options.pop(key) for key in list(options) if key in {*sizes, "dropout"}}
    seams = {key: options.pop(key, None) for key in ("qk", "softcap")}
    torch.manual_seed(0)
    module = ATTENTIONS.build({"type": "multihead", "backend": backend, **options}, **sizes, **seams).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# the core


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 9])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_attend_matches_float64_oracle(backend: str, window: int | None, kv_heads: int, masked: bool) -> None:
    q, k, v = qkv(kv_heads=kv_heads)
    key_mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool) if masked else None
    got = attend(q, k, v, scale=0.7, window=window, key_mask=key_mask, backend=backend)
    seen = None if key_mask is None else key_mask.numpy()
    want = oracle.attend(q.numpy(), k.numpy(), v.numpy(), scale=0.7, window=window, key_mask=seen)
    torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", CAPPING)
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_soft_capped_attend_matches_float64_oracle(window: int | None, masked: bool, backend: str) -> None:
    q, k, v = qkv()
    key_mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool) if masked else None
    got = attend(q * 9, k, v, scale=0.5, window=window, key_mask=key_mask, softcap=2.0, backend=backend)
    seen = None if key_mask is None else key_mask.numpy()
    want = oracle.attend(q.numpy() * 9, k.numpy(), v.numpy(), scale=0.5, window=window, key_mask=seen, cap=2.0)
    torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-11, atol=1e-11)


def shifted(kind: str) -> tuple[dict[str, Any], Any]:
    """Options of `attend` with 4 heads and 6 tokens, and those of the oracle."""
    slopes, sinks = torch.tensor([0.5, 0.25, 0.1, 1.0], dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    near, both = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    return {
        "slopes": ({"slopes": slopes}, {"shift": lambda h, i, j: -slopes[h].item() * (i - j)}),
        "bias": ({"bias": near}, {"shift": lambda h, i, j: near[h, min(i - j, 2)].item()}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks.numpy()}),
        "sinks and bias": (
            {"sinks": sinks, "bias": near, "softcap": 1.5},
            {"sinks": sinks.numpy(), "shift": lambda h, i, j: near[h, min(i - j, 2)].item(), "cap": 1.5},
        ),
        "bidirectional": ({"causal": False}, {"causal": False}),
        "bidirectional bias": (
            {"causal": False, "bias": both},
            {"causal": False, "shift": lambda h, i, j: both[h, 3 + max(-3, min(i - j, 3))].item()},
        ),
    }[kind]


CANNOT = {
    ("fused", "bidirectional"),
    ("fused", "bidirectional bias"),
    ("sdpa", "sinks"),
    ("sdpa", "sinks and bias"),
}
KINDS = ["slopes", "bias", "sinks", "sinks and bias", "bidirectional", "bidirectional bias"]
SHIFTED = [(b, kind) for b in ["auto", *BACKENDS] for kind in KINDS if (b, kind) not in CANNOT]


@pytest.mark.parametrize(("backend", "kind"), SHIFTED)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_shifts_and_sinks_match_the_float64_oracle(backend: str, kind: str, window: int | None, masked: bool) -> None:
    q, k, v = qkv()
    key_mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool) if masked else None
    given, told = shifted(kind)
    if "causal" in given:
        window = None
    got = attend(q, k, v, scale=0.7, window=window, key_mask=key_mask, backend=backend, **given)
    seen = None if key_mask is None else key_mask.numpy()
    want = oracle.attend(q.numpy(), k.numpy(), v.numpy(), scale=0.7, window=window, key_mask=seen, **told)
    torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("backend", "kind"), [pair for pair in SHIFTED if pair[0] != "auto"])
def test_gradients_of_shifts_and_sinks(backend: str, kind: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(length=4, batch=1, width=2))
    given, _ = shifted(kind)
    learned = [name for name in ("bias", "sinks") if name in given]
    tensors = [given.pop(name).requires_grad_() for name in learned]

    def core(*inputs: Tensor) -> Tensor:
        more = dict(zip(learned, inputs[3:], strict=True))
        return attend(*inputs[:3], scale=0.7, backend=backend, **given, **more)

    assert torch.autograd.gradcheck(core, (q, k, v, *tensors), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shifts_in_bf16_are_as_close_as_its_rounding(backend: str) -> None:
    q, k, v = (t.bfloat16() for t in qkv(length=200, batch=1))
    given, told = shifted("slopes")
    got = attend(q, k, v, scale=0.5, backend=backend, slopes=given["slopes"].float())
    want = oracle.attend(*(t.double().numpy() for t in (q, k, v)), scale=0.5, **told)
    assert got.dtype == torch.bfloat16
    assert (got.double() - torch.from_numpy(want)).abs().max() < 0.03


def check_multihead(backend: str) -> None:
    module = build(backend, n_kv_heads=2, d_model=7, linear_bias=True, window=3, scale=0.4)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    p = {key: value.detach().numpy() for key, value in module.named_parameters()}
    q, k, v = (
        (x.numpy() @ p[f"w_{n}"].T + p[f"{n}_bias"]).reshape(2, 5, heads, 3)
        for n, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    want = oracle.attend(q, k, v, scale=0.4, window=3).reshape(2, 5, 12) @ p["w_o"].T + p["o_bias"]
    torch.testing.assert_close(module(x), torch.from_numpy(want), rtol=1e-11, atol=1e-11)


def check_mla(backend: str) -> None:
    value = 5 if backend == "fused" else 2
    for rank in (None, 4):
        sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": value}
        module = latent(backend, d_model=7, linear_bias=True, q_lora_rank=rank, **sizes)
        x = torch.randn(2, 5, 7, dtype=torch.float64)
        p = {key: parameter.detach().numpy() for key, parameter in module.named_parameters()}
        want = oracle.latent(x.numpy(), p, heads=4, nope=3, eps=1e-6)
        torch.testing.assert_close(module(x), torch.from_numpy(want), rtol=1e-11, atol=1e-11)


def latent(backend: str = "auto", **options: Any) -> Any:
    """Latent attention with 4 heads and random weights, in fp64."""
    sizes = {"d_model": 12, "n_heads": 4, "d_head": 4, "linear_bias": False}
    sizes |= {key: options.pop(key) for key in list(options) if key in sizes}
    torch.manual_seed(0)
    module = ATTENTIONS.build({"type": "mla", "backend": backend, **options}, **sizes).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


ORACLES = {"multihead": check_multihead, "mla": check_mla}


@pytest.mark.parametrize("name", ATTENTIONS.names())
@pytest.mark.parametrize("backend", BACKENDS)
def test_module_matches_float64_oracle(name: str, backend: str) -> None:
    ORACLES[name](backend)


def test_a_latent_has_the_proportions_of_deepseek_unless_given() -> None:
    """DeepSeek-V2: heads of 128, a latent of 512, 64 dimensions turned, so 192 per query and 576 in the cache."""
    module = latent(d_head=128, n_heads=2, d_model=16)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "w_q": (2 * 192, 16),
        "w_kv_down": (576, 16),
        "kv_gain": (512,),
        "w_kv_up": (2 * 256, 512),
        "w_o": (16, 256),
    }
    assert module.scale == 192**-0.5
    assert ATTENTIONS.ask("widths", {"type": "mla"}, n_heads=2, d_head=128) == (64, 2 * 320, 576)


@pytest.mark.parametrize("rank", [None, 7])
def test_latent_attention_is_that_of_transformers(rank: int | None) -> None:
    v2 = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2", reason=NO_TRANSFORMERS)
    from transformers import DeepseekV2Config

    sizes = {
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 6,
        "v_head_dim": 3,
    }  # theirs wants even ones
    config = DeepseekV2Config(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=rank,
        head_dim=6,  # of the rotation
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        attn_implementation="eager",
        **sizes,
    )
    theirs = v2.DeepseekV2Attention(config, 0)
    module = latent(q_lora_rank=rank, **sizes).float()
    names = {"w_kv_down": "kv_a_proj_with_mqa", "kv_gain": "kv_a_layernorm", "w_kv_up": "kv_b_proj", "w_o": "o_proj"}
    names |= (
        {"w_q": "q_proj"} if rank is None else {"w_q_down": "q_a_proj", "q_gain": "q_a_layernorm", "w_q": "q_b_proj"}
    )
    theirs.load_state_dict({f"{names[name]}.weight": p for name, p in module.state_dict().items()})
    x = torch.randn(2, 9, 12)
    positions = torch.arange(9)[None]
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    want, _ = theirs(x, attention_mask=mask, position_embeddings=v2.DeepseekV2RotaryEmbedding(config)(x, positions))
    rope = POSITIONS.build({"type": "rope", "theta": 50.0}, d_head=6)
    torch.testing.assert_close(module(x, rope), want, rtol=1e-4, atol=1e-4)


def test_the_default_scale_is_that_of_the_head_width() -> None:
    assert build(d_head=16, n_heads=2, n_kv_heads=1).scale == 0.25
    assert build(scale=2).scale == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(length=3, batch=1, width=2))
    key_mask = torch.tensor([[False, True, True]])
    for given in ({}, {"window": 2}, {"key_mask": key_mask}):
        core = partial(attend, scale=0.7, backend=backend, **given)
        assert torch.autograd.gradcheck(core, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_as_close_as_its_rounding(backend: str) -> None:
    q, k, v = (t.bfloat16() for t in qkv(length=200, batch=1))
    got = attend(q, k, v, scale=0.5, backend=backend)
    want = oracle.attend(*(t.double().numpy() for t in (q, k, v)), scale=0.5)
    assert got.dtype == torch.bfloat16
    assert (got.double() - torch.from_numpy(want)).abs().max() < 0.02


# ---------------------------------------------------------------------------------------------------------------------
# sinks, gates, biases


def test_a_sink_takes_its_share_by_hand() -> None:
    """Scores ln 2 and 0 with a sink of 0: weights 1/2 and 1/4, and a quarter on nothing."""
    for backend in CAPPING:
        weights = weights_of_two_keys(math.log(2.0), backend, scale=1.0, sinks=torch.zeros(1).double())
        torch.testing.assert_close(weights[1], torch.tensor([0.5, 0.25]).double())


@pytest.mark.parametrize("backend", CAPPING)
def test_a_sink_of_minus_infinity_is_none(backend: str) -> None:
    q, k, v = qkv()
    got = attend(q, k, v, scale=1.0, sinks=torch.full((4,), -1e9).double(), backend=backend)
    torch.testing.assert_close(got, attend(q, k, v, scale=1.0, backend=backend), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gate", "rows"), [("headwise", 4), ("elementwise", 12)])
def test_a_gate_opens_by_its_own_sigmoid(gate: str, rows: int) -> None:
    """Shut, a gate lets nothing through; at zero half; wide open everything."""
    plain, module = build(), build(gate=gate, linear_bias=True)
    assert module.w_gate.shape == (rows, 12)
    module.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for name in ("w_gate", "q_bias", "k_bias", "v_bias", "o_bias"):
            getattr(module, name).zero_()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    for logit, part in ((-1e3, 0.0), (0.0, 0.5), (1e3, 1.0)):
        torch.nn.init.constant_(module.gate_bias, logit)
        torch.testing.assert_close(module(x), part * plain(x))
    torch.nn.init.constant_(module.gate_bias, -1e3)
    with torch.no_grad():
        module.gate_bias[0] = 1e3  # head 0, or its first number
    opened = (module(x) @ torch.linalg.pinv(module.w_o).T).abs().amax((0, 1)) > 1e-9
    assert opened.nonzero().flatten().tolist() == ([0, 1, 2] if gate == "headwise" else [0])


@pytest.mark.parametrize(
    ("bias", "linear_bias", "biased"),
    [
        (None, False, ""),
        (None, True, "qkvo"),
        ("none", True, ""),
        ("qkv", False, "qkv"),
        ("out", False, "o"),
        ("all", False, "qkvo"),
    ],
)
def test_the_projections_with_a_bias_are_those_asked_for(bias: str | None, linear_bias: bool, biased: str) -> None:
    module = build(bias=bias, linear_bias=linear_bias)
    names = {name for name, _ in module.named_parameters() if name.endswith("_bias")}
    assert names == {f"{letter}_bias" for letter in biased}
    assert module(torch.randn(1, 3, 12).double()).isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# every direction


def test_without_causality_a_query_sees_all_keys() -> None:
    module = build(causal=False)
    x = torch.randn(1, 6, 12, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x)[0, 0].sum(), x)
    assert (grad[0].abs().sum(-1) > 0).all()
    torch.testing.assert_close(module(x.flip(1)), module(x).flip(1), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# windows


def test_a_window_counts_the_query_itself() -> None:
    assert causal_mask(6, 6, 3).sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert causal_mask(6, 6, None).sum(-1).tolist() == [1, 2, 3, 4, 5, 6]
    assert causal_mask(6, 6, 3)[4].tolist() == [False, False, True, True, True, False]


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_the_keys_that_influence_a_query_are_those_of_the_window(backend: str, window: int | None) -> None:
    module = build(backend, window=window)
    x = torch.randn(1, 6, 12, dtype=torch.float64, requires_grad=True)
    out = module(x)
    for i in range(6):
        (grad,) = torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)
        influence = grad[0].abs().sum(-1) > 0
        assert influence.nonzero().flatten().tolist() == list(oracle.visible(i, window))


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_as_long_as_the_sequence_is_no_window(backend: str) -> None:
    q, k, v = qkv()
    full = attend(q, k, v, scale=1.0, backend=backend)
    for window in (6, 7, 1000):
        got = attend(q, k, v, scale=1.0, window=window, backend=backend)
        torch.testing.assert_close(got, full, rtol=1e-14, atol=1e-14)
    assert torch.equal(causal_mask(6, 6, 6), causal_mask(6, 6, None))


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_one_returns_the_values(backend: str) -> None:
    q, k, v = qkv(kv_heads=4)
    assert torch.equal(attend(q, k, v, scale=1.0, window=1, backend=backend), v)


# ---------------------------------------------------------------------------------------------------------------------
# shared key/value heads


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_share_key_value_heads_in_blocks(backend: str) -> None:
    q, k, _ = qkv(heads=4, kv_heads=2)
    v = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1).expand(2, 6, 2, 3)
    out = attend(q, k, v, scale=1.0, backend=backend)
    torch.testing.assert_close(out[0, -1, :, 0].tolist(), [0.0, 0.0, 1.0, 1.0])


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_equal_full_heads_with_copied_weights(backend: str, kv_heads: int) -> None:
    grouped, full = build(backend, n_kv_heads=kv_heads), build(backend, n_kv_heads=4)
    copies = 4 // kv_heads
    for name, parameter in grouped.named_parameters():
        copied = parameter.detach()
        if name in ("w_k", "w_v"):
            copied = torch.cat([block for block in copied.split(3) for _ in range(copies)])
        full.get_parameter(name).data.copy_(copied)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# soft-cap, scale and mask


def weights_of_two_keys(raw: float, backend: str, **options: Any) -> Tensor:
    """Weights ``(L, M)`` of two tokens whose scores are `raw` for key 0 and 0 for key 1, before any scale."""
    q = torch.tensor([raw, raw], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 1, 2)
    k = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64).view(1, 2, 1, 2)
    return attend(q, k, torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2), backend=backend, **options)[0, :, 0]


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", CAPPING)
def test_scores_are_scaled_before_they_are_capped(backend: str) -> None:
    """Capped first, 80 would become 14.8559."""
    weights = weights_of_two_keys(80.0, backend, scale=0.5, softcap=30.0)
    assert math.log(weights[1, 0] / weights[1, 1]) == pytest.approx(26.1018, abs=1e-4)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_custom_scale_is_used(backend: str) -> None:
    weights = weights_of_two_keys(8.0, backend, scale=0.25)
    assert math.log(weights[1, 0] / weights[1, 1]) == pytest.approx(2.0)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", CAPPING)
@pytest.mark.parametrize("cap", [None, 1.0])
def test_the_future_has_no_weight_and_no_gradient(cap: float | None, backend: str) -> None:
    """Capping after masking would turn minus infinity into minus the cap."""
    q, k, v = (t.requires_grad_() for t in qkv())
    out = attend(q, k, v, scale=1.0, softcap=cap, backend=backend)
    grads = torch.autograd.grad(out[:, 2].square().sum(), (q, k, v))
    assert all((grad[:, 3:] == 0).all() for grad in grads)
    changed = attend(q, k, torch.cat((v[:, :3], v[:, 3:] + 1e15), 1), scale=1.0, backend=backend)
    plain = attend(q, k, v, scale=1.0, backend=backend)
    assert torch.equal(changed[:, :3], plain[:, :3])


@pytest.mark.usefixtures("impl")
def test_a_soft_cap_is_applied_or_refused_never_dropped() -> None:
    x = torch.randn(2, 6, 12, dtype=torch.float64) * 3
    outputs = {backend: build(backend)(x) for backend in ("auto", *BACKENDS)}
    capped = {backend: build(backend, softcap=1.0)(x) for backend in ("auto", *CAPPING)}
    for found in (outputs, capped):
        for out in found.values():
            torch.testing.assert_close(out, found["eager"], rtol=1e-11, atol=1e-11)
    for backend, out in capped.items():
        assert not torch.allclose(out, outputs[backend], atol=0.1)
    with pytest.raises(ConfigError, match="sdpa cannot apply an attention soft-cap.*eager or auto"):
        build("sdpa", softcap=1.0)


@pytest.mark.parametrize(
    ("backend", "tricks", "path"),
    [("auto", (), "sdpa"), ("auto", ("attn_softcap",), "eager"), ("eager", (), "eager"), ("sdpa", (), "sdpa")],
)
def test_what_ran_is_noted(backend: str, tricks: tuple[str, ...], path: str) -> None:
    with ops.using("reference"):
        TransformerLM(design(tricks, attn={"backend": backend}))(torch.zeros(1, 2, dtype=torch.long))
        assert library.taken["attention"] == path


# ---------------------------------------------------------------------------------------------------------------------
# queries with nothing to attend to


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize(("backend", "cap"), [(b, None) for b in BACKENDS] + [(b, 1.0) for b in CAPPING])
@pytest.mark.parametrize("window", [None, 2])
def test_a_query_without_keys_gives_zeros_and_poisons_no_gradient(
    backend: str, cap: float | None, window: int | None
) -> None:
    """Two tokens of left padding: the same sequence without them gives the same output and the same gradients."""
    torch.manual_seed(0)
    module = build(backend, window=window, softcap=cap)
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    key_mask = torch.tensor([[False, False, True, True, True, True]])
    padded = module(x, key_mask=key_mask)
    assert (padded[:, :2] == 0).all()
    module.zero_grad()
    padded[:, 2:].square().sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    short = module(x[:, 2:])
    short.square().sum().backward()
    torch.testing.assert_close(padded[:, 2:], short, rtol=1e-12, atol=1e-12)
    for got, parameter in zip(grads, module.parameters(), strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, parameter.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pos", options("pos"))
def test_left_padding_leaves_a_finite_model(backend: str, pos: str) -> None:
    model = TransformerLM(design(pos=pos, attn={"backend": backend, "window": 2}))
    tokens = torch.randint(0, 23, (2, 8))
    key_mask = torch.ones(2, 8, dtype=torch.bool)
    key_mask[0, :3] = False
    targets = torch.where(key_mask, tokens, -100)
    sums = model(tokens, targets, key_mask)
    sums.nll.backward()
    assert sums.n_tokens == 13
    assert torch.isfinite(sums.nll)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    changed = tokens.clone()
    changed[0, :3] = (tokens[0, :3] + 1) % 23
    assert torch.equal(model(tokens, None, key_mask)[0, 3:], model(changed, None, key_mask)[0, 3:])


# ---------------------------------------------------------------------------------------------------------------------
# dropout


@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("attn", ["mha", "gqa2", "mla"])
def test_attention_dropout_acts_in_training_only(attn: str, backend: str) -> None:
    models = [TransformerLM(design(attn=(attn, {"backend": backend}), dropout=p)).double() for p in (0.5, 0.0)]
    module, plain = (model.blocks[0].attn for model in models)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    assert not torch.allclose(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    torch.testing.assert_close(module(x), plain(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
def test_attention_dropout_keeps_the_expected_weight(backend: str) -> None:
    """With values of one the output of a query is the sum of what is left of its weights: one on average."""
    torch.manual_seed(0)
    q, k, v = torch.zeros(200, 50, 1, 1), torch.zeros(200, 50, 1, 1), torch.ones(200, 50, 1, 1)
    out = attend(q, k, v, scale=1.0, dropout=0.25, backend=backend)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    first = out[:, 0].flatten()  # the one weight of the first query is kept, enlarged, or dropped
    torch.testing.assert_close(first[first > 0], torch.full_like(first[first > 0], 4 / 3))
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0}, "window=0 must be at least 1"),
        ({"window": 3, "causal": False}, "window=3 has no agreed meaning with model.attn.causal=false"),
        ({"backend": "fused", "dropout": 0.5}, "backend=fused has no dropout, but model.dropout=0.5; use .*=auto"),
        ({"backend": "fused", "causal": False}, "backend=fused is causal; use model.attn.backend=auto"),
        ({"backend": "sdpa", "sinks": True}, "backend=sdpa has no sinks"),
        ({"bias": "kv"}, "bias='kv' is not one of none, qkv, out, all, or null"),
        ({"gate": "all"}, "gate='all' is not one of headwise, elementwise, or null"),
        ({"backend": "flash"}, "'flash' is not one of auto, fused, sdpa, eager"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**options)
