"""Attention's scores as the softmax gets them, by layer or of given queries and keys, and how two sets of them differ.

`change_without_position` and `values_turned` change what carries the position.
"""

# Shapes: B batch, L queries, M keys, H query heads, G key heads, K d_head
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from andrea_ablate.attention import MultiHeadAttention, attend, multihead, watching
from andrea_ablate.model import TransformerLM
from andrea_ablate.positions import POSITIONS

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def attentions(model: TransformerLM) -> list[MultiHeadAttention]:
    """Those of a model, first layer to last."""
    return [cast(MultiHeadAttention, block.attn) for block in model.blocks]


def gap(a: Tensor, b: Tensor) -> float:
    """Largest ``|a - b|`` of an item of the batch over the largest ``|b|`` of that item; equal infinities are equal."""
    apart = (a.double() - b.double()).abs().masked_fill(a == b, 0.0).flatten(1).amax(1)
    return float((apart / b.double().abs().masked_fill(b.isinf(), 0.0).flatten(1).amax(1)).max())


def scores(q: Tensor, k: Tensor) -> Tensor:
    """The scores of all queries and keys, ``(B, H, L, M)``, without a mask."""
    found: list[Tensor] = []
    with watching(found.append):
        attend(q, k, k, scale=q.shape[-1] ** -0.5, causal=False, backend="eager")
    return found[0]


def layer_scores(model: TransformerLM, tokens: Tensor) -> list[Tensor]:
    """The scores of every layer, ``(B, H, L, M)``, -inf where a query may not see."""
    found: list[Tensor] = []
    with torch.no_grad(), watching(found.append):
        model.hidden(tokens)
    return found


def diagonal_change(score_BHLM: Tensor) -> float:
    """Largest change from score ``(i, j)`` to ``(i + 1, j + 1)``, over the largest score."""
    return gap(score_BHLM[..., 1:, 1:], score_BHLM[..., :-1, :-1])


def streams(model: TransformerLM, tokens: Tensor) -> list[Tensor]:
    """The stream before each block."""
    found: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _, args: found.append(args[0])) for block in model.blocks]
    try:
        with torch.no_grad():
            model.hidden(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found


def change_without_position(model: TransformerLM, tokens: Tensor) -> list[float]:
    """Per layer: how far its scores move when the encoding is taken out and the layer still reads the same stream."""
    read, before = streams(model, tokens), layer_scores(model, tokens)
    after: list[Tensor] = []
    pos, model.pos = model.pos, POSITIONS.build({"type": "none"})
    try:
        for layer, block in enumerate(model.blocks):
            handle = block.register_forward_pre_hook(lambda _, args, x=read[layer]: (x, *args[1:]))
            after.append(layer_scores(model, tokens)[layer])
            handle.remove()
    finally:
        model.pos = pos
    return [gap(now, then) for now, then in zip(after, before, strict=True)]


@contextmanager
def values_turned(turn: Turn) -> Iterator[None]:
    """Within the block, attention turns its values as it turns its keys: what RoPE does not do."""

    def turned(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return attend(q, k, turn(v, v)[1], **given)

    before = vars(multihead)["attend"]
    vars(multihead)["attend"] = turned
    try:
        yield
    finally:
        vars(multihead)["attend"] = before
