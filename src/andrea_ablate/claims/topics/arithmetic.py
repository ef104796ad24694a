"""Measurements of arithmetic.yaml: parameters and FLOPs of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.accounting import account
from andrea_ablate.claims.claim import Claim, Finding, Measurement
from andrea_ablate.claims.decide import exact, told, within
from andrea_ablate.claims.facts import facts
from andrea_ablate.claims.ledger import measures
from andrea_ablate.claims.probes.counts import LENGTH, Design, bare, designs, matmul_flops, variants
from andrea_ablate.claims.probes.models import built, zipf_tokens
from andrea_ablate.model import TransformerLM

# What the lesson's own code adds to the bare matrices.
LESSON = ("tied", "biases of the MLP", "norms with gain and bias", "position table")
# How far the norms of a design are from the lesson's, which have two vectors each.
NORM_VECTORS = {"norms with gain and bias": 0, "norms with gain": 1, "norms without parameters": 2}


@measures("andrea-trunk-85m")
def trunk(claim: Claim) -> Measurement:
    design = bare("andrea_120m", tied=False)
    matrices = account(design.config, LENGTH).block_matrices
    full = next(d for d in designs("andrea_120m") if {"all biases", "norms with gain and bias"} <= {*d.parts})
    counted = account(full.config, LENGTH)
    last_norm = 2 * full.config.d_model
    return Measurement(
        worded=(exact("matrices of the 12 blocks", matrices, equals=85e6, digits=2),),
        reported=(told("with all biases and the norms of the blocks", counted.non_embedding_params - last_norm),),
    )


@measures("andrea-embed-13m")
def token_embedding(claim: Claim) -> Measurement:
    """Rows of 768 numbers for 8449 tokens, once where tied and twice where not."""
    tables = {}
    for tied in (True, False):
        model = bare("andrea_120m", tied).config
        tables[tied] = account(model, LENGTH).embedding_params - model.max_seq_len * model.d_model
    return Measurement(
        worded=(exact("tied token embedding", tables[True], equals=13e6, digits=2),),
        reported=(told("untied: embedding and output projection", tables[False]),),
    )


def _printed(params: int, millions: float) -> bool:
    """Whether a count, in millions, rounds to what is printed with three digits."""
    return float(f"{params / 1e6:.3g}") == millions


@measures("andrea-total-120m")
def total(claim: Claim) -> Measurement:
    """The audit: every way to count the model, how far each is from the published figure, and which round to it."""
    published = facts()["andrea_120m", "params_millions"].value
    assert isinstance(published, float)
    table = sorted(designs("andrea_120m"), key=lambda design: abs(_distance(design, published)))
    matching = [design for design in table if _printed(design.params, published)]
    lesson = next(design for design in table if design.parts == LESSON)
    fewest = min(map(_given_up, matching))
    seen_in = {(design.parts[0], design.parts[-1]): None for design in matching}
    return Measurement(
        worded=(
            exact(
                f"the lesson's own design ({lesson.name})",
                lesson.params,
                low=claim.margin["low"],
                high=claim.margin["high"],
            ),
            exact(
                f"the largest of {len(table)} designs",
                max(d.params for d in table),
                low=claim.margin["low"],
                high=claim.margin["high"],
            ),
        ),
        reported=(
            told(f"designs that round to the published {published:g} million, of {len(table)}", len(matching)),
            told("output projection and positions of these", " or ".join(map(", ".join, seen_in))),
            told("digits that would tell these apart", _digits([design.params for design in matching])),
            # What is said beside the digits: each narrows them to one design, and not all to the same.
            told(f"nearest: {table[0].name}", table[0].params),
            told(
                f"of these, with the fewest of the lesson's statements given up ({fewest})",
                _named(design for design in matching if _given_up(design) == fewest),
            ),
            told(
                "of these, as microgpt, which the card's name of the engine points to (an inference)",
                _named(
                    design
                    for design in matching
                    if {*str(facts()["microgpt", "design"].value).split(", ")} <= {*design.parts}
                ),
            ),
            *(
                told(
                    f"with {name}, designs that round to it",
                    sum(_printed(variants(design)[name].params, published) for design in table),
                )
                for name in variants(lesson)
            ),
            *(
                told(
                    f"{'rounds to it: ' if design in matching else ''}{design.name}, "
                    f"{_distance(design, published):+,.0f} from it",
                    design.params,
                )
                for design in table
            ),
        ),
    )


def _distance(design: Design, millions: float) -> float:
    return design.params - 1e6 * millions


def _digits(counts: Sequence[int]) -> int:
    """The fewest significant digits at which no two of the counts round to the same number."""
    return next(n for n in range(1, 12) if len({f"{count:.{n}g}" for count in counts}) == len(counts))


def _given_up(design: Design) -> int:
    """How many of the lesson's statements on what is counted a design contradicts; gain and bias are one each."""
    others = sum(mine != said for mine, said in zip(design.parts, LESSON, strict=True) if mine not in NORM_VECTORS)
    return others + sum(vectors for name, vectors in NORM_VECTORS.items() if name in design.parts)


def _named(found: Iterable[Design]) -> str:
    return " or ".join(f"{one.name} ({one.params:,})" for one in found) or "none"


@measures("andrea-block-share")
def block_share(claim: Claim) -> Measurement:
    counts = {name: account(bare("andrea_120m", name == "tied").config, LENGTH) for name in ("untied", "tied")}
    return Measurement(
        worded=tuple(
            exact(
                f"blocks / all parameters, {name}",
                count.block_matrices / count.params,
                low=claim.margin["low"],
                high=claim.margin["high"],
            )
            for name, count in counts.items()
        )
    )


@measures("andrea-tied")
def tied_output(claim: Claim) -> Measurement:
    """How many designs of each published size round to its figure, tied and untied."""
    found = {}
    for size in ("andrea_12m", "andrea_120m"):
        published = facts()[size, "params_millions"].value
        assert isinstance(published, float)
        matching = [design for design in designs(size) if _printed(design.params, published)]
        found[size] = (published, sum("tied" in d.parts for d in matching), sum("untied" in d.parts for d in matching))
    return Measurement(
        worded=tuple(
            exact(f"tied designs that count {published:g} million parameters, as published for {size}", tied, low=1)
            for size, (published, tied, _) in found.items()
        ),
        reported=tuple(told(f"untied designs that do, {size}", untied) for size, (_, _, untied) in found.items()),
    )


@measures("tied-grad")
def tied_gradient(claim: Claim) -> Measurement:
    """Gradient of a tied matrix against those of the two matrices of an untied copy."""
    tied, untied = (
        built("model.n_layers=2", f"model.tie_embeddings={tie}", dtype=torch.float64) for tie in ("true", "false")
    )
    tokens = zipf_tokens(tied, seed=0)
    missing, extra = untied.load_state_dict(tied.state_dict(), strict=False)
    assert (missing, extra) == (["head"], [])
    with torch.no_grad():
        untied.head.copy_(tied.embedding)  # type: ignore[union-attr]
    [both], [lookup, projection] = (
        _gradients(tied, tokens, "embedding"),
        _gradients(untied, tokens, "embedding", "head"),
    )

    def error(expected: Tensor) -> float:
        return float((both - expected).abs().max() / both.abs().max())

    tolerance = claim.margin["fp64"]
    return Measurement(
        worded=(within("|tied - (lookup + projection)|", error(lookup + projection), tolerance),),
        controls=(
            within("without the projection's part", error(lookup), tolerance),
            within("without the lookup's part", error(projection), tolerance),
        ),
        seeds=(0,),
    )


def _gradients(model: TransformerLM, tokens: Tensor, *names: str) -> tuple[Tensor, ...]:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return torch.autograd.grad(loss, [getattr(model, name) for name in names])


@measures("flops-6nd")
def six_n_d(claim: Claim) -> Measurement:
    """FLOPs per token at the full context over 6 N; causal attention needs (T + 1) / 2 keys per token, not T."""
    model = bare("andrea_120m", tied=False).config
    counted = account(model, LENGTH)
    forward, backward = (flops / LENGTH for flops in matmul_flops(model))
    blocks = counted.block_matrices
    weights = 2 * (blocks + model.vocab_size * model.d_model)
    causal = 3 * (weights + (forward - weights) * (LENGTH + 1) / (2 * LENGTH))
    full = forward + backward
    sizes = {"N without embeddings": blocks, "N with all parameters": counted.params}

    def over(flops: float, name: str, how: str, band: float) -> Finding:
        share = flops / (6 * sizes[name])
        return exact(f"{how}, {name}: FLOPs / 6 N D, band {band:g}", share, low=1 - band, high=1 + band)

    return Measurement(
        worded=(
            exact("backward / forward", backward / forward, equals=2),
            *(over(causal, name, "causal attention", claim.margin["wide"]) for name in sizes),
        ),
        reported=(
            *(over(causal, name, "causal attention", claim.margin["tight"]) for name in sizes),
            *(over(full, name, "attention in full", claim.margin["wide"]) for name in sizes),
            told("scores of causal attention / 6 N D without embeddings", (causal / 3 - weights) / (2 * blocks)),
            told("output projection / 6 N D without embeddings", weights / (2 * blocks) - 1),
        ),
    )
