"""The whole model, from its design as plain nested dicts and its parameters by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oracles.attention import attend, latent, softcap
from oracles.ffn import FFNS
from oracles.norms import NORMS, Array, layernorm, rmsnorm
from oracles.positions import alibi_slope, rope, scaled_frequencies, sine, t5_bucket

Branch = Callable[[Array], Array]
Norms = Mapping[str, Branch]

# position: the stream x after a sublayer f with norms n, in layer `layer` (from 1) of `depth`
WIRING: dict[str, Callable[[Array, Branch, Norms, int, int], Array]] = {
    "pre": lambda x, f, n, layer, depth: x + f(n["before"](x)),
    "post": lambda x, f, n, layer, depth: n["after"](x + f(x)),
    "double": lambda x, f, n, layer, depth: x + n["branch"](f(n["before"](x))),
    "output": lambda x, f, n, layer, depth: x + n["branch"](f(x)),
    "deepnorm": lambda x, f, n, layer, depth: n["after"](np.sqrt(np.sqrt(2 * depth)) * x + f(x)),
    "depth_scaled": lambda x, f, n, layer, depth: x + f(n["before"](x) / np.sqrt(layer)),
    "none": lambda x, f, n, layer, depth: x + f(x),
}
ENDS_IN_NORM = {"pre": True, "post": False, "double": True, "output": True, "none": False}
ENDS_IN_NORM |= {"deepnorm": False, "depth_scaled": True}


def turn(x: Array, plan: Mapping[str, Any], kind: str) -> Array:
    """Rotate queries or keys ``(B, L, H, K)`` as a layer of this kind does."""
    pos = plan["pos"]
    if pos["rotated"] not in ("all", kind):
        return x
    theta = pos["theta"] if kind == "global" or pos["local_theta"] is None else pos["local_theta"]
    rotary = int(x.shape[-1] * pos["rotary_fraction"])
    scaling = plan["scaling"] if pos["scaled"] in ("all", kind) else {"type": "none"}
    if "original_len" in scaling:
        scaling = {**scaling, "original_len": scaling["original_len"] or plan["max_seq_len"]}
    frequencies, magnitude = scaled_frequencies(scaling, theta, rotary, x.shape[1])
    y = rope(x, theta, pos["pairing"], rotary, frequencies)
    y[..., :rotary] *= magnitude
    return y


def score_shift(p: Mapping[str, Array], plan: Mapping[str, Any]) -> Callable[[int, int, int], float] | None:
    """What the position encoding adds to the score of (head, query, key)."""
    pos, heads, causal = plan["pos"], plan["n_heads"], plan["attn"]["causal"]
    if pos["type"] == "alibi":
        return lambda h, i, j: -alibi_slope(h, heads) * (i - j)
    if pos["type"] == "t5":
        return lambda h, i, j: p["pos.bucket_bias"][t5_bucket(i - j, pos["buckets"], pos["max_distance"], causal), h]
    return None


def over_all_heads(x: Array, gain: Array, bias: Array | float, eps: float) -> Array:
    return rmsnorm(x.reshape(*x.shape[:2], -1), gain, bias, eps).reshape(x.shape)


QK_NORMS = {"qk_norm": rmsnorm, "qk_norm_full": over_all_heads, "qk_layernorm": layernorm}


def logits(p: Mapping[str, Array], plan: Mapping[str, Any], tokens: Array, key_mask: Array | None = None) -> Array:
    """tokens ``(B, L)`` -> logits ``(B, L, V)``.

    Args:
        p: parameters by full name. plan: the fields of the model's configuration.
    """
    length, width, tricks = tokens.shape[1], plan["d_model"], plan["stability"]
    heads = plan["n_heads"]
    kv_heads = plan["attn"].get("n_kv_heads") or heads
    d_head = plan["d_head"] or width // heads

    def own(prefix: str) -> dict[str, Array]:
        return {name.removeprefix(f"{prefix}."): value for name, value in p.items() if name.startswith(f"{prefix}.")}

    def norm(name: str) -> Branch:
        return lambda x: NORMS[plan["norm"]["type"]](x, own(name), plan["norm"])

    def norms(prefix: str) -> Norms:
        return {name: norm(f"{prefix}.{name}") for name in ("before", "after", "branch")}

    def latent_attention(prefix: str, kind: str) -> Branch:
        own = {name.removeprefix(f"{prefix}."): value for name, value in p.items() if name.startswith(f"{prefix}.")}
        options, pos = plan["attn"], plan["pos"]["type"]
        return lambda x: latent(
            *(x, own),
            heads=heads,
            nope=options["qk_nope_head_dim"] or d_head,
            eps=options["eps"],
            scale=options["scale"],
            turn=lambda t: turn(t, plan, kind) if pos == "rope" else t,
            key_mask=key_mask,
            cap=tricks.get("attn_softcap", {}).get("cap"),
        )

    def attention(prefix: str, kind: str) -> Branch:
        if plan["attn"]["type"] == "mla":
            return latent_attention(prefix, kind)
        window = plan["attn"]["window"] if kind == "local" else None

        def project(x: Array, name: str, n: int) -> Array:
            y = x @ p[f"{prefix}.w_{name}"].T + p.get(f"{prefix}.{name}_bias", 0.0)
            return y.reshape(*x.shape[:2], n, d_head)

        def f(x: Array) -> Array:
            options = plan["attn"]
            q, k, v = project(x, "q", heads), project(x, "k", kv_heads), project(x, "v", kv_heads)
            for trick in QK_NORMS.keys() & tricks.keys():
                q, k = (
                    QK_NORMS[trick](
                        t,
                        p[f"{prefix}.qk.parts.0.{side}_gain"],
                        p.get(f"{prefix}.qk.parts.0.{side}_bias", 0.0),
                        tricks[trick]["eps"],
                    )
                    for side, t in (("q", q), ("k", k))
                )
            if plan["pos"]["type"] == "rope":
                q, k = (turn(t, plan, kind) for t in (q, k))
            cap = tricks.get("attn_softcap", {}).get("cap")
            out = attend(
                *(q, k, v),
                scale=options["scale"],
                window=window,
                key_mask=key_mask,
                cap=cap,
                causal=options["causal"],
                shift=score_shift(p, plan),
                sinks=p[f"{prefix}.sink"] if options["sinks"] else None,
            )
            if options["gate"]:
                opened = 1 / (1 + np.exp(-(x @ p[f"{prefix}.w_gate"].T + p.get(f"{prefix}.gate_bias", 0.0))))
                out = out * (opened[..., None] if options["gate"] == "headwise" else opened.reshape(out.shape))
            return out.reshape(*x.shape[:2], -1) @ p[f"{prefix}.w_o"].T + p.get(f"{prefix}.o_bias", 0.0)

        return f

    def feed_forward(prefix: str) -> Branch:
        return lambda x: FFNS[plan["ffn"]["type"]](x, own(prefix), plan["ffn"]["activation"])

    def scaled(f: Branch, prefix: str) -> Branch:
        """What a sublayer adds to the stream, after the tricks on it."""
        gain = p.get(f"{prefix}.parts.0.gain", tricks.get("residual_multiplier", {}).get("factor", 1.0))
        return lambda x: gain * f(x)

    x = p["embedding"][tokens]
    if "embedding_scale" in tricks:
        x = x * (tricks["embedding_scale"]["factor"] or math.sqrt(width))
    if plan["pos"]["type"] == "learned":
        x = x + p["pos.vectors"][:length]
    elif plan["pos"]["type"] == "sine":
        x = x + sine(length, width, plan["pos"]["theta"])
    if "embedding_norm" in tricks:
        gain, bias = p["on_stream.parts.0.gain"], p["on_stream.parts.0.bias"]
        x = layernorm(x, gain, bias, tricks["embedding_norm"]["eps"])
    position = plan["block"]["norm_position"]
    kinds = plan["layer_pattern"] * plan["n_layers"]
    for i in range(plan["n_layers"]):

        def wire(x: Array, f: Branch, prefix: str, layer: int = i + 1) -> Array:
            return WIRING[position](x, f, norms(prefix), layer, plan["n_layers"])

        attn = scaled(attention(f"blocks.{i}.attn", kinds[i]), f"blocks.{i}.attn_end")
        ffn = scaled(feed_forward(f"blocks.{i}.ffn"), f"blocks.{i}.ffn_end")
        if plan["block"]["type"] == "serial":
            x = wire(x, attn, f"blocks.{i}.attn_norm")
            x = wire(x, ffn, f"blocks.{i}.ffn_norm")
        elif plan["block"]["type"] == "no_residual":
            for branch, prefix in ((attn, f"blocks.{i}.attn_norm"), (ffn, f"blocks.{i}.ffn_norm")):
                x = branch(norms(prefix)["before"](x) if position == "pre" else x)
        elif plan["block"]["type"] == "parallel":
            x = wire(x, lambda h, attn=attn, ffn=ffn: attn(h) + ffn(h), f"blocks.{i}.norm")
        else:
            n_attn, n_ffn = norms(f"blocks.{i}.attn_norm")["before"], norms(f"blocks.{i}.ffn_norm")["before"]
            x = x + attn(n_attn(x)) + ffn(n_ffn(x))
    if ENDS_IN_NORM[position]:
        x = norm("final_norm")(x)
    x = x * tricks.get("logit_multiplier", {}).get("factor", 1.0)
    out = x @ p["embedding" if plan["tie_embeddings"] else "head"][: plan["vocab_size"]].T
    out = out + p.get("head_bias", np.zeros(plan["vocab_size"]))[: plan["vocab_size"]]
    return softcap(out, tricks["output_softcap"]["cap"]) if "output_softcap" in tricks else np.asarray(out)
