"""What a trained model holds inside, read on the validation text of its run: the stream by layer, position, log Z."""

# Shapes: N windows, L length, D d_model, P numbers to predict
from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate.claims.probes.trained import Trained
from andrea_ablate.data import prepare
from andrea_ablate.model import TransformerLM

WINDOWS = 128  # of validation text; the first half fits a linear probe, the second half judges it
RIDGE = 1e-3  # times the mean square of the stream: a probe's penalty


def text(run: Trained, windows: int = WINDOWS, part: str = "val") -> Tensor:
    """The first windows of the run's validation (or ``train``) tokens, ``(windows, seq_len + 1)``."""
    tokens = getattr(prepare(run.cfg.data, Path(run.cfg.paths.cache)), part)
    length = run.cfg.data.seq_len
    windows = min(windows, (len(tokens) - 1) // length)
    at = np.arange(windows)[:, None] * length + np.arange(length + 1)
    return torch.from_numpy(np.asarray(tokens)[at].astype(np.int64))


@torch.no_grad()
def loss(model: TransformerLM, tokens_NL: Tensor) -> float:
    """Next-token loss in nats."""
    return float(model(tokens_NL[:, :-1], tokens_NL[:, 1:]).mean())


@torch.no_grad()
def log_z(model: TransformerLM, tokens_NL: Tensor) -> float:
    """Mean ``|log sum exp(logits)|`` over the positions."""
    return float(model(tokens_NL[:, :-1]).double().logsumexp(-1).abs().mean())


@torch.no_grad()
def recall(model: TransformerLM, tokens_NL: Tensor) -> float:
    """How much lower, in nats, the loss of half a window is where it comes a second time, right after the first.

    The first token of either copy is left out: nothing says what it will be.
    """
    half_NL = tokens_NL[:, : (tokens_NL.shape[1] - 1) // 2]
    twice_NL = torch.cat((half_NL, half_NL), 1)
    losses_NL = F.cross_entropy(model(twice_NL[:, :-1]).transpose(1, 2), twice_NL[:, 1:], reduction="none")
    half = half_NL.shape[1]
    return float(losses_NL[:, : half - 1].mean() - losses_NL[:, half:].mean())


@torch.no_grad()
def streams(model: TransformerLM, tokens_NL: Tensor) -> list[Tensor]:
    """The stream before the first block and after each one, ``(N, L, D)``."""
    kept: list[Tensor] = []
    handles = [model.blocks[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))]
    handles += [block.register_forward_hook(lambda _, args, out: kept.append(out)) for block in model.blocks]
    try:
        model.hidden(tokens_NL)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def decodable(x_NLD: Tensor, target_NLP: Tensor) -> float:
    """R2 of a ridge regression from the stream to what is asked for, fitted on one half of the windows, on the other.

    With several numbers to predict, the share of their whole variance; below 0 where the probe is worse than the mean.
    """
    half = len(x_NLD) // 2
    (x, y), (x_new, y_new) = (
        (x_NLD[part].flatten(0, 1).double(), target_NLP[part].flatten(0, 1).double())
        for part in (slice(half), slice(half, None))
    )
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    penalty = RIDGE * float(x.pow(2).mean()) * len(x) + 1e-30
    weight = torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    error = (y_new - y_mean - (x_new - x_mean) @ weight).pow(2).sum()
    return 1 - float(error / (y_new - y_new.mean(0)).pow(2).sum())


def position_by_layer(model: TransformerLM, tokens_NL: Tensor) -> list[float]:
    """R2 of the position in the stream before the first block and after each one."""
    found = streams(model, tokens_NL[:, :-1])
    position_NLP = torch.arange(found[0].shape[1]).view(1, -1, 1).expand(len(found[0]), -1, -1)
    return [decodable(x_NLD, position_NLP) for x_NLD in found]


def profile(model: TransformerLM, tokens_NL: Tensor) -> dict[str, list[float]]:
    """R2 after each block of the position, of the token before, of the token itself and of the next one."""
    found = streams(model, tokens_NL[:, :-1])[1:]
    vocab = model.dims.vocab_size
    one_hot_NLV = F.one_hot(tokens_NL, vocab)
    position_NLP = torch.arange(tokens_NL.shape[1]).view(1, -1, 1).expand(len(tokens_NL), -1, -1)
    targets = {"position": (position_NLP, 0), "previous": (one_hot_NLV, -1), "token": (one_hot_NLV, 0)}
    targets["next"] = (one_hot_NLV, 1)
    length = tokens_NL.shape[1] - 1
    return {
        name: [decodable(x_NLD[:, 1:], values[:, 1 + shift : length + shift]) for x_NLD in found]
        for name, (values, shift) in targets.items()
    }


def between_layers(by_layer: dict[str, list[float]]) -> float:
    """Variance of the probes' R2 between layers, mean over the probes."""
    return statistics.fmean(statistics.pvariance(values) for values in by_layer.values())


def step_cosines(model: TransformerLM, tokens_NL: Tensor) -> list[float]:
    """Mean cosine between the stream before and after each block."""
    found = streams(model, tokens_NL[:, :-1])
    return [float(F.cosine_similarity(a, b, dim=-1).mean()) for a, b in zip(found, found[1:], strict=False)]


class _Known(torch.nn.Module):
    """In the place of the blocks up to one: the stream that is known to be there."""

    def __init__(self, x_NLD: Tensor) -> None:
        super().__init__()
        self.x_NLD = x_NLD

    def forward(self, *_: Any) -> Tensor:
        return self.x_NLD


def skip_losses(model: TransformerLM, tokens_NL: Tensor) -> list[float]:
    """How much the loss rises when a block is left out, block by block; what comes before it is computed once."""
    whole, before, found = loss(model, tokens_NL), streams(model, tokens_NL[:, :-1]), []
    blocks = model.blocks
    try:
        for i in range(len(blocks)):
            model.blocks = torch.nn.ModuleList([_Known(before[i]), *blocks[i + 1 :]])
            found.append(loss(model, tokens_NL) - whole)
    finally:
        model.blocks = blocks
    return found
