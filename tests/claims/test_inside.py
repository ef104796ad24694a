"""Probes of a trained model see what was planted, and nothing where nothing is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from andrea_ablate.claims.probes.inside import (
    between_layers,
    decodable,
    log_z,
    loss,
    position_by_layer,
    profile,
    recall,
    skip_losses,
    step_cosines,
    streams,
)
from andrea_ablate.claims.probes.models import built, zipf_tokens
from andrea_ablate.claims.probes.stream import silence
from andrea_ablate.model import TransformerLM


def model(*overrides: str) -> TransformerLM:
    return built("model.d_model=24", "model.n_heads=3", "model.n_layers=3", "data.seq_len=12", *overrides).eval()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_linear_map_is_decoded_and_noise_is_not() -> None:
    x_NLD = noise(40, 7, 5)
    planted_NLP = x_NLD @ noise(5, 3, seed=1) + 2
    assert decodable(x_NLD, planted_NLP) == pytest.approx(1, abs=1e-4)
    assert decodable(x_NLD, noise(40, 7, 3, seed=2)) < 0.05
    half_NLP = planted_NLP + planted_NLP.std((0, 1)) * noise(40, 7, 3, seed=3)  # as much noise as signal
    assert decodable(x_NLD, half_NLP) == pytest.approx(0.5, abs=0.1)


def test_position_stands_in_the_stream_where_it_was_added() -> None:
    tokens_NL = zipf_tokens(model(), seed=0, batch=64)
    assert position_by_layer(model("pos=sine"), tokens_NL)[0] > 0.95
    for pos in ("rope", "none"):
        found = position_by_layer(model(f"pos={pos}"), tokens_NL)
        assert len(found) == 4 and found[0] < 0.02


def test_the_token_is_decoded_and_the_one_before_is_not_yet_before_attention() -> None:
    tokens_NL = zipf_tokens(model(), seed=0, batch=64)
    quiet = profile(silence(model()), tokens_NL)
    assert quiet["token"][0] > 0.2 > 0.02 > quiet["previous"][0]  # 24 dimensions for 257 tokens
    assert between_layers(quiet) == pytest.approx(0, abs=1e-12)  # silent blocks: every layer holds the same
    assert between_layers({"a": [0.0, 1.0], "b": [0.5, 0.5]}) == 0.125


def test_recall_is_what_the_second_of_two_copies_gains() -> None:
    class Copier:
        """Sure of the successor of a token that it saw within its reach, else of nothing, among 100 tokens."""

        def __init__(self, reach: int) -> None:
            self.reach = reach

        def __call__(self, tokens_NL: torch.Tensor) -> torch.Tensor:
            logits_NLV = torch.zeros(*tokens_NL.shape, 100)
            for row, tokens in enumerate(tokens_NL.tolist()):
                for at, token in enumerate(tokens):
                    for i in range(max(0, at + 1 - self.reach), at):
                        if tokens[i] == token:
                            logits_NLV[row, at, tokens[i + 1]] = 100.0
            return logits_NLV

    tokens_NL = torch.stack([torch.randperm(100, generator=torch.Generator().manual_seed(i))[:14] for i in range(3)])
    for reach, gain in ((99, math.log(100)), (7, math.log(100)), (6, 0.0)):  # 13 tokens: the copies are 6 apart
        copier: Any = Copier(reach)
        assert recall(copier, tokens_NL) == pytest.approx(gain, abs=1e-6)
    assert abs(recall(model(), zipf_tokens(model(), seed=0, batch=64))) < 0.05  # untrained: nothing


@contextmanager
def skipped(block: torch.nn.Module) -> Iterator[None]:
    """While it lasts, the block hands on what it is given."""
    handle = block.register_forward_hook(lambda _, args, out: args[0])
    try:
        yield
    finally:
        handle.remove()


def test_a_block_left_out() -> None:
    tokens_NL = zipf_tokens(model(), seed=0, batch=8)
    whole = model()
    assert max(map(abs, skip_losses(silence(model()), tokens_NL))) == 0
    assert max(map(abs, skip_losses(whole, tokens_NL))) > 1e-4
    before, loss_of_whole = streams(whole, tokens_NL), loss(whole, tokens_NL)
    risen = []
    for block in whole.blocks:
        with skipped(block):
            risen.append(loss(whole, tokens_NL) - loss_of_whole)
    assert skip_losses(whole, tokens_NL) == pytest.approx(risen, abs=1e-7)
    torch.testing.assert_close(streams(whole, tokens_NL)[3], before[3])  # and every block is back
    assert step_cosines(silence(model()), tokens_NL) == pytest.approx([1, 1, 1])


def test_log_z_of_even_logits_is_that_of_the_vocabulary() -> None:
    flat = model()
    with torch.no_grad():
        flat.embedding.zero_()
        if flat.head is not None:
            flat.head.zero_()
    assert log_z(flat, zipf_tokens(flat, seed=0)) == pytest.approx(math.log(flat.dims.vocab_size))
