"""Optimizers and which parameters they decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import BLOCK_ROLES, MATMUL_ROLES, named_params, named_roles
from andrea_ablate.registry import ConfigError, Registry

OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optim")


def param_groups(model: TransformerLM, weight_decay: float, decay_embeddings: bool) -> list[dict[str, Any]]:
    """Groups of one weight decay and one factor on the learning rate (init.py), with each parameter in exactly one.

    Matrices decay; gains and biases never do; token and position embeddings (a tied head among them) by option.
    """
    decayed = {*MATMUL_ROLES, *(("embedding", "position") if decay_embeddings else ())}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for _, parameter, param in named_params(model):
        groups.setdefault((param.role in decayed, model.scheme.lr_factor(param)), []).append(parameter)
    return [
        {"params": groups[decay, factor], "weight_decay": weight_decay if decay else 0.0, "lr_factor": factor}
        for decay, factor in sorted(groups, reverse=True)
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its learning rate of the coming step, where that of the run is `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def check_optimizer(node: Mapping[str, Any], model: TransformerLM) -> None:
    """Refuse an unknown optimizer or option, and one that the model's initialisation has no learning rates for."""
    OPTIMIZERS.check(node, model=model)
    meant = model.scheme.optimizers
    if meant and node["type"] not in meant:
        raise ConfigError(
            f"optim={node['type']} has no agreed learning rates under this init, which scales them with the width for "
            f"{' and '.join(meant)}; use optim={meant[0]} or init=fan_in"
        )


@OPTIMIZERS.register("adamw")
def adamw(
    *,
    model: TransformerLM,
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
    model: TransformerLM,
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
    hidden = {id(p) for _, p, role in named_roles(model) if role in BLOCK_ROLES}
    rest = [
        {**group, "params": [p for p in group["params"] if id(p) not in hidden]}
        for group in param_groups(model, weight_decay, decay_embeddings)
    ]
    beta1, beta2 = betas
    return Together(
        Muon([p for p in model.parameters() if id(p) in hidden], lr=lr, momentum=momentum, weight_decay=weight_decay),
        torch.optim.AdamW([g for g in rest if g["params"]], lr=lr, betas=(beta1, beta2), eps=eps, fused=True),
    )


@OPTIMIZERS.register("lion")
def lion(
    *, model: TransformerLM, lr: float, betas: Iterable[float], weight_decay: float, decay_embeddings: bool
) -> torch.optim.Optimizer:
    """Lion: updates of one size, the sign of a momentum. Source: Chen et al. 2023, arXiv:2302.06675."""
    beta1, beta2 = betas
    return Lion(param_groups(model, weight_decay, decay_embeddings), lr=lr, betas=(beta1, beta2))


@OPTIMIZERS.register("sgd")
def sgd(
    *, model: TransformerLM, lr: float, momentum: float, nesterov: bool, weight_decay: float, decay_embeddings: bool
) -> torch.optim.Optimizer:
    """SGD in torch's fused form; weight decay is part of the gradient. Source: Sutskever et al. 2013 (momentum)."""
    groups = param_groups(model, weight_decay, decay_embeddings)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)


class Lion(torch.optim.Optimizer):
    """``W <- (1 - lr wd) W - lr sign(b1 m + (1 - b1) g)``, then ``m <- b2 m + (1 - b2) g``.

    Args:
        params: parameters or groups. lr, betas (b1, b2), weight_decay wd: as in the formula.
    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(weight.grad.lerp(momentum, beta1).sign_(), alpha=-lr)
                momentum.lerp_(weight.grad, 1 - beta2)


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
