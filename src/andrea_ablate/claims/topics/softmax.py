"""Measurements of softmax.yaml: softmax stability."""

# Shapes: N tokens, D width, V vocabulary, L queries, M keys, H heads, K d_head
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.attention import attend
from andrea_ablate.claims.claim import Claim, Finding, Measurement
from andrea_ablate.claims.decide import exact, ratio, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.models import SEEDS, built, zipf_tokens
from andrea_ablate.claims.probes.scores import attentions, layer_scores
from andrea_ablate.loss import LossSums, lm_loss
from andrea_ablate.stability import STABILITY

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CAPS = (30.0, 50.0)  # Gemma 2's, of the output logits and of the scores


class Logits:
    """Logits ``x W^T + shift`` of 64 tokens over 97 words, and the model's loss of them.

    Args:
        share: part of the vocabulary whose logits are shifted, 1.0 for a common shift.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, share: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x_ND = torch.randn(64, 32, dtype=torch.float64, generator=generator).to(dtype)
        self.weight_VD = torch.randn(97, 32, dtype=torch.float64, generator=generator).to(dtype) / 4
        self.target_N = torch.randint(97, (64,), generator=generator)
        # The shift is one more input, with weight 1 to every logit that it moves.
        self.column_V1 = (torch.arange(97)[:, None] < share * 97).to(dtype)

    def of(self, shift_N: Tensor, scale: float = 1.0) -> Tensor:
        return F.linear(torch.cat((scale * self.x_ND, shift_N[:, None]), 1), self._weight())

    def loss(self, shift_N: Tensor, scale: float = 1.0, **given: float) -> LossSums:
        x_ND = torch.cat((scale * self.x_ND, shift_N[:, None]), 1)
        return lm_loss(x_ND, self._weight(), self.target_N, **given)

    def _weight(self) -> Tensor:
        return torch.cat((self.weight_VD, self.column_V1), 1)


@measures("ce-shift")
def loss_under_shift_and_scale(claim: Claim) -> Measurement:
    def change(logits: Logits, shift: float, scale: float = 1.0, **given: float) -> float:
        zero_N = torch.zeros(64, dtype=logits.x_ND.dtype)
        return abs(float(logits.loss(zero_N + shift, scale, **given).nll / logits.loss(zero_N, **given).nll) - 1)

    def gradient_of_shift(logits: Logits) -> float:
        """Largest sum over the shifted logits of the loss's gradient, which is the gradient of the shift."""
        shift_N = torch.zeros(64, dtype=logits.x_ND.dtype, requires_grad=True)
        return float(torch.autograd.grad(logits.loss(shift_N).nll, shift_N)[0].abs().max())

    held = tuple(
        finding
        for name, tolerance in claim.margin.items()
        for finding in (
            *(
                within(f"{name}: loss at logits + {c:g}", change(Logits(DTYPES[name]), c), tolerance, "relative")
                for c in (1.0, 30.0, 1000.0)
            ),
            within(f"{name}: sum of the gradient over the logits", gradient_of_shift(Logits(DTYPES[name])), tolerance),
        )
    )
    tolerance, half = claim.margin["fp64"], Logits(share=0.5)
    return Measurement(
        worded=(*held, within("fp64: loss at logits x 3", change(Logits(), 0.0, scale=3.0), tolerance, "relative")),
        corrected=held,
        controls=(
            within("half of the logits shifted: loss", change(half, 1.0), tolerance, "relative"),
            within("half of the logits: sum of the gradient", gradient_of_shift(half), tolerance),
        ),
        reported=(
            told(
                "with an output soft-cap of 30: loss at logits + 30", change(Logits(), 30.0, softcap=30.0), "relative"
            ),
        ),
        seeds=(0,),
    )


@measures("zloss-free")
def z_shifted_to_zero(claim: Claim) -> Measurement:
    def findings(name: str, times: float, share: float = 1.0) -> tuple[Finding, Finding, Finding]:
        """Shift every token's logits by `times` its own log Z."""
        logits, zero_N = Logits(share=share), torch.zeros(64, dtype=torch.float64)
        shift_N = times * logits.of(zero_N).logsumexp(-1)
        before, after = (logits.loss(shift, z_weight=1.0) for shift in (zero_N, shift_N))
        moved = (logits.of(shift_N).softmax(-1) - logits.of(zero_N).softmax(-1)).abs().max()
        tolerance = claim.margin["fp64"]
        return (
            within(f"{name}: z-loss over the one before", float(after.penalty / before.penalty), tolerance),
            within(f"{name}: change of the loss", abs(float(after.nll / before.nll) - 1), tolerance, "relative"),
            within(f"{name}: change of a probability", float(moved), tolerance),
        )

    return Measurement(
        worded=findings("logits - log Z", -1.0),
        controls=(findings("logits - 2 log Z", -2.0)[0], *findings("half of the logits - log Z", -1.0, share=0.5)[1:]),
        seeds=(0,),
    )


@measures("attn-saturation")
def softmax_of_long_queries(claim: Claim) -> Measurement:
    """64 heads of one query over 64 keys whose values are the unit vectors, so that the output is the weights."""
    keys = d_head = 64
    value_1MHM = torch.eye(keys, dtype=torch.float64)[None, :, None].expand(1, keys, 64, keys)

    def softmax(scale: float, normed: bool = False) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {"entropy": {}, "gradient": {}}
        for seed in SEEDS:
            generator = torch.Generator().manual_seed(seed)
            q, k = (
                scale * torch.randn(1, length, 64, d_head, dtype=torch.float64, generator=generator)
                for length in (1, keys)
            )
            if normed:
                q, k = (_qk_norm(d_head)(x, x)[0] for x in (q, k))
            score_HM = torch.zeros(64, keys, dtype=torch.float64, requires_grad=True)  # added to the scores
            weight_HM = attend(q, k, value_1MHM, scale=d_head**-0.5, bias=score_HM, backend="eager")[0, 0]
            readout_HM = torch.randn(64, keys, dtype=torch.float64, generator=generator)
            (gradient_HM,) = torch.autograd.grad((weight_HM * readout_HM).sum(), score_HM)
            found["entropy"][seed] = float(torch.special.entr(weight_HM.detach()).sum(-1).mean())
            found["gradient"][seed] = float(gradient_HM.norm())
        return found

    def findings(name: str, normed: bool) -> tuple[Finding, ...]:
        bound, long, short = claim.margin["bound"], softmax(100.0, normed), softmax(1.0, normed)
        return tuple(ratio(f"{name}: {what}", long[what], short[what], bound=bound, above=False) for what in long)

    by_scale = {scale: softmax(scale) for scale in (1.0, 2.0, 5.0, 10.0)}
    return Measurement(
        worded=findings("q and k x 100 / x 1", normed=False),
        controls=findings("the same with QK-norm", normed=True),
        reported=tuple(
            told(f"q and k x {scale:g}: {what}, mean of the seeds", sum(values.values()) / len(SEEDS))
            for scale, found in by_scale.items()
            for what, values in found.items()
        ),
        seeds=SEEDS,
    )


def _qk_norm(d_head: int) -> nn.Module:
    norm = STABILITY.build({"type": "qk_norm"}, d_head=d_head)
    for gain in norm.parameters():
        nn.init.ones_(gain)
    return norm.double()


@measures("qknorm-bound")
def largest_score(claim: Claim) -> Measurement:
    """The largest score of a model whose query weights have grown; keys with the weights of the queries are worst."""

    def excess(*overrides: str, grown: float, gain: float = 1.0) -> float:
        model = built("model.d_model=128", "model.n_heads=2", "model.n_layers=2", *overrides)
        with torch.no_grad():
            for attn in attentions(model):
                attn.w_q.mul_(grown)
                attn.w_k.copy_(attn.w_q)
                for gains in attn.qk.parameters() if isinstance(attn.qk, nn.Module) else ():
                    gains.fill_(gain)
        found = layer_scores(model, zipf_tokens(model, seed=0, length=32))
        return max(float(score.masked_fill(score.isinf(), 0).abs().max()) for score in found) / math.sqrt(64) - 1

    tolerance, on = claim.margin["fp32"], "stability=[qk_norm]"
    what = "largest |score| / sqrt(d_head) - 1"
    return Measurement(
        worded=tuple(
            within(f"weights x {grown:g}: {what}", excess(on, grown=grown), tolerance) for grown in (1.0, 1e2, 1e4)
        ),
        controls=(within(f"without QK-norm, weights x 100: {what}", excess(grown=1e2), tolerance),),
        reported=(told(f"gains of 3: {what}", excess(on, grown=1.0, gain=3.0)),),
        seeds=(0,),
    )


GRID = torch.linspace(-1e4, 1e4, 20001, dtype=torch.float64)


@measures("softcap-bound")
def capped_logits(claim: Claim) -> Measurement:
    names = ("fp64", "fp32", "bf16")

    def capped(name: str, cap: float) -> Tensor:
        return ops.softcap(GRID.to(DTYPES[name]), cap)

    def slope(at: float, cap: float) -> float:
        x = torch.tensor([at], requires_grad=True)
        return float(torch.autograd.grad(ops.softcap(x, cap).sum(), x)[0])

    def beyond(name: str, values: Tensor, cap: float) -> Finding:
        return exact(f"{name}, cap {cap:g}: logits beyond the cap", int((values.abs() > cap).sum()), equals=0)

    slopes = tuple(
        within(f"cap {cap:g}: |slope at 0 - 1|", abs(slope(0.0, cap) - 1), claim.margin["fp32"]) for cap in CAPS
    )
    closed = tuple(beyond(name, capped(name, cap), cap) for name in names for cap in CAPS)
    at_cap = {(name, cap): capped(name, cap).abs() >= cap for name in names for cap in CAPS}
    return Measurement(
        worded=(
            *(
                exact(f"{name}, cap {cap:g}: logits at the cap or beyond", int(found.sum()), equals=0)
                for (name, cap), found in at_cap.items()
            ),
            *slopes,
        ),
        corrected=(*closed, *slopes),
        controls=(beyond("no soft-cap", GRID, CAPS[1]),),
        reported=(
            *(
                told(f"{name}, cap {cap:g}: smallest logit that gives the cap", float(GRID.abs()[found].min()))
                for (name, cap), found in at_cap.items()
                if found.any()
            ),
            told("cap 30: slope at 300", slope(300.0, 30.0)),
        ),
    )


@measures("softcap-overflow")
def softmax_that_does_not_overflow(claim: Claim) -> Measurement:
    def overflowed(values: Tensor) -> int:
        return int((~values.isfinite()).sum())

    def exponentials(name: str, cap: float | None) -> int:
        """Of the exponentials of the grid, without the largest logit taken off."""
        logits = GRID.to(DTYPES[name])
        return overflowed((logits if cap is None else ops.softcap(logits, cap)).exp())

    def softmaxes(name: str) -> dict[str, int]:
        """Of what attention and the loss return for logits of up to 1e4, without a cap."""
        x = 100 * torch.eye(16, dtype=DTYPES[name])
        x_BLHK = x[None, :, None]
        seen = attend(x_BLHK, -x_BLHK, x_BLHK, scale=1.0, causal=False, backend="eager")
        same = attend(x_BLHK, x_BLHK, x_BLHK, scale=1.0)
        return {
            "attention": overflowed(seen) + overflowed(same),
            "loss": overflowed(lm_loss(x, x, torch.arange(16).roll(1)).nll),
        }

    largest = ops.softcap(torch.tensor([1e4, -1e4], dtype=torch.float64), CAPS[1])
    return Measurement(
        worded=tuple(
            exact(f"{name}, cap {cap:g}: exponentials that overflow", exponentials(name, cap), equals=0)
            for name in ("fp32", "bf16", "fp16")
            for cap in CAPS
        ),
        corrected=tuple(
            exact(f"{name}, no cap, logits to 1e4: numbers of the {part} that overflow", count, equals=0)
            for name in ("fp32", "bf16")
            for part, count in softmaxes(name).items()
        ),
        controls=(exact("fp32, no cap: exponentials that overflow", exponentials("fp32", None), equals=0),),
        reported=(
            told(
                "entropy of two logits at the caps of 50", float(torch.special.entr(largest.softmax(0)).sum()), "nats"
            ),
        ),
    )
