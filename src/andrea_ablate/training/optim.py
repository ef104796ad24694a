"""Optimizers and which parameters they decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from andrea_ablate.parameters import MATMUL_ROLES, named_roles
from andrea_ablate.registry import Registry

OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optim")


def param_groups(model: nn.Module, weight_decay: float, decay_embeddings: bool) -> list[dict[str, Any]]:
    """Two groups, decayed and not, with each parameter in exactly one.

    Matrices decay; gains and biases never do; token and position embeddings (a tied head among them) by option.
    """
    decayed = {*MATMUL_ROLES, *(("embedding", "position") if decay_embeddings else ())}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for _, parameter, role in named_roles(model):
        groups[role in decayed].append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decay else 0.0} for decay, params in groups.items() if params
    ]


@OPTIMIZERS.register("adamw")
def adamw(
    *,
    model: nn.Module,
    lr: float,
    betas: Iterable[float],
    eps: float,
    weight_decay: float,
    decay_embeddings: bool,
) -> torch.optim.Optimizer:
    """AdamW in torch's fused form. Source: Loshchilov & Hutter 2019, arXiv:1711.05101."""
    beta1, beta2 = betas
    groups = param_groups(model, weight_decay, decay_embeddings)
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=True)


@OPTIMIZERS.register("muon")
def muon(
    *,
    model: nn.Module,
    lr: float,
    momentum: float,
    betas: Iterable[float],
    eps: float,
    weight_decay: float,
    decay_embeddings: bool,
) -> torch.optim.Optimizer:
    """Muon for the blocks' matrices (updates scaled to AdamW's root mean square), AdamW for every other parameter.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982, equation 4 for the scaling.
    """
    hidden = {id(p) for _, p, role in named_roles(model) if role in ("matrix", "out")}
    rest = [
        {**group, "params": [p for p in group["params"] if id(p) not in hidden]}
        for group in param_groups(model, weight_decay, decay_embeddings)
    ]
    beta1, beta2 = betas
    return Together(
        Muon([p for p in model.parameters() if id(p) in hidden], lr=lr, momentum=momentum, weight_decay=weight_decay),
        torch.optim.AdamW([g for g in rest if g["params"]], lr=lr, betas=(beta1, beta2), eps=eps, fused=True),
    )


class Muon(torch.optim.Optimizer):
    """``b <- m b + (1 - m) g``, then ``W <- (1 - lr wd) W - lr 0.2 sqrt(max(W.shape)) orthogonalise(m b + (1 - m) g)``.

    As torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``, but that multiplies in bf16 everywhere, which takes 20
    times as long as fp32 on a CPU without instructions for it.

    Args:
        params: matrices. lr, momentum m, weight_decay wd: as in the formula.
    """

    def __init__(self, params: list[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - momentum)
                update = orthogonalise(weight.grad.lerp(buffer, momentum))
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr * 0.2 * max(weight.shape) ** 0.5)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """``U S' V^T`` for ``U S V^T``, with every singular value near 1: Newton-Schulz iterations of degree five.

    Source: Jordan et al. 2024 (Muon), with its coefficients.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if x.shape[0] > x.shape[1] else wide


class Together(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters that step as one; they share their group dicts with it."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
