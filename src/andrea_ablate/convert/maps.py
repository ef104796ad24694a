"""A family applied: its configuration and tensors to ours, and ours to its."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from andrea_ablate.config import ModelConfig, model_dims
from andrea_ablate.convert.families import FAMILIES, Family, Rule
from andrea_ablate.convert.keys import Fixed, Rope, Seen, flatten, unexpressed, unflatten
from andrea_ablate.convert.layout import repaired
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError, nearest

# Keys of config.json that change no logit in evaluation.
_SILENT = re.compile(
    r"architectures|auto_map|model_type|.*dtype|transformers_version|_name_or_path|.*_token_ids?|use_cache|.*init.*|"
    r".*drop.*|.*pdrop|summary_.*|id2label|label2id|num_labels|task_specific_params|pretraining_tp|slow_but_exact|"
    r"output_.*|return_dict|problem_type|chunk_size_feed_forward|is_encoder_decoder|is_decoder|torchscript|gradient_.*|"
    r"attn_implementation|vocab_multiple|reorder_and_upcast_attn|n_ctx|.*_norm_type|unk_.*|tokenizer_class|predict_special_tokens|"
    r"n_group|topk_.*|.*expert.*|moe_.*|norm_topk_prob|routed_.*|num_mtp_layers|num_nextn_predict_layers|router_.*|"
    r"attention_layers|_sliding_window_pattern|learned_pos_emb"  # what others say again, or nobody reads
)


def family_of(model_type: str) -> Family:
    """The family called so in config.json. Raises ConfigError with the nearest name."""
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"model_type='{model_type}' is not one of {known}{nearest(model_type, FAMILIES)}")
    return FAMILIES[model_type]


def config_from_hf(hf: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """Our configuration from a config.json, and the keys of it that nothing here reads.

    Raises: ConfigError naming every key that has no choice here.
    """
    family = family_of(hf.get("model_type", ""))
    given = Seen({**family.given, **hf}, "config.json has no '{}'")
    for alias, name in family.aliases.items():
        if alias in given and name not in hf:
            given[name] = given.get(alias)
    read = _all_of(hf["model_type"], (lambda part=part: part.read(given) for part in family.keys))
    unread = [key for key in hf if key not in given.read and not _SILENT.fullmatch(key)]
    return unflatten({"kinds": ["local"] * read["n_layers"], **read}), unread


def config_to_hf(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """The config.json of our design in a family. Raises ConfigError naming every choice the family cannot express."""
    family = family_of(model_type)
    ours = Seen(flatten(_in_form(config, family)), "needs model.{}, which this design does not have")
    written = _all_of(model_type, (lambda part=part: part.write(ours) for part in family.keys))
    left = unexpressed(ours)
    if left:
        raise ConfigError(f"{model_type} cannot express {', '.join(left)}")
    return {"architectures": [family.architecture], "model_type": model_type, "dtype": "float32", **written}


def _all_of(model_type: str, steps: Iterable[Any]) -> dict[str, Any]:
    """What the parts of a map give together; what they refuse is said together, too."""
    found: dict[str, Any] = {}
    refused: list[str] = []
    for step in steps:
        try:
            for key, value in step().items():
                if found.setdefault(key, value) != value:
                    refused.append(f"one {key} stands for both {found[key]} and {value}")
        except ConfigError as error:
            refused.append(str(error))
    if refused:
        raise ConfigError(f"{model_type}: {'; '.join(dict.fromkeys(refused))}")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# tensors


def weights_from_hf(config: ModelConfig, model_type: str, hf: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors, in fp32, from theirs. Raises ConfigError naming what is missing, of a wrong shape, or left over."""
    family, dims, shapes = family_of(model_type), model_dims(config), _shapes(config)
    if not any(name.startswith(family.prefix) for name in hf):  # saved without the language-model head
        hf = {name if name.startswith("lm_head.") else f"{family.prefix}{name}": t for name, t in hf.items()}
    ours: dict[str, Tensor] = {}
    left = {name for name in hf if not any(re.fullmatch(_numbered(pattern), name) for pattern in family.unread)}
    for rule in _rules(family, config, shapes):
        if rule.hf in hf:
            rows = [shapes[name][0] for name in rule.ours]
            ours |= dict(zip(rule.ours, rule.layout.split(hf[rule.hf].float(), rows, dims), strict=True))
            left.discard(rule.hf)
    if config.tie_embeddings:
        left.discard("lm_head.weight")
    wrong = [f"{name} is {tuple(t.shape)}, not {shapes[name]}" for name, t in ours.items() if t.shape != shapes[name]]
    for what, names in (("nothing for", shapes.keys() - ours.keys()), ("no place for", left), ("a shape:", wrong)):
        if names:
            raise ConfigError(f"{model_type}: the weights have {what} {_some(sorted(names))}")
    return {name: t.contiguous() for name, t in ours.items()}


def weights_to_hf(config: ModelConfig, model_type: str, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors from ours. Raises ConfigError where `config_to_hf` does, or for a tensor without a place."""
    family, dims = family_of(model_type), model_dims(config)
    target = _in_form(config, family)
    shapes = _shapes(target)
    if target.pos != config.pos:
        ours = _repaired(config, ours, to_half=target.pos["pairing"] == "half")
    ours = {
        **{name: torch.zeros(shapes[name]) for name in shapes.keys() - ours.keys() if name.endswith("bias")},
        **ours,
    }
    ours = {name: t[: dims.vocab_size] if name in _PADDED else t for name, t in ours.items()}
    written: dict[str, Tensor] = {}
    done: set[str] = set()
    for rule in _rules(family, target, shapes):
        if not done & set(rule.ours):
            written[rule.hf] = rule.layout.join([ours[name].float() for name in rule.ours], dims).contiguous()
            done |= set(rule.ours)
    if shapes.keys() - done:
        raise ConfigError(f"{model_type} has no place for {_some(sorted(shapes.keys() - done))}")
    return written


_PADDED = ("embedding", "head", "head_bias")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of our parameters, without building them."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in TransformerLM(config).named_parameters()}


def _rules(family: Family, config: ModelConfig, shapes: Mapping[str, Any]) -> Iterator[Rule]:
    """The family's rules for every layer, those whose tensors this design has."""
    for rule in family.rules:
        for i in range(config.n_layers if "{i}" in rule.hf else 1):
            numbered = Rule(rule.hf.format(i=i), tuple(name.format(i=i) for name in rule.ours), rule.layout)
            replaced = rule.unless is not None and rule.unless.format(i=i) in shapes
            if not replaced and all(name in shapes for name in numbered.ours):
                yield numbered


def _numbered(pattern: str) -> str:
    return re.escape(pattern).replace(r"\{i\}", r"\d+")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _in_form(config: ModelConfig, family: Family) -> ModelConfig:
    """The same function in the family's form: its pairing (see `repaired`), and zeros for biases it always has."""
    flat = flatten(config)
    for part in family.keys:
        if isinstance(part, Rope) and config.pos["type"] == "rope" and config.attn["type"] != "mla":
            flat["pos.pairing"] = part.pairing
        if isinstance(part, Fixed):
            for key in ("linear_bias", "head_bias", "norm.bias", "attn.bias"):
                if part.choices.get(key) and flat.get(key) in (False, "none"):
                    flat[key] = part.choices[key]
    return unflatten(flat)


def _repaired(config: ModelConfig, ours: Mapping[str, Tensor], *, to_half: bool) -> dict[str, Tensor]:
    d_head = model_dims(config).d_head
    rotary = int(d_head * config.pos["rotary_fraction"])
    turned = re.compile(r"blocks\.\d+\.attn\.(w_[qk]|[qk]_bias|qk\.parts\.\d+\.[qk]_(gain|bias))")
    return {
        name: repaired(t, rotary, d_head, to_half=to_half) if turned.fullmatch(name) else t for name, t in ours.items()
    }
