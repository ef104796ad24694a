"""Measurements of ffn.yaml: size, activation and gating of the feed-forward sublayer."""

# Shapes: N tokens, D d_model, F d_ff
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from andrea_ablate import ops
from andrea_ablate.accounting import account
from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import exact, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.counts import LENGTH, bare, parameters
from andrea_ablate.claims.probes.models import config
from andrea_ablate.ffn import DenseFFN
from andrea_ablate.model import TransformerLM

Function = Callable[[Tensor], Tensor]


def activation(kind: str) -> Function:
    """The model's own, by the name that a configuration gives it."""
    return lambda x: ops.activation(x, kind)


def grid(low: float, high: float, count: int = 200_001) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


@measures("mlp-two-linear")
def two_linear_maps(claim: Claim) -> Measurement:
    """ANDREA's MLP with the activation taken out is one matrix of rank 768 or less; with it, it is none."""
    d_model, d_ff = 768, 3072
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x_ND, up_FD, down_DF = normal(64, d_model), normal(d_ff, d_model), normal(d_model, d_ff)
    one_DD = down_DF @ up_FD

    def output(kind: str) -> Tensor:
        mlp = DenseFFN(d_model=d_model, d_ff=d_ff, linear_bias=False, activation=kind).double()
        with torch.no_grad():
            mlp.w_up.copy_(up_FD)
            mlp.w_down.copy_(down_DF)
            out_ND: Tensor = mlp(x_ND)
        return out_ND

    def error(kind: str, expected_ND: Tensor) -> float:
        return float((output(kind) - expected_ND).abs().max() / expected_ND.abs().max())

    tolerance = claim.margin["fp64"]
    hidden_NF = torch.nn.functional.gelu(x_ND @ up_FD.T)
    return Measurement(
        worded=(
            within("|MLP - W2 gelu(W1 x)|", error("gelu", hidden_NF @ down_DF.T), tolerance, "relative"),
            within("no activation: |MLP - (W2 W1) x|", error("identity", x_ND @ one_DD.T), tolerance, "relative"),
            exact("no activation: rank of W2 W1", int(torch.linalg.matrix_rank(one_DD)), high=d_model),
        ),
        controls=(within("with GELU: |MLP - (W2 W1) x|", error("gelu", x_ND @ one_DD.T), tolerance, "relative"),),
        seeds=(0,),
    )


@measures("andrea-mlp-params")
def mlp_parameters(claim: Claim) -> Measurement:
    model = bare("andrea_120m", tied=False).config
    up, down = (parameters(model, f"blocks.0.ffn.{name}") for name in ("w_up", "w_down"))
    return Measurement(
        worded=(
            exact("W1", up, equals=2.36e6, digits=3),
            exact("W2", down, equals=2.36e6, digits=3),
            exact("both, per block", up + down, equals=4.72e6, digits=3),
            exact("all blocks", parameters(model, ".ffn."), equals=56.6e6, digits=3),
        )
    )


@measures("andrea-mlp-half")
def mlp_share(claim: Claim) -> Measurement:
    found = {}
    for name in ("untied", "tied"):
        model = bare("andrea_120m", name == "tied").config
        found[name] = parameters(model, ".ffn."), account(model, LENGTH)
    mlp, counted = found["untied"]
    return Measurement(
        worded=tuple(
            exact(
                f"MLPs / all parameters, {name}", mlp / count.params, low=claim.margin["low"], high=claim.margin["high"]
            )
            for name, (mlp, count) in found.items()
        ),
        reported=(told("MLPs / matrices of the blocks", mlp / counted.block_matrices),),
    )


def phi_error(gelu: Function) -> float:
    """Largest distance of ``gelu(x) / x`` from the normal distribution function, for x from -8 to 8."""
    x = grid(-8, 8, 200_000)  # an even count leaves 0 out
    return float((gelu(x) / x - 0.5 * torch.erfc(-x / math.sqrt(2))).abs().max())


@measures("gelu-tanh-error")
def tanh_approximation(claim: Claim) -> Measurement:
    x = grid(-8, 8)
    approximation, true = activation("gelu_tanh"), x * 0.5 * torch.erfc(-x / math.sqrt(2))
    distance = (approximation(x) - true).abs()
    formula = x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def logistic(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    tolerance = claim.margin["error"]
    return Measurement(
        worded=(
            within("an approximation of Phi: largest error", phi_error(approximation), tolerance),
            within("of GELU: largest error", float(distance.max()), tolerance),
        ),
        controls=(within("x sigmoid(1.702 x) in its place", phi_error(logistic), tolerance),),
        reported=(
            told("GELU: where it is largest", -abs(float(x[distance.argmax()]))),
            told("the model's gelu_tanh against the formula", float((approximation(x) - formula).abs().max())),
        ),
    )


@measures("gelu-regimes")
def regimes(claim: Claim) -> Measurement:
    def errors(kind: str) -> dict[str, float]:
        large, small, zero, left, right = activation(kind)(
            torch.tensor([10.0, -10.0, 0.0, -1e-12, 1e-12], dtype=torch.float64)
        ).tolist()
        return {
            "at 10: |y - x|": abs(large - 10),
            "at -10: |y|": abs(small),
            "at 0: |y|": abs(zero),
            "just beside 0: |y|": max(abs(left), abs(right)),
        }

    tolerance = claim.margin["fp64"]
    broken = dict(zip(errors("gelu"), ("silu", "silu", "sigmoid", "sigmoid"), strict=True))
    return Measurement(
        worded=tuple(within(f"GELU {name}", error, tolerance) for name, error in errors("gelu").items()),
        controls=tuple(within(f"{kind} {name}", errors(kind)[name], tolerance) for name, kind in broken.items()),
    )


@measures("gelu-negative-leak")
def negative_leak(claim: Claim) -> Measurement:
    x = grid(-5, -5e-6, 100_000)

    def passed(kind: str) -> float:
        y = activation(kind)(x)
        return float(((y < 0) & (y > x)).double().mean())

    y = activation("gelu")(x)
    left = x < x[y.argmin()]
    return Measurement(
        worded=(exact("share of the negative inputs that pass, made smaller", passed("gelu"), equals=1),),
        controls=(exact("of ReLU", passed("relu"), equals=1), exact("of the identity", passed("identity"), equals=1)),
        reported=(
            told("least value", float(y.min())),
            told("where", float(x[y.argmin()])),
            told("share left of it where it falls as x grows", float((y[left].diff() < 0).double().mean())),
            told("least value of SiLU", float(activation("silu")(x).min())),
        ),
    )


def jump(function: Function, order: int) -> float:
    """By how much the derivative of that order jumps at 0: its values at 1e-12 on either side."""
    x = torch.tensor([-1e-12, 1e-12], dtype=torch.float64, requires_grad=True)
    with ops.using("reference"):  # the fused operations have no second derivative
        y = function(x)
    for _ in range(order):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return float((y[1] - y[0]).detach().abs())


@measures("relu-kink")
def kink(claim: Claim) -> Measurement:
    tolerance = claim.margin["fp64"]
    relu, gelu = activation("relu"), activation("gelu")
    return Measurement(
        worded=(
            exact("ReLU: jump of the derivative at 0", jump(relu, 1), equals=1),
            within("GELU: jump of the derivative at 0", jump(gelu, 1), tolerance),
            within("GELU: jump of the second derivative at 0", jump(gelu, 2), tolerance),
        ),
        controls=(
            within("ReLU in its place", jump(relu, 1), tolerance),
            within("ReLU squared in its place, second derivative", jump(activation("relu2"), 2), tolerance),
        ),
    )


class Cost(NamedTuple):
    """Of one block's FFN: parameters, and FLOPs of one token forward."""

    params: int
    flops: int


def ffn_cost(*overrides: str) -> Cost:
    """Counted on the module, at ANDREA's width unless said otherwise."""
    with torch.device("meta"):
        model = TransformerLM(config("size=andrea_120m", "model.n_layers=1", *overrides))
        ffn: Any = model.blocks[0].ffn
        with ops.using("reference"), FlopCounterMode(display=False) as counted:
            ffn(torch.empty(1, 1, model.dims.d_model))
    return Cost(sum(p.numel() for p in ffn.parameters()), counted.get_total_flops())


DENSE, GATED = ("ffn=gelu4x",), ("ffn=swiglu",)


@measures("glu-1.5x")
def glu_cost(claim: Claim) -> Measurement:
    dense, gated = ffn_cost(*DENSE), ffn_cost(*GATED, "model.ffn.ratio=4")
    return Measurement(
        worded=(
            exact("parameters, gated / plain at 4x", gated.params / dense.params, equals=claim.margin["equals"]),
            exact("FLOPs, gated / plain at 4x", gated.flops / dense.flops, equals=claim.margin["equals"]),
        ),
        reported=(told("parameters of a gated FFN", gated.params), told("of a plain one", dense.params)),
    )


@measures("glu-8-3-match")
def glu_match(claim: Claim) -> Measurement:
    """At a width that 3 divides; LLaMA-7B's 4096 is rounded up, to 11008 in its own multiple of 256."""
    dense, gated = ffn_cost(*DENSE), ffn_cost(*GATED)
    wide = ("model.d_model=4096", "model.n_heads=32")
    plain = ffn_cost(*wide, *DENSE)
    return Measurement(
        worded=(
            exact("parameters, gated at 8/3 / plain at 4", gated.params / dense.params, equals=1),
            exact("FLOPs, gated at 8/3 / plain at 4", gated.flops / dense.flops, equals=1),
        ),
        reported=tuple(
            told(
                f"at 4096, rounded up to a multiple of {multiple}: parameters, gated / plain",
                ffn_cost(*wide, *GATED, f"model.ffn.multiple={multiple}").params / plain.params,
            )
            for multiple in (64, 256)
        ),
    )


@measures("swiglu-cheaper")
def gating_cost(claim: Claim) -> Measurement:
    """The cost alone; whether the loss is lower at that cost takes a GPU (`glu-better`)."""
    dense, gated = ffn_cost(*DENSE), ffn_cost(*GATED)
    ratios = {"parameters": gated.params / dense.params, "FLOPs": gated.flops / dense.flops}
    below = math.nextafter(1, 0)
    return Measurement(
        worded=tuple(exact(f"{name}, SwiGLU at 8/3 / GELU at 4", r, high=below) for name, r in ratios.items()),
        corrected=tuple(
            exact(f"equal cost: {name}, SwiGLU at 8/3 / GELU at 4", r, equals=1) for name, r in ratios.items()
        ),
    )
