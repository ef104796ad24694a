"""The residual stream: what every sublayer reads, adds and leaves, with the residual or without it; its Jacobian."""

# Shapes: B batch, L length, D d_model
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from andrea_ablate.blocks import Branch, NormPosition, Norms
from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import named_roles


@dataclass(frozen=True)
class Sublayer:
    """The stream before a sublayer, what its branch (with the norm at its end) returned, the stream after it."""

    before: Tensor
    added: Tensor
    after: Tensor


class _Watched:
    """A norm position that notes what passes."""

    def __init__(self, position: NormPosition, passed: list[Sublayer]) -> None:
        self.position, self.passed = position, passed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.position, name)

    def wire(self, x: Tensor, f: Branch, n: Norms) -> Tensor:
        returned: list[Tensor] = []

        def noted(branch: Branch) -> Branch:
            def call(h: Tensor) -> Tensor:
                returned.append(branch(h))
                return returned[-1]

            return call

        norms = {name: n[name] for name in self.position.norms}
        if "branch" in norms:
            norms["branch"] = noted(norms["branch"])
        out = self.position.wire(x, noted(f), norms)
        self.passed.append(Sublayer(x, returned[-1], out))
        return out


class NoResidual:
    """A norm position with the addition taken out: ``f(n(x))`` for pre, ``n(f(x))`` for post."""

    def __init__(self, position: NormPosition) -> None:
        self.norms, self.final_norm = position.norms, position.final_norm

    def wire(self, x: Tensor, f: Branch, n: Norms) -> Tensor:
        x = f(n["before"](x) if "before" in self.norms else x)
        for name in ("branch", "after"):
            x = n[name](x) if name in self.norms else x
        return x


def cut_residual(model: TransformerLM) -> TransformerLM:
    """The same model, without its residual connections (in place)."""
    for block in model.blocks:
        block.position = NoResidual(cast(NormPosition, block.position))  # type: ignore[assignment]
    return model


def scale_outputs(model: TransformerLM, factor: float) -> TransformerLM:
    """The same model, with every projection that writes to the stream times `factor` (in place)."""
    with torch.no_grad():
        for _, parameter, role in named_roles(model):
            if role == "out":
                parameter.mul_(factor)
    return model


def silence(model: TransformerLM) -> TransformerLM:
    """The same model, with zeros in every projection that writes to the stream (in place)."""
    return scale_outputs(model, 0)


def sublayers(model: TransformerLM, tokens: Tensor) -> list[Sublayer]:
    """What passes through the sublayers of a model, first to last, in one forward pass."""
    passed: list[Sublayer] = []
    positions = [block.position for block in model.blocks]
    try:
        for block in model.blocks:
            block.position = _Watched(cast(NormPosition, block.position), passed)  # type: ignore[assignment]
        model.hidden(tokens)
    finally:
        for block, position in zip(model.blocks, positions, strict=True):
            block.position = position
    return passed


def sum_error(model: TransformerLM, tokens: Tensor) -> float:
    """Largest ``|embedding + sum of all that was added - final stream|``, relative to the largest of the stream."""
    with torch.no_grad():
        passed = sublayers(model, tokens)
    total_BLD = passed[0].before + torch.stack([s.added for s in passed]).sum(0)
    final_BLD = passed[-1].after
    return float((total_BLD - final_BLD).abs().max() / final_BLD.abs().max())


def through_blocks(model: TransformerLM) -> Callable[[Tensor], Tensor]:
    """The map of a model's blocks alone: the stream ``(B, L, D)`` before the first -> after the last."""

    def run(x_BLD: Tensor) -> Tensor:
        out: list[Tensor] = []
        first, last = model.blocks[0], model.blocks[-1]
        handles = [
            first.register_forward_pre_hook(lambda _, args: (x_BLD, *args[1:])),
            last.register_forward_hook(lambda _, args, result: out.append(result)),
        ]
        try:
            model.hidden(torch.zeros(x_BLD.shape[:2], dtype=torch.long))
        finally:
            for handle in handles:
                handle.remove()
        return out[0]

    return run


def identity_error(model: TransformerLM, length: int = 3) -> float:
    """Largest ``|J - I|``, J the Jacobian of the blocks at a random stream of that length."""
    shape = (1, length, model.dims.d_model)
    x_BLD = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.embedding.dtype)
    found = cast(Tensor, torch.autograd.functional.jacobian(through_blocks(model), x_BLD))  # type: ignore[no-untyped-call]
    count = x_BLD.numel()
    return float((found.reshape(count, count) - torch.eye(count, dtype=x_BLD.dtype)).abs().max())


def rms(x: Tensor) -> float:
    """Root of the mean square of all numbers."""
    return float(x.double().pow(2).mean().sqrt())
