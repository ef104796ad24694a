"""Measurements of norm_type.yaml: LayerNorm or RMSNorm, and biases."""

# Shapes: N tokens, D d_model, F features of the map that follows
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import exact, timing, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.counts import LENGTH, arithmetic, bare, designs, matmul_flops
from andrea_ablate.claims.probes.models import built, zipf_tokens
from andrea_ablate.claims.probes.timing import interleaved
from andrea_ablate.model import TransformerLM
from andrea_ablate.norms import NORMS
from andrea_ablate.parameters import named_roles

D = 96
NO_EPS = 1e-30  # what the claims leave aside


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs() -> dict[str, Tensor]:
    """Tokens as they come, and three kinds that are hard on a norm."""
    x_ND = normal(64, D)
    return {"normal": x_ND, "offset by 1000": x_ND + 1e3, "times 1e6": 1e6 * x_ND, "times 1e-6": 1e-6 * x_ND}


def norm(name: str, eps: float = 1e-5) -> Callable[[Tensor], Tensor]:
    """A norm of the registry in float64, with gains that are not 1; its shift, which the claims leave aside, is 0."""
    module = NORMS.build({"type": name, **({} if name == "dyt" else {"eps": eps})}, d_model=D).double()
    with torch.no_grad():
        for part, parameter in module.named_parameters():
            parameter.copy_(torch.zeros(D) if part == "bias" else 1 + 0.1 * normal(*parameter.shape, seed=1))

    def apply(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    return apply


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def centre_writes(model: TransformerLM) -> None:
    """Take the mean over d_model out of everything that is written to the stream (in place)."""
    with torch.no_grad():
        for _, parameter, role in named_roles(model):
            if role in ("embedding", "position"):
                parameter.sub_(parameter.mean(-1, keepdim=True))
            elif role == "out":
                parameter.sub_(parameter.mean(0))


def conversion_error(centred: bool) -> float:
    """Logits of a pre-LayerNorm model against those of RMSNorm with its weights, centred or as they are."""
    shape = ("model.d_model=48", "model.n_layers=3", "pos=learned")
    layer = built(*shape, "norm_type=layernorm", dtype=torch.float64)
    rms = built(*shape, "norm_type=rmsnorm", "model.norm.bias=true", dtype=torch.float64)
    with torch.no_grad():
        for i, (_, parameter, role) in enumerate(named_roles(layer)):
            if role in ("gain", "bias"):
                parameter.add_(0.1 * normal(*parameter.shape, seed=i))
    rms.load_state_dict(layer.state_dict())
    if centred:
        centre_writes(rms)
    tokens = zipf_tokens(layer, seed=0)
    with torch.no_grad():
        return distance(rms(tokens), layer(tokens))


@measures("rms-eq-ln-centred")
def centred_rms(claim: Claim) -> Measurement:
    layer, rms, tolerance = norm("layernorm"), norm("rmsnorm"), claim.margin["fp64"]
    x_ND = inputs()["normal"]
    return Measurement(
        worded=(
            *(
                within(
                    f"|RMS(x - mean) - LN(x)|, {name}", distance(rms(x - x.mean(-1, keepdim=True)), layer(x)), tolerance
                )
                for name, x in inputs().items()
            ),
            within("a pre-LN model as pre-RMSNorm, writes centred: logits", conversion_error(centred=True), tolerance),
        ),
        controls=(
            within("mean left in: |RMS(x) - LN(x)|", distance(rms(x_ND + 0.1), layer(x_ND)), tolerance),
            within("the model, writes as they are", conversion_error(centred=False), tolerance),
        ),
        seeds=(0,),
    )


@measures("norm-invariances")
def invariances(claim: Claim) -> Measurement:
    x_ND, tolerance = inputs()["normal"], claim.margin["fp64"]

    def scaled(name: str) -> float:
        f = norm(name, NO_EPS)
        return max(distance(f(factor * x_ND), f(x_ND)) for factor in (1e-3, 7.0, 1e3))

    def shifted(name: str) -> float:
        f = norm(name, NO_EPS)
        return max(distance(f(x_ND + offset), f(x_ND)) for offset in (-5.0, 0.3, 100.0))

    return Measurement(
        worded=(
            within("RMSNorm, input scaled", scaled("rmsnorm"), tolerance),
            within("LayerNorm, input scaled", scaled("layernorm"), tolerance),
            within("LayerNorm, input shifted", shifted("layernorm"), tolerance),
        ),
        controls=(
            within("RMSNorm, input shifted", shifted("rmsnorm"), tolerance),
            within("dynamic tanh, input scaled", scaled("dyt"), tolerance),
        ),
        seeds=(0,),
    )


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain + bias


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


@measures("norm-flops-share")
def norm_flops(claim: Claim) -> Measurement:
    """Operations of the 25 norms, counted one by one, over the FLOPs of the matrix products, per token."""
    model = bare("andrea_120m", tied=False).config
    products = dict(zip(("forward", "backward"), matmul_flops(model), strict=True))
    count, width = 2 * model.n_layers + 1, model.d_model
    x, gain, bias = torch.ones(8, width), torch.ones(width), torch.ones(width)
    per_token = {
        "LayerNorm": [n / len(x) for n in arithmetic(layer_norm, x, gain, bias)],
        "RMSNorm": [n / len(x) for n in arithmetic(rms_norm, x, gain)],
    }
    both = sum(products.values()) / LENGTH
    return Measurement(
        worded=tuple(
            exact(f"{name}, {what}: share of the FLOPs", count * n / (total + count * n), high=claim.margin["below"])
            for name, (forward, backward) in per_token.items()
            for what, n, total in (
                ("forward", forward, products["forward"] / LENGTH),
                ("forward and backward", forward + backward, both),
            )
        ),
        reported=tuple(told(f"{name}: operations per number, forward", n[0] / width) for name, n in per_token.items()),
    )


@measures("norm-param-share")
def norm_parameters(claim: Claim) -> Measurement:
    return _share_of("norms with gain and bias", "norms with gain", base="norms without parameters", claim=claim)


@measures("bias-param-share")
def bias_parameters(claim: Claim) -> Measurement:
    return _share_of("all biases", "biases of the MLP", base="no biases", claim=claim)


def _share_of(*choices: str, base: str, claim: Claim) -> Measurement:
    """What each choice adds to the untied model with `base` in its place, as a share of the whole."""
    table = {design.parts: design for design in designs("andrea_120m")}
    plain = bare("andrea_120m", tied=False)
    added = {}
    for choice in choices:
        chosen = table[tuple(choice if part == base else part for part in plain.parts)]
        added[choice] = (chosen.params - plain.params, chosen.params)
    return Measurement(
        worded=tuple(
            exact(f"{name} / all parameters", more / whole, high=claim.margin["below"])
            for name, (more, whole) in added.items()
        ),
        reported=tuple(told(f"{name}: parameters", more) for name, (more, _) in added.items()),
    )


@measures("bias-redundant-gamma")
def folding(claim: Claim) -> Measurement:
    """Into what can a bias be folded? W (gain * x + beta) + b, with x normalised and without a mean."""
    n, width, features = 64, 24, 40
    x_ND = F.layer_norm(normal(n, width), (width,))
    w_FD, gain_D, beta_D, b_F = (
        normal(features, width, seed=1),
        normal(width, seed=2),
        normal(width, seed=3),
        normal(features, seed=4),
    )
    want_NF = (gain_D * x_ND + beta_D) @ w_FD.T + b_F

    def folded(bias_F: Tensor) -> float:
        return distance(x_ND @ (w_FD * gain_D).T + bias_F, want_NF)

    # The gain that comes nearest to W (gain * x) + b without the b: least squares over all tokens and features.
    design = (x_ND[:, None, :] * w_FD).reshape(n * features, width)
    target = ((gain_D * x_ND) @ w_FD.T + b_F).reshape(-1)
    nearest_D = torch.linalg.lstsq(design, target[:, None]).solution[:, 0]
    left = float((design @ nearest_D - target).norm() / b_F.expand(n, -1).norm())
    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=(within("b that no gain can stand in for, as a share of b", left, tolerance),),
        corrected=(within("beta folded into the bias that follows: error", folded(w_FD @ beta_D + b_F), tolerance),),
        controls=(within("beta left out: error", folded(b_F), tolerance),),
        seeds=(0,),
    )


@measures("norm-memory-bound")
def memory_bound(claim: Claim) -> Measurement:
    """LayerNorm of 16384 x 768 numbers against a copy of them, and its arithmetic against that of a matrix product."""
    rows, width, inner = 16_384, 768, 3072
    x, y = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)), torch.empty(rows, width)
    gain, bias = torch.ones(width), torch.zeros(width)
    times = interleaved({"copy": lambda: y.copy_(x), "norm": lambda: F.layer_norm(x, (width,), gain, bias)})
    operations = arithmetic(layer_norm, x[:8], gain, bias)[0] / (8 * width)
    bound = 1 / claim.margin["share"]
    per_byte = operations / (2 * x.element_size())
    product = 2 * rows * width * inner / (x.element_size() * (rows * width + width * inner + rows * inner))
    return Measurement(
        worded=(
            timing("time, LayerNorm / copy", times["norm"], times["copy"], times["again"], bound=bound, above=False),
            exact("FLOPs per byte, matrix product / LayerNorm", product / per_byte, low=claim.margin["factor"]),
        ),
        reported=(told("LayerNorm: FLOPs per byte", per_byte), told("768 x 3072 product: FLOPs per byte", product)),
    )


@measures("rms-faster")
def rms_time(claim: Claim) -> Measurement:
    """Forward, 4096 x 768: each operation a pass of its own, torch's own function, and this package's."""
    x = torch.randn(4096, 768, generator=torch.Generator().manual_seed(0))
    gain, bias = torch.ones(768), torch.zeros(768)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "one pass per operation": (lambda: layer_norm(x, gain, bias), lambda: rms_norm(x, gain)),
        "torch's own": (lambda: F.layer_norm(x, (768,), gain, bias), lambda: F.rms_norm(x, (768,), gain, 1e-5)),
        "this package's": (
            lambda: ops.norm(x, gain, bias, eps=1e-5, center=True),
            lambda: ops.norm(x, gain, eps=1e-5, center=False),
        ),
    }
    found = []
    for name, (layer, rms) in ways.items():
        times = interleaved({"layer": layer, "rms": rms})
        found.append(
            timing(f"{name}: time, RMSNorm / LayerNorm", times["rms"], times["layer"], times["again"], above=False)
        )
    return Measurement(worded=tuple(found), corrected=(found[0],))
