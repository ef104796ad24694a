"""Gradient norms by layer, of weights and of the stream, and how alike the tokens of the stream are."""

# Shapes: B batch, L length, D d_model
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.claims.probes.stream import Sublayer, sublayers
from andrea_ablate.model import TransformerLM


def weight_gradients(model: TransformerLM, tokens: Tensor) -> dict[str, list[float]]:
    """Gradient norm of the next-token loss by parameter: ``ffn.w_up`` … over the layers, ``embedding`` once."""
    model.zero_grad()
    _loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    found: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".", 2)[2] if name.startswith("blocks.") else name
        found.setdefault(part, []).append(0.0 if parameter.grad is None else float(parameter.grad.norm()))
    return found


def stream_gradients(model: TransformerLM, tokens: Tensor) -> list[float]:
    """Gradient norm of the next-token loss with respect to the stream before each block, and after the last."""
    kept: list[Tensor] = []

    def keep(_: object, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    handles = [block.register_forward_pre_hook(keep) for block in model.blocks]
    handles.append(model.final_norm.register_forward_pre_hook(keep))
    try:
        _loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return [0.0 if x.grad is None else float(x.grad.norm()) for x in kept]


def token_cosine(model: TransformerLM, tokens: Tensor) -> float:
    """Mean cosine between two different positions of one sequence, in the stream after the last block."""
    with torch.no_grad():
        x_BLD = F.normalize(sublayers(model, tokens)[-1].after.double(), dim=-1)
    cosine_BLL = x_BLD @ x_BLD.transpose(1, 2)
    length = cosine_BLL.shape[1]
    return float((cosine_BLL.sum((1, 2)) - cosine_BLL.diagonal(dim1=1, dim2=2).sum(1)).mean() / (length * (length - 1)))


def step_cosine(sublayer: Sublayer) -> float:
    """Mean over tokens of the cosine between the stream before and after a sublayer."""
    return float(F.cosine_similarity(sublayer.before.double(), sublayer.after.double(), dim=-1).mean())


def _loss(model: TransformerLM, tokens: Tensor) -> Tensor:
    logits_BLV = model(tokens[:, :-1])
    return F.cross_entropy(logits_BLV.flatten(0, 1), tokens[:, 1:].flatten())
