"""What is easily lost on one of the paths that compute a model holds on all of them, against one float64 oracle.

A path is a backend of attention, torch's own operations or the compiled ones, and plain, cached or by the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.attention import KVCache
from andrea_ablate.model import TransformerLM
from designs import design
from ops.checks import needs_library
from oracles import transformer as oracle
from test_model import arrays, random_model

pytestmark = pytest.mark.slow  # hundreds of models: `make test` is to stay short

LENGTH = 7
TOKENS = torch.randint(0, 23, (2, LENGTH), generator=torch.Generator().manual_seed(1))
PADDED = torch.tensor([[True] * LENGTH, [False] * 3 + [True] * (LENGTH - 3)])
# care: the design, and whether the second sequence is padded on its left
CARES: dict[str, tuple[dict[str, Any], bool]] = {
    "neighbours paired": ({"d_head": 6}, False),
    "halves paired, in a part of the head": ({"pos": {"pairing": "half", "rotary_fraction": 0.5}, "d_head": 8}, False),
    "yarn's magnitude": ({"scaling": ("yarn", {"original_len": 4, "factor": 16.0})}, False),
    "alibi's slopes of six heads": ({"pos": "alibi", "n_heads": 6, "d_head": 3}, False),
    "a bias by distance": ({"pos": ("t5", {"buckets": 4, "max_distance": 5})}, False),
    "a window": ({"attn": {"window": 3}}, False),
    "shared key/value heads": ({"attn": ("gqa2", {})}, False),
    "a scale of one's own": ({"attn": ("mqa", {"scale": 0.1})}, False),
    "a latent's scale of one's own": ({"attn": ("mla", {"scale": 0.1, "v_head_dim": 6})}, False),
    "scale, then cap, then mask": ({"stability": {"attn_softcap": {"cap": 1.0}}, "attn": {"scale": 2.0}}, False),
    "sinks": ({"attn": {"sinks": True}}, False),
    "queries without keys": ({"attn": {"window": 2}}, True),
    "queries without keys, with sinks": ({"attn": {"sinks": True}}, True),
    "queries of a latent without keys": ({"attn": ("mla", {"v_head_dim": 6})}, True),
    "eps inside the root": (
        {"norm_type": "rmsnorm", "norm": {"eps": 0.3}, "stability": {"qk_norm": {"eps": 0.3}}},
        False,
    ),
    "the exact gelu": ({"ffn": "gelu4x"}, False),
    "gelu by tanh": ({"ffn": "gelu_tanh4x"}, False),
    "the exact gelu as a gate": ({"ffn": ("geglu", {"activation": "gelu"})}, False),
    "tied embeddings": ({"tie_embeddings": True}, False),
}
CANNOT = {"sdpa": ("cap", "sinks")}  # refused by name, see test_attention
PATHS = [(backend, impl) for backend in ("auto", "fused", "sdpa", "eager") for impl in ("reference", "compiled")]
EVERY = [
    pytest.param(care, backend, impl, marks=needs_library if impl == "compiled" else ())
    for care in CARES
    for backend, impl in PATHS
    if not any(word in care for word in CANNOT.get(backend, ()))
]
on_every_path = pytest.mark.parametrize(("care", "backend", "impl"), EVERY)


@contextmanager
def taking(impl: str, backend: str) -> Iterator[None]:
    """Within the block the model runs on this path, and is seen to."""
    with ops.using(impl) as taken:
        yield
        assert taken.pop("attention") in ([impl] if backend == "fused" else [backend, impl, "sdpa", "eager"])
        assert set(taken.values()) == {impl}


def built(care: str, backend: str) -> TransformerLM:
    changes = dict(CARES[care][0])
    attn = changes.get("attn", {})
    option, given = attn if isinstance(attn, tuple) else ("mha", attn)
    return random_model(design(**{**changes, "attn": (option, {**given, "backend": backend})}))


def mask(care: str) -> Tensor | None:
    return PADDED if CARES[care][1] else None


@lru_cache
def wanted(care: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the oracle; gradients of the loss of the seen tokens on the plainest path, by the parameters' names."""
    model, seen = built(care, "eager"), mask(care)
    plan = asdict(design(**CARES[care][0]))
    logits = oracle.logits(arrays(model), plan, TOKENS.numpy(), None if seen is None else seen.numpy())
    with ops.using("reference"):
        return torch.from_numpy(logits), gradients(model, care)


def gradients(model: TransformerLM, care: str) -> dict[str, Tensor]:
    seen = mask(care)
    targets = TOKENS.roll(-1, 1) if seen is None else TOKENS.roll(-1, 1).masked_fill(~seen, -100)
    model(TOKENS, targets, seen).nll.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on_every_path
def test_logits_and_gradients(care: str, backend: str, impl: str) -> None:
    logits, grads = wanted(care)
    model = built(care, backend)
    with taking(impl, backend):
        torch.testing.assert_close(model(TOKENS, None, mask(care)), logits, rtol=1e-9, atol=1e-9)
        found = gradients(model, care)
    assert found.keys() == grads.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-8, atol=1e-9, msg=name)


@on_every_path
def test_logits_token_by_token(care: str, backend: str, impl: str) -> None:
    if mask(care) is not None:
        pytest.skip("generation pads nothing")
    model, cache = built(care, backend), KVCache()
    with torch.no_grad(), ops.using(impl):
        parts = [model(part, cache=cache) for part in TOKENS.split([3, 1, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted(care)[0], rtol=1e-9, atol=1e-9)


@on_every_path
def test_bf16_is_as_close_as_its_rounding(care: str, backend: str, impl: str) -> None:
    """Of weights that bf16 holds exactly: what is lost on a path changes the logits by a multiple of this."""
    model, seen = built(care, backend).bfloat16(), mask(care)
    plan = asdict(design(**CARES[care][0]))
    exact = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    want = torch.from_numpy(oracle.logits(exact, plan, TOKENS.numpy(), None if seen is None else seen.numpy()))
    with torch.no_grad(), taking(impl, backend):
        got = model(TOKENS, None, seen)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).square().mean().sqrt() < 0.04 * want.std()


@pytest.mark.parametrize("impl", ["reference", pytest.param("compiled", marks=needs_library)])
@pytest.mark.parametrize(
    "care", ["neighbours paired", "a window", "scale, then cap, then mask", "queries without keys"]
)
def test_logits_and_gradients_through_the_compiler(care: str, impl: str) -> None:
    logits, grads = wanted(care)
    model = built(care, "auto")
    torch.compiler.reset()
    with ops.using(impl):
        model.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(model(TOKENS, None, mask(care)), logits, rtol=1e-9, atol=1e-9)
        for name, grad in gradients(model, care).items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-8, atol=1e-9, msg=name)
