"""Measurements of position.yaml: position encoding."""

# Shapes: B batch, L length, D d_model, H heads, K d_head, P pairs of dimensions
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from andrea_ablate.attention import MultiHeadAttention
from andrea_ablate.claims.claim import Claim, Finding, Measurement
from andrea_ablate.claims.decide import exact, shares, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.models import SEEDS, built, zipf_tokens
from andrea_ablate.claims.probes.scores import (
    attentions,
    change_without_position,
    diagonal_change,
    gap,
    layer_scores,
    scores,
    values_turned,
)
from andrea_ablate.positions import SCALINGS, LearnedPosition, RotaryPosition, SinePosition
from andrea_ablate.positions.scaling import NoScaling
from andrea_ablate.positions.tables import AngleTables
from andrea_ablate.registry import ConfigError

SMALL = ("model.d_model=48", "model.n_heads=4", "model.n_layers=3")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
OFFSETS = (1, 960, 131072)
D_HEAD = 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Unit-normal numbers in fp64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scaling(name: str, **options: float) -> NoScaling:
    return SCALINGS.build({"type": name, **options}, max_seq_len=4096)


@measures("ape-no-params")
def no_row_past_the_table(claim: Claim) -> Measurement:
    trained, longer = 64, 128

    def longest(pos: nn.Module) -> int:
        """The longest sequence that it takes, of those up to twice the trained length."""
        taken = 0
        for length in range(1, 2 * trained + 1):
            try:
                pos(torch.zeros(1, length, 8))
            except ConfigError:
                break
            taken = length
        return taken

    def gradient_past(length: int) -> float:
        """Largest gradient of the rows past the trained length, in a model that reads sequences of `length`."""
        model = built(*SMALL, "pos=learned", f"data.seq_len={longer}")
        tokens = zipf_tokens(model, seed=0, length=length + 1)
        nll = model.loss(model.hidden(tokens[:, :-1]), tokens[:, 1:]).nll
        (gradient_LD,) = torch.autograd.grad(nll, model.get_parameter("pos.vectors"))
        return float(gradient_LD[trained:].abs().max())

    rows, past = "longest sequence of a table of 64 rows", "largest gradient of rows 64 to 127"
    return Measurement(
        worded=(
            exact(rows, longest(LearnedPosition(d_model=8, max_seq_len=trained)), equals=trained),
            exact(f"{past}, trained on 64 tokens", gradient_past(trained), equals=0),
        ),
        controls=(
            exact(f"sinusoids: {rows}", longest(SinePosition(d_model=8)), equals=trained),
            exact(f"{past}, trained on 128 tokens", gradient_past(longer), equals=0),
        ),
        seeds=(0,),
    )


@measures("sinusoid-cross-terms")
def scores_along_a_diagonal(claim: Claim) -> Measurement:
    """The same token at every place: purely relative scores do not change along a diagonal."""

    def in_a_model(pos: str) -> float:
        model = built(*SMALL, f"pos={pos}", dtype=torch.float64)
        return diagonal_change(layer_scores(model, torch.full((1, 32), 7))[0])

    p_1LD = SinePosition(d_model=48)(torch.zeros(1, 32, 48, dtype=torch.float64))
    w_q, w_k = normal(48, 48, seed=1), normal(48, 48, seed=2)
    broken = {
        "sinusoids through W_q and W_k, no content": diagonal_change(scores(*_heads(p_1LD @ w_q, p_1LD @ w_k))),
        "sinusoids in a model": in_a_model("sine"),
        "learned table in a model": in_a_model("learned"),
    }
    relative = {
        "sinusoids alone, p_i.p_j": diagonal_change(scores(*_heads(p_1LD, p_1LD))),
        "RoPE in a model": in_a_model("rope"),
    }
    bound = claim.margin["bound"]
    return Measurement(
        worded=tuple(exact(f"{name}: change along a diagonal", value, low=bound) for name, value in broken.items()),
        controls=tuple(exact(f"{name}: change along a diagonal", value, low=bound) for name, value in relative.items()),
        seeds=(0,),
    )


def _heads(q_BLD: Tensor, k_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """One head of the whole width."""
    return q_BLD[:, :, None], k_BLD[:, :, None]


class RoundedAngles(AngleTables):
    """A broken table: the angles are rounded to bf16, as those of a model are that was cast to it."""

    def _make(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle_LP = torch.arange(length, dtype=torch.float64).outer(self.scaling.frequencies(self.theta, self.dim, 1))
        angle_LP = angle_LP.bfloat16().double()
        return angle_LP.cos().to(device, dtype), angle_LP.sin().to(device, dtype)


Encode = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def rope(pairing: str = "interleaved", table: Callable[[int, float], AngleTables] = AngleTables) -> Encode:
    """Turns queries and keys from a position on."""
    pos = RotaryPosition(d_head=D_HEAD, pairing=pairing)
    pos.tables = {"local": table(D_HEAD, 10000.0)}
    return lambda q, k, start: pos(q, k, start=start)


@measures("rope-relative")
def scores_after_a_shift(claim: Claim) -> Measurement:
    # Unit-normal ones, large ones, and the same one at every place.
    q = torch.cat((normal(1, 24, 3, D_HEAD), 1e4 * normal(1, 24, 3, D_HEAD, seed=1), torch.ones(1, 24, 3, D_HEAD)))
    k = torch.cat((normal(2, 24, 3, D_HEAD, seed=2), torch.ones(1, 24, 3, D_HEAD)))

    def error(encode: Encode, dtype: torch.dtype, offset: int) -> float:
        here, there = (scores(*encode(q.to(dtype), k.to(dtype), start)) for start in (0, offset))
        return gap(there, here)

    def keys_alone(q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return q, rope()(q, k, start)[1]

    last, fp32 = OFFSETS[-1], claim.margin["fp32"]
    longest = q.norm(dim=-1).amax((1, 2)) * k.norm(dim=-1).amax((1, 2)) / D_HEAD**0.5
    rounding = 2**-8 * float((4 * longest / scores(q, k).abs().amax((1, 2, 3))).max() + 2)
    return Measurement(
        worded=tuple(
            within(f"{pairing}, {name}, shift {offset}", error(rope(pairing), DTYPES[name], offset), tolerance)
            for pairing in ("interleaved", "half")
            for name, tolerance in claim.margin.items()
            for offset in OFFSETS
        ),
        controls=(
            within("queries not turned, fp64, shift 1", error(keys_alone, torch.float64, 1), fp32),
            within("angles rounded to bf16, shift 960", error(rope(table=RoundedAngles), torch.float64, 960), fp32),
        ),
        reported=(
            told(f"bf16 with fp32 angles, shift {last}", error(rope(), torch.bfloat16, last), "relative"),
            told("which the rounding of q, k and the scores to bf16 explains up to", rounding, "relative"),
        ),
        seeds=(0, 1, 2),
    )


@measures("rope-norm")
def length_of_a_turned_vector(claim: Claim) -> Measurement:
    def error(dtype: torch.dtype, of: NoScaling | None = None) -> float:
        x = torch.cat((normal(1, 512, 3, D_HEAD), 1e4 * normal(1, 512, 3, D_HEAD, seed=1))).to(dtype)
        turned, _ = RotaryPosition(d_head=D_HEAD, scaling=of)(x, x, start=4096)
        return float((turned.double().norm(dim=-1) / x.double().norm(dim=-1) - 1).abs().max())

    what = "||Rx| / |x| - 1|"
    return Measurement(
        worded=tuple(within(f"{name}: {what}", error(DTYPES[name]), tol) for name, tol in claim.margin.items()),
        controls=(within(f"YaRN's temperature: {what}", error(torch.float64, scaling("yarn")), claim.margin["fp32"]),),
        reported=(told(f"bf16: {what}", error(torch.bfloat16)),),
        seeds=(0, 1),
    )


@measures("rope-qk-only")
def values_are_left_alone(claim: Claim) -> Measurement:
    """Zero queries weigh all values alike, so that only the values' own path is left; then a shift of the output."""
    pos, x_BLD = RotaryPosition(d_head=16), normal(2, 24, 64)
    attn = MultiHeadAttention(d_model=64, n_heads=4, n_kv_heads=4, d_head=16, linear_bias=False).double()
    with torch.no_grad():
        for seed, weight in enumerate(attn.parameters()):
            weight.copy_(normal(*weight.shape, seed=seed) / 8)

    def turn(start: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return lambda q, k: pos(q, k, start=start)

    @torch.no_grad()
    def output(start: int | None, broken: bool) -> Tensor:
        rotate = None if start is None else turn(start)
        if not broken or rotate is None:
            out: Tensor = attn(x_BLD, rotate)
            return out
        with values_turned(rotate):
            return output(start, broken=False)

    def apart(broken: bool) -> float:
        kept = attn.w_q.detach().clone()
        nn.init.zeros_(attn.w_q)
        found = float((output(5, broken) - output(None, broken)).abs().max())
        with torch.no_grad():
            attn.w_q.copy_(kept)
        return found

    def shifted(broken: bool) -> float:
        return gap(output(960, broken), output(0, broken))

    tolerance = claim.margin["fp64"]
    alike, moved = "output with RoPE - without it, zero queries", "change of the output by a shift of 960"
    return Measurement(
        worded=(exact(alike, apart(False), equals=0), within(moved, shifted(False), tolerance, "relative")),
        controls=(
            exact(f"values turned: {alike}", apart(True), equals=0),
            within(f"values turned: {moved}", shifted(True), tolerance, "relative"),
        ),
        seeds=(0,),
    )


@measures("rope-spectrum")
def wavelengths(claim: Claim) -> Measurement:
    """Positions per full turn of each pair, from the turn between two neighbouring positions."""
    cos_LP, sin_LP = AngleTables(D_HEAD, 10000.0)(2, torch.device("cpu"), torch.float64)
    length_P = 2 * math.pi / torch.atan2(sin_LP[1], cos_LP[1])
    grown_P = length_P[1:] / length_P[:-1]
    measured = {"shortest": length_P[0], "longest": length_P[-1], "step": grown_P.min(), "largest_step": grown_P.max()}
    return Measurement(
        worded=tuple(
            exact(f"wavelength, {name.replace('_', ' ')}", float(measured[name]), equals=claimed, digits=3)
            for name, claimed in claim.margin.items()
        ),
        reported=(
            told("pairs that complete a turn in 1024 positions", int((length_P < 1024).sum()), f"of {D_HEAD // 2}"),
        ),
    )


@measures("rope-fresh")
def position_by_layer(claim: Claim) -> Measurement:
    """How far the scores of a layer move when the encoding goes and the stream that the layer reads stays."""

    def change(pos: str, *more: str) -> list[float]:
        model = built(*SMALL, f"pos={pos}", *more, dtype=torch.float64)
        return change_without_position(model, zipf_tokens(model, seed=0))

    every, never = "least change of a layer's scores", "largest change of a layer's scores"
    skipped = ("model.layer_pattern=[local,global]", "model.pos.rotated=local")
    bound = claim.margin["bound"]
    return Measurement(
        worded=(
            exact(f"RoPE: {every}", min(change("rope")), low=bound),
            exact(f"sinusoids: {never}", max(change("sine")), equals=0),
        ),
        controls=(
            exact(f"RoPE in some layers: {every}", min(change("rope", *skipped)), low=bound),
            exact(f"ALiBi: {never}", max(change("alibi")), equals=0),
        ),
        reported=(told(f"learned table: {never}", max(change("learned"))),),
        seeds=(0,),
    )


@measures("pi-range")
def squeezed_positions(claim: Claim) -> Measurement:
    trained, factor = 256, 4

    def rows(of: NoScaling, length: int) -> Tensor:
        return torch.stack(AngleTables(D_HEAD, 10000.0, of)(length, torch.device("cpu"), torch.float64))

    def findings(name: str, of: NoScaling) -> tuple[Finding, Finding]:
        every_fourth = rows(of, factor * trained)[:, ::factor]
        ratio_P = of.frequencies(10000.0, D_HEAD, factor * trained) / NoScaling().frequencies(10000.0, D_HEAD, trained)
        farthest = float(((factor * trained - 1) * ratio_P).max())
        return (
            within(
                f"{name}: angle of position 4m - that of m", gap(every_fourth, rows(NoScaling(), trained)), tolerance
            ),
            exact(f"{name}: farthest of 1024 positions, as a trained one", farthest, low=0, high=trained),
        )

    tolerance = claim.margin["fp64"]
    linear = scaling("linear", factor=float(factor))
    step_P = linear.frequencies(10000.0, D_HEAD, 1) / NoScaling().frequencies(10000.0, D_HEAD, 1)
    return Measurement(
        worded=findings("PI", linear),
        controls=(*findings("no scaling", NoScaling()), *findings("NTK-aware", scaling("ntk", factor=float(factor)))),
        reported=(told("turn between neighbours, of the trained one", float(step_P.mean()), "x"),),
    )


@measures("ntk-base")
def stretched_base(claim: Claim) -> Measurement:
    margin = claim.margin
    dim, factor, tolerance = int(margin["example_dim"]), margin["example_factor"], margin["fp64"]
    plain_P = NoScaling().frequencies(10000.0, dim, 1)

    def base(of: NoScaling) -> float:
        """The base that the second pair's frequency is of."""
        return math.pow(float(of.frequencies(10000.0, dim, 1)[1]), -dim / 2)

    def findings(name: str, of: NoScaling) -> tuple[Finding, ...]:
        found_P = of.frequencies(10000.0, dim, 1)
        ratio_P = found_P / plain_P
        same_P = NoScaling().frequencies(base(of), dim, 1)
        return (
            within(f"{name}: fastest pair, |new / old - 1|", abs(float(ratio_P[0]) - 1), tolerance),
            within(f"{name}: slowest pair, |new / old - 1 / s|", abs(float(ratio_P[-1]) - 1 / factor), tolerance),
            within(f"{name}: distance from RoPE of another base", float((found_P / same_P - 1).abs().max()), tolerance),
        )

    ntk = scaling("ntk", factor=factor)
    held, pi = findings("NTK-aware", ntk), findings("PI", scaling("linear", factor=factor))
    return Measurement(
        worded=(
            *held,
            exact(f"base at factor {factor:g}, d {dim}", base(ntk), equals=margin["example_base"], digits=3),
        ),
        corrected=held,
        controls=(pi[0], pi[2]),
        reported=tuple(
            told(f"factor that makes 10000 to 500000 at d {d}", 50 ** ((d - 2) / d), "x") for d in (dim, D_HEAD)
        ),
    )


@measures("yarn-parts")
def bands_and_temperature(claim: Claim) -> Measurement:
    factor, trained, tolerance = 8.0, 4096, claim.margin["fp64"]
    plain_P = NoScaling().frequencies(10000.0, D_HEAD, 1)
    turns_P = trained * plain_P / (2 * math.pi)
    fast, slow = turns_P > 32, turns_P < 1
    x = normal(1, 1, 3, D_HEAD)

    def findings(name: str, of: NoScaling) -> dict[str, Finding]:
        ratio_P = of.frequencies(10000.0, D_HEAD, 1) / plain_P
        between_P = ratio_P[~fast & ~slow]
        sharper = [scores(*RotaryPosition(d_head=D_HEAD, scaling=s)(x, x)) for s in (of, None)]
        temperature = float((sharper[0] / sharper[1] - (0.1 * math.log(factor) + 1) ** 2).abs().max())
        outside = max(float(between_P.diff().max()), float(between_P.max()) - 1, 1 / factor - float(between_P.min()))
        return {
            "fast": within(f"{name}: over 32 turns, |new / old - 1|", _most(ratio_P[fast] - 1), tolerance),
            "slow": within(f"{name}: under 1 turn, |new / old - 1 / s|", _most(ratio_P[slow] - 1 / factor), tolerance),
            "ramp": within(f"{name}: between them, rise or step outside of 1 / s to 1", outside, 0.0),
            "scores": within(f"{name}: scores at distance 0, distance from (0.1 ln s + 1)^2", temperature, tolerance),
        }

    one = scaling("yarn", factor=1.0).frequencies(10000.0, D_HEAD, 1)
    linear, ntk = findings("PI", scaling("linear", factor=factor)), findings("NTK-aware", scaling("ntk", factor=factor))
    return Measurement(
        worded=(
            *findings("YaRN", scaling("yarn", factor=factor)).values(),
            within("YaRN at s = 1: |new / old - 1|", _most(one / plain_P - 1), tolerance),
        ),
        controls=(linear["fast"], linear["scores"], ntk["slow"], ntk["fast"]),
        reported=(told("pairs kept", int(fast.sum())), told("pairs interpolated", int(slow.sum()), "of 32")),
    )


def _most(x: Tensor) -> float:
    return float(x.abs().max())


@measures("nope-mask-leak")
def order_through_the_mask(claim: Claim) -> Measurement:
    """How far the last token's logits move when the tokens before it are put in another order."""

    def change(layers: int, masked: bool = True) -> dict[int, float]:
        moved = {}
        for seed in SEEDS:
            model = built(*SMALL[:2], f"model.n_layers={layers}", "pos=none", seed=seed, dtype=torch.float64)
            for attn in attentions(model):
                attn.causal = masked
            tokens = zipf_tokens(model, seed, batch=2, length=32)
            order = torch.randperm(31, generator=torch.Generator().manual_seed(seed))
            mixed = torch.cat((tokens[:, order], tokens[:, -1:]), 1)
            with torch.no_grad():
                moved[seed] = gap(model(mixed)[:, -1], model(tokens)[:, -1])
        return moved

    bound, what = claim.margin["bound"], "change of the last token's logits by the order before it"
    return Measurement(
        worded=tuple(shares(f"{layers} layers: {what}", change(layers), bound=bound) for layers in (2, 3)),
        controls=(
            shares(f"2 layers, no mask: {what}", change(2, masked=False), bound=bound),
            shares(f"3 layers, no mask: {what}", change(3, masked=False), bound=bound),
            shares(f"1 layer, which has the mask but no depth: {what}", change(1), bound=bound),
        ),
        seeds=SEEDS,
    )
