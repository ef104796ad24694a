"""Context extension of rope against float64 oracles and the functions of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from andrea_ablate.model import TransformerLM
from andrea_ablate.positions import POSITIONS, SCALINGS
from andrea_ablate.registry import ConfigError
from designs import content, design, options
from oracles import positions as oracle

# Widths, bases, and lengths below, at and above the original one; pairs of every band exist at the large original.
CASES = [(8, 10000.0, 12), (10, 500000.0, 4096), (64, 10000.0, 8192), (96, 150000.0, 2048), (2, 10000.0, 64)]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "linear": [{}, {"factor": 1.5}],
    "ntk": [{}, {"factor": 1.5}],
    "dynamic_ntk": [{}, {"factor": 1.5}, {"factor": 1.0}],
    "yarn": [{}, {"factor": 1.5, "beta_fast": 8.0}, {"truncate": False}, {"attention_factor": 0.7}],
    "longrope": [{}, {"factor": 32.0}, {"attention_factor": 1.2}, {"lists": True}],
    "llama3": [{}, {"factor": 3.0, "low_freq_factor": 0.7, "high_freq_factor": 9.0}],
}


def plans(name: str, width: int, original: int) -> list[dict[str, Any]]:
    """The options of an extension: its YAML file with each set of changes, and the original length."""
    found = []
    for change in CHANGES.get(name, [{}]):
        plan = {**content("scaling", name), **{key: value for key, value in change.items() if key != "lists"}}
        if "original_len" in plan:
            plan["original_len"] = original
        if "lists" in change:
            plan["short_factor"] = [1 + 0.1 * i for i in range(width // 2)]
            plan["long_factor"] = [2 + 0.7 * i for i in range(width // 2)]
        found.append(plan)
    return found


@pytest.mark.parametrize("name", SCALINGS.names())
@pytest.mark.parametrize(("width", "theta", "original"), CASES)
def test_frequencies_match_the_oracle(name: str, width: int, theta: float, original: int) -> None:
    for plan in plans(name, width, original):
        scaling = SCALINGS.build(plan, max_seq_len=5)
        for length in (1, original, original + 1, 5 * original):
            want, magnitude = oracle.scaled_frequencies(plan, theta, width, length)
            got = scaling.frequencies(theta, width, length)
            torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)
            assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)


# Our names of Hugging Face's options.
THEIRS = {"original_len": "original_max_position_embeddings"}
TYPES = {"dynamic_ntk": "dynamic", "ntk": "dynamic"}


@pytest.mark.parametrize("name", [name for name in SCALINGS.names() if name != "none"])
@pytest.mark.parametrize(("width", "theta", "original"), [case for case in CASES if case[0] > 2])
def test_frequencies_are_those_of_transformers(name: str, width: int, theta: float, original: int) -> None:
    reason = "transformers, an extra for tests, is not installed"
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason=reason)
    from transformers import LlamaConfig

    for plan in plans(name, width, original):
        scaling = SCALINGS.build(plan, max_seq_len=5)
        for length in (1, original, original + 1, 5 * original):
            rope = {THEIRS.get(key, key): value for key, value in plan.items() if key != "type" and value is not None}
            rope |= {"rope_type": TYPES.get(name, name), "rope_theta": theta}
            seq_len = length
            if name == "ntk":  # theirs has the dynamic form only: with a factor of 1 it stretches by length / original
                rope["factor"], seq_len = 1.0, int(plan["factor"] * original)
            if name == "longrope":
                rope.setdefault("short_factor", [1.0] * (width // 2))
                rope.setdefault("long_factor", [plan["factor"]] * (width // 2))
            config = LlamaConfig(
                hidden_size=4 * width, num_attention_heads=4, max_position_embeddings=original, rope_parameters=rope
            )
            want, magnitude = utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=seq_len)
            got = scaling.frequencies(theta, width, length)
            torch.testing.assert_close(got.float(), want, rtol=5e-6, atol=0)
            assert scaling.magnitude == pytest.approx(magnitude, rel=1e-9)


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("name", options("scaling"))
def test_rope_turns_by_the_scaled_frequencies(name: str) -> None:
    torch.manual_seed(0)
    for plan in plans(name, 6, 4):
        scaling = SCALINGS.build(plan, max_seq_len=5)
        module = POSITIONS.build({"type": "rope", "rotary_fraction": 0.75, "theta": 50.0}, d_head=8, scaling=scaling)
        for length in (3, 9, 4, 5, 9):  # a kept table must not answer for another length
            q = torch.randn(1, length, 2, 8, dtype=torch.float64)
            frequencies, magnitude = oracle.scaled_frequencies(plan, 50.0, 6, length)
            want = torch.from_numpy(oracle.rope(q.numpy(), 50.0, "interleaved", 6, frequencies))
            want[..., :6] *= magnitude
            torch.testing.assert_close(module(q, q)[0], want, rtol=1e-12, atol=1e-12)


def yarn(**changes: Any) -> Any:
    return SCALINGS.build({"type": "yarn", **changes}, max_seq_len=64)


def test_yarn_multiplies_cosines_and_sines_once_by_its_published_factor() -> None:
    assert [round(yarn(factor=s).magnitude, 5) for s in (4.0, 16.0, 64.0)] == [1.13863, 1.27726, 1.41589]
    assert yarn(factor=16.0, attention_factor=1.0).magnitude == 1.0


@pytest.mark.parametrize("name", options("scaling"))
def test_a_factor_of_one_is_plain_rope_bit_for_bit(name: str) -> None:
    plan = {**content("scaling", name), **({} if name == "none" else {"factor": 1.0})}
    scaling, plain = SCALINGS.build(plan, max_seq_len=64), SCALINGS.build({"type": "none"})
    for length in (10, 64, 1000):
        if name == "dynamic_ntk" and length > 64:
            continue  # its factor is how fast the base grows, not how far
        assert torch.equal(scaling.frequencies(10000.0, 64, length), plain.frequencies(10000.0, 64, length))
    assert scaling.magnitude == 1.0


def test_the_original_length_is_that_of_the_model_unless_given() -> None:
    assert yarn().original_len == 64
    assert yarn(original_len=32).original_len == 32


@pytest.mark.parametrize("kind", ["local", "global"])
def test_only_the_layers_asked_for_are_scaled(kind: str) -> None:
    """As in Gemma 3 and OLMo 3, whose local layers keep plain frequencies."""
    q = torch.randn(1, 9, 2, 8)
    plain = POSITIONS.build({"type": "rope"}, d_head=8)(q, q)[0]
    scaling = SCALINGS.build({"type": "linear"})
    for scaled in ("all", "global"):
        module = POSITIONS.build({"type": "rope", "scaled": scaled}, d_head=8, scaling=scaling)
        assert torch.equal(module(q, q, kind=kind)[0], plain) == (scaled not in ("all", kind))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": ("linear", {"factor": 0.5})}, "factor=0.5 must be at least 1"),
        ({"scaling": ("yarn", {"original_len": 1})}, "original_len=1 must be at least 2"),
        ({"scaling": "yarn", "max_seq_len": 1}, "original_len=1 must be at least 2"),
        ({"scaling": ("yarn", {"beta_fast": 1.0})}, "beta_fast=1.0 must be above beta_slow=1.0"),
        ({"scaling": ("llama3", {"low_freq_factor": 4.0})}, "high_freq_factor=4.0 must be above low_freq"),
        ({"scaling": ("longrope", {"long_factor": [1.0]})}, "long_factor=.* must be 2 numbers above 0"),
        ({"scaling": ("longrope", {"short_factor": [0.0, 1.0]})}, "short_factor=.* must be 2 numbers above 0"),
        ({"scaling": ("longrope", {"short_factor": 2.0})}, "short_factor=2.0 must be 2 numbers above 0"),
        ({"scaling": ("longrope", {"short_factor": "ab"})}, "short_factor=ab must be 2 numbers above 0"),
        ({"scaling": "yarn", "pos": {"theta": 1.0}}, "yarn needs model.pos.theta above 1, not 1.0"),
        (
            {"scaling": "yarn", "pos": "learned"},
            "scaling=yarn .* of rope, and pos=learned has none",
        ),
    ],
    ids=str,
)
def test_impossible_extensions_are_refused_before_memory_is_taken(changes: dict[str, Any], words: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        TransformerLM(design(**changes))
