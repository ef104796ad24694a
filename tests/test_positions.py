"""Position encodings against float64 NumPy, and what must hold for rotations."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate.attention import score_shift
from andrea_ablate.config import layer_kinds
from andrea_ablate.model import TransformerLM
from andrea_ablate.positions import POSITIONS
from andrea_ablate.positions.scores import alibi_slopes
from andrea_ablate.registry import ConfigError
from designs import design
from oracles import positions as oracle

NO_TRANSFORMERS = "transformers, an extra for tests, is not installed"
PAIRINGS = ["interleaved", "half"]


def rope(d_head: int = 8, **options: Any) -> nn.Module:
    return POSITIONS.build({"type": "rope", **options}, d_head=d_head)


def check_rope(module_options: dict[str, Any]) -> None:
    q, k = (torch.randn(2, 7, heads, 10, dtype=torch.float64) for heads in (4, 2))
    turned = rope(10, **module_options)(q, k)
    theta, pairing = module_options.get("theta", 10000.0), module_options.get("pairing", "interleaved")
    rotary = {1.0: 10, 0.6: 6, 0.25: 2}[module_options.get("rotary_fraction", 1.0)]
    for got, x in zip(turned, (q, k), strict=True):
        want = torch.from_numpy(oracle.rope(x.numpy(), theta, pairing, rotary))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(got[..., rotary:], x[..., rotary:])


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


def shifts(module: Any, length: int, causal: bool = True) -> Tensor:
    """What the encoding adds to the scores of `length` tokens."""
    given = module(torch.zeros(1, length, 3, dtype=torch.float64))
    found = score_shift(given.get("slopes"), given.get("bias"), length, length, causal)
    assert found is not None
    return found


def check_alibi(module_options: dict[str, Any]) -> None:
    got = shifts(POSITIONS.build({"type": "alibi"}, n_heads=6), 9)
    for h, i, j in product(range(6), range(9), range(9)):
        assert j > i or got[h, i, j].item() == -oracle.alibi_slope(h, 6) * (i - j)


def check_t5(module_options: dict[str, Any]) -> None:
    for causal in (True, False):
        module: Any = POSITIONS.build({"type": "t5", **module_options}, n_heads=3, causal=causal).double()
        module.bucket_bias.data = torch.randn_like(module.bucket_bias)
        got, learned = shifts(module, 140, causal), module.bucket_bias
        for d in range(0 if causal else -139, 140):
            bucket = oracle.t5_bucket(d, module.buckets, module.max_distance, causal)
            assert (got.diagonal(-d, 1, 2) == learned[bucket][:, None]).all(), d


ORACLES = {
    "rope": check_rope,
    "sine": check_sine,
    "learned": check_learned,
    "none": check_none,
    "alibi": check_alibi,
    "t5": check_t5,
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "rope": [
        {"theta": theta, "pairing": pairing, "rotary_fraction": fraction}
        for theta in (10000.0, 50.0)
        for pairing in PAIRINGS
        for fraction in (1.0, 0.6, 0.25)
    ],
    "sine": [{}, {"theta": 50.0}],
    "t5": [{}, {"buckets": 8, "max_distance": 12}, {"buckets": 20, "max_distance": 90}],
}


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", POSITIONS.names())
def test_position_matches_its_oracle(name: str) -> None:
    torch.manual_seed(0)
    for options in OPTIONS.get(name, [{}]):
        ORACLES[name](options)


# ---------------------------------------------------------------------------------------------------------------------
# shifts of the scores


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes_by_hand(heads: int, exponents: list[float]) -> None:
    assert alibi_slopes(heads) == [2**-exponent for exponent in exponents]


@pytest.mark.parametrize("heads", [*range(1, 18), 40, 71, 112])
def test_alibi_slopes_are_those_of_bloom_and_mpt(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason=NO_TRANSFORMERS)
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt", reason=NO_TRANSFORMERS)
    want = bloom._get_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), want, rtol=1e-5, atol=0)
    theirs = mpt.build_mpt_alibi_tensor(heads, 2)  # the last but one key of the last query
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), -theirs[:, 0, 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 100), (8, 20), (64, 1000)])
def test_t5_buckets_are_those_of_transformers(causal: bool, buckets: int, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason=NO_TRANSFORMERS)
    length = max_distance + 50
    module: Any = POSITIONS.build(
        {"type": "t5", "buckets": buckets, "max_distance": max_distance}, n_heads=1, causal=causal
    )
    module.bucket_bias.data = torch.arange(buckets).view(-1, 1).float()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    want = t5.T5Attention._relative_position_bucket(-distance, not causal, buckets, max_distance)
    got = shifts(module, length, causal)[0]
    allowed = (distance >= 0) | (not causal)
    assert torch.equal(got[allowed], want[allowed].float())


def test_every_layer_adds_the_same_shifts() -> None:
    model = TransformerLM(design(pos="t5", n_layers=3))
    assert [name for name, _ in model.named_parameters() if "bucket" in name] == ["pos.bucket_bias"]


def test_a_model_in_bf16_keeps_exact_slopes() -> None:
    model: Any = TransformerLM(design(pos="alibi", n_heads=12, d_head=2)).bfloat16()
    slopes = model.pos(torch.zeros(1, dtype=torch.bfloat16))["slopes"]
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == pytest.approx(alibi_slopes(12), rel=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# rotations


@pytest.mark.usefixtures("impl")
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


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_keeps_the_length_and_leaves_the_first_position_alone(pairing: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 50, 3, 8, dtype=torch.float64)
    turned, _ = rope(pairing=pairing)(x, x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1:], x[:, 1:], atol=0.1)


@pytest.mark.usefixtures("impl")
def test_the_two_pairings_agree_after_the_fixed_permutation() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 9, 2, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # half puts the first of each pair first
    interleaved, _ = rope(pairing="interleaved")(x, x)
    half, _ = rope(pairing="half")(x[..., order], x[..., order])
    torch.testing.assert_close(half, interleaved[..., order])


def angles(module: Any, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    cos, sin = module.tables["local"](length, torch.device("cpu"), dtype)
    return cos, sin


def exact_angles(length: int, width: int) -> Tensor:
    frequency = torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency


@pytest.mark.usefixtures("impl")
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


@pytest.mark.usefixtures("impl")
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


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_kept_tables_never_answer_for_another_length_offset_or_dtype(pairing: str) -> None:
    torch.manual_seed(0)
    module = rope(pairing=pairing)
    for length, start, dtype in [
        (8, 0, torch.float32),
        (8, 4, torch.float32),
        (16, 0, torch.float32),
        (8, 0, torch.float32),
        (8, 4, torch.float64),
        (5, 0, torch.bfloat16),
        (16, 9, torch.float64),
        (1, 30, torch.float32),
        (1, 0, torch.float32),
    ]:
        q = torch.randn(2, length, 2, 8, dtype=dtype)
        fresh = rope(pairing=pairing)(q, q, start=start)
        for kept, new in zip(module(q, q, start=start), fresh, strict=True):
            assert kept.dtype == dtype
            assert torch.equal(kept, new)
        exact = torch.from_numpy(oracle.rope(F.pad(q, (0, 0, 0, 0, start, 0)).double().numpy(), 10000.0, pairing))
        torch.testing.assert_close(kept.double(), exact[:, start:], rtol=1e-2, atol=1e-2)


def test_tables_do_not_pile_up_over_lengths() -> None:
    module: Any = rope()
    for length in range(1, 50):
        angles(module, length)
    kept = [tensor for pair in module.tables["local"]._kept.values() for tensor in pair]
    assert len(kept) == 2


@pytest.mark.parametrize("name", ["rope", "sine", "alibi"])
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
# layers that differ


def test_local_and_global_layers_have_their_own_bases() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    module = rope(theta=1e6, local_theta=50.0)
    for kind, theta in (("local", 50.0), ("global", 1e6)):
        want = torch.from_numpy(oracle.rope(q.numpy(), theta, "interleaved"))
        torch.testing.assert_close(module(q, q, kind=kind)[0], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rotated", "turned"), [("all", "local global"), ("local", "local"), ("global", "global")])
def test_layers_without_rotation_keep_their_queries_and_keys(rotated: str, turned: str) -> None:
    q = torch.randn(1, 5, 2, 8)
    for kind in ("local", "global"):
        assert torch.equal(rope(rotated=rotated)(q, q, kind=kind)[0], q) == (kind not in turned.split())


def test_the_pattern_of_layers_is_repeated_over_the_depth() -> None:
    pattern = ["local", "local", "global"]
    config = design(n_layers=7, layer_pattern=pattern, pos={"rotated": "local"}, attn={"window": 3})
    assert layer_kinds(config) == [*pattern, *pattern, "local"]
    model = TransformerLM(config)
    assert [block.attn.window for block in model.blocks] == [3, 3, None, 3, 3, None, 3]
    seen: list[str] = []
    model.pos.register_forward_hook(lambda module, args, kwargs, out: seen.append(kwargs["kind"]), with_kwargs=True)
    model(torch.zeros(1, 4, dtype=torch.long))
    assert seen == layer_kinds(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn": {"window": 3}, "layer_pattern": ["global"]}, "model.attn.window=3 is for local layers.*'global'"),
        ({"pos": {"local_theta": 9.0}, "layer_pattern": ["global"]}, "model.pos.local_theta=9.0 is for local layers"),
        ({"pos": {"rotated": "global"}}, "model.pos.rotated=global is for global layers.*add global to it"),
        ({"pos": {"scaled": "global"}}, "model.pos.scaled=global is for global layers"),
    ],
)
def test_what_is_for_layers_that_the_pattern_does_not_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransformerLM(design(**changes))


@pytest.mark.parametrize("pattern", [[], ["locl"], ["local", "none"]])
def test_a_pattern_of_other_words_is_refused(pattern: list[str]) -> None:
    with pytest.raises(ConfigError, match="layer_pattern=.* must be a list of local and global"):
        TransformerLM(design(layer_pattern=pattern))


# ---------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    ("name", "options", "sizes", "words"),
    [
        ("rope", {}, {"d_head": 65}, "even head width, not 65"),
        ("rope", {"pairing": "halves"}, {"d_head": 8}, "pairing='halves' is not one of half, interleaved"),
        ("rope", {"theta": 0.0}, {"d_head": 8}, "theta=0.0 must be positive"),
        ("rope", {"local_theta": 0.0}, {"d_head": 8}, "theta=0.0 must be positive"),
        ("rope", {"rotary_fraction": 0.4}, {"d_head": 8}, "rotary_fraction=0.4 turns 3 of the 8 .* even, from 2 to 8"),
        ("rope", {"rotary_fraction": 0.1}, {"d_head": 8}, "turns 0 of the 8"),
        ("rope", {"rotary_fraction": 1.5}, {"d_head": 8}, "turns 12 of the 8"),
        ("rope", {"rotated": "some"}, {"d_head": 8}, "rotated='some' is not one of all, local, global"),
        ("rope", {"scaled": "none"}, {"d_head": 8}, "scaled='none' is not one of all, local, global"),
        ("t5", {"buckets": 7}, {"n_heads": 2}, "buckets=7 must be a multiple of 2 from 4 up"),
        ("t5", {"buckets": 2}, {"n_heads": 2}, "buckets=2 must be a multiple of 2 from 4 up"),
        ("t5", {"buckets": 6}, {"n_heads": 2, "causal": False}, "buckets=6 must be a multiple of 4 from 8 up"),
        ("t5", {"max_distance": 16}, {"n_heads": 2}, "max_distance=16 must be above 16"),
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


@pytest.mark.parametrize("name", ["rope", "sine", "none", "alibi", "t5"])
def test_encodings_without_a_table_take_any_length(name: str) -> None:
    model = TransformerLM(design(pos=name, max_seq_len=4))
    assert model.pos.max_len is None
    assert torch.isfinite(model(torch.zeros(1, 9, dtype=torch.long))).all()
