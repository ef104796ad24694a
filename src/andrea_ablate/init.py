"""Initial values. Each parameter's values depend on (seed, its name, its shape, the scheme) and on nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from andrea_ablate.parameters import Param, Role, named_roles
from andrea_ablate.registry import Registry


class Init(Protocol):
    """Gives the standard deviation of a parameter that is neither a gain (1) nor a bias (0), and its distribution."""

    uniform: bool

    def std(self, param: Param) -> float: ...


INITS: Registry[Init] = Registry("init")


@INITS.register("gpt2")
class GPT2Init:
    """``N(0, std)``; projections that write to the residual stream ``N(0, std / sqrt(2 n_layers))``.

    Args:
        n_layers: depth of the stack; std: base standard deviation.
    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """

    uniform = False

    def __init__(self, *, n_layers: int, std: float = 0.02) -> None:
        self.base, self.residual = std, std / math.sqrt(2 * n_layers)

    def std(self, param: Param) -> float:
        return self.residual if param.role == "out" else self.base


@INITS.register("xavier")
class XavierInit:
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


def initialise(model: nn.Module, node: Mapping[str, Any], seed: int, **derived: Any) -> None:
    """Fill every parameter of `model` in place with the scheme named by ``node['type']``.

    Args:
        seed: init seed; derived: sizes a scheme may ask for (n_layers, d_model).
    """
    scheme = INITS.build(node, **derived)
    with torch.no_grad():
        for name, parameter, role in named_roles(model):
            _fill(parameter, name, role, scheme, seed)


def _fill(parameter: Tensor, name: str, role: Role, scheme: Init, seed: int) -> None:
    if role in ("gain", "bias"):
        parameter.fill_(1.0 if role == "gain" else 0.0)
        return
    # A generator per name: adding or removing a part never shifts the values of another.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    # Always drawn in fp32 on the CPU, whatever torch's defaults are at the moment.
    drawn: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    std = scheme.std(Param(tuple(parameter.shape), role))
    if scheme.uniform and role not in ("embedding", "position"):
        values = (torch.rand(parameter.shape, **drawn) * 2 - 1) * (std * math.sqrt(3))
    else:
        values = torch.randn(parameter.shape, **drawn) * std
    parameter.copy_(values)
