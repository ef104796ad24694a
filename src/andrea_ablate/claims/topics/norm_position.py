"""Measurements of norm_position.yaml: what normalisation does and where it sits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import exact, linear_fit, ratio, shares, slope, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.gradients import stream_gradients, weight_gradients
from andrea_ablate.claims.probes.models import ANDREA, ONE_BLOCK, SEEDS, SMALL, built, config, zipf_tokens
from andrea_ablate.claims.probes.norms import hard_rows, leak, moment_errors, restore_error
from andrea_ablate.claims.probes.stream import identity_error, rms, scale_outputs, silence, sublayers
from andrea_ablate.model import TransformerLM
from andrea_ablate.norms import PlainLayerNorm, PlainRMSNorm

EPS = (1e-5, 1e-8, 1e-2)
# Xiong et al. 2020: Xavier everywhere, unit embeddings, ReLU, an inner width of d_model.
XIONG = ("init=xavier", "model.init.embedding_std=1.0", "ffn=relu4x", "model.ffn.ratio=1")
GPT2 = ("init=gpt2", "pos=learned")


@measures("ln-moments")
def moments(claim: Claim) -> Measurement:
    x_ND, tolerance = hard_rows(), claim.margin["fp64"]
    found = {eps: moment_errors(PlainLayerNorm(eps=eps), x_ND, eps) for eps in EPS}
    rms_mean, _ = moment_errors(PlainRMSNorm(eps=EPS[0]), x_ND, EPS[0])
    return Measurement(
        worded=tuple(
            finding
            for eps, (mean, variance) in found.items()
            for finding in (
                within(f"eps {eps:g}: mean", mean, tolerance),
                within(f"eps {eps:g}: variance - s2 / (s2 + eps)", variance, tolerance),
            )
        ),
        controls=(within("RMSNorm: mean", rms_mean, tolerance),),
        reported=(told("variance of a constant token", float(PlainLayerNorm()(x_ND[-1]).var())),),
    )


@measures("ln-token-local")
def token_local(claim: Claim) -> Measurement:
    x_ND = hard_rows()
    return Measurement(
        worded=(exact("change of the other tokens", leak(PlainLayerNorm(), x_ND), equals=0),),
        controls=(
            exact(
                "batch norm: change of the other tokens",
                leak(lambda x: F.batch_norm(x, None, None, training=True), x_ND),
                equals=0,
            ),
        ),
    )


@measures("ln-affine-restores")
def affine_restores(claim: Claim) -> Measurement:
    """Can one gain and bias per feature give tokens back? Not their own scales; only tokens of one mean and scale."""
    norm, generator = PlainLayerNorm(eps=1e-12), torch.Generator().manual_seed(0)
    alike_ND = norm(torch.randn(5, 96, dtype=torch.float64, generator=generator)) * 3 + 1
    scaled_ND = alike_ND * torch.tensor([0.1, 0.5, 1.0, 2.0, 10.0])[:, None]
    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=(within("tokens of five scales: left over", restore_error(norm(scaled_ND), scaled_ND), tolerance),),
        corrected=(within("tokens of one scale: left over", restore_error(norm(alike_ND), alike_ND), tolerance),),
        controls=(
            within("from other tokens: left over", restore_error(norm(alike_ND.roll(1, 0)), alike_ND), tolerance),
        ),
        seeds=(0,),
    )


@measures("post-stream-unit")
def stream_unit(claim: Claim) -> Measurement:
    """Per token, the RMS of the stream after every sublayer."""

    def distance(norm: str) -> float:
        model = built(*SMALL, f"norm={norm}", "model.norm.eps=1e-15", dtype=torch.float64)
        with torch.no_grad():
            passed = sublayers(model, zipf_tokens(model, seed=0))
        return max(float((s.after.pow(2).mean(-1).sqrt() - 1).abs().max()) for s in passed)

    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=(within("post-norm: |RMS - 1|", distance("post"), tolerance),),
        controls=(within("pre-norm: |RMS - 1|", distance("pre"), tolerance),),
        seeds=(0,),
    )


@measures("pre-stream-growth")
def stream_growth(claim: Claim) -> Measurement:
    """E[x^2] before the first block and after every block, over depth."""
    squares: dict[str, dict[int, list[float]]] = {}
    for name, overrides in {"Xiong's set-up": XIONG, "GPT-2 init": GPT2}.items():
        squares[name] = {}
        for seed in SEEDS:
            model = built("model.d_model=128", "model.n_heads=4", "model.n_layers=12", *overrides, seed=seed)
            with torch.no_grad():
                passed = sublayers(model, zipf_tokens(model, seed))
            squares[name][seed] = [rms(x) ** 2 for x in (passed[0].before, *(s.after for s in passed[1::2]))]
    depth = len(squares["GPT-2 init"][0]) - 1
    grown = {name: {seed: y[-1] / y[0] for seed, y in by.items()} for name, by in squares.items()}
    bounded = grown["Xiong's set-up"]
    return Measurement(
        worded=(
            *(
                linear_fit(f"{name}: R2 of a line", range(depth + 1), by, bound=claim.margin["r2"])
                for name, by in squares.items()
            ),
            shares("Xiong's set-up: E[x^2] last / first, lower bound 1 + L/2", bounded, bound=1 + depth / 2),
            shares("the same, upper bound 1 + 3L/2", bounded, bound=1 + 3 * depth / 2, above=False),
        ),
        reported=(told("GPT-2 init: E[x^2] last / first", sum(grown["GPT-2 init"].values()) / len(SEEDS), "x"),),
        seeds=SEEDS,
    )


def _by_layer(norm: str, depth: int, overrides: tuple[str, ...], part: str) -> dict[int, list[float]]:
    """Gradient norm of a weight over the layers, by seed."""
    found = {}
    for seed in SEEDS:
        size = ("model.d_model=64", "model.n_heads=4", f"model.n_layers={depth}")
        model = built(*size, f"norm={norm}", *overrides, seed=seed)
        found[seed] = weight_gradients(model, zipf_tokens(model, seed))[part]
    return found


@measures("post-early-explode")
def early_explode(claim: Claim) -> Measurement:
    def first_over_last(
        norm: str, name: str, overrides: tuple[str, ...], part: str
    ) -> tuple[str, dict[int, float], dict[int, float]]:
        by_layer = _by_layer(norm, 12, overrides, part)
        first, last = ({seed: y[i] for seed, y in by_layer.items()} for i in (0, -1))
        return f"{norm}-norm, {name}, {PARTS[part]}: gradient first / last layer", first, last

    setups = {"Xiong's set-up": XIONG, "GPT-2 init": GPT2}
    made = {
        norm: [first_over_last(norm, name, o, part) for name, o in setups.items() for part in PARTS]
        for norm in ("post", "pre")
    }
    return Measurement(
        worded=tuple(ratio(*found, bound=claim.margin["bound"]) for found in made["post"]),
        reported=tuple(ratio(*found, bound=claim.margin["bound"]) for found in made["pre"]),
        seeds=SEEDS,
    )


PARTS = {"ffn.w_up": "W_1", "ffn.w_down": "W_2"}
DEPTHS = (6, 12, 24, 48)


@measures("post-late-large")
def late_large(claim: Claim) -> Measurement:
    """The last layer's gradient, post-norm over pre-norm, by depth.

    The set-up of the paper that the lecture summary cites decides; GPT-2's initial values are reported beside it.
    """

    def last(norm: str, overrides: tuple[str, ...]) -> dict[int, dict[int, float]]:
        return {
            depth: {seed: y[-1] for seed, y in _by_layer(norm, depth, overrides, "ffn.w_down").items()}
            for depth in DEPTHS
        }

    post, pre = last("post", XIONG), last("pre", XIONG)
    ratios = {seed: [post[depth][seed] / pre[depth][seed] for depth in DEPTHS] for seed in SEEDS}
    post_gpt2, pre_gpt2 = last("post", GPT2), last("pre", GPT2)
    return Measurement(
        worded=(
            *(ratio(f"{depth} layers: last W_2, post / pre", post[depth], pre[depth], bound=1) for depth in DEPTHS),
            slope("power of the depth in it", DEPTHS, ratios, low=claim.margin["low"], high=claim.margin["high"]),
        ),
        reported=tuple(
            ratio(f"GPT-2 init, {depth} layers: last W_2, post / pre", post_gpt2[depth], pre_gpt2[depth], bound=1)
            for depth in DEPTHS
        ),
        seeds=SEEDS,
    )


@measures("pre-no-attenuation")
def no_attenuation(claim: Claim) -> Measurement:
    """Gradient at the bottom over that at the top, of the stream before a block and of W_1."""
    findings = []
    for depth in (12, 48):
        stream = {}
        for seed in SEEDS:
            model = built("model.d_model=64", "model.n_heads=4", f"model.n_layers={depth}", *GPT2, seed=seed)
            stream[seed] = stream_gradients(model, zipf_tokens(model, seed))[:-1]
        weights = _by_layer("pre", depth, GPT2, "ffn.w_up")
        for name, by_layer in (("the stream", stream), ("W_1", weights)):
            first, last = ({seed: y[i] for seed, y in by_layer.items()} for i in (0, -1))
            label = f"{depth} layers: gradient of {name}, first / last block"
            findings.append(ratio(label, first, last, bound=claim.margin["bound"]))
    return Measurement(worded=tuple(findings), seeds=SEEDS)


@measures("andrea-25-norms")
def norm_count(claim: Claim) -> Measurement:
    def count(*overrides: str) -> int:
        with torch.device("meta"):
            model = TransformerLM(config(*ANDREA, *overrides))
        return sum(type(module) is type(model.final_norm) for module in model.modules())

    return Measurement(
        worded=(exact("norms of ANDREA-120M", count(), equals=claim.margin["equals"]),),
        reported=(
            told("with parallel blocks", count("block=parallel")),
            told("with norms on both sides of a branch", count("norm=double")),
        ),
    )


@measures("sandwich-identity")
def sandwich(claim: Claim) -> Measurement:
    """RMS of what a branch adds while its last matrix grows by 10^k; the Jacobian with that matrix at zero."""

    def spread(norm: str) -> float:
        model = built(*SMALL, f"norm={norm}", "init=xavier", "model.norm.eps=1e-15", dtype=torch.float64)
        sizes = []
        for _ in range(4):
            with torch.no_grad():
                sizes.append([s.added.pow(2).mean(-1).sqrt() for s in sublayers(model, zipf_tokens(model, seed=0))])
            scale_outputs(model, 10)
        return max(float((a - 1).abs().max()) for by_scale in sizes for a in by_scale)

    def distance(norm: str) -> float:
        return identity_error(silence(built(*ONE_BLOCK, f"norm={norm}", dtype=torch.float64)))

    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=tuple(
            finding
            for norm in ("double", "output")
            for finding in (
                within(f"{norm}: |RMS of what is added - 1|, outputs x1 to x1000", spread(norm), tolerance),
                within(f"{norm}: |J - I|", distance(norm), tolerance),
            )
        ),
        controls=(
            within("pre: |RMS of what is added - 1|", spread("pre"), tolerance),
            within("post: |J - I|", distance("post"), tolerance),
        ),
        seeds=(0,),
    )
