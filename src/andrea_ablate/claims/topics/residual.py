"""Measurements of residual.yaml: the residual stream."""

from __future__ import annotations

import torch

from andrea_ablate.claims.claim import Claim, Finding, Measurement
from andrea_ablate.claims.decide import ratio, shares, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.gradients import step_cosine, token_cosine, weight_gradients
from andrea_ablate.claims.probes.models import ANDREA, ONE_BLOCK, SEEDS, SMALL, built, zipf_tokens
from andrea_ablate.claims.probes.stream import cut_residual, identity_error, rms, silence, sublayers, sum_error


@measures("res-delta-sum")
def delta_sum(claim: Claim) -> Measurement:
    def error(norm: str, dtype: torch.dtype, broken: bool = False) -> float:
        model = built(*SMALL, f"norm={norm}", dtype=dtype)
        if broken:
            cut_residual(model)
        return sum_error(model, zipf_tokens(model, seed=0))

    dtypes = {"fp64": torch.float64, "fp32": torch.float32}
    return Measurement(
        worded=tuple(
            within(f"{norm}-norm, {name}: error", error(norm, dtype), claim.margin[name], "relative")
            for norm in ("pre", "double", "output")
            for name, dtype in dtypes.items()
        ),
        controls=(
            within("post-norm: error", error("post", torch.float64), claim.margin["fp32"], "relative"),
            within(
                "pre-norm without residual: error", error("pre", torch.float64, True), claim.margin["fp32"], "relative"
            ),
        ),
        seeds=(0,),
    )


@measures("res-identity-jac")
def identity_path(claim: Claim) -> Measurement:
    def distance(norm: str, broken: bool = False) -> float:
        model = silence(built(*ONE_BLOCK, f"norm={norm}", dtype=torch.float64))
        return identity_error(cut_residual(model) if broken else model)

    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=tuple(
            within(f"{norm}-norm: |J - I|", distance(norm), tolerance) for norm in ("pre", "double", "output")
        ),
        controls=(
            within("post-norm: |J - I|", distance("post"), tolerance),
            within("pre-norm without residual: |J - I|", distance("pre", broken=True), tolerance),
        ),
        seeds=(0,),
    )


@measures("res-none-grad")
def gradient_without_residual(claim: Claim) -> Measurement:
    """Gradients of the embedding and of the deepest queries, 12 layers, without residuals over with them.

    The claim is about blocks as they are, with norms. Without norms the gradient is lost; with them the embedding's
    survives, and the queries' goes because all tokens become alike.
    """
    size = ("model.d_model=256", "model.n_heads=4", "model.n_layers=12", "pos=learned")

    def gradients(init: str, norm: str, cut: bool) -> tuple[dict[int, float], dict[int, float], float]:
        embedding, queries = {}, {}
        for seed in SEEDS:
            model = built(*size, f"init={init}", f"norm={norm}", seed=seed)
            tokens = zipf_tokens(cut_residual(model) if cut else model, seed)
            found = weight_gradients(model, tokens)
            embedding[seed], queries[seed] = found["embedding"][0], found["attn.w_q"][-1]
        return embedding, queries, token_cosine(model, tokens)

    lost, queries_lost, cosines = {}, {}, []
    for init in ("gpt2", "xavier"):
        for norm, kept in (("pre", "norms kept"), ("none", "no norms")):
            (embedding, queries, alike), (embedding_0, queries_0, alike_0) = (
                gradients(init, norm, cut) for cut in (False, True)
            )
            name, bound = f"{init}, {kept}: gradient of the", claim.margin["bound"]
            lost[init, norm] = ratio(
                f"{name} embedding, without / with residuals", embedding_0, embedding, bound=bound, above=False
            )
            if norm == "pre":
                queries_lost[init] = ratio(
                    f"{name} last queries, without / with residuals", queries_0, queries, bound=bound, above=False
                )
                cosines.append(told(f"{init}: cosine between tokens, with residuals", alike))
                cosines.append(told(f"{init}: cosine between tokens, without", alike_0))
    return Measurement(
        worded=(lost["gpt2", "pre"], lost["xavier", "pre"]),
        corrected=(lost["gpt2", "none"], lost["xavier", "none"], queries_lost["gpt2"], queries_lost["xavier"]),
        reported=tuple(cosines),
        seeds=SEEDS,
    )


@measures("res-deep-grad")
def gradient_by_depth(claim: Claim) -> Measurement:
    """Gradient of the first layer's W_1 in a pre-norm stack, by depth, over that of 12 layers."""
    first: dict[int, dict[int, float]] = {}
    last_over_first: dict[int, float] = {}
    for depth in (12, 48, 192, 384):
        first[depth] = {}
        for seed in SEEDS:
            model = built("model.d_model=64", "model.n_heads=4", f"model.n_layers={depth}", seed=seed)
            by_layer = weight_gradients(model, zipf_tokens(model, seed))["ffn.w_up"]
            first[depth][seed], last_over_first[depth] = by_layer[0], by_layer[-1] / by_layer[0]
    return Measurement(
        worded=tuple(
            ratio(
                f"gradient of the first W_1, {depth} / 12 layers", first[depth], first[12], bound=claim.margin["bound"]
            )
            for depth in (48, 192, 384)
        ),
        reported=tuple(
            told(f"{depth} layers: last / first W_1 (seed 7)", value) for depth, value in last_over_first.items()
        ),
        seeds=SEEDS,
    )


@measures("res-identity-init")
def identity_at_init(claim: Claim) -> Measurement:
    """Cosine of the stream before and after each sublayer of ANDREA's trunk, at the first step."""
    schemes = {
        "GPT-2": ("init=gpt2",),
        "Xavier, unit embeddings": ("init=xavier", "model.init.embedding_std=1.0"),
        "zero outputs": ("init=zero_out",),
    }
    least: dict[str, dict[int, float]] = {}
    sizes: list[Finding] = []
    for name, overrides in schemes.items():
        least[name] = {}
        for seed in SEEDS:
            model = built(*ANDREA, *overrides, seed=seed)
            with torch.no_grad():
                passed = sublayers(model, zipf_tokens(model, seed, batch=1))
            least[name][seed] = min(map(step_cosine, passed))
        for where in (0, 1, len(passed) - 1):
            size = rms(passed[where].added) / rms(passed[where].before)
            sizes.append(told(f"{name}: added / stream at sublayer {where + 1} (seed {seed})", size))
    bound = claim.margin["cosine"]
    cosine = {name: shares(f"{name}: least cosine over the sublayers", least[name], bound=bound) for name in schemes}
    return Measurement(
        worded=(cosine["GPT-2"],),
        corrected=(cosine["zero outputs"],),
        reported=(cosine["Xavier, unit embeddings"], *sizes),
        seeds=SEEDS,
    )
