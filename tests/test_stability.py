"""Stability tricks against float64 NumPy, and the seam that each plugs into."""

from __future__ import annotations

import math
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


def check_qk_norm() -> None:
    module: Any = STABILITY.build({"type": "qk_norm", "eps": 1e-3}, d_head=5).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    q, k = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 2, 5, dtype=torch.float64)
    for got, x, gain in zip(module(q, k), (q, k), (module.q_gain, module.k_gain), strict=True):
        want = norms.rmsnorm(x.numpy(), gain.detach().numpy(), 0.0, 1e-3)
        torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-12, atol=1e-12)


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
    "qk_norm": check_qk_norm,
    "attn_softcap": check_attn_softcap,
    "output_softcap": check_output_softcap,
    "z_loss": check_z_loss,
}
SEAMS = {"qk_norm": "qk", "attn_softcap": "scores", "output_softcap": "logits", "z_loss": "loss"}


@pytest.mark.parametrize("name", STABILITY.names())
def test_trick_matches_its_oracle(name: str) -> None:
    torch.manual_seed(0)
    ORACLES[name]()


@pytest.mark.parametrize("name", STABILITY.names())
def test_trick_names_its_seam(name: str) -> None:
    assert STABILITY.get(name).seam == SEAMS[name]


@pytest.mark.parametrize("name", STABILITY.names())
def test_trick_changes_what_its_seam_carries_and_nothing_else(name: str) -> None:
    """Only the loss may change without the logits, and only by the penalty."""
    hard = {"qk_norm": {}, "attn_softcap": {"cap": 0.01}, "output_softcap": {"cap": 0.01}, "z_loss": {"alpha": 1.0}}
    plain, tricked = TransformerLM(design()), TransformerLM(design({name: hard[name]}))
    with torch.no_grad():
        for model in (plain, tricked):
            for parameter in model.parameters():
                parameter.mul_(3)
    tokens = torch.arange(10).view(1, 10)
    same = torch.allclose(plain(tokens), tricked(tokens), atol=1e-6)
    assert same == (name == "z_loss")
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
        ({"type": "softcap"}, "softcap.*attn_softcap, output_softcap, qk_norm, z_loss"),
    ],
)
def test_impossible_options_are_refused(node: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        STABILITY.build(node, d_head=4)
