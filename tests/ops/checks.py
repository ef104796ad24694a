"""What every compiled op is held against: precision, memory layouts, contracts. Each check names what broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from andrea_ablate.ops.library import loaded

needs_library = pytest.mark.skipif(loaded().path is None, reason=f"the compiled library is {loaded().reason}")
LOW = (torch.float32, torch.bfloat16, torch.float16)
ODD_WIDTHS = (1, 2, 3, 5, 7, 31, 33, 46, 127, 3420)

Op = Callable[..., Tensor | tuple[Tensor, ...]]


def _tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def run(op: Op, inputs: Sequence[Tensor], rounded_to: torch.dtype | None = None) -> list[Tensor]:
    """Outputs of `op` and the gradients of its floating inputs for fixed random gradients of its outputs.

    Args:
        rounded_to: dtype that the gradients of the outputs are rounded to first; None for that of the outputs.
    """
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outputs = _tuple(op(*leaves))
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    grads = [g.to(rounded_to or o.dtype).to(o) for g, o in zip(drawn, outputs, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, wanted, grads, materialize_grads=True))


def error(got: Tensor, true: Tensor) -> float:
    """Root mean square distance; infinite where only one of the two is finite."""
    if got.numel() == 0:
        return 0.0
    return (got.double() - true).square().mean().sqrt().nan_to_num(nan=torch.inf).item()


def assert_as_precise_as(op: Op, eager: Op, oracle: Op, inputs: Sequence[Tensor], factor: float = 2.0) -> None:
    """Every output and gradient of `op` is at most `factor` times as far from float64 as that of torch's own ops.

    The oracle sees the inputs as they are after rounding. Half a unit in the last place of the largest value is
    granted, because eager may be exact, and more where few values make the mean: either side may be lucky in them.
    """
    true = run(oracle, [t.double() if t.is_floating_point() else t for t in inputs], rounded_to=inputs[0].dtype)
    for i, (ours, theirs, exact) in enumerate(zip(run(op, inputs), run(eager, inputs), true, strict=True)):
        assert ours.shape == exact.shape and ours.dtype == theirs.dtype, (i, ours.shape, ours.dtype, theirs.dtype)
        unit = torch.finfo(ours.dtype).eps * (max(1.0, exact.abs().max().item()) if exact.numel() else 0.0)
        granted = (0.5 + 2 / max(1, exact.numel()) ** 0.5) * unit
        assert error(ours, exact) <= factor * error(theirs, exact) + granted, (i, ours.dtype, tuple(exact.shape))


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The values of a matrix x in memory that is not packed: strided, transposed, sliced, expanded, one element in."""
    rows, width = x.shape
    wide = x.new_zeros(rows, 2 * width)
    wide[:, ::2] = x
    tall = x.new_zeros(2 * rows, width)
    tall[::2] = x
    inner = x.new_zeros(rows * width + 1)
    inner[1:] = x.flatten()
    return {
        "transposed": x.t().contiguous().t(),
        "every second column": wide[:, ::2],
        "every second row": tall[::2],
        "one element in": inner[1:].view(rows, width),
    }
