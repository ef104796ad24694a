"""The whole model, from its design as plain nested dicts and its parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oracles.attention import attend, softcap
from oracles.ffn import FFNS
from oracles.norms import NORMS, Array, rmsnorm
from oracles.positions import rope, sine

Branch = Callable[[Array], Array]
Norms = Mapping[str, Branch]

WIRING: dict[str, Callable[[Array, Branch, Norms], Array]] = {
    "pre": lambda x, f, n: x + f(n["before"](x)),
    "post": lambda x, f, n: n["after"](x + f(x)),
    "double": lambda x, f, n: x + n["branch"](f(n["before"](x))),
    "output": lambda x, f, n: x + n["branch"](f(x)),
    "none": lambda x, f, n: x + f(x),
}
ENDS_IN_NORM = {"pre": True, "post": False, "double": True, "output": True, "none": False}


def logits(p: Mapping[str, Array], plan: Mapping[str, Any], tokens: Array, key_mask: Array | None = None) -> Array:
    """tokens ``(B, L)`` -> logits ``(B, L, V)``.

    Args:
        p: parameters by full name. plan: the fields of the model's configuration.
    """
    length, width, tricks = tokens.shape[1], plan["d_model"], plan["stability"]
    heads = plan["n_heads"]
    kv_heads = plan["attn"]["n_kv_heads"] or heads
    d_head = plan["d_head"] or width // heads

    def norm(name: str) -> Branch:
        kind, eps = plan["norm"]["type"], plan["norm"]["eps"]
        return lambda x: NORMS[kind](x, p[f"{name}.gain"], p.get(f"{name}.bias", 0.0), eps)

    def norms(prefix: str) -> Norms:
        return {name: norm(f"{prefix}.{name}") for name in ("before", "after", "branch")}

    def attention(prefix: str) -> Branch:
        def project(x: Array, name: str, n: int) -> Array:
            y = x @ p[f"{prefix}.w_{name}"].T + p.get(f"{prefix}.{name}_bias", 0.0)
            return y.reshape(*x.shape[:2], n, d_head)

        def f(x: Array) -> Array:
            q, k, v = project(x, "q", heads), project(x, "k", kv_heads), project(x, "v", kv_heads)
            if "qk_norm" in tricks:
                eps = tricks["qk_norm"]["eps"]
                q = rmsnorm(q, p[f"{prefix}.qk.parts.0.q_gain"], 0.0, eps)
                k = rmsnorm(k, p[f"{prefix}.qk.parts.0.k_gain"], 0.0, eps)
            if plan["pos"]["type"] == "rope":
                q, k = (rope(t, plan["pos"]["theta"], plan["pos"]["pairing"]) for t in (q, k))
            cap = tricks.get("attn_softcap", {}).get("cap")
            scale, window = plan["attn"]["scale"], plan["attn"]["window"]
            out = attend(q, k, v, scale=scale, window=window, key_mask=key_mask, cap=cap)
            return out.reshape(*x.shape[:2], -1) @ p[f"{prefix}.w_o"].T + p.get(f"{prefix}.o_bias", 0.0)

        return f

    def feed_forward(prefix: str) -> Branch:
        own = {name.removeprefix(f"{prefix}."): value for name, value in p.items() if name.startswith(f"{prefix}.")}
        return lambda x: FFNS[plan["ffn"]["type"]](x, own, plan["ffn"]["activation"])

    x = p["embedding"][tokens]
    if plan["pos"]["type"] == "learned":
        x = x + p["pos.vectors"][:length]
    elif plan["pos"]["type"] == "sine":
        x = x + sine(length, width, plan["pos"]["theta"])
    position = plan["block"]["norm_position"]
    wire = WIRING[position]
    for i in range(plan["n_layers"]):
        attn, ffn = attention(f"blocks.{i}.attn"), feed_forward(f"blocks.{i}.ffn")
        if plan["block"]["type"] == "serial":
            x = wire(x, attn, norms(f"blocks.{i}.attn_norm"))
            x = wire(x, ffn, norms(f"blocks.{i}.ffn_norm"))
        else:
            x = wire(x, lambda h, attn=attn, ffn=ffn: attn(h) + ffn(h), norms(f"blocks.{i}.norm"))
    if ENDS_IN_NORM[position]:
        x = norm("final_norm")(x)
    out = x @ p["embedding" if plan["tie_embeddings"] else "head"][: plan["vocab_size"]].T
    return softcap(out, tricks["output_softcap"]["cap"]) if "output_softcap" in tricks else np.asarray(out)
