"""Maximal update parametrisation: what it changes, and the coordinate check over widths 64 to 1024."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from andrea_ablate.init import INITS
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.training.identity import check
from andrea_ablate.training.optim import OPTIMIZERS, set_lr
from designs import design
from support import Compose

WIDTHS = (64, 256, 1024)
TOKENS = torch.randint(0, 23, (4, 13), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": [0.9, 0.95], "eps": 1e-8},
    "lion": {"betas": [0.9, 0.99]},
}


def optimizer_of(model: TransformerLM, optim: str, lr: float) -> torch.optim.Optimizer:
    node = {"type": optim, "lr": lr, "weight_decay": 0.0, "decay_embeddings": False, **OPTIONS[optim]}
    optimizer = OPTIMIZERS.build(node, model=model)
    set_lr(optimizer, lr)
    return optimizer


def activations(init: str, width: int, optim: str, lr: float, steps: int = 4) -> dict[str, float]:
    """Mean size of what both sublayers and the model give after a few steps, four heads at every width."""
    model = TransformerLM(design(d_model=width, n_layers=1, init=init))
    optimizer = optimizer_of(model, optim, lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS[:, :-1], TOKENS[:, 1:]).mean().backward()
        optimizer.step()
    sizes: dict[str, float] = {}

    def note(name: str, module: Any, inputs: Any, output: torch.Tensor) -> None:
        sizes[name] = output.abs().mean().item()

    for part in ("attn", "ffn"):
        model.blocks[0].get_submodule(part).register_forward_hook(partial(note, part))
    with torch.no_grad():
        sizes["logits"] = model(TOKENS[:, :-1]).abs().mean().item()
    return sizes


@pytest.mark.slow  # several runs
@pytest.mark.parametrize(("optim", "lr"), [("adamw", 1e-2), ("lion", 3e-3)])
def test_activations_after_some_steps_do_not_grow_with_the_width(optim: str, lr: float) -> None:
    """The coordinate check of Tensor Programs V, appendix D.1; with one rate for all matrices they do grow."""
    mup, standard = ({width: activations(init, width, optim, lr) for width in WIDTHS} for init in ("mup", "fan_in"))
    for name in mup[64]:
        sizes = [mup[width][name] for width in WIDTHS]
        assert max(sizes) < 2 * min(sizes), (name, sizes)
        grown = [standard[width][name] for width in WIDTHS]
        assert grown[0] < grown[1] < grown[2] and grown[2] > 3 * grown[0], (name, grown)


def test_scores_and_logits_are_scaled_as_by_hand() -> None:
    """Width 32 against a base of 8, heads of 8: scores times 1/8, logits times 1/4."""
    config = design(d_model=32, init="mup", stability=("output_softcap",))
    config.init["base_width"] = 8
    model = TransformerLM(config)
    tricks = {"logit_multiplier": {"factor": 0.25}, "output_softcap": {}}
    same = TransformerLM(design(tricks, d_model=32, attn={"scale": 1 / 8}))
    same.load_state_dict(model.state_dict())
    assert torch.equal(model(TOKENS[:, :12]), same(TOKENS[:, :12]))
    assert torch.equal(model(TOKENS[:, :-1], TOKENS[:, 1:]).nll, same(TOKENS[:, :-1], TOKENS[:, 1:]).nll)


def test_a_scale_that_is_given_is_kept() -> None:
    blocks: Any = TransformerLM(design(init="mup", attn={"scale": 0.3})).blocks
    assert [block.attn.scale for block in blocks] == [0.3, 0.3]


@pytest.mark.parametrize("optim", OPTIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_the_blocks_learn_slower_in_proportion_to_the_width(optim: str, tied: bool) -> None:
    """A first update of AdamW or Lion moves everything by its learning rate; width 32 is a fourth of the base."""
    model = TransformerLM(design(d_model=32, init="mup", tie_embeddings=tied, linear_bias=True, ffn="swiglu"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, optim, 1e-3)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        want = 4e-3 if name.startswith("blocks.") and parameter.ndim == 2 else 1e-3
        moved = (parameter.detach() - before[name]).abs().median().item()
        assert moved == pytest.approx(want, rel=1e-3), name


@pytest.mark.parametrize("optim", OPTIMIZERS.names())
def test_an_optimizer_without_agreed_rates_is_refused(optim: str, epochs: Compose) -> None:
    cfg = epochs("init=mup", f"optim={optim}")
    if optim in OPTIONS:
        check(cfg)
        return
    with pytest.raises(ConfigError, match=f"optim={optim} has no agreed learning rates.*optim=adamw or init=fan_in"):
        check(cfg)


@pytest.mark.parametrize("width", [0, -128])
def test_a_base_width_below_one_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=f"base_width={width} must be at least 1"):
        INITS.build({"type": "mup", "base_width": width}, d_model=16, d_head=4)
