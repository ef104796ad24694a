"""Small model configurations from the YAML options, without the time that composing them through Hydra takes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from andrea_ablate.config import ModelConfig, from_mapping

CONF = Path(__file__).parents[1] / "conf"
# The groups that choose a part of the model, and the node that each writes to.
NODES = {
    "norm": "block",
    "block": "block",
    "norm_type": "norm",
    "ffn": "ffn",
    "pos": "pos",
    "scaling": "scaling",
    "attn": "attn",
    "stability": "stability",
    "init": "init",
}
DEFAULTS = {
    "norm": "pre",
    "block": "serial",
    "norm_type": "layernorm",
    "ffn": "gelu4x",
    "pos": "rope",
    "scaling": "none",
    "attn": "mha",
    "init": "gpt2",
}
SIZES: dict[str, Any] = {
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "d_head": None,
    "vocab_size": 23,
    "vocab_multiple": 1,
    "max_seq_len": 12,
    "tie_embeddings": False,
    "linear_bias": False,
    "head_bias": False,
    "dropout": 0.0,
    "layer_pattern": ["local"],
}


def options(group: str) -> list[str]:
    """The names that can be chosen in a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@lru_cache
def _content(group: str, option: str) -> dict[str, Any]:
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    return dict(content)


def content(group: str, option: str) -> dict[str, Any]:
    """The keys of one option's file."""
    return dict(_content(group, option))


def design(stability: tuple[str, ...] | dict[str, dict[str, Any]] = (), **changes: Any) -> ModelConfig:
    """A 2-layer model of width 16: ``design(norm="post", d_model=24, attn={"window": 3})``.

    Args:
        stability: names of tricks, or names with their options.
        changes: a group's option, a field, keys to change in a node, or both: ``pos=("t5", {"buckets": 8})``.
    """
    plain: dict[str, Any] = {**SIZES, "stability": {}}
    for group, option in DEFAULTS.items():
        if isinstance(changes.get(group), tuple):
            option, changes[group] = changes[group]
        chosen = changes.pop(group) if isinstance(changes.get(group), str) else option
        plain[NODES[group]] = {**plain.get(NODES[group], {}), **content(group, chosen)}
    for trick in stability:
        given = stability[trick] if isinstance(stability, dict) else {}
        plain["stability"][trick] = {**content("stability", trick), **given}
    for key, value in changes.items():
        assert key in plain, f"no such field: {key}"
        plain[key] = {**plain[key], **value} if isinstance(value, dict) else value
    return from_mapping(ModelConfig, plain)
