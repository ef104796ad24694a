"""Counting: parameters by part, the FLOPs that torch counts, and the arithmetic of everything else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from andrea_ablate import ops
from andrea_ablate.accounting import account
from andrea_ablate.claims.probes.models import config
from andrea_ablate.config import ModelConfig
from andrea_ablate.model import TransformerLM

LENGTH = 1024  # ANDREA's context


class Design(NamedTuple):
    """One way to count a model: what it has, in words, and its configuration."""

    parts: tuple[str, ...]
    config: ModelConfig

    @property
    def name(self) -> str:
        return ", ".join(self.parts)

    @property
    def params(self) -> int:
        return account(self.config, LENGTH).params


@lru_cache
def designs(size: str) -> tuple[Design, ...]:
    """Every combination of what a model of this size may be counted with: output projection, biases, norms, positions.

    Args:
        size: an option of the group ``size``.
    """
    base = config(f"size={size}")
    outputs = {"tied": True, "untied": False}
    biases = {
        "no biases": (False, None),
        "biases of q, k and v": (False, "qkv"),
        "biases of the attention": (False, "all"),
        "biases of the MLP": (True, "none"),
        "all biases": (True, None),
    }
    norms: dict[str, dict[str, Any]] = {
        "norms without parameters": {"type": "layernorm_plain"},
        "norms with gain": {"type": "rmsnorm"},
        "norms with gain and bias": {"type": "layernorm"},
    }
    positions: dict[str, dict[str, Any]] = {"position table": base.pos, "no position table": {"type": "none"}}
    return tuple(
        Design(
            parts,
            replace(
                base,
                tie_embeddings=outputs[parts[0]],
                linear_bias=biases[parts[1]][0],
                attn={**base.attn, "bias": biases[parts[1]][1]},
                norm=norms[parts[2]],
                pos=positions[parts[3]],
            ),
        )
        for parts in itertools.product(outputs, biases, norms, positions)
    )


def variants(design: Design) -> dict[str, Design]:
    """The same design with what neither the lesson nor the card rules out in words, each by its name."""
    model, parts = design.config, design.parts
    changed = {
        "a bias of the output projection": replace(model, head_bias=True),
        "the vocabulary padded to a multiple of 64": replace(model, vocab_multiple=64),
        "the vocabulary padded to a multiple of 128": replace(model, vocab_multiple=128),
        "a gated MLP of ratio 8/3": replace(model, ffn={**model.ffn, "type": "gated", "ratio": "8/3"}),
    }
    return {name: Design((*parts, name), config) for name, config in changed.items()}


def bare(size: str, tied: bool) -> Design:
    """The design of `designs` that counts weight matrices and the position table alone."""
    parts = ("tied" if tied else "untied", "no biases", "norms without parameters", "position table")
    return next(design for design in designs(size) if design.parts == parts)


def parameters(model: ModelConfig, *parts: str) -> int:
    """Numbers in the parameters whose full name contains one of `parts`, from a model that is never given memory."""
    with torch.device("meta"):
        named = list(TransformerLM(model).named_parameters())
    return sum(p.numel() for name, p in named if any(part in name for part in parts))


def matmul_flops(model: ModelConfig, length: int = LENGTH) -> tuple[int, int]:
    """FLOPs of the matrix products of one sequence, forward and backward, as torch counts them; attention in full."""
    with torch.device("meta"):
        built = TransformerLM(model)
        blocks: Any = built.blocks
        for block in blocks:
            block.attn.backend = "eager"  # torch counts the products of its own operations only
        with ops.using("reference"), FlopCounterMode(display=False) as forward:
            out: Tensor = built(torch.zeros(1, length, dtype=torch.long))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()  # type: ignore[no-untyped-call]
    return forward.get_total_flops(), backward.get_total_flops()


class _Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts one operation for each number that an elementwise operation writes or a reduction reads."""

    count = 0
    reductions = (torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.reductions:
            self.count += args[0].numel()
        elif torch.Tag.pointwise in func.tags:
            self.count += out.numel()
        return out


def arithmetic(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, int]:
    """Elementwise operations of `function` and of its backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with _Arithmetic() as forward:  # type: ignore[no-untyped-call]
        out = function(*leaves)
    gradient = torch.ones_like(out)
    with _Arithmetic() as backward:  # type: ignore[no-untyped-call]
        torch.autograd.grad(out, leaves, gradient)
    return forward.count, backward.count
