"""Parameters, FLOPs and KV-cache bytes from the configuration alone; the model is never built.

FLOPs count matrix products only (a multiply-add is two), attention as the full L x L square, or L x window in a local
layer, backward as twice forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from andrea_ablate.attention import ATTENTIONS
from andrea_ablate.blocks import BLOCKS, NORM_POSITIONS
from andrea_ablate.config import ModelConfig, layer_kinds, model_dims, part_options
from andrea_ablate.ffn import FFNS
from andrea_ablate.model import TransformerLM
from andrea_ablate.norms import NORMS
from andrea_ablate.parameters import MATMUL_ROLES, Param
from andrea_ablate.positions import POSITIONS
from andrea_ablate.registry import Registry
from andrea_ablate.stability import STABILITY


@dataclass(frozen=True)
class Account:
    """Counts of one design. flops_* are per token at the given sequence length; kv_cache_bytes is for one sequence."""

    params: int
    embedding_params: int
    block_matrices: int
    flops_forward: int
    kv_cache_elements: int

    @property
    def non_embedding_params(self) -> int:
        return self.params - self.embedding_params

    @property
    def flops_train(self) -> int:
        """FLOPs per token of forward and backward."""
        return 3 * self.flops_forward

    def kv_cache_bytes(self, bytes_per_element: int = 2, batch: int = 1) -> int:
        """``2 * n_kv_heads * d_head * length * bytes * batch`` per layer; a window bounds length, MLA keeps latents."""
        return self.kv_cache_elements * bytes_per_element * batch


def account(model: ModelConfig, seq_len: int) -> Account:
    """Count the design `model` at sequences of `seq_len` tokens. Raises ConfigError for sizes that do not fit."""
    dims = model_dims(model)
    sizes = {**vars(dims), "linear_bias": model.linear_bias, "dropout": model.dropout}

    def table(registry: Registry[Any], node: Mapping[str, Any]) -> list[Param]:
        return list(registry.ask("table", node, **sizes).values())

    block = BLOCKS.get(model.block["type"])
    position = NORM_POSITIONS.get(model.block["norm_position"])
    norm = table(NORMS, model.norm)
    per_block = table(ATTENTIONS, part_options(model.attn)) + table(FFNS, part_options(model.ffn))
    per_block += norm * (len(position.norms) * block.n_sublayers)
    once = table(POSITIONS, model.pos) + (norm if position.final_norm else [])
    for name, options in model.stability.items():
        trick = table(STABILITY, {"type": name, **options})
        seam = STABILITY.get(name).seam
        if seam in ("qk", "branch"):
            per_block += trick * (2 if seam == "branch" else 1)
        else:
            once += trick
    outer = list(TransformerLM.table(dims.d_model, dims.padded_vocab, model.tie_embeddings, model.head_bias).values())
    everything = per_block * dims.n_layers + once + outer

    block_matrices = dims.n_layers * sum(p.numel for p in per_block if p.role in MATMUL_ROLES)
    head = dims.vocab_size * dims.d_model
    widths, window = ATTENTIONS.ask("widths", model.attn, **sizes), model.attn.get("window") or seq_len
    keys = sum(min(window, seq_len) if kind == "local" else seq_len for kind in layer_kinds(model))
    return Account(
        params=sum(p.numel for p in everything),
        embedding_params=sum(p.numel for p in everything if p.role in ("embedding", "head", "position")),
        block_matrices=block_matrices,
        flops_forward=2 * (block_matrices + head + widths.scores * keys),
        kv_cache_elements=widths.cache * keys,
    )
