"""Measurements of shape.yaml: heads, width and depth, vocabulary."""

# Shapes: L length, H heads
from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from andrea_ablate.accounting import account
from andrea_ablate.attention import watching
from andrea_ablate.claims.claim import Claim, Finding, Measurement
from andrea_ablate.claims.decide import exact, superior, timing, told
from andrea_ablate.claims.facts import facts
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.models import built, config, zipf_tokens
from andrea_ablate.claims.probes.timing import interleaved
from andrea_ablate.generate import generate
from andrea_ablate.model import TransformerLM

WIDTH, HEADS = 64, 4


def head_model(d_head: int, *overrides: str) -> TransformerLM:
    return built(f"model.d_model={WIDTH}", f"model.n_heads={HEADS}", f"model.d_head={d_head}", *overrides)


def unsquare(d_head: int, *overrides: str, name: str = "w_q") -> int:
    """Rows minus columns of a projection of the first block."""
    attn: Any = head_model(d_head, *overrides).blocks[0].attn
    rows, columns = getattr(attn, name).shape
    return int(rows - columns)


def without_gradient(d_head: int, cut: bool = False) -> int:
    """Parameters that a backward pass leaves without a finite gradient other than 0."""
    model = head_model(d_head)
    if cut:
        attn: Any = model.blocks[0].attn
        attn.register_forward_hook(lambda module, args, out: out.detach())
    model(zipf_tokens(model, seed=0)).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return sum(g is None or not bool(g.isfinite().all()) or not bool(g.any()) for g in grads)


@measures("head-product-free")
def free_heads(claim: Claim) -> Measurement:
    return Measurement(
        worded=(
            *(
                exact(f"{HEADS} heads of {d} in {WIDTH}: parameters that do not learn", without_gradient(d), equals=0)
                for d in (6, 24)
            ),
            exact(f"{HEADS} heads of 16 in {WIDTH}: rows - columns of W_q", unsquare(16), equals=0),
        ),
        controls=(
            exact("attention cut off: parameters that do not learn", without_gradient(24, cut=True), equals=0),
            exact(f"{HEADS} heads of 24 in {WIDTH}: rows - columns of W_q", unsquare(24), equals=0),
        ),
        reported=(told("2 key/value heads of 16: rows - columns of W_k", unsquare(16, "attn=gqa2", name="w_k")),),
        seeds=(0,),
    )


def score_ranks(d_head: int, softmax: bool = False) -> tuple[int, int]:
    """Least and largest rank over the heads of the scores of 256 tokens that all see each other."""
    model = built(
        "model.d_model=256", "model.n_layers=1", "model.n_heads=2", f"model.d_head={d_head}", "pos=learned",
        "model.attn.causal=false", "data.seq_len=256", "init=xavier", dtype=torch.float64,
    )  # fmt: skip
    seen: list[Tensor] = []
    tokens = torch.arange(256)[None]
    with torch.no_grad(), watching(seen.append):
        model(tokens)
    scores_HLL = seen[0][0]
    ranks = torch.linalg.matrix_rank(scores_HLL.exp() if softmax else scores_HLL, rtol=1e-10)
    return int(ranks.min()), int(ranks.max())


@measures("dhead-rank")
def rank_of_scores(claim: Claim) -> Measurement:
    ranks = {d_head: score_ranks(d_head) for d_head in (8, 16, 32, 64, 128)}
    return Measurement(
        worded=tuple(exact(f"heads of {d}: largest rank", high, high=d) for d, (_, high) in ranks.items()),
        controls=(exact("heads of 8: rank of exp(scores)", score_ranks(8, softmax=True)[1], high=8),),
        reported=tuple(told(f"heads of {d}: least rank", low) for d, (low, _) in ranks.items()),
        seeds=(0,),
    )


def size(model: str, field: str) -> float:
    """A cell of the fact table. Its source must have been checked."""
    fact = facts()[model, field]
    assert fact.checked and isinstance(fact.value, float)
    return fact.value


@measures("gpt3-shape")
def published_shapes(claim: Claim) -> Measurement:
    width = size("gpt3_175b", "d_model")
    andrea = config("size=andrea_120m")
    return Measurement(
        worded=(
            exact("GPT-3: heads x d_head", size("gpt3_175b", "n_heads") * size("gpt3_175b", "d_head"), equals=width),
            exact("GPT-3: d_model / layers", width / size("gpt3_175b", "n_layers"), equals=128),
            exact(
                "Llama 3 70B: d_model / layers",
                size("llama3_70b", "d_model") / size("llama3_70b", "n_layers"),
                equals=102,
                digits=3,
            ),
        ),
        reported=(
            told("ANDREA-120M: d_model / layers", andrea.d_model / andrea.n_layers),
            told("ANDREA-120M: d_head", andrea.d_model / andrea.n_heads),
        ),
    )


VOCABULARIES = (8449, 32_000, 50_257, 128_256, 256_000)


@measures("vocab-cost")
def embedding_cost(claim: Claim) -> Measurement:
    """Embedding and output projection at ANDREA's width over V d_model: 2 untied, 1 tied."""

    def copies(vocab: int, tied: bool) -> tuple[float, int, int]:
        model = config(
            "size=andrea_120m", "pos=none", f"model.vocab_size={vocab}", f"model.tie_embeddings={tied}".lower()
        )
        counted = account(model, 1024)
        return counted.embedding_params / (vocab * model.d_model), counted.embedding_params, counted.block_matrices

    def each(tied: bool, claimed: int) -> tuple[Finding, ...]:
        name = "tied" if tied else "untied"
        return tuple(exact(f"{name}, V {v}: / V d_model", copies(v, tied)[0], equals=claimed) for v in VOCABULARIES)

    largest, trunk = copies(VOCABULARIES[-1], tied=False)[1:]
    return Measurement(
        worded=(*each(False, 2), *each(True, 2)),
        corrected=each(True, 1),
        reported=(
            told(f"V {VOCABULARIES[-1]}, untied: parameters", largest),
            told("the same / matrices of the blocks", largest / trunk),
        ),
    )


LEARNT = (257, 1024, 4096, 8192, 32_768)  # 257: bytes and the end of a document
FOLDS = 8


@measures("vocab-shorter")
def shorter_text(claim: Claim) -> Measurement:
    """Tokens per byte of unseen files of the standard library, in eight folds; learnt from half of all files."""
    from andrea_ablate.data import CORPORA, TOKENIZERS

    folds: dict[int, list[bytes]] = {fold: [] for fold in range(4 * FOLDS)}
    for text in sorted(CORPORA.build({"type": "stdlib"}).documents()):  # type: ignore[union-attr]
        folds[hashlib.blake2b(text, digest_size=1).digest()[0] % (4 * FOLDS)].append(text)
    unseen = {fold: folds[fold] for fold in range(FOLDS)}
    seen = [text for fold in range(FOLDS, 3 * FOLDS) for text in folds[fold]]
    rates: dict[int, dict[int, float]] = {}
    for vocab in LEARNT:
        tokenizer = TOKENIZERS.build({"type": "bpe", "vocab_size": vocab})
        tokenizer.train(seen)
        rates[vocab] = {fold: len(tokenizer.encode(texts)) / sum(map(len, texts)) for fold, texts in unseen.items()}
    mean = {vocab: sum(rate.values()) / FOLDS for vocab, rate in rates.items()}
    return Measurement(
        worded=tuple(
            superior(
                f"tokens per byte, vocabulary {more} - {less}",
                rates[more],
                rates[less],
                unit="",
                margin=claim.margin["margin"],
            )
            for less, more in zip(LEARNT, LEARNT[1:], strict=False)
        ),
        reported=tuple(told(f"vocabulary {vocab}: tokens per byte", rate) for vocab, rate in mean.items()),
        seeds=tuple(range(FOLDS)),
    )


SHAPES = ((6, 256), (24, 128), (96, 64))  # layers and width, of equal parameters in the blocks


@measures("depth-latency")
def latency_by_depth(claim: Claim) -> Measurement:
    """Time of 16 tokens and one after them, keys and values kept, of shapes with as many parameters in their blocks."""
    calls, blocks = {}, {}
    for layers, width in SHAPES:
        overrides = (f"model.n_layers={layers}", f"model.d_model={width}", "model.n_heads=4")
        blocks[layers] = account(config(*overrides), 32).block_matrices
        model = built(*overrides)
        calls[layers] = partial(generate, model, zipf_tokens(model, seed=0, batch=1, length=16), 2)
    times = interleaved({str(layers): call for layers, call in calls.items()})
    wide = str(SHAPES[0][0])
    return Measurement(
        worded=tuple(
            timing(f"time, {layers} / {wide} layers", times[str(layers)], times[wide], times["again"])
            for layers, _ in SHAPES[1:]
        ),
        reported=tuple(told(f"{layers} layers: parameters of the blocks", count) for layers, count in blocks.items()),
    )
