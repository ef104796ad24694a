"""What each Hugging Face family is made of here: its configuration keys, and where its tensors go.

A family is its ``model_type``. Names of layers hold ``{i}``; a rule whose tensors a design does not have is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from andrea_ablate.convert.keys import (
    Cap,
    Factor,
    Fixed,
    Flat,
    Key,
    LayerTypes,
    NoRopeLayers,
    Only,
    Part,
    QKLayerNorm,
    Rope,
    Scale,
    Seen,
)
from andrea_ablate.convert.layout import Below, Grouped, PerHead, Plain, Shifted, Stacked, Transposed
from andrea_ablate.registry import ConfigError


@dataclass(frozen=True)
class Rule:
    """One tensor of theirs and the tensors of ours that it holds."""

    hf: str
    ours: tuple[str, ...]
    layout: Plain
    unless: str | None = None  # left out where a design has this tensor


@dataclass(frozen=True)
class Family:
    """A map both ways.

    Args:
        architecture: name of the class with the language-model head. prefix: what stands before the names of the stack.
        keys: of config.json. rules: of the tensors, in a full design. unread: buffers that a folder may also hold.
        aliases: older names of keys. given: values of keys that a configuration may lack.
    """

    architecture: str
    prefix: str
    keys: tuple[Part, ...]
    rules: tuple[Rule, ...]
    unread: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


def one(hf: str, ours: str, layout: Plain | None = None) -> tuple[Rule, ...]:
    return (Rule(hf, (ours,), layout or Plain()),)


def linear(hf: str, part: str, *names: str, layout: Plain | None = None) -> tuple[Rule, ...]:
    """A linear map, weight and bias, for one or several of ours: ``linear("q_proj", "attn", "q")``."""
    layout = layout or (Plain() if len(names) == 1 else Stacked())
    weights, biases = (tuple(f"{part}.{form.format(name)}" for name in names) for form in ("w_{}", "{}_bias"))
    return Rule(f"{hf}.weight", weights, layout), Rule(f"{hf}.bias", biases, layout)


def norm(hf: str, ours: str, gain: str = "gain") -> tuple[Rule, ...]:
    return *one(f"{hf}.weight", f"{ours}.{gain}"), *one(f"{hf}.bias", f"{ours}.bias")


def layers(hf: str, *rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules of one layer, under its name there and here."""
    return tuple(
        Rule(
            f"{hf}.{rule.hf}",
            tuple(f"blocks.{{i}}.{name}" for name in rule.ours),
            rule.layout,
            rule.unless and f"blocks.{{i}}.{rule.unless}",
        )
        for group in rules
        for rule in group
    )


def sizes(d_model: str, n_layers: str, n_heads: str, max_seq_len: str) -> tuple[Part, ...]:
    pairs = {d_model: "d_model", n_layers: "n_layers", n_heads: "n_heads", max_seq_len: "max_seq_len"}
    return Key("vocab_size", "vocab_size"), *(Key(hf, ours) for hf, ours in pairs.items())


def tied(default: bool) -> Key:
    return Key("tie_word_embeddings", "tie_embeddings", default=default)


@dataclass(frozen=True)
class GroupedHeads(Part):
    """Key/value heads and the width of a head; null for as many as query heads, and for ``d_model / n_heads``."""

    def read(self, hf: Seen) -> Flat:
        heads = {"attn.n_kv_heads": hf.get("num_key_value_heads"), "d_head": hf.get("head_dim")}
        return {"attn.type": "multihead", **heads}

    def write(self, ours: Seen) -> dict[str, Any]:
        Fixed({"attn.type": "multihead"}).write(ours)
        return {"num_key_value_heads": ours["attn.n_kv_heads"], "head_dim": ours["d_head"]}


GROUPED = (GroupedHeads(),)
SWITCHED = LayerTypes(switch=("use_sliding_window", "max_window_layers"))


@dataclass(frozen=True)
class MultiHead(Part):
    """As many key/value heads as query heads, together as wide as the stream."""

    def read(self, hf: Seen) -> Flat:
        return {"attn.type": "multihead", "attn.n_kv_heads": None, "d_head": None}

    def write(self, ours: Seen) -> dict[str, Any]:
        Fixed({"attn.type": "multihead", "attn.n_kv_heads": ours["n_heads"]}).write(ours)
        Fixed({"d_head": ours["d_model"] / ours["n_heads"]}).write(ours)
        return {}


@dataclass(frozen=True)
class FourTimes(Part):
    """The inner width of the feed-forward; null, or no key, for four times the outer one."""

    width: str
    hf: str | None = None

    def read(self, hf: Seen) -> Flat:
        given = hf.get(self.hf) if self.hf else None
        return {"d_ff": 4 * hf[self.width] if given is None else given}

    def write(self, ours: Seen) -> dict[str, Any]:
        if self.hf:
            return {self.hf: ours["d_ff"]}
        Fixed({"d_ff": 4 * ours["d_model"]}).write(ours)
        return {}


@dataclass(frozen=True)
class FalconHeads(Part):
    """Key/value heads and norms, told by three switches. Without a new decoder: one key/value head, or all."""

    def read(self, hf: Seen) -> Flat:
        new, n_heads = hf.get("new_decoder_architecture", False), hf["num_attention_heads"]
        norms = hf.get("num_ln_in_parallel_attn") or (2 if new else 1)
        some, n_kv_heads = hf.get("num_kv_heads") or n_heads, 1 if hf.get("multi_query", True) else n_heads
        return {
            "attn.type": "multihead",
            "attn.n_kv_heads": some if new else n_kv_heads,
            "d_head": None,
            "block.type": "parallel2" if new and norms == 2 else "parallel",
        }

    def write(self, ours: Seen) -> dict[str, Any]:
        n_kv_heads, n_heads, block = ours["attn.n_kv_heads"], ours["n_heads"], ours["block.type"]
        Fixed({"attn.type": "multihead", "d_head": ours["d_model"] / n_heads}).write(ours)
        Fixed({"block.type": block if block.startswith("parallel") else "parallel"}).write(ours)
        new = block == "parallel2" or n_kv_heads not in (1, n_heads)
        return {
            "new_decoder_architecture": new,
            "multi_query": n_kv_heads == 1,
            "num_kv_heads": n_kv_heads,
            "num_ln_in_parallel_attn": (2 if block == "parallel2" else 1) if new else None,
        }


@dataclass(frozen=True)
class MptAttention(Part):
    """MPT keeps what concerns attention in a section of its own."""

    def read(self, hf: Seen) -> Flat:
        given = Seen(hf["attn_config"], "config.json has no 'attn_config.{}'")
        Only({"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False, "prefix_lm": False}).read(given)
        return {"pos.type": "alibi", "scaling.type": "none", "attn.scale": given.get("softmax_scale")}

    def write(self, ours: Seen) -> dict[str, Any]:
        Fixed({"pos.type": "alibi", "scaling.type": "none"}).write(ours)
        return {"attn_config": {"alibi": True, "alibi_bias_max": 8, "softmax_scale": ours["attn.scale"]}}


@dataclass(frozen=True)
class NeoLayers(Part):
    """GPT-Neo's runs of ``global`` and ``local``."""

    def read(self, hf: Seen) -> Flat:
        kinds = [kind for names, times in hf["attention_types"] for kind in names * times]
        return {"kinds": kinds, "attn.window": hf["window_size"]}

    def write(self, ours: Seen) -> dict[str, Any]:
        kinds, window = ours["kinds"], ours["attn.window"]
        kinds = kinds if window else ["global"] * len(kinds)
        return {"attention_types": [[kinds, 1]], "window_size": window or ours["max_seq_len"]}


@dataclass(frozen=True)
class Latents(Part):
    """DeepSeek's attention, in a stack whose layers are all dense: mixtures of experts have no choice here."""

    widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def read(self, hf: Seen) -> Flat:
        dense, n_layers = hf.get("first_k_dense_replace", 0), hf["num_hidden_layers"]
        if dense < n_layers:
            raise ConfigError(
                f"first_k_dense_replace={dense}: the {n_layers - dense} layers after them are mixtures of experts, "
                "which have no choice here"
            )
        hf.read |= {"num_key_value_heads", "head_dim", "qk_head_dim"}  # what these are follows from the widths
        given = {f"attn.{key}": hf[key] for key in self.widths}
        return {"attn.type": "mla", "attn.scale": None, "d_head": hf["qk_nope_head_dim"], **given}

    def write(self, ours: Seen) -> dict[str, Any]:
        Fixed({"attn.type": "mla", "attn.scale": None}).write(ours)
        d_head = ours["d_head"]
        usual = {"kv_lora_rank": 4 * d_head, "qk_nope_head_dim": d_head, "qk_rope_head_dim": d_head // 2}
        usual |= {"q_lora_rank": None, "v_head_dim": d_head}
        given = {key: ours[f"attn.{key}"] or usual[key] for key in self.widths}
        return {**given, "first_k_dense_replace": ours["n_layers"], "num_key_value_heads": ours["n_heads"]}


@dataclass(frozen=True)
class RotaryDim(Part):
    """GPT-J's rope: neighbours, and the number of turned dimensions instead of their part of a head."""

    def read(self, hf: Seen) -> Flat:
        d_head, rotary = hf["n_embd"] // hf["n_head"], hf["rotary_dim"]
        fraction = rotary / d_head
        if int(d_head * fraction) < rotary:  # 44 * (30 / 44) is a little less than 30
            fraction = math.nextafter(fraction, 1)
        return {**Rope("interleaved").read(hf), "pos.rotary_fraction": fraction}

    def write(self, ours: Seen) -> dict[str, Any]:
        Fixed({"pos.theta": 10000.0, "scaling.type": "none"}).write(ours)
        Rope("interleaved").write(ours)
        return {"rotary_dim": round(ours["pos.rotary_fraction"] * ours["d_head"])}


# ---------------------------------------------------------------------------------------------------------------------
# GPT and its kin: layer norms, dense feed-forward

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}
ACTIVATIONS = {**GELUS, "relu": "relu", "silu": "silu", "swish": "silu", "relu2": "relu2"}
LAYERNORM = {"norm.type": "layernorm", "norm.bias": True}
DENSE = {"ffn.type": "dense"}
LEARNED = {"pos.type": "learned", "scaling.type": "none"}
BIASED = {"linear_bias": True, "attn.bias": "all"}
UNBIASED = {"linear_bias": False, "attn.bias": "none"}


def block(form: str, position: str = "pre") -> Flat:
    return {"block.type": form, "block.norm_position": position}


GPT_SIZES = sizes("n_embd", "n_layer", "n_head", "n_positions")
SIZES = sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
GPT_BLOCK = (
    linear("attn.c_attn", "attn", "q", "k", "v", layout=Transposed(Stacked())),
    linear("attn.c_proj", "attn", "o", layout=Transposed(Plain())),
    linear("mlp.c_fc", "ffn", "up", layout=Transposed(Plain())),
    linear("mlp.c_proj", "ffn", "down", layout=Transposed(Plain())),
)
HEAD = (*one("lm_head.weight", "head"), *one("lm_head.bias", "head_bias"))

GPT2 = Family(
    "GPT2LMHeadModel",
    "transformer.",
    (
        *GPT_SIZES,
        MultiHead(),
        FourTimes("n_embd", "n_inner"),
        Key("activation_function", "ffn.activation", ACTIVATIONS, "gelu_new"),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        tied(True),
        Fixed({**block("serial"), **LAYERNORM, **LEARNED, **BIASED, **DENSE}),
        Only({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}),
    ),
    (
        *one("transformer.wte.weight", "embedding"),
        *one("transformer.wpe.weight", "pos.vectors"),
        *layers("transformer.h.{i}", *GPT_BLOCK, norm("ln_1", "attn_norm.before"), norm("ln_2", "ffn_norm.before")),
        *norm("transformer.ln_f", "final_norm"),
        *HEAD,
    ),
    unread=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)

OPENAI_GPT = Family(
    "OpenAIGPTLMHeadModel",
    "transformer.",
    (
        *GPT_SIZES,
        MultiHead(),
        FourTimes("n_embd"),
        Key("afn", "ffn.activation", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        tied(True),
        Fixed({**block("serial", "post"), **LAYERNORM, **LEARNED, **BIASED, **DENSE}),
    ),
    (
        *one("transformer.tokens_embed.weight", "embedding"),
        *one("transformer.positions_embed.weight", "pos.vectors"),
        *layers("transformer.h.{i}", *GPT_BLOCK, norm("ln_1", "attn_norm.after"), norm("ln_2", "ffn_norm.after")),
        *HEAD,
    ),
    unread=("transformer.h.{i}.attn.bias", "transformer.position_ids"),
)

OPT = Family(
    "OPTForCausalLM",
    "model.",
    (
        *SIZES,
        MultiHead(),
        Key("ffn_dim", "d_ff"),
        Key("activation_function", "ffn.activation", ACTIVATIONS, "relu"),
        Key("do_layer_norm_before", "block.norm_position", {True: "pre", False: "post"}, True),
        Key("word_embed_proj_dim", "d_model"),
        tied(True),
        Fixed({"block.type": "serial", **LAYERNORM, "norm.eps": 1e-5, **LEARNED, **BIASED, **DENSE}),
        Only({"enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}),
    ),
    (
        *one("model.decoder.embed_tokens.weight", "embedding"),
        *one("model.decoder.embed_positions.weight", "pos.vectors", Below(2)),
        *layers(
            "model.decoder.layers.{i}",
            *(linear(f"self_attn.{name}_proj", "attn", name) for name in "qkv"),
            linear("self_attn.out_proj", "attn", "o"),
            linear("fc1", "ffn", "up"),
            linear("fc2", "ffn", "down"),
            *(norm("self_attn_layer_norm", f"attn_norm.{where}") for where in ("before", "after")),
            *(norm("final_layer_norm", f"ffn_norm.{where}") for where in ("before", "after")),
        ),
        *norm("model.decoder.final_layer_norm", "final_norm"),
        *HEAD,
    ),
)

GPT_NEO = Family(
    "GPTNeoForCausalLM",
    "transformer.",
    (
        *sizes("hidden_size", "num_layers", "num_heads", "max_position_embeddings"),
        MultiHead(),
        NeoLayers(),
        FourTimes("hidden_size", "intermediate_size"),
        Key("activation_function", "ffn.activation", ACTIVATIONS, "gelu_new"),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        tied(True),
        Fixed({**block("serial"), **LAYERNORM, **LEARNED, **DENSE}),
        Fixed({"linear_bias": True, "attn.bias": "out", "attn.scale": 1.0}),
    ),
    (
        *one("transformer.wte.weight", "embedding"),
        *one("transformer.wpe.weight", "pos.vectors"),
        *layers(
            "transformer.h.{i}",
            *(linear(f"attn.attention.{name}_proj", "attn", name) for name in "qkv"),
            linear("attn.attention.out_proj", "attn", "o"),
            linear("mlp.c_fc", "ffn", "up"),
            linear("mlp.c_proj", "ffn", "down"),
            norm("ln_1", "attn_norm.before"),
            norm("ln_2", "ffn_norm.before"),
        ),
        *norm("transformer.ln_f", "final_norm"),
        *HEAD,
    ),
    unread=("transformer.h.{i}.attn.attention.bias", "transformer.h.{i}.attn.attention.masked_bias"),
)

GPT_J = Family(
    "GPTJForCausalLM",
    "transformer.",
    (
        *GPT_SIZES,
        MultiHead(),
        RotaryDim(),
        FourTimes("n_embd", "n_inner"),
        Key("activation_function", "ffn.activation", ACTIVATIONS, "gelu_new"),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        tied(False),
        Fixed({**block("parallel"), **LAYERNORM, **DENSE}),
        Fixed({"linear_bias": True, "attn.bias": "none", "head_bias": True}),
    ),
    (
        *one("transformer.wte.weight", "embedding"),
        *layers(
            "transformer.h.{i}",
            *(linear(f"attn.{name}_proj", "attn", name) for name in "qkv"),
            linear("attn.out_proj", "attn", "o"),
            linear("mlp.fc_in", "ffn", "up"),
            linear("mlp.fc_out", "ffn", "down"),
            norm("ln_1", "norm.before"),
        ),
        *norm("transformer.ln_f", "final_norm"),
        *HEAD,
    ),
    unread=(
        "transformer.h.{i}.attn.bias",
        "transformer.h.{i}.attn.masked_bias",
        "transformer.h.{i}.attn.embed_positions",
    ),
)

GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    (
        *SIZES,
        MultiHead(),
        Rope(fraction=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
        Key("intermediate_size", "d_ff"),
        Key("hidden_act", "ffn.activation", ACTIVATIONS, "gelu"),
        Key("layer_norm_eps", "norm.eps", default=1e-5),
        Key("use_parallel_residual", "block.type", {True: "parallel2", False: "serial"}, True),
        Key("attention_bias", "attn.bias", {True: "all", False: "none"}, True),
        tied(False),
        Fixed({"block.norm_position": "pre", **LAYERNORM, **DENSE, "linear_bias": True}),
    ),
    (
        *one("gpt_neox.embed_in.weight", "embedding"),
        *layers(
            "gpt_neox.layers.{i}",
            linear("attention.query_key_value", "attn", "q", "k", "v", layout=Grouped()),
            linear("attention.dense", "attn", "o"),
            linear("mlp.dense_h_to_4h", "ffn", "up"),
            linear("mlp.dense_4h_to_h", "ffn", "down"),
            norm("input_layernorm", "attn_norm.before"),
            norm("post_attention_layernorm", "ffn_norm.before"),
        ),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
        *HEAD,
        *one("embed_out.weight", "head"),  # its older name
    ),
    unread=tuple(f"gpt_neox.layers.{{i}}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
)

PHI = Family(
    "PhiForCausalLM",
    "model.",
    (
        *SIZES,
        *GROUPED,
        Rope(fraction=0.5),
        Key("intermediate_size", "d_ff"),
        Key("hidden_act", "ffn.activation", ACTIVATIONS, "gelu_new"),
        Key("layer_norm_eps", "norm.eps", default=1e-5),
        tied(False),
        Fixed({**block("parallel"), **LAYERNORM, **DENSE, **BIASED, "head_bias": True}),
        QKLayerNorm("qk_layernorm", "layer_norm_eps", bias=True, gains="shared"),
    ),
    (
        *one("model.embed_tokens.weight", "embedding"),
        *layers(
            "model.layers.{i}",
            *(linear(f"self_attn.{name}_proj", "attn", name) for name in "qkv"),
            linear("self_attn.dense", "attn", "o"),
            linear("mlp.fc1", "ffn", "up"),
            linear("mlp.fc2", "ffn", "down"),
            norm("input_layernorm", "norm.before"),
            *(one(f"self_attn.{name}_layernorm.weight", f"attn.qk.parts.0.{name}_gain") for name in "qk"),
            *(one(f"self_attn.{name}_layernorm.bias", f"attn.qk.parts.0.{name}_bias") for name in "qk"),
        ),
        *norm("model.final_layernorm", "final_norm"),
        *HEAD,
    ),
)

FALCON_BLOCK = (
    linear("self_attention.query_key_value", "attn", "q", "k", "v", layout=Grouped()),
    linear("self_attention.dense", "attn", "o"),
    linear("mlp.dense_h_to_4h", "ffn", "up"),
    linear("mlp.dense_4h_to_h", "ffn", "down"),
)
FALCON = Family(
    "FalconForCausalLM",
    "transformer.",
    (
        *SIZES,
        FalconHeads(),
        Rope(),
        FourTimes("hidden_size", "ffn_hidden_size"),
        Key("activation", "ffn.activation", ACTIVATIONS, "gelu"),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        Key("bias", "attn.bias", {True: "all", False: "none"}, False),
        Key("bias", "linear_bias", default=False),
        tied(True),
        Fixed({"block.norm_position": "pre", **LAYERNORM, **DENSE}),
        Only({"alibi": False, "parallel_attn": True}),  # its ALiBi is divided by sqrt(d_head) and rounded to bf16
    ),
    (
        *one("transformer.word_embeddings.weight", "embedding"),
        *layers(
            "transformer.h.{i}",
            *FALCON_BLOCK,
            norm("input_layernorm", "norm.before"),
            norm("ln_attn", "attn_norm.before"),
            norm("ln_mlp", "ffn_norm.before"),
        ),
        *norm("transformer.ln_f", "final_norm"),
        *HEAD,
    ),
    aliases={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
    },
    given={"max_position_embeddings": 2048},
)

BLOOM = Family(
    "BloomForCausalLM",
    "transformer.",
    (
        *sizes("hidden_size", "n_layer", "n_head", "seq_length"),
        MultiHead(),
        FourTimes("hidden_size"),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        Key("layer_norm_epsilon", "stability.embedding_norm.eps", default=1e-5),
        tied(True),
        Fixed({**block("serial"), **LAYERNORM, **DENSE, "ffn.activation": "gelu_tanh", **BIASED}),
        Fixed({"pos.type": "alibi", "scaling.type": "none"}),
        Only({"apply_residual_connection_post_layernorm": False}),
    ),
    (
        *one("transformer.word_embeddings.weight", "embedding"),
        *norm("transformer.word_embeddings_layernorm", "on_stream.parts.0"),
        *layers(
            "transformer.h.{i}",
            *FALCON_BLOCK,
            norm("input_layernorm", "attn_norm.before"),
            norm("post_attention_layernorm", "ffn_norm.before"),
        ),
        *norm("transformer.ln_f", "final_norm"),
        *HEAD,
    ),
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    given={"seq_length": 2048},
)

MPT = Family(
    "MptForCausalLM",
    "transformer.",
    (
        *sizes("d_model", "n_layers", "n_heads", "max_seq_len"),
        MultiHead(),
        MptAttention(),
        FourTimes("d_model"),
        Key("layer_norm_epsilon", "norm.eps", default=1e-5),
        tied(True),
        Fixed({**block("serial"), "norm.type": "layernorm", "norm.bias": False, **DENSE, **UNBIASED}),
        Fixed({"ffn.activation": "gelu"}),
        Only({"no_bias": True, "expansion_ratio": 4, "logit_scale": None, "embedding_fraction": 1.0}),
        Only({"norm_type": "low_precision_layernorm"}),
    ),
    (
        *one("transformer.wte.weight", "embedding"),
        *layers(
            "transformer.blocks.{i}",
            linear("attn.Wqkv", "attn", "q", "k", "v"),
            linear("attn.out_proj", "attn", "o"),
            linear("ffn.up_proj", "ffn", "up"),
            linear("ffn.down_proj", "ffn", "down"),
            norm("norm_1", "attn_norm.before"),
            norm("norm_2", "ffn_norm.before"),
        ),
        *norm("transformer.norm_f", "final_norm"),
        *HEAD,
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# Llama and its kin: RMS norms, gated feed-forward, rope, grouped key/value heads

CASTS = ("t5", "llama")  # of which fp32 weights know nothing
RMSNORM = {"norm.type": ("rmsnorm_llama", "rmsnorm")}
RMS_EPS = Key("rms_norm_eps", "norm.eps", default=1e-6)
ATTENTION_BIAS = Key("attention_bias", "attn.bias", {True: "all", False: "none"}, False)
MLP_BIAS = Key("mlp_bias", "linear_bias", default=False)
WIDTH = Key("intermediate_size", "d_ff")


def silu(key: str = "hidden_act") -> tuple[Part, ...]:
    return Fixed({"ffn.type": "gated"}), Key(key, "ffn.activation", ACTIVATIONS, "silu")


def llama_rules(*norms: tuple[Rule, ...], gain: str = "gain") -> tuple[Rule, ...]:
    """The names of Llama's tensors, with these norms in a layer."""
    return (
        *one("model.embed_tokens.weight", "embedding"),
        *layers(
            "model.layers.{i}",
            *(linear(f"self_attn.{name}_proj", "attn", name) for name in "qkvo"),
            *(linear(f"mlp.{name}_proj", "ffn", name) for name in ("gate", "up", "down")),
            *norms,
        ),
        *norm("model.norm", "final_norm", gain),
        *HEAD,
    )


def qk_norms(layout: Plain | None = None) -> tuple[tuple[Rule, ...], ...]:
    return tuple(one(f"self_attn.{name}_norm.weight", f"attn.qk.parts.0.{name}_gain", layout) for name in "qk")


PRE = (norm("input_layernorm", "attn_norm.before"), norm("post_attention_layernorm", "ffn_norm.before"))
OUTPUT = (norm("post_attention_layernorm", "attn_norm.branch"), norm("post_feedforward_layernorm", "ffn_norm.branch"))
LLAMA_KEYS = (*SIZES, *GROUPED, WIDTH, *silu(), RMS_EPS, Fixed({**block("serial"), **RMSNORM}))
INV_FREQ = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)

LLAMA = Family(
    "LlamaForCausalLM",
    "model.",
    (*LLAMA_KEYS, Rope(), ATTENTION_BIAS, MLP_BIAS, tied(False)),
    llama_rules(*PRE),
    unread=INV_FREQ,
)
MISTRAL = Family(
    "MistralForCausalLM",
    "model.",
    (*LLAMA_KEYS, Rope(), LayerTypes(listed=False), Fixed(UNBIASED), tied(False)),
    llama_rules(*PRE),
    unread=INV_FREQ,
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "model.",
    (*LLAMA_KEYS, Rope(), SWITCHED, Fixed({"linear_bias": False, "attn.bias": "qkv"}), tied(False)),
    llama_rules(*PRE),
    unread=INV_FREQ,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "model.",
    (
        *(*LLAMA_KEYS, Rope(), SWITCHED, ATTENTION_BIAS, tied(False)),
        Key("rms_norm_eps", "stability.qk_norm.eps", default=1e-6),
        Fixed({"linear_bias": False, "stability.qk_norm.cast": CASTS[::-1]}),
    ),
    llama_rules(*PRE, *qk_norms()),
)
SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "model.",
    (
        *(*LLAMA_KEYS, Rope(theta=2000000.0), NoRopeLayers(), ATTENTION_BIAS, MLP_BIAS, tied(True)),
        Fixed({"attn.window": None}),
    ),
    llama_rules(*PRE),
)
GRANITE = Family(
    "GraniteForCausalLM",
    "model.",
    (
        *(*LLAMA_KEYS, Rope(), ATTENTION_BIAS, MLP_BIAS, tied(False)),
        Factor("embedding_multiplier", "embedding_scale"),
        Factor("residual_multiplier", "residual_multiplier"),
        Factor("logits_scaling", "logit_multiplier", inverse=True),
        Scale("attention_multiplier"),
    ),
    llama_rules(*PRE),
)
OLMO = Family(
    "OlmoForCausalLM",
    "model.",
    (
        *(*SIZES, *GROUPED, WIDTH, *silu(), Rope(), ATTENTION_BIAS, tied(False)),
        Fixed({**block("serial"), "norm.type": "layernorm_plain", "norm.eps": 1e-5, "linear_bias": False}),
        Only({"clip_qkv": None}),
    ),
    llama_rules(),
)
OLMO2_KEYS = (
    *(*SIZES, *GROUPED, WIDTH, *silu(), ATTENTION_BIAS, tied(False)),
    Key("rms_norm_eps", "norm.eps", default=1e-5),
    Key("rms_norm_eps", "stability.qk_norm_full.eps", default=1e-5),
    Fixed({**block("serial", "output"), "norm.type": ("rmsnorm", "rmsnorm_llama"), "linear_bias": False}),
    Fixed({"stability.qk_norm_full.cast": CASTS}),
)
OLMO2 = Family("Olmo2ForCausalLM", "model.", (*OLMO2_KEYS, Rope(theta=500000.0)), llama_rules(*OUTPUT, *qk_norms()))
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "model.",
    (*OLMO2_KEYS, Rope(theta=500000.0, nested=True), LayerTypes(("local", "local", "local", "global"))),
    llama_rules(*OUTPUT, *qk_norms()),
)

GEMMA_KEYS = (
    *(*SIZES, *GROUPED, WIDTH, RMS_EPS, ATTENTION_BIAS, tied(True)),
    Fixed({"norm.type": "rmsnorm_offset", "ffn.type": "gated", "linear_bias": False}),
    Fixed({"block.type": "serial", "stability.embedding_scale.factor": None}),
    Only({"use_bidirectional_attention": False}),
)
TANH_ONLY = {**GELUS, "gelu": "gelu_tanh"}
GEMMA_DOUBLE = (
    norm("input_layernorm", "attn_norm.before", "offset"),
    norm("post_attention_layernorm", "attn_norm.branch", "offset"),
    norm("pre_feedforward_layernorm", "ffn_norm.before", "offset"),
    norm("post_feedforward_layernorm", "ffn_norm.branch", "offset"),
)
GEMMA = Family(
    "GemmaForCausalLM",
    "model.",
    (
        *(*GEMMA_KEYS, Rope()),
        Key("hidden_act", "ffn.activation", TANH_ONLY, "gelu_pytorch_tanh"),
        Fixed({"block.norm_position": "pre"}),
    ),
    llama_rules(
        norm("input_layernorm", "attn_norm.before", "offset"),
        norm("post_attention_layernorm", "ffn_norm.before", "offset"),
        gain="offset",
    ),
)
GEMMA2_KEYS = (
    *GEMMA_KEYS,
    Key("hidden_activation", "ffn.activation", TANH_ONLY, "gelu_pytorch_tanh"),
    Scale("query_pre_attn_scalar", inverse_root=True),
    Cap("attn_logit_softcapping", "attn_softcap"),
    Cap("final_logit_softcapping", "output_softcap"),
    Fixed({"block.norm_position": "double"}),
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "model.",
    (*GEMMA2_KEYS, Rope(), LayerTypes(("local", "global"))),
    llama_rules(*GEMMA_DOUBLE, gain="offset"),
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "model.",
    (
        *GEMMA2_KEYS,
        Rope(theta=1000000.0, local_theta_key="rope_local_base_freq", nested=True),
        LayerTypes((*["local"] * 5, "global")),
        Key("rms_norm_eps", "stability.qk_norm.eps", default=1e-6),
        Fixed({"stability.qk_norm.cast": CASTS}),
    ),
    llama_rules(*GEMMA_DOUBLE, *qk_norms(Shifted(1.0)), gain="offset"),
)

MLA_KEYS = (
    *(*SIZES, WIDTH, *silu(), RMS_EPS, tied(False)),
    Latents(),
    Fixed({**block("serial"), **RMSNORM, "linear_bias": False, "attn.eps": 1e-6}),
    Only({"attention_bias": False, "mlp_bias": False}),
)
MLA_RULES = (
    *one("model.embed_tokens.weight", "embedding"),
    *layers(
        "model.layers.{i}",
        (Rule("self_attn.q_proj.weight", ("attn.w_q",), Plain(), unless="attn.w_q_down"),),
        one("self_attn.q_b_proj.weight", "attn.w_q"),
        linear("self_attn.q_a_proj", "attn", "q_down"),
        one("self_attn.q_a_layernorm.weight", "attn.q_gain"),
        linear("self_attn.kv_a_proj_with_mqa", "attn", "kv_down"),
        one("self_attn.kv_a_layernorm.weight", "attn.kv_gain"),
        one("self_attn.kv_b_proj.weight", "attn.w_kv_up"),
        linear("self_attn.o_proj", "attn", "o"),
        *(linear(f"mlp.{name}_proj", "ffn", name) for name in ("gate", "up", "down")),
        *PRE,
    ),
    *norm("model.norm", "final_norm"),
    *HEAD,
)
DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "model.", (*MLA_KEYS, Rope("interleaved")), MLA_RULES)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM", "model.", (*MLA_KEYS, Rope("interleaved", pairing_key="rope_interleave")), MLA_RULES
)

COHERE_KEYS = (
    *(*SIZES, *GROUPED, WIDTH, *silu(), ATTENTION_BIAS, tied(True)),
    Key("layer_norm_eps", "norm.eps", default=1e-5),
    Factor("logit_scale", "logit_multiplier"),
    Fixed({**block("parallel"), "norm.type": "layernorm", "norm.bias": False, "linear_bias": False}),
)
COHERE_NORM = norm("input_layernorm", "norm.before")
COHERE = Family(
    "CohereForCausalLM",
    "model.",
    (
        *(*COHERE_KEYS, Rope("interleaved")),
        QKLayerNorm("use_qk_norm", "layer_norm_eps", bias=False, gains="per_head"),
    ),
    llama_rules(COHERE_NORM, *qk_norms(PerHead())),
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    "model.",
    (
        *(*COHERE_KEYS, Rope("interleaved")),
        LayerTypes(("local", "local", "local", "global")),
        Fixed({"pos.rotated": "local"}),
    ),
    llama_rules(COHERE_NORM),
)

FAMILIES: dict[str, Family] = {
    "bloom": BLOOM,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "falcon": FALCON,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "gptj": GPT_J,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mpt": MPT,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "openai-gpt": OPENAI_GPT,
    "opt": OPT,
    "phi": PHI,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
}
