"""Wiring, with branches and norms that are simple enough to work by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from andrea_ablate.blocks import BLOCKS, NORM_POSITIONS
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from designs import design
from oracles.transformer import ENDS_IN_NORM, WIRING

NORM_COUNT = {"pre": 1, "post": 1, "double": 2, "output": 1, "deepnorm": 1, "depth_scaled": 1, "none": 0}
LAYER, DEPTH = 4, 8  # of the block in these tests: deepnorm's alpha is 2, depth_scaled's factor 1/2


class Affine(nn.Module):
    """``a x + b``, for a branch or a norm that cannot be mistaken for another."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x + self.b


def place(position: str) -> Any:
    return NORM_POSITIONS.build({"type": position}, layer=LAYER, n_layers=DEPTH)


def block(name: str, position: str, dropout: float = 0.0) -> tuple[Any, list[Affine]]:
    """A block with attn ``2 x + 1`` and ffn ``3 x - 1``, and its norms in the order in which they are made."""
    made: list[Affine] = []

    def make_norm() -> nn.Module:
        made.append(Affine(0.5 + len(made), 0.25 * len(made)))
        return made[-1]

    wired = BLOCKS.get(name)(
        position=place(position),
        attn=Affine(2, 1),
        ffn=Affine(3, -1),
        make_norm=make_norm,
        dropout=dropout,
    )
    return wired, made


def run(wired: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = wired(x, lambda attn, h: attn(h))
    return out


def named(norms: list[Affine], position: str) -> dict[str, Callable[[Any], Any]]:
    order = {"pre": ["before"], "post": ["after"], "double": ["before", "branch"], "output": ["branch"], "none": []}
    order |= {"deepnorm": ["after"], "depth_scaled": ["before"]}
    return dict(zip(order[position], norms, strict=True))


@pytest.mark.parametrize("position", NORM_POSITIONS.names())
def test_serial_block_matches_the_formula(position: str) -> None:
    wired, norms = block("serial", position)
    n = NORM_COUNT[position]
    assert len(norms) == 2 * n
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    want = WIRING[position](x.numpy(), Affine(2, 1), named(norms[:n], position), LAYER, DEPTH)
    want = WIRING[position](want, Affine(3, -1), named(norms[n:], position), LAYER, DEPTH)
    torch.testing.assert_close(run(wired, x), torch.as_tensor(want), rtol=1e-14, atol=1e-14)


BY_HAND = {  # from x = 1, with n(x) = 2 x + 1, attn(x) = 2 x + 1, ffn(x) = 3 x - 1
    ("serial", "none"): 15,  # 1 + 3 = 4, 4 + 11
    ("serial", "pre"): 58,  # n 3, attn 7, sum 8; n 17, ffn 50, sum 58
    ("serial", "post"): 71,  # attn 3, sum 4, n 9; ffn 26, sum 35, n 71
    ("serial", "output"): 55,  # attn 3, n 7, sum 8; ffn 23, n 47, sum 55
    ("serial", "double"): 213,  # n 3, attn 7, n 15, sum 16; n 33, ffn 98, n 197, sum 213
    ("serial", "deepnorm"): 109,  # attn 3, 2 + 3 = 5, n 11; ffn 32, 22 + 32 = 54, n 109
    ("serial", "depth_scaled"): 20.5,  # n 3, half 1.5, attn 4, sum 5; n 11, half 5.5, ffn 15.5, sum 20.5
    ("no_residual", "none"): 8,  # attn 3, ffn 8
    ("no_residual", "pre"): 44,  # n 3, attn 7, n 15, ffn 44
    ("parallel", "none"): 6,  # attn 3, ffn 2
    ("parallel", "pre"): 16,  # n 3, attn 7, ffn 8
    ("parallel2", "pre"): 16,  # likewise: its norms are told apart below
}


@pytest.mark.parametrize(("name", "position"), BY_HAND)
def test_block_by_hand(name: str, position: str) -> None:
    wired = BLOCKS.get(name)(
        position=place(position),
        attn=Affine(2, 1),
        ffn=Affine(3, -1),
        make_norm=lambda: Affine(2, 1),
        dropout=0.0,
    )
    assert run(wired, torch.ones(1, 1, 1)).item() == BY_HAND[name, position]


def test_every_block_is_worked_by_hand() -> None:
    assert {name for name, _ in BY_HAND} == set(BLOCKS.names())


@pytest.mark.parametrize("position", ["pre", "none"])
def test_without_residual_the_branches_replace_the_stream(position: str) -> None:
    wired, norms = block("no_residual", position)
    assert len(norms) == 2 * NORM_COUNT[position]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    first, second = norms or (nn.Identity(), nn.Identity())
    torch.testing.assert_close(run(wired, x), 3 * second(2 * first(x) + 1) - 1, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("position", ["pre", "none"])
def test_parallel_block_adds_both_branches_of_the_same_input(position: str) -> None:
    wired, norms = block("parallel", position)
    assert len(norms) == NORM_COUNT[position]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    h = norms[0](x) if norms else x
    torch.testing.assert_close(run(wired, x), x + (2 * h + 1) + (3 * h - 1), rtol=1e-14, atol=1e-14)


def test_parallel_block_with_two_norms_adds_both_branches_of_the_same_input() -> None:
    wired, norms = block("parallel2", "pre")
    assert len(norms) == 2
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    want = x + (2 * norms[0](x) + 1) + (3 * norms[1](x) - 1)
    torch.testing.assert_close(run(wired, x), want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("position", [name for name in NORM_POSITIONS.names() if name != "pre"])
def test_two_norms_are_refused_where_they_have_no_agreed_meaning(position: str) -> None:
    with pytest.raises(ConfigError, match="block=parallel2.*norm=pre or block=serial"):
        block("parallel2", position)


@pytest.mark.parametrize("position", [name for name in NORM_POSITIONS.names() if name not in ("pre", "none")])
@pytest.mark.parametrize("name", ["parallel", "no_residual"])
def test_a_block_is_refused_where_it_has_no_agreed_meaning(name: str, position: str) -> None:
    with pytest.raises(ConfigError, match=f"block={name}.*norm=pre, norm=none or block=serial"):
        block(name, position)


@pytest.mark.parametrize("position", NORM_POSITIONS.names())
def test_the_stack_ends_in_a_norm_where_the_stream_is_not_normalised(position: str) -> None:
    model = TransformerLM(design(norm=position))
    assert isinstance(model.final_norm, nn.Identity) != ENDS_IN_NORM[position]


@pytest.mark.parametrize("name", [name for name in BLOCKS.names() if name != "no_residual"])
def test_dropout_drops_what_a_branch_adds_and_never_the_stream(name: str) -> None:
    wired, _ = block(name, "pre", dropout=0.5)
    wired.attn, wired.ffn = Affine(0, 1), Affine(0, 1)
    x = torch.full((1000, 1, 1), 7.0)
    torch.manual_seed(0)
    out = run(wired, x) - x
    together = {0.0, 4.0}  # each branch adds 1, doubled where it is kept
    added = {"serial": {0.0, 2.0, 4.0}, "parallel": together, "parallel2": together}[name]
    assert set(out.flatten().tolist()) == added
    assert out.mean().item() == pytest.approx(2.0, abs=0.3)
    assert (run(wired.eval(), x) == 9).all()
