"""Parameter tables: each module states its parameters once, by name, shape and role.

The same table builds the module, counts it without building it (accounting.py), chooses the initial values (init.py)
and sorts parameters into decayed and undecayed groups (training/optim.py), so that these four agree about a new part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn

# matrix: an inner projection · query: one that makes queries or keys · out: one that writes to the residual stream
# head: the output projection · gain: multiplies, starts at 1 · bias: adds, starts at 0
Role = Literal["matrix", "query", "out", "head", "embedding", "position", "gain", "bias"]
BLOCK_ROLES: tuple[Role, ...] = ("matrix", "query", "out")
MATMUL_ROLES: tuple[Role, ...] = (*BLOCK_ROLES, "head")


class Param(NamedTuple):
    """Shape and role of one parameter; a matrix is (features out, features in). start: where another gain starts."""

    shape: tuple[int, ...]
    role: Role
    start: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Table = Mapping[str, Param]


def declare(module: nn.Module, table: Table, optional: Iterable[str] = ()) -> None:
    """Create the parameters of `table` on `module`, without values; `init.initialise` fills them.

    Args:
        optional: names that the table may leave out; the module then has None there.
    """
    for name in optional:
        module.register_parameter(name, None)
    for name, param in table.items():
        module.register_parameter(name, nn.Parameter(torch.empty(param.shape)))
    module.declared = table  # type: ignore[assignment]


def named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Param]]:
    """Yield ``(full name, parameter, what its table says)`` for every parameter of `model`, each once."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            table: Table = module.declared
            yield (f"{prefix}.{name}" if prefix else name), parameter, table[name]


def named_roles(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Role]]:
    """Yield ``(full name, parameter, role)`` for every parameter of `model`, each once."""
    for name, parameter, param in named_params(model):
        yield name, parameter, param.role
