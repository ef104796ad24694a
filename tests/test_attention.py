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
from andrea_ablate.registry import ConfigError
from designs import design
from oracles import attention as oracle

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


@pytest.mark.parametrize("name", ATTENTIONS.names())
@pytest.mark.parametrize("backend", BACKENDS)
def test_module_matches_float64_oracle(name: str, backend: str) -> None:
    assert name == "multihead"
    module = build(backend, n_kv_heads=2, d_model=7, linear_bias=True, window=3, scale=0.4)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    p = {key: value.detach().numpy() for key, value in module.named_parameters()}
    q, k, v = (
        (x.numpy() @ p[f"w_{n}"].T + p[f"{n}_bias"]).reshape(2, 5, heads, 3)
        for n, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    want = oracle.attend(q, k, v, scale=0.4, window=3).reshape(2, 5, 12) @ p["w_o"].T + p["o_bias"]
    torch.testing.assert_close(module(x), torch.from_numpy(want), rtol=1e-11, atol=1e-11)


def test_the_default_scale_is_that_of_the_head_width() -> None:
    assert build(d_head=16, n_heads=2, n_kv_heads=1).scale == 0.25
    assert build(scale=2).scale == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(length=3, batch=1, width=2))
    key_mask = torch.tensor([[False, True, True]])
    for options in ({}, {"window": 2}, {"key_mask": key_mask}):
        core = partial(attend, scale=0.7, backend=backend, **options)
        assert torch.autograd.gradcheck(core, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_as_close_as_its_rounding(backend: str) -> None:
    q, k, v = (t.bfloat16() for t in qkv(length=200, batch=1))
    got = attend(q, k, v, scale=0.5, backend=backend)
    want = oracle.attend(*(t.double().numpy() for t in (q, k, v)), scale=0.5)
    assert got.dtype == torch.bfloat16
    assert (got.double() - torch.from_numpy(want)).abs().max() < 0.02


# ---------------------------------------------------------------------------------------------------------------------
# windows


def test_a_window_counts_the_query_itself() -> None:
    assert causal_mask(6, 3).sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert causal_mask(6, None).sum(-1).tolist() == [1, 2, 3, 4, 5, 6]
    assert causal_mask(6, 3)[4].tolist() == [False, False, True, True, True, False]


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_as_long_as_the_sequence_is_no_window(backend: str) -> None:
    q, k, v = qkv()
    full = attend(q, k, v, scale=1.0, backend=backend)
    for window in (6, 7, 1000):
        got = attend(q, k, v, scale=1.0, window=window, backend=backend)
        torch.testing.assert_close(got, full, rtol=1e-14, atol=1e-14)
    assert torch.equal(causal_mask(6, 6), causal_mask(6, None))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_one_returns_the_values(backend: str) -> None:
    q, k, v = qkv(kv_heads=4)
    assert torch.equal(attend(q, k, v, scale=1.0, window=1, backend=backend), v)


# ---------------------------------------------------------------------------------------------------------------------
# shared key/value heads


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_share_key_value_heads_in_blocks(backend: str) -> None:
    q, k, _ = qkv(heads=4, kv_heads=2)
    v = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1).expand(2, 6, 2, 3)
    out = attend(q, k, v, scale=1.0, backend=backend)
    torch.testing.assert_close(out[0, -1, :, 0].tolist(), [0.0, 0.0, 1.0, 1.0])


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


@pytest.mark.parametrize("backend", CAPPING)
def test_scores_are_scaled_before_they_are_capped(backend: str) -> None:
    """Capped first, 80 would become 14.8559."""
    weights = weights_of_two_keys(80.0, backend, scale=0.5, softcap=30.0)
    assert math.log(weights[1, 0] / weights[1, 1]) == pytest.approx(26.1018, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_custom_scale_is_used(backend: str) -> None:
    weights = weights_of_two_keys(8.0, backend, scale=0.25)
    assert math.log(weights[1, 0] / weights[1, 1]) == pytest.approx(2.0)


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


def test_a_soft_cap_is_applied_or_refused_never_dropped() -> None:
    x = torch.randn(2, 6, 12, dtype=torch.float64) * 3
    outputs = {backend: build(backend)(x) for backend in ("auto", *BACKENDS)}
    capped = {backend: build(backend, softcap=1.0)(x) for backend in ("auto", *CAPPING)}
    for found in (outputs, capped):
        for out in found.values():
            torch.testing.assert_close(out, found["eager"], rtol=1e-11, atol=1e-11)
    assert not torch.allclose(capped["eager"], outputs["eager"], atol=0.1)
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


@pytest.mark.parametrize(("backend", "cap"), [("sdpa", None), ("eager", 1.0), ("fused", None), ("fused", 1.0)])
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pos", ["none", "rope", "learned", "sine"])
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
def test_attention_dropout_acts_in_training_only(backend: str) -> None:
    module, plain = build(backend, dropout=0.5), build(backend)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
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
        ({"backend": "flash"}, "'flash' is not one of auto, fused, sdpa, eager"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**options)
