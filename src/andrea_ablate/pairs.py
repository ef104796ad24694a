"""Choices of different axes that have no agreed meaning together: refused with the reason and the way out.

What concerns one axis alone, or a backend that cannot compute a choice, is refused by the part itself.
"""

from __future__ import annotations

from andrea_ablate.blocks import NORM_POSITIONS
from andrea_ablate.config import ModelConfig
from andrea_ablate.registry import ConfigError
from andrea_ablate.stability import STABILITY


def check_pairs(model: ModelConfig) -> None:
    """Raises ConfigError for the first pair that cannot be."""
    pos, scaling, attn = model.pos["type"], model.scaling["type"], model.attn["type"]
    if scaling != "none" and pos != "rope":
        raise ConfigError(
            f"scaling={scaling} changes the frequencies of rope, and pos={pos} has none; "
            "choose pos=rope or scaling=none"
        )
    if pos in ("none", "alibi") and not model.attn.get("causal", True):
        why = "without it nothing tells their order" if pos == "none" else "its distances are those to earlier tokens"
        raise ConfigError(f"pos={pos} needs model.attn.causal=true: {why}; choose pos=rope, learned, sine or t5")
    if pos in ("alibi", "t5") and attn == "mla":
        raise ConfigError(
            f"pos={pos} has no agreed meaning with attn=mla, whose heads keep a part for rope; "
            "choose pos=rope, learned, sine or none"
        )
    if attn == "mla" and model.attn.get("n_kv_heads") is not None:
        raise ConfigError("attn=mla has a latent in place of key/value heads; leave model.attn.n_kv_heads away")
    _check_branch(model)
    _check_layers(model)


def _check_branch(model: ModelConfig) -> None:
    """Refuse to scale a branch that its norm position normalises again."""
    where = model.block["norm_position"]
    scaling = [name for name in model.stability if STABILITY.get(name).seam == "branch"]
    if scaling and "branch" in NORM_POSITIONS.get(where).norms:
        raise ConfigError(
            f"stability={scaling[0]} scales a branch that norm={where} normalises again, which has no agreed "
            "meaning; use norm=pre or norm=post"
        )


def _check_layers(model: ModelConfig) -> None:
    """Refuse a setting for local or global layers where the pattern has none of them."""
    settings = {f"pos.{key}": model.pos.get(key) for key in ("rotated", "scaled", "local_theta")}
    for key, value in {"attn.window": model.attn.get("window"), **settings}.items():
        kind = value if value in ("all", "local", "global") else "local"
        if value not in (None, "all") and kind not in model.layer_pattern:
            raise ConfigError(
                f"model.{key}={value} is for {kind} layers, which model.layer_pattern={model.layer_pattern} has not; "
                f"add {kind} to it"
            )
