"""Registries, and their agreement with the YAML options."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from andrea_ablate.attention import ATTENTIONS
from andrea_ablate.blocks import BLOCKS, NORM_POSITIONS
from andrea_ablate.data import CORPORA, TOKENIZERS
from andrea_ablate.ffn import FFNS
from andrea_ablate.init import INITS
from andrea_ablate.model import TransformerLM
from andrea_ablate.norms import NORMS
from andrea_ablate.positions import POSITIONS, SCALINGS
from andrea_ablate.registry import ConfigError, Registry, nearest
from andrea_ablate.stability import STABILITY
from andrea_ablate.tracking import LOGGERS
from andrea_ablate.training.optim import OPTIMIZERS
from andrea_ablate.training.schedules import SCHEDULES
from designs import CONF, NODES, content, design, options
from support import Compose

# group: its registry, the key that names the part, keys that become sizes, and what the program hands to the part
Group = tuple[Registry[Any], str, set[str], set[str]]
SIZES = {"d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size", "max_seq_len"}
GIVEN = {*SIZES, "linear_bias", "dropout"}
GROUPS: dict[str, Group] = {
    "norm": (NORM_POSITIONS, "norm_position", set(), {"n_layers", "layer"}),
    "block": (BLOCKS, "type", set(), {"position", "attn", "ffn", "make_norm", "make_end", "dropout"}),
    "norm_type": (NORMS, "type", set(), GIVEN),
    "ffn": (FFNS, "type", {"ratio", "multiple"}, GIVEN),
    "pos": (POSITIONS, "type", set(), {*GIVEN, "scaling", "causal"}),
    "scaling": (SCALINGS, "type", set(), GIVEN),
    "attn": (ATTENTIONS, "type", {"n_kv_heads"}, {*GIVEN, "kind", "qk", "softcap"}),
    "init": (INITS, "type", set(), GIVEN),
    "optim": (OPTIMIZERS, "type", set(), {"model"}),
    "schedule": (SCHEDULES, "type", {"warmup_tokens"}, {"warmup", "total"}),
    "data": (CORPORA, "type", set(), {"vocab_size"}),
    "tokenizer": (TOKENIZERS, "type", set(), set()),
    "logger": (LOGGERS, "type", set(), set()),
}
CHOICES = [(group, option) for group in GROUPS for option in options(group)]
MODEL_CHOICES = [(group, option) for group, option in CHOICES if group in NODES]
STABILITY_CHOICES = [("stability", option) for option in options("stability")]
NEEDED = {"text": ["data.path=x"], "bin": ["data.path=x"], "hf": ["data.name=x"]}
# A vocabulary given here keeps composition from opening the tokenizer to count it.
NEEDED |= {
    "file": ["data.tokenizer.path=x", "data.tokenizer.vocab_size=9"],
    "tiktoken": ["data.tokenizer.vocab_size=9"],
}


def keyword_only(item: Any) -> set[str]:
    return {p.name for p in inspect.signature(item).parameters.values() if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("group", GROUPS)
def test_registered_names_and_yaml_types_agree(group: str) -> None:
    registry, key, _, _ = GROUPS[group]
    assert {content(group, option)[key] for option in options(group)} == set(registry.names())


def test_stability_names_and_yaml_files_agree() -> None:
    assert options("stability") == STABILITY.names()


def test_every_folder_of_options_is_known_here() -> None:
    folders = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert folders == {*GROUPS, "stability", "size", "preset", "launcher"}


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_yaml_keys_are_the_options_of_the_signature(group: str, option: str) -> None:
    registry, key, sizes, given = GROUPS[group]
    keys = content(group, option)
    # A source may choose its own tokenizer.
    written = set(keys) - {key, "defaults", "tokenizer"} - sizes
    assert written == keyword_only(registry.get(keys[key])) - given


@pytest.mark.parametrize("trick", options("stability"))
def test_stability_yaml_keys_are_the_options_of_the_signature(trick: str) -> None:
    assert set(content("stability", trick)) == keyword_only(STABILITY.get(trick)) - GIVEN


@pytest.mark.parametrize(("group", "option"), [*MODEL_CHOICES, *STABILITY_CHOICES])
def test_yaml_values_are_the_defaults_of_the_signature(group: str, option: str) -> None:
    """A part built in Python without options is the part that the YAML option of its name describes."""
    keys = content(group, option)
    kind = option if group == "stability" else keys[GROUPS[group][1]]
    if option != kind in options(group):
        return  # layernorm_nobias is a layernorm with other options than layernorm's
    item = STABILITY.get(option) if group == "stability" else GROUPS[group][0].get(kind)
    for p in inspect.signature(item).parameters.values():
        if p.name in keys and p.default is not inspect.Parameter.empty:
            assert keys[p.name] == p.default or float(keys[p.name]) == p.default


@pytest.mark.parametrize(("group", "option"), [*MODEL_CHOICES, *STABILITY_CHOICES])
def test_each_model_option_builds(group: str, option: str) -> None:
    model = TransformerLM(design(stability=(option,)) if group == "stability" else design(**{group: option}))
    assert torch.isfinite(model(torch.arange(10).view(1, 10))).all()


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_each_option_composes(tiny: Compose) -> None:
    """Round after round, the next option of every group at once, until all have had their turn."""
    groups = {group: options(group) for group in GROUPS}
    for turn in range(max(len(found) for found in groups.values())):
        chosen = {group: found[turn % len(found)] for group, found in groups.items()}
        needed = NEEDED.get(chosen["data"], []) + NEEDED.get(chosen["tokenizer"], [])
        tricks = f"stability=[{','.join(options('stability')[: turn + 1])}]"
        cfg = tiny(*(f"{key}={value}" for key, value in chosen.items()), *needed, tricks, "model.vocab_size=60000")
        model = cfg.model
        composed = {"norm": model.block, "block": model.block, "norm_type": model.norm, "optim": cfg.optim}
        composed |= {"schedule": cfg.schedule, "logger": cfg.logger, "tokenizer": cfg.data.tokenizer}
        composed |= {"data": {"type": cfg.data.type}}
        for group, option in chosen.items():
            key = GROUPS[group][1]
            assert composed.get(group, getattr(model, group, None))[key] == content(group, option)[key]
        assert list(model.stability) == options("stability")[: turn + 1]


# ---------------------------------------------------------------------------------------------------------------------
# the registry itself


@pytest.fixture
def animals() -> Registry[Any]:
    registry: Registry[Any] = Registry("animal")

    @registry.register("cat")
    class Cat:
        def __init__(self, *, lives: int = 9, weight: float = 4.0, name: str | None = None, fur: bool = True) -> None:
            self.lives, self.weight, self.name, self.fur = lives, weight, name, fur

    @registry.register("dog")
    def dog(*, size: int, bark: str) -> str:
        return bark * size

    return registry


def test_build_passes_options_and_the_derived_sizes_that_are_asked_for(animals: Registry[Any]) -> None:
    cat = animals.build({"type": "cat", "lives": 7}, size=3)
    assert (cat.lives, cat.weight, cat.name) == (7, 4.0, None)
    assert animals.build({"type": "dog", "bark": "wau"}, size=2) == "wauwau"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "cta"}, ["animal", "cta", "cat, dog", "did you mean 'cat'"]),
        ({}, ["animal", "cat, dog"]),
        ({"type": "cat", "livs": 7}, ["livs", "'cat'", "fur, lives, name, weight", "did you mean 'lives'"]),
        ({"type": "dog", "bark": "wau", "size": 3}, ["size=3", "derived"]),
        ({"type": "dog"}, ["'dog'", "needs the option 'bark'"]),
        ({"type": "cat", "lives": "9"}, ["lives='9'", "int"]),
        ({"type": "cat", "lives": 9.5}, ["lives=9.5", "int"]),
        ({"type": "cat", "lives": True}, ["lives=True", "int"]),
        ({"type": "cat", "lives": None}, ["lives=None", "int"]),
        ({"type": "cat", "weight": "heavy"}, ["weight='heavy'", "float"]),
        ({"type": "cat", "name": 3}, ["name=3", "str"]),
        ({"type": "cat", "fur": 1}, ["fur=1", "bool"]),
    ],
)
def test_a_mistake_is_named_with_the_way_out(animals: Registry[Any], node: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        animals.build(node, size=2)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_whole_numbers_are_floats_and_null_is_an_option_where_allowed(animals: Registry[Any]) -> None:
    cat = animals.build({"type": "cat", "weight": 5, "name": None})
    assert (cat.weight, cat.name) == (5, None)


def test_a_name_is_registered_once(animals: Registry[Any]) -> None:
    with pytest.raises(AssertionError, match="twice"):
        animals.register("cat")(dict)


def test_nearest_says_nothing_when_nothing_is_close() -> None:
    assert nearest("layernrom", ["layernorm", "rmsnorm"]) == "; did you mean 'layernorm'?"
    assert nearest("xyz", ["layernorm"]) == ""


def test_no_model_part_accepts_a_derived_size_from_the_configuration() -> None:
    """A size that a file could set would make the module disagree with the rest of the model."""
    for node in ({"norm": {"d_model": 8}}, {"pos": {"d_head": 8}}, {"ffn": {"d_ff": 8}}, {"attn": {"n_heads": 8}}):
        with pytest.raises(ConfigError, match="derived"):
            TransformerLM(design(**node))
