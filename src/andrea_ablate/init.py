"""Initial values. Each parameter's values depend on (seed, its name, its shape, the scheme) and on nothing else.

A scheme may go on to say how fast each parameter learns and what width does to scores and logits (muP).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from andrea_ablate.parameters import BLOCK_ROLES, Param, named_params
from andrea_ablate.registry import ConfigError, Registry


class Init(Protocol):
    """The initial distribution of every parameter that is neither a gain nor a bias."""

    uniform: bool = False  # normal; embeddings and positions always are
    attn_scale: float | None = None  # of the scores, where the configuration names none; None for 1 / sqrt(d_head)
    logit_factor: float = 1.0
    optimizers: tuple[str, ...] = ()  # the ones that lr_factor is meant for, empty for all

    def std(self, param: Param) -> float:
        """The standard deviation of a parameter's values."""

    def lr_factor(self, param: Param) -> float:
        """The parameter's learning rate over that of the run."""
        return 1.0


INITS: Registry[Init] = Registry("init")


@INITS.register("gpt2")
class GPT2Init(Init):
    """``N(0, std)``; projections that write to the residual stream ``N(0, std / sqrt(2 n_layers))``.

    Args:
        n_layers: depth of the stack; std: base standard deviation.
    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """

    def __init__(self, *, n_layers: int, std: float = 0.02) -> None:
        self.base, self.residual = std, std / math.sqrt(2 * n_layers)

    def std(self, param: Param) -> float:
        return self.residual if param.role == "out" else self.base


@INITS.register("xavier")
class XavierInit(Init):
    """Matrices uniform with variance ``2 / (fan_in + fan_out)``; embeddings and positions ``N(0, embedding_std)``.

    Args:
        d_model: width; embedding_std: null for ``1 / sqrt(d_model)``.
    Source: Glorot & Bengio 2010, equation 16; embeddings as in Vaswani et al. 2017.
    """

    uniform = True

    def __init__(self, *, d_model: int, embedding_std: float | None = None) -> None:
        self.embedding_std = d_model**-0.5 if embedding_std is None else embedding_std

    def std(self, param: Param) -> float:
        if param.role in ("embedding", "position"):
            return self.embedding_std
        return math.sqrt(2 / sum(param.shape))


@INITS.register("fan_in")
class FanInInit(Init):
    """Matrices ``N(0, 1 / fan_in)``, which keeps the size of what they map; embeddings ``N(0, embedding_std^2)``.

    Args:
        d_model: width; embedding_std: of embeddings and positions, null for ``1 / sqrt(d_model)``.
    Source: LeCun et al. 1998 (Efficient BackProp), section 4.6.
    """

    def __init__(self, *, d_model: int, embedding_std: float | None = None) -> None:
        self.embedding_std = d_model**-0.5 if embedding_std is None else embedding_std

    def std(self, param: Param) -> float:
        return self.embedding_std if param.role in ("embedding", "position") else param.shape[1] ** -0.5


@INITS.register("zero_out")
class ZeroOutInit(FanInInit):
    """`FanInInit` with zeros in the projections that write to the residual stream: every block starts as the identity.

    Args: as FanInInit.
    Source: Zhang et al. 2019 (Fixup), arXiv:1901.09321, section 3; in transformers as in modded-nanogpt.
    """

    def std(self, param: Param) -> float:
        return 0.0 if param.role == "out" else super().std(param)


@INITS.register("small_init")
class SmallInit(Init):
    """``N(0, 2 / (5 d_model))``; projections that write to the stream ``N(0, 4 / (n_layers^2 d_model))``.

    Args:
        d_model, n_layers: width and depth.
    Source: Nguyen & Salazar 2019, arXiv:1910.05895, and Wang & Komatsuzaki 2021 for the outputs; together in GPT-NeoX,
        Black et al. 2022, arXiv:2204.06745, section 2.
    """

    def __init__(self, *, d_model: int, n_layers: int) -> None:
        self.base, self.residual = math.sqrt(2 / (5 * d_model)), 2 / (n_layers * math.sqrt(d_model))

    def std(self, param: Param) -> float:
        return self.residual if param.role == "out" else self.base


@INITS.register("deepnorm")
class DeepNormInit(Init):
    """Xavier's normal form, ``beta = (8 n_layers)^(-1/4)`` times smaller everywhere but in queries, keys and the head.

    Made for ``norm=deepnorm``.

    Args:
        d_model, n_layers: width and depth; embeddings and positions are ``N(0, 1 / d_model)``.
    Source: Wang et al. 2022, arXiv:2203.00555, for decoders.
    """

    def __init__(self, *, d_model: int, n_layers: int) -> None:
        self.embedding_std, self.beta = 1 / math.sqrt(d_model), math.pow(8 * n_layers, -0.25)

    def std(self, param: Param) -> float:
        if param.role in ("embedding", "position"):
            return self.embedding_std
        return math.sqrt(2 / sum(param.shape)) * (self.beta if param.role in ("matrix", "out") else 1)


@INITS.register("mup")
class MuPInit(FanInInit):
    """Maximal update parametrisation: what a learning rate does to the activations does not depend on the width.

    With ``m = d_model / base_width``: the blocks' matrices ``N(0, 1 / fan_in)``, learning rate ``lr / m``; embeddings,
    positions and the head ``N(0, 1 / base_width)``, ``lr``, which gains and biases have too; attention scores times
    ``1 / d_head`` for ``1 / sqrt(d_head)``, logits times ``1 / m``. AdamW's decay follows each learning rate.

    Args:
        d_model, d_head: width, and that of a head; base_width: where the learning rate was tuned, >= 1; a width with
            the same ratio of d_ff to d_model can then use it.
    Raises: ConfigError if ``base_width < 1``.
    Source: Yang et al. 2022 (Tensor Programs V), arXiv:2203.03466, table 8 and definition 4.1.
    """

    optimizers = ("adamw", "lion")

    def __init__(self, *, d_model: int, d_head: int, base_width: int = 128) -> None:
        if base_width < 1:
            raise ConfigError(f"init: base_width={base_width} must be at least 1, such as 128")
        super().__init__(d_model=d_model, embedding_std=1 / math.sqrt(base_width))
        self.attn_scale, self.logit_factor = 1 / d_head, base_width / d_model

    def std(self, param: Param) -> float:
        return self.embedding_std if param.role == "head" else super().std(param)

    def lr_factor(self, param: Param) -> float:
        return self.logit_factor if param.role in BLOCK_ROLES else 1.0


def initialise(model: nn.Module, scheme: Init, seed: int) -> None:
    """Fill every parameter of `model` in place; seed: init seed."""
    with torch.no_grad():
        for name, parameter, param in named_params(model):
            _fill(parameter, name, param, scheme, seed)


def _fill(parameter: Tensor, name: str, param: Param, scheme: Init, seed: int) -> None:
    if param.role in ("gain", "bias"):
        parameter.fill_(param.start if param.role == "gain" else 0.0)
        return
    # A generator per name: adding or removing a part never shifts the values of another.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    # Always drawn in fp32 on the CPU, whatever torch's defaults are at the moment.
    drawn: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    std = scheme.std(param)
    if scheme.uniform and param.role not in ("embedding", "position"):
        values = (torch.rand(parameter.shape, **drawn) * 2 - 1) * (std * math.sqrt(3))
    else:
        values = torch.randn(parameter.shape, **drawn) * std
    parameter.copy_(values)
