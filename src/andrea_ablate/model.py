"""TransformerLM: a decoder-only language model put together from the registries. Runs without Hydra or Lightning."""

# Shapes: B batch, L length, D d_model, V vocabulary
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.attention import ATTENTIONS, KVCache
from andrea_ablate.blocks import BLOCKS, NORM_POSITIONS
from andrea_ablate.config import ModelConfig, layer_kinds, model_dims, part_options
from andrea_ablate.ffn import FFNS
from andrea_ablate.init import INITS, initialise
from andrea_ablate.loss import LossSums, lm_loss
from andrea_ablate.norms import NORMS
from andrea_ablate.pairs import check_pairs
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.positions import POSITIONS, SCALINGS
from andrea_ablate.stability import STABILITY, Multiplier


class TransformerLM(nn.Module):
    """Token embedding, blocks, final norm where the norm position asks for one, output projection.

    Args:
        config: the design. init_seed: see init.py.
    Shape: tokens ``(B, L)`` int64 -> logits ``(B, L, V)``; with targets ``(B, L)`` -> LossSums. With a cache the
        tokens follow those that it has seen, and it learns them.
    Raises: ConfigError where choices do not fit together.
    """

    embedding: nn.Parameter
    head: nn.Parameter | None
    head_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, init_seed: int = 0) -> None:
        super().__init__()
        self.dims = dims = model_dims(config)
        self.dropout = config.dropout
        sizes = {**vars(dims), "linear_bias": config.linear_bias, "dropout": config.dropout}

        def trick(name: str) -> nn.Module:
            return STABILITY.build({"type": name, **config.stability[name]}, **sizes)

        def at(seam: str) -> list[str]:
            return [name for name in config.stability if STABILITY.get(name).seam == seam]

        def option(seam: str, name: str) -> float | None:
            """The one number of a trick that another part computes itself."""
            return next((getattr(trick(found), name) for found in at(seam)), None)

        def chain(seam: str) -> Chain:
            factor = self.scheme.logit_factor if seam == "output" else 1.0
            return Chain([trick(name) for name in at(seam)] + ([Multiplier(factor=factor)] if factor != 1 else []))

        def make_norm() -> nn.Module:
            return NORMS.build(config.norm, **sizes)

        check_pairs(config)
        where = config.block["norm_position"]
        self.scaling, causal = SCALINGS.build(config.scaling, **sizes), config.attn.get("causal", True)
        turned = {**sizes, "d_head": ATTENTIONS.ask("widths", config.attn, **sizes).turned}
        self.pos = POSITIONS.build(config.pos, **turned, scaling=self.scaling, causal=causal)
        self.scheme = INITS.build(config.init, **sizes)
        attn = part_options(config.attn)
        if self.scheme.attn_scale is not None and attn.get("scale") is None:
            attn["scale"] = self.scheme.attn_scale
        self.blocks = nn.ModuleList(
            BLOCKS.get(config.block["type"])(
                position=NORM_POSITIONS.build({"type": where}, **sizes, layer=layer),
                attn=ATTENTIONS.build(
                    attn,
                    **sizes,
                    kind=kind,
                    qk=chain("qk") if at("qk") else None,
                    softcap=option("scores", "cap"),
                ),
                ffn=FFNS.build(part_options(config.ffn), **sizes),
                make_norm=make_norm,
                make_end=lambda: chain("branch"),
                dropout=config.dropout,
            )
            for layer, kind in enumerate(layer_kinds(config), start=1)
        )
        self.final_norm = make_norm() if NORM_POSITIONS.get(where).final_norm else nn.Identity()
        self.on_embedding, self.on_stream, self.on_output = chain("embedding"), chain("stream"), chain("output")
        self.skip_step = next((trick(name) for name in at("step")), None)
        self.softcap, self.z_weight = option("logits", "cap"), option("loss", "alpha") or 0.0
        table = self.table(dims.d_model, dims.padded_vocab, config.tie_embeddings, config.head_bias)
        declare(self, table, optional=("head", "head_bias"))
        if not self.embedding.is_meta:
            initialise(self, self.scheme, init_seed)

    @staticmethod
    def table(d_model: int, padded_vocab: int, tied: bool, head_bias: bool) -> Table:
        table = {"embedding": Param((padded_vocab, d_model), "embedding")}
        if not tied:
            table["head"] = Param((padded_vocab, d_model), "head")
        return {**table, "head_bias": Param((padded_vocab,), "bias")} if head_bias else table

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        key_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        x_BLD = self.hidden(tokens, key_mask, cache)
        return self.logits(x_BLD) if targets is None else self.loss(x_BLD, targets)

    def hidden(self, tokens: Tensor, key_mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """What the output projection reads, ``(B, L, D)``."""
        new, start = tokens.shape[1], 0
        if cache is not None:
            tokens = cache.take(tokens, self.scaling.regime(cache.length + new))
            start = cache.length
        x_BLD = self.on_embedding(F.embedding(tokens, self.embedding))
        if self.pos.seam == "embedding":
            x_BLD = self.pos(x_BLD, start)
        x_BLD = self._drop(self.on_stream(x_BLD))
        scores = self.pos(x_BLD) if self.pos.seam == "scores" else {}

        def attend(attn: nn.Module, h_BLD: Tensor) -> Tensor:
            rotate = partial(self.pos, kind=attn.kind, start=start) if self.pos.seam == "qk" else None
            added_BLD: Tensor = attn(h_BLD, rotate, key_mask, **scores, cache=None if cache is None else cache.of(attn))
            return added_BLD

        for block in self.blocks:
            x_BLD = block(x_BLD, attend)
        if cache is not None:
            cache.length += tokens.shape[1]
            x_BLD = x_BLD[:, tokens.shape[1] - new :]
        out_BLD: Tensor = self.on_output(self.final_norm(x_BLD))
        if self.head_bias is not None:
            out_BLD = F.pad(out_BLD, (0, 1), value=1.0)  # a constant input: its column of the projection is the bias
        return out_BLD

    def loss(self, x_BLD: Tensor, targets: Tensor) -> LossSums:
        """Output projection, soft-cap and loss of any positions of the stream, with their targets ``(B, L)``."""
        return lm_loss(x_BLD, self._head(), targets, softcap=self.softcap, z_weight=self.z_weight)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Output projection and output soft-cap."""
        logits_BLV = F.linear(x_BLD, self._head())
        return logits_BLV if self.softcap is None else ops.softcap(logits_BLV, self.softcap)

    def _head(self) -> Tensor:
        """The matrix of the output projection, without the rows that only pad the vocabulary."""
        weight_VD: Tensor = self.embedding if self.head is None else self.head
        if self.head_bias is not None:
            weight_VD = torch.cat((weight_VD, self.head_bias[:, None]), dim=1)
        return weight_VD[: self.dims.vocab_size]

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def choices(config: ModelConfig) -> dict[str, Any]:
    """The classes that a configuration names. Raises ConfigError for a name that is not registered."""
    return {
        "norm": NORM_POSITIONS.get(config.block["norm_position"]),
        "block": BLOCKS.get(config.block["type"]),
        "norm_type": NORMS.get(config.norm["type"]),
        "ffn": FFNS.get(config.ffn["type"]),
        "pos": POSITIONS.get(config.pos["type"]),
        "scaling": SCALINGS.get(config.scaling["type"]),
        "attn": ATTENTIONS.get(config.attn["type"]),
        "init": INITS.get(config.init["type"]),
        **{name: STABILITY.get(name) for name in config.stability},
    }


class Chain(nn.Module):
    """Modules of one seam, applied in turn; like nn.Sequential, for one or several tensors. Empty, it does nothing."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *tensors: Tensor) -> Any:
        for part in self.parts:
            out = part(*tensors)
            tensors = out if isinstance(out, tuple) else (out,)
        return tensors if len(tensors) > 1 else tensors[0]
