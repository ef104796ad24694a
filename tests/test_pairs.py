"""Every pair of choices trains, or is refused by name with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from andrea_ablate.accounting import account
from andrea_ablate.attention import KVCache
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from designs import NODES, design, options

Choice = tuple[str, Any]
Pair = tuple[Choice, Choice]
# Options of one choice that change its form, beside the YAML files.
FORMS = {
    "rope in local layers": ("rope", {"rotated": "local", "local_theta": 100.0}),
    "rope in half of a head": ("rope", {"rotary_fraction": 0.5}),
}
AXES: dict[str, list[Any]] = {
    **{group: options(group) for group in NODES if group != "stability"},
    "pos": [*options("pos"), *FORMS],
    "stability": [(), *((trick,) for trick in options("stability"))],
    "tie_embeddings": [False, True],
    "head_bias": [False, True],
    "linear_bias": [False, True],
    "dropout": [0.0, 0.1],
    "window": [None, 3],
    "layer_pattern": [("local",), ("local", "global")],
    "backend": ["auto", "sdpa", "eager"],
    "causal": [True, False],
    "bias": [None, "qkv"],
    "sinks": [False, True],
    "gate": [None, "headwise", "elementwise"],
}
INSIDE = ("window", "backend", "causal", "bias", "sinks", "gate")  # keys of the attention, the first value its default
NOT_LATENT: list[Choice] = [
    ("window", 3),
    ("causal", False),
    ("bias", "qkv"),
    ("sinks", True),
    ("gate", "headwise"),
    ("gate", "elementwise"),
]
WITHOUT_ROPE = [name for name in options("pos") if name != "rope"]
SCALED = [name for name in options("scaling") if name != "none"]
REFUSED: dict[Pair, str] = {
    **{(("pos", pos), ("scaling", name)): "choose pos=rope" for pos in WITHOUT_ROPE for name in SCALED},
    **{
        (("norm", norm), ("block", block)): f"block={block} has no agreed meaning"
        for block, meant in (("parallel", ("pre", "none")), ("parallel2", ("pre",)), ("no_residual", ("pre", "none")))
        for norm in options("norm")
        if norm not in meant
    },
    **{
        (("norm", norm), ("stability", (trick,))): f"stability={trick} scales a branch that norm={norm} normalises"
        for norm in ("double", "output")
        for trick in ("layerscale", "residual_multiplier")
    },
    (("stability", ("attn_softcap",)), ("backend", "sdpa")): "backend=sdpa cannot apply an attention soft-cap",
    (("backend", "sdpa"), ("sinks", True)): "backend=sdpa has no sinks",
    (("window", 3), ("causal", False)): "no agreed meaning with model.attn.causal=false",
    **{(("pos", pos), ("attn", "mla")): "no agreed meaning with attn=mla" for pos in ("alibi", "t5")},
    (("pos", "rope in half of a head"), ("attn", "mla")): "turns 1 of the 2 dimensions",
    **{
        (("attn", "mla"), ("stability", (norm,))): "attn=mla norms its latents already"
        for norm in ("qk_norm", "qk_norm_full", "qk_layernorm")
    },
    **{(("attn", "mla"), choice): "is not an option of 'mla'" for choice in NOT_LATENT},
    (("pos", "none"), ("causal", False)): "nothing tells their order",
    (("pos", "alibi"), ("causal", False)): "distances are those to earlier tokens",
}
PAIRS: list[Pair] = [
    ((a, chosen_a), (b, chosen_b)) for a, b in combinations(AXES, 2) for chosen_a, chosen_b in product(AXES[a], AXES[b])
]
LENGTH = 8


def pairs_of(row: dict[str, Any]) -> set[Pair]:
    return set(combinations(((axis, row[axis]) for axis in AXES if axis in row), 2))


def covering() -> Iterator[dict[str, Any]]:
    """Designs that choose on every axis and together hold every pair that is not refused."""
    left = [pair for pair in PAIRS if pair not in REFUSED]
    while left:
        row = dict(left[0])
        for axis in AXES:
            if axis not in row:
                offers = [{**row, axis: option} for option in AXES[axis]]
                allowed = [offer for offer in offers if not pairs_of(offer) & set(REFUSED)]
                row = max(allowed, key=lambda offer: len(pairs_of(offer) & set(left)))
        yield row
        left = [pair for pair in left if pair not in pairs_of(row)]


ROWS = list(covering())


def label(row: dict[str, Any]) -> str:
    shown = {axis: "+".join(option) if isinstance(option, tuple) else option for axis, option in row.items()}
    return ",".join(f"{axis}={option}" for axis, option in shown.items())


def build(row: dict[str, Any]) -> TransformerLM:
    config = design(**{key: FORMS.get(value, value) for key, value in row.items() if key not in INSIDE})
    config.attn.update({key: row[key] for key in INSIDE if key in row and row[key] != AXES[key][0]})
    model = TransformerLM(config)
    assert account(config, LENGTH).params == sum(p.numel() for p in model.parameters())
    return model


def test_every_pair_is_in_a_design_or_refused() -> None:
    assert set().union(*(pairs_of(row) for row in ROWS)) == set(PAIRS) - set(REFUSED)
    assert set(REFUSED) <= set(PAIRS)


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_a_pair_without_meaning_is_refused_with_the_reason(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=REFUSED[pair]):
        build(dict(pair))


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_design_trains_and_sees_the_future_only_where_asked_to(row: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = build(row)
    tokens = torch.randint(0, 23, (2, LENGTH + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    # Without residuals a branch that starts small, or at zero, is all that is left: the stream may fade to nothing.
    fades = row["block"] == "no_residual"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = model.eval()(inputs, targets)
    model.train()
    for step in range(2):
        optimizer.zero_grad()
        sums = model(inputs, targets)
        ((sums.nll + sums.penalty) / sums.n_tokens).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            # Without rotation or a norm of the keys, a bias adds the same to all scores of a query: softmax drops it.
            # A projection of zeros lets no gradient through until it has moved. A scalenorm's gain has none where the
            # next norm takes its scale away again.
            waits = fades or (row["init"] == "zero_out" and step == 0)
            idle = name.endswith("k_bias") or parameter.numel() == 1
            assert (parameter.grad != 0).any() or idle or waits, name
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        idle = name.endswith("k_bias") or parameter.numel() == 1
        assert not torch.equal(parameter, before[name]) or idle or fades, name
    end = model.eval()(inputs, targets)
    assert end.nll + end.penalty < start.nll + start.penalty or fades

    at = LENGTH // 2
    changed = inputs.clone()
    changed[:, at] = (changed[:, at] + 1) % 23
    with torch.no_grad():
        old, new = model(inputs), model(changed)
    assert torch.equal(old[:, :at], new[:, :at]) == row["causal"] or (fades and not row["causal"])
    assert not torch.equal(old[:, at], new[:, at]) or fades
    assert not torch.equal(old[:, at + 1], new[:, at + 1]) or fades

    again = build(row).eval()
    again.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(again(inputs), old)

    if row["causal"]:
        cache, done = KVCache(), 0
        with torch.no_grad():
            for count in (3, 1, 1, LENGTH - 5):
                logits = model(inputs[:, done : done + count], cache=cache)
                done += count
                torch.testing.assert_close(logits, model(inputs[:, :done])[:, -count:], rtol=1e-4, atol=1e-5)
