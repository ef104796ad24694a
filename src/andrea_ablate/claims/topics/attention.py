"""Measurements of attention.yaml: KV cache and attention pattern."""

# Shapes: B batch, L length, D d_model
from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from andrea_ablate.accounting import account
from andrea_ablate.attention import KVCache, attend
from andrea_ablate.claims.claim import Claim, Measurement
from andrea_ablate.claims.decide import FEWEST_REPEATS, exact, timing, told, within
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.models import ANDREA, built, config, zipf_tokens
from andrea_ablate.claims.probes.scores import gap
from andrea_ablate.claims.probes.stream import cut_residual, through_blocks
from andrea_ablate.claims.probes.times import taking_turns
from andrea_ablate.model import TransformerLM

SMALL = ("model.d_model=48", "model.n_heads=12", "model.n_layers=3")


def kept_tensors(model: TransformerLM, length: int, batch: int = 1) -> list[Tensor]:
    """What generation keeps of `length` tokens."""
    cache = KVCache()
    with torch.no_grad():
        model.hidden(zipf_tokens(model, seed=0, batch=batch, length=length), cache=cache)
    return [x for layer in cache.layers.values() for x in layer.kept]


def allocated(model: TransformerLM, length: int, batch: int = 1) -> int:
    """Bytes of the memory behind it."""
    return sum(x.untyped_storage().nbytes() for x in kept_tensors(model, length, batch))


def formula(model: TransformerLM, length: int) -> int:
    """``2 x layers x n_kv x d_head x L x bytes``."""
    dims = model.dims
    return 2 * dims.n_layers * dims.n_kv_heads * dims.d_head * length * model.embedding.element_size()


@measures("kv-formula")
def bytes_of_the_cache(claim: Claim) -> Measurement:
    length = 40
    models = {
        "MHA, fp32": built(*SMALL),
        "MHA, bf16": built(*SMALL, dtype=torch.bfloat16),
        "4 KV heads, bf16": built(*SMALL, "attn=gqa4", dtype=torch.bfloat16),
        "MQA, fp64": built(*SMALL, "attn=mqa", dtype=torch.float64),
    }
    broken = {
        "a window of 8": built(*SMALL, "model.attn.window=8"),
        "latent attention": built(*SMALL, "attn=mla"),
    }
    andrea = account(config(*ANDREA), 1024).kv_cache_bytes(bytes_per_element=2) / 1e6
    return Measurement(
        worded=(
            *(exact(f"{name}: bytes", allocated(m, length), equals=formula(m, length)) for name, m in models.items()),
            exact(
                "ANDREA-120M's trunk, 1024 tokens in bf16",
                andrea,
                equals=claim.margin["andrea_mb"],
                digits=3,
                unit="MB",
            ),
        ),
        controls=tuple(
            exact(f"{name}: bytes", allocated(m, length), equals=formula(m, length)) for name, m in broken.items()
        ),
        reported=(
            told(
                "3 sequences at once: bytes over the formula, which leaves the batch out",
                allocated(models["MHA, fp32"], length, batch=3) / formula(models["MHA, fp32"], length),
                "x",
            ),
        ),
    )


@measures("kv-shrink")
def cache_by_kv_heads(claim: Claim) -> Measurement:
    kept = {n: built(*SMALL, f"model.attn.n_kv_heads={n}") for n in (12, 6, 4, 3, 2, 1)}
    whole = allocated(kept[12], 40)
    widths = {kept_tensors(model, 4)[0].shape[-1] for model in kept.values()}
    return Measurement(
        worded=tuple(
            exact(f"bytes of 12 KV heads over those of {n}", whole / allocated(model, 40), equals=12 / n, unit="x")
            for n, model in kept.items()
        ),
        reported=tuple(
            told("width of a kept head, whatever the number of KV heads", width) for width in sorted(widths)
        ),
    )


@measures("gqa-interpolates")
def shared_heads_as_copies(claim: Claim) -> Measurement:
    """A model with n_kv heads against one with 12 whose key and value weights are copies of them."""

    def error(n_kv: int, dtype: torch.dtype, in_order: bool = True) -> float:
        few, all_heads = built(*SMALL, f"model.attn.n_kv_heads={n_kv}", dtype=dtype), built(*SMALL, dtype=dtype)
        width, copies = few.dims.d_head, 12 // n_kv

        def copied(weight: Tensor) -> Tensor:
            heads = weight.view(n_kv, width, -1)
            return (heads.repeat_interleave(copies, 0) if in_order else heads.repeat(copies, 1, 1)).flatten(0, 1)

        state = few.state_dict()
        all_heads.load_state_dict(
            {name: copied(x) if name.endswith((".w_k", ".w_v")) else x for name, x in state.items()}
        )
        tokens = zipf_tokens(few, seed=0, length=40)
        with torch.no_grad():
            return gap(few(tokens), all_heads(tokens))

    dtypes = {"fp64": torch.float64, "fp32": torch.float32}
    names = {12: "12 KV heads (MHA)", 4: "4 KV heads", 1: "1 KV head (MQA)"}
    return Measurement(
        worded=tuple(
            within(f"{name}, {dtype}: logits", error(n_kv, dtypes[dtype]), claim.margin[dtype], "relative")
            for n_kv, name in names.items()
            for dtype in dtypes
        ),
        controls=(
            within(
                "4 KV heads, copies out of order: logits",
                error(4, torch.float64, in_order=False),
                claim.margin["fp32"],
                "relative",
            ),
        ),
        seeds=(0,),
    )


@measures("swa-reach")
def receptive_field(claim: Claim) -> Measurement:
    """How many tokens of the stream before the first block the last token's output has a gradient from."""
    window, depths = int(claim.margin["window"]), (1, 2, 3, 4)

    def gradients(layers: int, window: int | None, residual: bool = True) -> Tensor:
        size = ("model.d_model=16", "model.n_heads=2", f"model.n_layers={layers}")
        model = built(*size, f"model.attn.window={'null' if window is None else window}", dtype=torch.float64)
        if not residual:
            cut_residual(model)
        generator = torch.Generator().manual_seed(0)
        x_BLD = torch.randn(1, 64, 16, dtype=torch.float64, generator=generator).requires_grad_()
        readout_D = torch.randn(16, dtype=torch.float64, generator=generator)
        gradient_BLD = torch.autograd.grad(through_blocks(model)(x_BLD)[0, -1] @ readout_D, x_BLD)[0]
        norm_L: Tensor = gradient_BLD[0].norm(dim=-1)
        return norm_L

    def reach(layers: int, window: int | None) -> int:
        return int((gradients(layers, window) > 0).sum())

    what = "tokens that are seen through"

    def near(residual: bool) -> int:
        """The nearest tokens that hold 90 % of the gradient."""
        held_L = gradients(4, window, residual).flip(0).cumsum(0)
        return int((held_L < 0.9 * held_L[-1]).sum()) + 1

    return Measurement(
        worded=tuple(exact(f"{what} {k} layers", reach(k, window), equals=k * window) for k in depths),
        corrected=tuple(exact(f"{what} {k} layers", reach(k, window), equals=k * (window - 1) + 1) for k in depths),
        controls=(
            exact(f"window of one more: {what} 4 layers", reach(4, window + 1), equals=4 * (window - 1) + 1),
            exact(f"no window: {what} 4 layers", reach(4, None), equals=4 * (window - 1) + 1),
        ),
        reported=(
            *(
                told(f"window i - 8 to i: farthest token seen through {k} layers", reach(k, window + 1) - 1)
                for k in depths
            ),
            told("4 layers: nearest tokens that hold 90 % of the gradient", near(residual=True)),
            told("the same through attention alone, without residuals", near(residual=False)),
        ),
        seeds=(0,),
    )


@measures("attn-quadratic")
def cost_by_length(claim: Claim) -> Measurement:
    """Attention alone: its FLOPs by the account, and the time of its kernel at a length and at four times that."""
    low, high, short, long = claim.margin["low"], claim.margin["high"], 1024, 4096

    def flops(length: int) -> tuple[int, int]:
        """Of a whole forward pass over `length` tokens of ANDREA-120M's trunk, and attention's part of them."""
        model = config(*ANDREA)
        whole, without = (length * account(model, seen).flops_forward for seen in (length, 0))
        return whole, whole - without

    def exponent(a: float, b: float, lengths: float) -> float:
        return math.log(b / a) / math.log(lengths)

    def call(length: int) -> Callable[[], object]:
        q = torch.randn(1, length, 4, 64, generator=torch.Generator().manual_seed(0))
        return lambda: attend(q, q, q, scale=0.125)

    with torch.no_grad():
        times = taking_turns({"long": call(long), "short": call(short), "again": call(short)}, FEWEST_REPEATS)
    what, grown = f"time of {long} / {short} tokens", long / short
    timed = (times["long"], times["short"], times["again"])
    parts = {length: flops(length) for length in (1024, 65536)}
    return Measurement(
        worded=(
            exact("exponent of attention's FLOPs", exponent(parts[1024][1], parts[65536][1], 64), equals=2, digits=6),
            timing(f"{what}, exponent above {low:g}", *timed, bound=grown**low),
            timing(f"{what}, exponent below {high:g}", *timed, bound=grown**high, above=False),
        ),
        reported=(
            told("exponent of the whole model's FLOPs, 1k to 64k", exponent(parts[1024][0], parts[65536][0], 64)),
            told("exponent of the time", exponent(statistics.median(timed[1]), statistics.median(timed[0]), grown)),
        ),
    )
