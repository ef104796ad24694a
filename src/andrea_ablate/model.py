"""TransformerLM: a decoder-only language model put together from the registries. Runs without Hydra or Lightning."""

# Shapes: B batch, L length, D d_model, V vocabulary
from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.attention import ATTENTIONS
from andrea_ablate.blocks import BLOCKS, NORM_POSITIONS
from andrea_ablate.config import ModelConfig, model_dims, part_options
from andrea_ablate.ffn import FFNS
from andrea_ablate.init import initialise
from andrea_ablate.loss import lm_loss
from andrea_ablate.norms import NORMS
from andrea_ablate.parameters import Param, Table, declare
from andrea_ablate.positions import POSITIONS
from andrea_ablate.stability import STABILITY


class TransformerLM(nn.Module):
    """Token embedding, blocks, final norm where the norm position asks for one, output projection.

    Args:
        config: the design. init_seed: see init.py.
    Shape: tokens ``(B, L)`` int64 -> logits ``(B, L, V)``; with targets ``(B, L)`` -> LossSums.
    Raises: ConfigError where choices do not fit together.
    """

    embedding: nn.Parameter
    head: nn.Parameter | None

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

        def make_norm() -> nn.Module:
            return NORMS.build(config.norm, **sizes)

        position = NORM_POSITIONS.build({"type": config.block["norm_position"]})
        self.pos = POSITIONS.build(config.pos, **sizes)
        self.blocks = nn.ModuleList(
            BLOCKS.get(config.block["type"])(
                position=position,
                attn=ATTENTIONS.build(
                    part_options(config.attn),
                    **sizes,
                    qk=Chain([trick(name) for name in at("qk")]) if at("qk") else None,
                    softcap=option("scores", "cap"),
                ),
                ffn=FFNS.build(part_options(config.ffn), **sizes),
                make_norm=make_norm,
                dropout=config.dropout,
            )
            for _ in range(dims.n_layers)
        )
        self.final_norm = make_norm() if position.final_norm else nn.Identity()
        self.softcap, self.z_weight = option("logits", "cap"), option("loss", "alpha") or 0.0
        declare(self, self.table(dims.d_model, dims.padded_vocab, config.tie_embeddings), optional=("head",))
        if not self.embedding.is_meta:
            initialise(self, config.init, init_seed, **sizes)

    @staticmethod
    def table(d_model: int, padded_vocab: int, tied: bool) -> Table:
        embedding = {"embedding": Param((padded_vocab, d_model), "embedding")}
        return embedding if tied else {**embedding, "head": Param((padded_vocab, d_model), "head")}

    def forward(self, tokens: Tensor, targets: Tensor | None = None, key_mask: Tensor | None = None) -> Any:
        x_BLD = F.embedding(tokens, self.embedding)
        if self.pos.seam == "embedding":
            x_BLD = self.pos(x_BLD)
        x_BLD = self._drop(x_BLD)
        rotate = self.pos if self.pos.seam == "qk" else None

        def attend(attn: nn.Module, h_BLD: Tensor) -> Tensor:
            out_BLD: Tensor = attn(h_BLD, rotate, key_mask)
            return out_BLD

        for block in self.blocks:
            x_BLD = block(x_BLD, attend)
        x_BLD = self.final_norm(x_BLD)
        if targets is None:
            return self.logits(x_BLD)
        return lm_loss(x_BLD, self._head(), targets, softcap=self.softcap, z_weight=self.z_weight)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Output projection and output soft-cap."""
        logits_BLV = F.linear(x_BLD, self._head())
        return logits_BLV if self.softcap is None else ops.softcap(logits_BLV, self.softcap)

    def _head(self) -> Tensor:
        """The matrix of the output projection, without the rows that only pad the vocabulary."""
        return (self.embedding if self.head is None else self.head)[: self.dims.vocab_size]

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Chain(nn.Module):
    """Modules of one seam, applied in turn; like nn.Sequential, for one or several tensors."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *tensors: Tensor) -> Any:
        for part in self.parts:
            out = part(*tensors)
            tensors = out if isinstance(out, tuple) else (out,)
        return tensors if len(tensors) > 1 else tensors[0]
