"""Wiring: where the norms of a sublayer sit, and whether attention and FFN run one after the other or side by side."""

# Shapes: B batch, L length, D d_model
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from andrea_ablate.registry import ConfigError, Registry

Branch = Callable[[Tensor], Tensor]


class Norms(Protocol):
    """The norms of one sublayer, by the names in `NormPosition.norms`."""

    def __getitem__(self, key: str) -> Branch: ...


class NormPosition(Protocol):
    """Where norms sit around a branch f: `norms` names the ones a sublayer owns, `wire` computes its output."""

    final_norm: bool

    @property
    def norms(self) -> tuple[str, ...]: ...

    def wire(self, x: Tensor, f: Branch, n: Norms) -> Tensor: ...


NORM_POSITIONS: Registry[NormPosition] = Registry("norm_position")
BLOCKS: Registry[nn.Module] = Registry("block")


@NORM_POSITIONS.register("pre")
class PreNorm:
    """``x + f(n(x))``: the stream is not normalised, so the stack ends in a norm. Xiong 2020, arXiv:2002.04745."""

    norms = ("before",)
    final_norm = True

    @staticmethod
    def wire(x: Tensor, f: Branch, n: Norms) -> Tensor:
        return x + f(n["before"](x))


@NORM_POSITIONS.register("post")
class PostNorm:
    """``n(x + f(x))``: every sublayer renormalises the stream. Vaswani 2017, arXiv:1706.03762."""

    norms = ("after",)
    final_norm = False

    @staticmethod
    def wire(x: Tensor, f: Branch, n: Norms) -> Tensor:
        return n["after"](x + f(x))


@NORM_POSITIONS.register("double")
class DoubleNorm:
    """``x + n2(f(n1(x)))``: norms on both sides of the branch. Gemma 2, arXiv:2408.00118."""

    norms = ("before", "branch")
    final_norm = True

    @staticmethod
    def wire(x: Tensor, f: Branch, n: Norms) -> Tensor:
        return x + n["branch"](f(n["before"](x)))


@NORM_POSITIONS.register("output")
class OutputNorm:
    """``x + n(f(x))``: the norm caps what the branch adds, the input is raw. OLMo 2, arXiv:2501.00656."""

    norms = ("branch",)
    final_norm = True

    @staticmethod
    def wire(x: Tensor, f: Branch, n: Norms) -> Tensor:
        return x + n["branch"](f(x))


@NORM_POSITIONS.register("deepnorm")
class DeepNorm:
    """``n(alpha x + f(x))``, ``alpha = (2 n_layers)^(1/4)``: post-norm with a heavier stream, for great depth.

    Made for ``init=deepnorm``, which starts the branches small. Wang et al. 2022, arXiv:2203.00555, for decoders.
    """

    norms = ("after",)
    final_norm = False

    def __init__(self, *, n_layers: int) -> None:
        self.alpha = (2 * n_layers) ** 0.25

    def wire(self, x: Tensor, f: Branch, n: Norms) -> Tensor:
        return n["after"](self.alpha * x + f(x))


@NORM_POSITIONS.register("depth_scaled")
class DepthScaledNorm:
    """``x + f(n(x) / sqrt(layer))``, layers counted from 1: pre-norm whose deep layers do not swell the stream.

    Sun et al. 2025, arXiv:2502.05795 (LayerNorm Scaling).
    """

    norms = ("before",)
    final_norm = True

    def __init__(self, *, layer: int) -> None:
        self.scale = layer**-0.5

    def wire(self, x: Tensor, f: Branch, n: Norms) -> Tensor:
        return x + f(n["before"](x) * self.scale)


@NORM_POSITIONS.register("none")
class NoNorm:
    """``x + f(x)``: no norm anywhere, not even at the end. Zhang et al. 2019 (Fixup), arXiv:1901.09321."""

    norms = ()
    final_norm = False

    @staticmethod
    def wire(x: Tensor, f: Branch, n: Norms) -> Tensor:
        return x + f(x)


@BLOCKS.register("serial")
class SerialBlock(nn.Module):
    """Attention, then the FFN, each its own sublayer: two additions to the stream.

    Args:
        position: of NORM_POSITIONS. attn, ffn: the branches. make_norm: builds one norm of the chosen type.
        make_end: builds what the output of one branch goes through (tricks of that seam).
        dropout: probability of dropping a value that a branch adds to the stream, training only.
    Shape: x ``(B, L, D)`` -> ``(B, L, D)``.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    n_sublayers = 2

    def __init__(
        self,
        *,
        position: NormPosition,
        attn: nn.Module,
        ffn: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
        make_end: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        self.position, self.attn, self.ffn, self.drop = position, attn, ffn, nn.Dropout(dropout)
        self.attn_end, self.ffn_end = make_end(), make_end()
        self.attn_norm = nn.ModuleDict({name: make_norm() for name in position.norms})
        self.ffn_norm = nn.ModuleDict({name: make_norm() for name in position.norms})

    def forward(self, x_BLD: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        x_BLD = self.position.wire(x_BLD, lambda h: self.drop(self.attn_end(attend(self.attn, h))), self.attn_norm)
        return self.position.wire(x_BLD, lambda h: self.drop(self.ffn_end(self.ffn(h))), self.ffn_norm)


@BLOCKS.register("no_residual")
class NoResidualBlock(SerialBlock):
    """Serial without the additions: ``x -> f(n(x))``, so that a branch replaces the stream. To see what they are for.

    Args, shape: as SerialBlock; the parameters too.
    Raises: ConfigError for norm positions other than pre and none, where nothing but the addition is left out.
    Source: the network without shortcuts of He et al. 2023, arXiv:2302.10322, section 1.
    """

    def __init__(self, *, position: NormPosition, **parts: Any) -> None:
        if not isinstance(position, (PreNorm, NoNorm)):
            raise ConfigError(
                "block=no_residual has no agreed meaning with this norm position; "
                "use norm=pre, norm=none or block=serial"
            )
        super().__init__(position=position, **parts)

    def forward(self, x_BLD: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        def normed(x_BLD: Tensor, norms: Norms) -> Tensor:
            return norms["before"](x_BLD) if self.position.norms else x_BLD

        x_BLD = self.drop(self.attn_end(attend(self.attn, normed(x_BLD, self.attn_norm))))
        out_BLD: Tensor = self.drop(self.ffn_end(self.ffn(normed(x_BLD, self.ffn_norm))))
        return out_BLD


@BLOCKS.register("parallel")
class ParallelBlock(nn.Module):
    """Attention and FFN read the same normed input and are added together: ``x + attn(n(x)) + ffn(n(x))``.

    Args, shape: as SerialBlock.
    Raises: ConfigError for norm positions other than pre and none: published models agree on no meaning for them.
    Source: Wang & Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022, arXiv:2204.02311, section 2.
    """

    n_sublayers = 1

    def __init__(
        self,
        *,
        position: NormPosition,
        attn: nn.Module,
        ffn: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
        make_end: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        if not isinstance(position, (PreNorm, NoNorm)):
            raise ConfigError(
                "block=parallel has no agreed meaning with this norm position; use norm=pre, norm=none or block=serial"
            )
        self.position, self.attn, self.ffn, self.drop = position, attn, ffn, nn.Dropout(dropout)
        self.attn_end, self.ffn_end = make_end(), make_end()
        self.norm = nn.ModuleDict({name: make_norm() for name in position.norms})

    def forward(self, x_BLD: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        def branches(h_BLD: Tensor) -> Tensor:
            added_BLD: Tensor = self.drop(self.attn_end(attend(self.attn, h_BLD)) + self.ffn_end(self.ffn(h_BLD)))
            return added_BLD

        return self.position.wire(x_BLD, branches, self.norm)


@BLOCKS.register("parallel2")
class TwoNormParallelBlock(SerialBlock):
    """Parallel, each branch with a norm of its own: ``x + attn(n1(x)) + ffn(n2(x))``.

    Args, shape: as SerialBlock; the parameters too, so weights of one load into the other.
    Raises: ConfigError for norm positions other than pre.
    Source: Black et al. 2022 (GPT-NeoX), arXiv:2204.06745, section 2, and its public code; Falcon 40B.
    """

    def __init__(self, *, position: NormPosition, **parts: Any) -> None:
        if not isinstance(position, PreNorm):
            raise ConfigError(
                "block=parallel2 has no agreed meaning with this norm position; use norm=pre or block=serial"
            )
        super().__init__(position=position, **parts)

    def forward(self, x_BLD: Tensor, attend: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        attn_BLD = self.attn_end(attend(self.attn, self.attn_norm["before"](x_BLD)))
        ffn_BLD = self.ffn_end(self.ffn(self.ffn_norm["before"](x_BLD)))
        added_BLD: Tensor = self.drop(attn_BLD + ffn_BLD)
        return x_BLD + added_BLD
