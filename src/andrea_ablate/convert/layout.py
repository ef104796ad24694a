"""How one tensor of a Hugging Face folder holds one or several of ours."""

# Shapes: D d_model, G key/value heads, H query heads, K d_head, … what follows the first dimension
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea_ablate.config import ModelDims


class Plain:
    """One tensor, as it is."""

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        """Theirs into ours. rows: the first dimension of each of ours."""
        return [tensor]

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        """Ours into theirs."""
        return tensors[0]


class Stacked(Plain):
    """Several one after the other along the first dimension: all queries, all keys, all values."""

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        return list(torch.split(tensor, list(rows)))

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        return torch.cat(list(tensors))


class Grouped(Plain):
    """Per key/value head: its H/G query heads, the key, the value. With G = H that is q, k, v of every head in turn."""

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        t = torch.unflatten(tensor, 0, (dims.n_kv_heads, -1, dims.d_head))
        return [part.flatten(0, 2) for part in (t[:, :-2], t[:, -2:-1], t[:, -1:])]

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        parts = [torch.unflatten(t, 0, (dims.n_kv_heads, -1, dims.d_head)) for t in tensors]
        return torch.cat(parts, dim=1).flatten(0, 2)


class PerHead(Plain):
    """A vector for every head, ``(H, K)``, which is one of all heads here."""

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        return [tensor.flatten()]

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        return tensors[0].view(-1, dims.d_head)


@dataclass(frozen=True)
class Transposed(Plain):
    """Matrices stored as (features in, features out), GPT-2's Conv1D; then as `inner`."""

    inner: Plain

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        return self.inner.split(_turned(tensor), rows, dims)

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        return _turned(self.inner.join(tensors, dims))


@dataclass(frozen=True)
class Shifted(Plain):
    """A gain stored as its distance from `by`."""

    by: float

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        return [tensor + self.by]

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        return tensors[0] - self.by


@dataclass(frozen=True)
class Below(Plain):
    """A table whose first `unread` rows are never read when a sequence starts at its beginning; written as zeros."""

    unread: int

    def split(self, tensor: Tensor, rows: Sequence[int], dims: ModelDims) -> list[Tensor]:
        return [tensor[self.unread :]]

    def join(self, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
        return torch.cat((tensors[0].new_zeros(self.unread, *tensors[0].shape[1:]), tensors[0]))


def _turned(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.T


def repaired(tensor: Tensor, rotary: int, d_head: int, *, to_half: bool) -> Tensor:
    """Permute the first `rotary` dimensions of every head, so that the other pairing of rope gives the same scores.

    Args:
        tensor: what makes queries or keys, ``(heads * d_head, …)``, or a gain of theirs ``(d_head,)``.
        to_half: from neighbours (2i, 2i + 1) to halves (i, i + R/2), or the other way.
    """
    heads = torch.unflatten(tensor, 0, (-1, d_head))
    turned, rest = heads[:, :rotary], heads[:, rotary:]
    shape = (-1, 2) if to_half else (2, -1)
    turned = torch.unflatten(turned, 1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, rest), dim=1).flatten(0, 1)
