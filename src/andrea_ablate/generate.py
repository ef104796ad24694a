"""Text from a trained run: ``python -m andrea_ablate.generate RUN "def "``."""

# Shapes: B batch, L length, V vocabulary
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from andrea_ablate.attention import KVCache
from andrea_ablate.command import command
from andrea_ablate.config import RunConfig, run_config
from andrea_ablate.data import tokenizer_of
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import Store


@torch.no_grad()
def generate(
    model: TransformerLM,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cached: bool = True,
) -> Tensor:
    """Continue `tokens` by `count` tokens, each drawn from ``softmax(logits / temperature)``.

    Args:
        temperature: 0 takes the likeliest token. top_k: draw among that many of the likeliest; None for all.
        seed: of the draws. cached: keep keys and values, so that each token is computed once; the logits are the same.
    Shape: tokens ``(B, L)`` int64, L >= 1 -> ``(B, L + count)``.
    Raises: ConfigError for a model that is not causal, no token to start from, or settings out of range.
    """
    if not all(getattr(block.attn, "causal", True) for block in model.blocks):
        raise ConfigError("generate: model.attn.causal=false predicts no next token; train with causal=true")
    if tokens.shape[1] == 0:
        raise ConfigError("generate: there is no token to continue; give a prompt")
    if temperature < 0 or count < 0 or (top_k is not None and top_k < 1):
        raise ConfigError(
            f"generate: temperature={temperature} and count={count} must be >= 0, and top_k={top_k} >= 1 or null"
        )
    generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = KVCache() if cached else None
    training = model.training
    model.eval()
    new = tokens
    for _ in range(count):
        logits_BV = model(new, cache=cache)[:, -1].float()
        next_B1 = _draw(logits_BV, temperature, top_k, generator)
        tokens = torch.cat((tokens, next_B1), 1)
        new = next_B1 if cached else tokens
    model.train(training)
    return tokens


def _draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)


def load(store: Store, name: str) -> tuple[TransformerLM, RunConfig]:
    """The trained model of a run, by its id or the beginning of it. Raises ConfigError without weights."""
    found = store.find(name)
    cfg = run_config(store.config(found))
    weights = store.path(found) / "model.safetensors"
    if not weights.exists():
        status = (store.record(found) or {}).get("status", "unknown")
        raise ConfigError(f"run {found} has no weights (status: {status}); repeat its command until it is finished")
    model = TransformerLM(cfg.model)
    model.load_state_dict(load_file(weights))
    return model.eval(), cfg


@command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.generate", description=__doc__)
    parser.add_argument("run", help="id of a finished run, or the beginning of it")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("--count", type=int, default=200, help="tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among that many of the likeliest tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cache", action="store_true", help="compute all tokens anew for each new one")
    given = parser.parse_args()
    model, cfg = load(Store(given.runs), given.run)
    tokenizer = tokenizer_of(cfg.data, Path(cfg.paths.cache))
    ids = tokenizer.encode([given.prompt.encode()])
    if tokenizer.end is not None:
        ids = ids[:-1]
    prompt = torch.from_numpy(ids.astype("int64"))[None]
    options = {"temperature": given.temperature, "top_k": given.top_k, "seed": given.seed}
    tokens = generate(model, prompt, given.count, **options, cached=not given.no_cache)
    print(tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    sys.exit(main())
