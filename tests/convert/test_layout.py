"""Each layout against numbers set by hand, and there and back."""

from __future__ import annotations

import pytest
import torch

from andrea_ablate.config import ModelDims, model_dims
from andrea_ablate.convert.layout import Below, Grouped, PerHead, Plain, Shifted, Stacked, Transposed, repaired
from andrea_ablate.convert.maps import _repaired
from andrea_ablate.model import TransformerLM
from designs import design

DIMS: ModelDims = model_dims(design(n_heads=4, d_head=1, attn={"n_kv_heads": 2}))
QUERY, KEY, VALUE = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])


def test_grouped_is_queries_then_key_then_value_per_key_head() -> None:
    fused = torch.tensor([0.0, 1.0, 10.0, 20.0, 2.0, 3.0, 11.0, 21.0])
    for got, want in zip(Grouped().split(fused, [4, 2, 2], DIMS), (QUERY, KEY, VALUE), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(Grouped().join([QUERY, KEY, VALUE], DIMS), fused)


def test_stacked_is_all_queries_then_all_keys_then_all_values() -> None:
    fused = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 20.0, 21.0])
    for got, want in zip(Stacked().split(fused, [4, 2, 2], DIMS), (QUERY, KEY, VALUE), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(Stacked().join([QUERY, KEY, VALUE], DIMS), fused)


def test_transposed_turns_matrices_and_leaves_biases() -> None:
    matrix, bias = torch.arange(6.0).view(2, 3), torch.arange(3.0)
    assert torch.equal(Transposed(Plain()).split(matrix, [3], DIMS)[0], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert torch.equal(Transposed(Plain()).split(bias, [3], DIMS)[0], bias)
    assert torch.equal(Transposed(Plain()).join(Transposed(Plain()).split(matrix, [3], DIMS), DIMS), matrix)


def test_shifted_gains_and_rows_below_a_table() -> None:
    assert torch.equal(Shifted(1.0).split(torch.zeros(2), [2], DIMS)[0], torch.ones(2))
    table = torch.tensor([[0.0], [0.0], [5.0], [6.0]])
    assert torch.equal(Below(2).split(table, [2], DIMS)[0], table[2:])
    assert torch.equal(Below(2).join([table[2:]], DIMS), table)


def test_a_vector_per_head_is_one_of_all_heads() -> None:
    rows = torch.arange(4.0).view(4, 1)
    assert torch.equal(PerHead().split(rows, [4], DIMS)[0], torch.arange(4.0))
    assert torch.equal(PerHead().join([torch.arange(4.0)], DIMS), rows)


def test_pairs_move_within_the_turned_part_of_each_head() -> None:
    rows = torch.tensor([0.0, 1, 2, 3, 4, 10, 11, 12, 13, 14])  # two heads of five, four of them turned
    halves = torch.tensor([0.0, 2, 1, 3, 4, 10, 12, 11, 13, 14])
    assert torch.equal(repaired(rows, 4, 5, to_half=True), halves)
    assert torch.equal(repaired(halves, 4, 5, to_half=False), rows)


@pytest.mark.parametrize("trick", [(), ("qk_norm",), ("qk_norm_full",), ("qk_layernorm",)])
def test_a_model_with_permuted_queries_and_keys_and_the_other_pairing_is_the_same(trick: tuple[str, ...]) -> None:
    given = {"d_model": 32, "attn": "gqa2", "linear_bias": True, "pos": {"rotary_fraction": 0.75}}
    config = design(trick, **given)
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    other = TransformerLM(design(trick, **{**given, "pos": {"rotary_fraction": 0.75, "pairing": "half"}}))
    other.load_state_dict(_repaired(config, model.state_dict(), to_half=True))
    tokens = torch.arange(9).view(1, 9)
    torch.testing.assert_close(other(tokens), model(tokens))
    back = _repaired(config, other.state_dict(), to_half=False)
    assert all(torch.equal(back[name], t) for name, t in model.state_dict().items())
