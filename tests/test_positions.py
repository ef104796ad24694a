"""Position encodings against float64 NumPy, and what must hold for rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from andrea_ablate.model import TransformerLM
from andrea_ablate.positions import POSITIONS
from andrea_ablate.registry import ConfigError
from designs import design
from oracles import positions as oracle

PAIRINGS = ["interleaved", "half"]


def rope(d_head: int = 8, **options: Any) -> nn.Module:
    return POSITIONS.build({"type": "rope", **options}, d_head=d_head)


def check_rope(module_options: dict[str, Any]) -> None:
    q, k = (torch.randn(2, 7, heads, 10, dtype=torch.float64) for heads in (4, 2))
    turned = rope(10, **module_options)(q, k)
    theta, pairing = module_options.get("theta", 10000.0), module_options.get("pairing", "interleaved")
    for got, x in zip(turned, (q, k), strict=True):
        want = torch.from_numpy(oracle.rope(x.numpy(), theta, pairing))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def check_sine(module_options: dict[str, Any]) -> None:
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    table = torch.from_numpy(oracle.sine(9, 6, module_options.get("theta", 10000.0)))
    got = POSITIONS.build({"type": "sine", **module_options}, d_model=6)(x)
    torch.testing.assert_close(got, x + table, rtol=1e-12, atol=1e-12)


def check_learned(module_options: dict[str, Any]) -> None:
    module: Any = POSITIONS.build({"type": "learned", **module_options}, d_model=3, max_seq_len=4).double()
    module.vectors.data = torch.arange(12, dtype=torch.float64).view(4, 3)
    got = module(torch.ones(2, 2, 3, dtype=torch.float64))
    assert got.tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2


def check_none(module_options: dict[str, Any]) -> None:
    """Without positions the last logits do not change when the tokens before it trade places."""
    model = TransformerLM(design(pos="none", norm="none")).double()
    a, b = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
    model.blocks = model.blocks[:1]  # a second layer sees the order through the causal mask
    torch.testing.assert_close(model(a)[0, -1], model(b)[0, -1], rtol=1e-12, atol=1e-12)
    assert POSITIONS.build({"type": "none", **module_options}).seam is None


ORACLES = {"rope": check_rope, "sine": check_sine, "learned": check_learned, "none": check_none}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "rope": [{"theta": theta, "pairing": pairing} for theta in (10000.0, 50.0) for pairing in PAIRINGS],
    "sine": [{}, {"theta": 50.0}],
}


@pytest.mark.parametrize("name", POSITIONS.names())
def test_position_matches_its_oracle(name: str) -> None:
    torch.manual_seed(0)
    for options in OPTIONS.get(name, [{}]):
        ORACLES[name](options)


# ---------------------------------------------------------------------------------------------------------------------
# rotations


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_depend_on_the_distance_alone(pairing: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    turned_q, turned_k = rope(pairing=pairing)(q.expand(1, 20, 1, 8), k.expand(1, 20, 1, 8))
    score = (turned_q[0, :, 0] @ turned_k[0, :, 0].T).numpy()
    for distance in range(-14, 15):
        diagonal = score.diagonal(distance)
        assert abs(diagonal - diagonal[0]).max() < 1e-12
    assert abs(score[0] - score[0, 0]).max() > 1e-2


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_keeps_the_length_and_leaves_the_first_position_alone(pairing: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 50, 3, 8, dtype=torch.float64)
    turned, _ = rope(pairing=pairing)(x, x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1:], x[:, 1:], atol=0.1)


def test_the_two_pairings_agree_after_the_fixed_permutation() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 9, 2, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # half puts the first of each pair first
    interleaved, _ = rope(pairing="interleaved")(x, x)
    half, _ = rope(pairing="half")(x[..., order], x[..., order])
    torch.testing.assert_close(half, interleaved[..., order])


def angles(module: Any, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    cos, sin = module.tables(length, torch.device("cpu"), dtype)
    return cos, sin


def exact_angles(length: int, width: int) -> Tensor:
    frequency = torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency


@pytest.mark.parametrize("built_under_bf16", [True, False])
def test_a_model_in_bf16_keeps_exact_angles(built_under_bf16: bool) -> None:
    """bf16 cannot tell position 256 from 257: neither positions nor frequencies may ever be rounded to it."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if built_under_bf16 else default)
        model = TransformerLM(design(d_head=8)).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 4, dtype=torch.long))
            cos, sin = angles(model.pos, 4096)
    finally:
        torch.set_default_dtype(default)
    want = exact_angles(4096, 8)
    torch.testing.assert_close(cos.double(), want.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), want.sin(), rtol=0, atol=1e-6)
    assert len(torch.cat((cos, sin), -1).unique(dim=0)) == 4096


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_queries_are_turned_in_fp32_and_rounded_once(pairing: str, autocast: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 600, 1, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        turned, _ = rope(pairing=pairing)(q, q)
    assert turned.dtype == torch.bfloat16
    want = torch.from_numpy(oracle.rope(q.double().numpy(), 10000.0, pairing))
    assert ((turned.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_kept_tables_never_answer_for_another_length_or_dtype(pairing: str) -> None:
    torch.manual_seed(0)
    module = rope(pairing=pairing)
    for length, dtype in [
        (8, torch.float32),
        (16, torch.float32),
        (8, torch.float32),
        (8, torch.float64),
        (5, torch.bfloat16),
        (16, torch.float64),
        (1, torch.float32),
    ]:
        q = torch.randn(2, length, 2, 8, dtype=dtype)
        for kept, fresh in zip(module(q, q), rope(pairing=pairing)(q, q), strict=True):
            assert kept.dtype == dtype
            assert torch.equal(kept, fresh)


def test_tables_do_not_pile_up_over_lengths() -> None:
    module: Any = rope()
    for length in range(1, 50):
        angles(module, length)
    kept = [tensor for pair in module.tables._kept.values() for tensor in pair]
    assert len(kept) == 2


@pytest.mark.parametrize("name", ["rope", "sine"])
def test_fixed_encodings_are_not_part_of_the_weights(name: str) -> None:
    model = TransformerLM(design(pos=name))
    model(torch.zeros(1, 4, dtype=torch.long))
    assert not any("pos" in key for key in model.state_dict())


@pytest.mark.parametrize("name", POSITIONS.names())
def test_a_pass_in_inference_mode_does_not_spoil_training(name: str) -> None:
    """A tensor made in inference mode cannot be saved for a backward pass: kept tables must not become such tensors."""
    for choice in [{"pairing": pairing} for pairing in PAIRINGS] if name == "rope" else [name]:
        model = TransformerLM(design(pos=choice))
        tokens = torch.zeros(1, 4, dtype=torch.long)
        with torch.inference_mode():
            model(tokens)
        model(tokens, tokens).nll.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    ("name", "options", "sizes", "words"),
    [
        ("rope", {}, {"d_head": 65}, "even head width, not 65"),
        ("rope", {"pairing": "halves"}, {"d_head": 8}, "pairing='halves' is not one of half, interleaved"),
        ("rope", {"theta": 0.0}, {"d_head": 8}, "theta=0.0 must be positive"),
        ("sine", {"theta": -1.0}, {"d_model": 8}, "theta=-1.0 must be positive"),
        ("sine", {}, {"d_model": 9}, "even model.d_model, not 9; try 10"),
    ],
)
def test_impossible_encodings_are_refused(
    name: str, options: dict[str, Any], sizes: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        POSITIONS.build({"type": name, **options}, **sizes)


@pytest.mark.parametrize("limit", [1, 4])
def test_a_sequence_longer_than_the_learned_table_is_refused(limit: int) -> None:
    """A table of one row would otherwise be added to every position without a word."""
    model = TransformerLM(design(pos="learned", max_seq_len=limit))
    assert model.pos.max_len == limit
    model(torch.zeros(1, limit, dtype=torch.long))
    with pytest.raises(ConfigError, match=f"5 tokens.*model.max_seq_len={limit}.*pos=rope"):
        model(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("name", ["rope", "sine", "none"])
def test_encodings_without_a_table_take_any_length(name: str) -> None:
    model = TransformerLM(design(pos=name, max_seq_len=4))
    assert model.pos.max_len is None
    assert torch.isfinite(model(torch.zeros(1, 9, dtype=torch.long))).all()
