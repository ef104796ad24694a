"""Stability tricks against float64 NumPy, and the seam that each plugs into."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.stability import STABILITY
from designs import design
from oracles import attention, norms


def check_qk_norm(cast: str) -> None:
    module: Any = STABILITY.build({"type": "qk_norm", "eps": 1e-3, "cast": cast}, d_head=5).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    q, k = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 2, 5, dtype=torch.float64)
    for got, x, gain in zip(module(q, k), (q, k), (module.q_gain, module.k_gain), strict=True):
        want = norms.rmsnorm(x.numpy(), gain.detach().numpy(), 0.0, 1e-3)
        torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-12, atol=1e-12)
    check_casts(module)


def check_qk_norm_full(cast: str) -> None:
    node = {"type": "qk_norm_full", "eps": 1e-3, "cast": cast}
    module: Any = STABILITY.build(node, n_heads=4, n_kv_heads=2, d_head=5).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    q, k = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 2, 5, dtype=torch.float64)
    for got, x, gain in zip(module(q, k), (q, k), (module.q_gain, module.k_gain), strict=True):
        want = norms.rmsnorm(x.reshape(2, 3, -1).numpy(), gain.detach().numpy(), 0.0, 1e-3)
        torch.testing.assert_close(got.reshape(2, 3, -1), torch.from_numpy(want), rtol=1e-12, atol=1e-12)
    check_casts(module)


def check_casts(module: Any) -> None:
    """The gain multiplies in fp64 before the only rounding (t5), or the rounded value and is rounded again (llama)."""
    module = module.float()
    q, k = torch.randn(9, 8, 4, 5).bfloat16(), torch.randn(9, 8, 2, 5).bfloat16()
    for got, x, gain in zip(module(q, k), (q, k), (module.q_gain, module.k_gain), strict=True):
        wide = x.double().view(*x.shape[:2], -1, gain.shape[-1])
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        want = (normed.bfloat16().double() if module.cast == "llama" else normed) * gain.double()
        assert got.dtype == torch.bfloat16
        differ = got.view(want.shape) != want.bfloat16()
        assert differ.float().mean() < 0.01  # a tie may fall on either side in fp32
        other = (normed if module.cast == "llama" else normed.bfloat16().double()) * gain.double()
        assert (got.view(want.shape) != other.bfloat16()).float().mean() > 0.1


def check_qk_layernorm() -> None:
    for bias, gains in product((False, True), ("shared", "per_head")):
        node = {"type": "qk_layernorm", "eps": 1e-3, "bias": bias, "gains": gains}
        module: Any = STABILITY.build(node, n_heads=4, n_kv_heads=2, d_head=5).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        own = {name: value.detach().numpy() for name, value in module.named_parameters()}
        q, k = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 2, 5, dtype=torch.float64)
        for got, x, side in zip(module(q, k), (q, k), "qk", strict=True):
            for head in range(x.shape[2]):
                its = slice(5 * head, 5 * head + 5) if gains == "per_head" else slice(5)
                shift = own[f"{side}_bias"][its] if bias else 0.0
                want = norms.layernorm(x[:, :, head].numpy(), own[f"{side}_gain"][its], shift, 1e-3)
                torch.testing.assert_close(got[:, :, head], torch.from_numpy(want), rtol=1e-12, atol=1e-12)
        low = module.bfloat16()(q.bfloat16(), k.bfloat16())
        assert [t.dtype for t in low] == [torch.bfloat16] * 2


def check_embedding_norm() -> None:
    module: Any = STABILITY.build({"type": "embedding_norm", "eps": 1e-3}, d_model=7).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    want = norms.layernorm(x.numpy(), module.gain.detach().numpy(), module.bias.detach().numpy(), 1e-3)
    torch.testing.assert_close(module(x), torch.from_numpy(want), rtol=1e-12, atol=1e-12)


def check_multiplier(name: str, want: float, **node: Any) -> None:
    """The product; the model with the trick is compared as a whole in test_model."""
    assert STABILITY.build({"type": name, **node}, d_model=16)(torch.tensor(5.0)).item() == 5 * want


def check_layerscale() -> None:
    model: Any = TransformerLM(design({"layerscale": {"start": 1e-4}}))
    for block in model.blocks:
        for end in (block.attn_end, block.ffn_end):
            assert end(torch.full((3, 16), 5.0)).flatten().tolist() == pytest.approx([5e-4] * 48)
            nn.init.normal_(end.parts[0].gain)
            assert torch.equal(end(torch.eye(16)), torch.diag(end.parts[0].gain))


def check_skip_step() -> None:
    """That its numbers reach the training; what is an outlier is tested in training/test_outliers.py."""
    model: Any = TransformerLM(design({"skip_step": {"window": 9, "sigma": 3.0}}))
    assert (model.skip_step.window, model.skip_step.sigma) == (9, 3.0)
    assert TransformerLM(design()).skip_step is None


TOKENS = torch.arange(10).view(1, 10)


def check_attn_softcap() -> None:
    """That the module reaches the scores; what happens to them there is tested with attention."""
    model: Any = TransformerLM(design({"attn_softcap": {"cap": 7.0}}))
    assert [block.attn.softcap for block in model.blocks] == [7.0] * len(model.blocks)


def check_output_softcap() -> None:
    plain, capped = TransformerLM(design()).double(), TransformerLM(design({"output_softcap": {"cap": 0.1}})).double()
    want = torch.from_numpy(attention.softcap(plain(TOKENS).detach().numpy(), 0.1))
    torch.testing.assert_close(capped(TOKENS).detach(), want, rtol=1e-12, atol=1e-12)
    z = want.logsumexp(-1)
    nll = (z - want.gather(-1, TOKENS[..., None]).squeeze(-1)).sum()
    torch.testing.assert_close(capped(TOKENS, TOKENS).nll.detach(), nll, rtol=1e-12, atol=1e-12)


def check_z_loss() -> None:
    model = TransformerLM(design({"z_loss": {"alpha": 0.5}})).double()
    want = 0.5 * np.square(np.log(np.exp(model(TOKENS).detach().numpy()).sum(-1))).sum()
    assert model(TOKENS, TOKENS).penalty.item() == pytest.approx(want, rel=1e-12)


ORACLES = {
    "qk_norm": lambda: [check_qk_norm(cast) for cast in ("t5", "llama")],
    "qk_norm_full": lambda: [check_qk_norm_full(cast) for cast in ("t5", "llama")],
    "qk_layernorm": check_qk_layernorm,
    "embedding_norm": check_embedding_norm,
    "embedding_scale": partial(check_multiplier, "embedding_scale", 4.0),  # the root of a width of 16
    "residual_multiplier": partial(check_multiplier, "residual_multiplier", 0.25, factor=0.25),
    "logit_multiplier": partial(check_multiplier, "logit_multiplier", 0.25, factor=0.25),
    "layerscale": check_layerscale,
    "skip_step": check_skip_step,
    "attn_softcap": check_attn_softcap,
    "output_softcap": check_output_softcap,
    "z_loss": check_z_loss,
}
SEAMS = {"qk_norm": "qk", "attn_softcap": "scores", "output_softcap": "logits", "z_loss": "loss"}
SEAMS |= {"qk_norm_full": "qk", "qk_layernorm": "qk", "embedding_norm": "stream", "embedding_scale": "embedding"}
SEAMS |= {"residual_multiplier": "branch", "layerscale": "branch", "logit_multiplier": "output", "skip_step": "step"}


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", STABILITY.names())
def test_trick_matches_its_oracle(name: str) -> None:
    torch.manual_seed(0)
    ORACLES[name]()


@pytest.mark.parametrize("name", STABILITY.names())
def test_trick_names_its_seam(name: str) -> None:
    assert STABILITY.get(name).seam == SEAMS[name]


@pytest.mark.parametrize("name", STABILITY.names())
def test_trick_changes_what_its_seam_carries_and_nothing_else(name: str) -> None:
    """Only the loss may change without the logits, and only by the penalty; or nothing but the update."""
    hard = {"attn_softcap": {"cap": 0.01}, "output_softcap": {"cap": 0.01}, "z_loss": {"alpha": 1.0}}
    plain, tricked = TransformerLM(design()), TransformerLM(design({name: hard.get(name, {})}))
    with torch.no_grad():
        for model in (plain, tricked):
            for parameter in model.parameters():
                parameter.mul_(3)
    tokens = torch.arange(10).view(1, 10)
    same = torch.allclose(plain(tokens), tricked(tokens), atol=1e-6)
    assert same == (name in ("z_loss", "skip_step"))
    before, after = plain(tokens, tokens), tricked(tokens, tokens)
    assert (after.penalty > 0) == (name == "z_loss")
    if name == "z_loss":
        assert torch.equal(before.nll, after.nll)


def test_normed_queries_and_keys_bound_the_scores() -> None:
    module = STABILITY.build({"type": "qk_norm"}, d_head=8)
    nn.init.ones_(module.get_parameter("q_gain"))
    nn.init.ones_(module.get_parameter("k_gain"))
    q, k = module(*(torch.randn(2, 1, 9, 1, 8) * 100))
    score = q[0, :, 0] @ k[0, :, 0].T / math.sqrt(8)
    assert score.abs().max() <= math.sqrt(8) + 1e-4


def test_several_tricks_of_one_model_all_act() -> None:
    model = TransformerLM(design({"output_softcap": {"cap": 0.01}, "z_loss": {"alpha": 2.0}, "qk_norm": {}}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    tokens = torch.arange(10).view(1, 10)
    logits = model(tokens)
    assert logits.abs().max() <= 0.01
    z = np.log(np.exp(logits.detach().double().numpy()).sum(-1))
    assert model(tokens, tokens).penalty.item() == pytest.approx(2 * (z**2).sum(), rel=1e-5)
    assert sum("q_gain" in name for name, _ in model.named_parameters()) == 2


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "attn_softcap", "cap": 0.0}, "cap=0.0 must be positive"),
        ({"type": "output_softcap", "cap": float("nan")}, "cap=nan must be positive"),
        ({"type": "output_softcap"}, "needs the option 'cap'"),
        ({"type": "z_loss", "alpha": -1e-4}, "alpha=-0.0001 must not be negative"),
        ({"type": "qk_norm", "eps": 0.0}, "eps=0.0 must be positive"),
        ({"type": "softcap"}, "softcap.*attn_softcap, .*output_softcap, .*qk_norm, .*z_loss"),
        ({"type": "qk_norm_full", "eps": -1.0}, "eps=-1.0 must be positive"),
        ({"type": "qk_norm", "cast": "bf16"}, "cast='bf16' is not one of t5, llama"),
        ({"type": "qk_norm_full", "cast": "T5"}, "cast='T5' is not one of t5, llama"),
        ({"type": "qk_layernorm", "eps": 0.0}, "eps=0.0 must be positive"),
        ({"type": "qk_layernorm", "gains": "heads"}, "gains='heads' is not one of shared, per_head"),
        ({"type": "embedding_norm", "eps": 0.0}, "eps=0.0 must be positive"),
        ({"type": "embedding_scale", "factor": 0.0}, "factor=0.0 must be positive"),
        ({"type": "residual_multiplier", "factor": -1.0}, "factor=-1.0 must be positive"),
        ({"type": "logit_multiplier", "factor": math.inf}, "factor=inf must be positive and finite"),
        ({"type": "layerscale", "start": 0.0}, "start=0.0 must be positive"),
        ({"type": "skip_step", "window": 1}, "window=1 must be at least 2"),
        ({"type": "skip_step", "sigma": 0.0}, "sigma=0.0 must be positive"),
    ],
)
def test_impossible_options_are_refused(node: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        STABILITY.build(node, d_model=16, n_heads=4, n_kv_heads=4, d_head=4)
