"""What generation keeps of the tokens behind it, so that each new token is computed once."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LayerCache:
    """The tensors that one attention keeps, ``(B, n, …)`` each, of the last n tokens."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, ...] = ()

    def extend(self, *new: Tensor, window: int | None = None) -> tuple[Tensor, ...]:
        """Those of the tokens behind and of the new ones, along dimension 1; keeps the last `window` (None for all)."""
        behind = self.kept or tuple(x[:, :0] for x in new)
        both = tuple(torch.cat(pair, 1) for pair in zip(behind, new, strict=True))
        # A copy, because a view would hold on to what it leaves out.
        self.kept = tuple(x if window is None or x.shape[1] <= window else x[:, -window:].clone() for x in both)
        return both


class KVCache:
    """A cache per attention module, and the tokens behind.

    Keys are kept before they are turned: the angles of some encodings change with the length. Deeper layers have then
    read the angles of before, so `take` has the tokens behind computed once more.
    """

    def __init__(self) -> None:
        self.length = 0  # tokens that the layers have seen
        self.layers: dict[nn.Module, LayerCache] = {}
        self._tokens: Tensor | None = None
        self._regime = 0

    def take(self, new: Tensor, regime: int) -> Tensor:
        """The tokens to compute: the new ones, after all those behind if these were of another `NoScaling.regime`."""
        self._tokens = new if self._tokens is None else torch.cat((self._tokens, new), 1)
        if regime == self._regime:
            return new
        self.length, self._regime = 0, regime
        self.layers.clear()
        return self._tokens

    def of(self, attn: nn.Module) -> LayerCache:
        """The cache of this attention."""
        return self.layers.setdefault(attn, LayerCache())

    def numel(self) -> int:
        """Numbers that are kept, over all layers and sequences."""
        return sum(x.numel() for layer in self.layers.values() for x in layer.kept)
