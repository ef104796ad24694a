"""Models to measure, from the command line's own words, and tokens for them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from andrea_ablate.composition import compose
from andrea_ablate.config import ModelConfig
from andrea_ablate.model import TransformerLM

# ANDREA-120M's trunk: width, depth, heads, learned positions, GELU 4x, pre-norm. Its tokens are bytes: what the trunk
# does at the first step does not depend on how many rows the embedding has.
ANDREA = ("model.d_model=768", "model.n_layers=12", "model.n_heads=12", "pos=learned", "data.seq_len=64")
SMALL = ("model.d_model=48", "model.n_heads=4", "model.n_layers=12")
ONE_BLOCK = ("model.d_model=12", "model.n_heads=3", "model.n_layers=1")
SEEDS = tuple(range(8))


@lru_cache(maxsize=256)
def config(*overrides: str) -> ModelConfig:
    """The model that these overrides describe, ``norm=post model.n_layers=6``, on top of the defaults."""
    return compose(["logger=none", "size=tiny", *overrides]).model


def built(*overrides: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> TransformerLM:
    """A new model with the initial values of `seed`, in `dtype`."""
    return TransformerLM(config(*overrides), init_seed=seed).to(dtype)


def zipf_tokens(model: TransformerLM, seed: int, batch: int = 4, length: int | None = None) -> Tensor:
    """Tokens drawn with ``p(rank) ~ 1 / rank``, as words are; ``(batch, length)``, length None for the model's own."""
    vocab, longest = model.dims.vocab_size, model.dims.max_seq_len
    weight_V = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    count = batch * (length or longest)
    return torch.multinomial(weight_V, count, replacement=True, generator=generator).view(batch, -1)
