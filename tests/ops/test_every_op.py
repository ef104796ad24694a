"""What every compiled op has to hold in each of its forms: a new one adds an entry to every.py.

Values and gradients against an independent oracle are in the file of the op.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from andrea_ablate import ops
from gpu.cases import Case, inputs
from ops.checks import LOW, error, layouts, needs_library, run
from ops.every import FORMS

pytestmark = needs_library
each_form = pytest.mark.parametrize("name", FORMS)


@pytest.fixture(autouse=True)
def _compiled():
    with ops.using("compiled") as taken:
        yield
    assert set(taken.values()) <= {"compiled"}, taken


def gradients(case: Case, given: Sequence[Tensor], grad: float | None = 1.0) -> list[Tensor]:
    """Outputs and gradients of the inputs as they lie in memory, for an expanded gradient of every output."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
    out = case.op(*leaves)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    wanted = [t for t in leaves if t.requires_grad]
    ones = [torch.full((), grad, dtype=o.dtype).expand_as(o) for o in outputs]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, wanted, ones, materialize_grads=True))


@pytest.mark.slow  # thousands of calls
@pytest.mark.parametrize("dtype", LOW)
@each_form
def test_error_is_at_most_twice_torchs_own(name: str, dtype: torch.dtype) -> None:
    """Nothing is granted: the errors of many draws are taken together, so that luck in a sum of few is evened out."""
    case = FORMS[name]
    for rows, width in itertools.product(
        (7, 64), {128, 127, 33, *case.widths} & {*case.widths, 128} - {1, 3, 5, 20000}
    ):
        ours, theirs = [0.0] * 9, [0.0] * 9
        for _ in range(32 if "cross_entropy" in name else 8 if rows == 7 else 4):  # a loss is one number a draw
            given = inputs(case, rows, width, dtype, "cpu")
            exact = run(case.reference, [t.double() if t.is_floating_point() else t for t in given], rounded_to=dtype)
            for i, (a, b, c) in enumerate(zip(run(case.op, given), run(case.reference, given), exact, strict=True)):
                ours[i] += error(a, c) ** 2
                theirs[i] += error(b, c) ** 2
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a**0.5 <= 2 * b**0.5, (i, rows, width, a**0.5, b**0.5)


@pytest.mark.parametrize("dtype", LOW)
@each_form
def test_where_the_inputs_lie_in_memory_does_not_matter(name: str, dtype: torch.dtype) -> None:
    case = FORMS[name]
    given = inputs(case, 6, 64, dtype, "cpu")
    expected = gradients(case, given)
    for which, given_one in enumerate(given):
        if given_one.dim() == 2:
            for layout, strided in layouts(given_one).items():
                got = gradients(case, [*given[:which], strided, *given[which + 1 :]])
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, msg=f"input {which} {layout}")
        else:  # parameters and targets
            apart = given_one.repeat_interleave(2)[::2]
            for a, b in zip(gradients(case, [*given[:which], apart, *given[which + 1 :]]), expected, strict=True):
                torch.testing.assert_close(a, b, msg=f"input {which}")
    expanded = given[0][:1].expand_as(given[0])
    for a, b in zip(*(gradients(case, [x, *given[1:]]) for x in (expanded, expanded.contiguous())), strict=True):
        torch.testing.assert_close(a, b)


@each_form
def test_no_rows_and_then_an_ordinary_call(name: str) -> None:
    case = FORMS[name]
    for value in gradients(case, inputs(case, 0, 64, torch.float32, "cpu")):
        assert value.numel() == 0 or not value.any()
    assert all(value.isfinite().all() for value in gradients(case, inputs(case, 3, 64, torch.float32, "cpu")))


@each_form
def test_low_precision_goes_in_and_out_with_parameters_of_any_dtype(name: str) -> None:
    case = FORMS[name]
    given = inputs(case, 4, 64, torch.bfloat16, "cpu")
    for parameters in (torch.float32, torch.bfloat16):
        mixed = [t.to(parameters) if t.dim() == 1 and t.is_floating_point() else t for t in given]
        with torch.autocast("cpu", torch.bfloat16):
            inside = gradients(case, mixed)
        outside = gradients(case, mixed)
        for a, b in zip(inside, outside, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        for gradient, t in zip(outside[-sum(t.is_floating_point() for t in mixed) :], mixed, strict=False):
            assert gradient.dtype == t.dtype


@each_form
def test_gradients_of_parameters_are_summed_in_fp32_into_what_is_there(name: str) -> None:
    case = FORMS[name]
    given = inputs(case, 4096 if "attention" not in name else 512, 64, torch.bfloat16, "cpu")
    exact = [t.double() if t.is_floating_point() else t for t in given]
    leaves = [[t.detach().requires_grad_(t.dim() == 1 and t.is_floating_point()) for t in ts] for ts in (given, exact)]
    parameters = [[t for t in ts if t.requires_grad] for ts in leaves]
    if not parameters[0] or "token" in name:
        return
    for times in (1, 2):
        for function, ts in ((case.op, leaves[0]), (case.reference, leaves[1])):
            out = function(*ts)
            (out if isinstance(out, Tensor) else sum(o.sum() for o in out)).sum().backward()
        for ours, true in zip(*parameters, strict=True):
            assert true.grad.any() and error(ours.grad, true.grad) < 0.01 * true.grad.square().mean().sqrt(), times


@each_form
def test_gradients_are_those_of_finite_differences_for_any_inputs_that_need_them(name: str) -> None:
    case = FORMS[name]
    given = [t.double() if t.is_floating_point() else t for t in inputs(case, 3, 4, torch.float32, "cpu")]
    floating = [i for i, t in enumerate(given) if t.is_floating_point()]
    for number in range(1, len(floating) + 1):
        for which in itertools.combinations(floating, number):
            leaves = [t.detach().requires_grad_(i in which) for i, t in enumerate(given)]
            assert torch.autograd.gradcheck(case.op, leaves, nondet_tol=1e-12, fast_mode=True), which


class Recorded(TorchDispatchMode):
    """The compiled operations that run within, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "andrea_ablate":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow  # opcheck traces much
@pytest.mark.parametrize("dtype", LOW)
@each_form
def test_schemas_and_fake_kernels_say_what_forward_and_backward_do(name: str, dtype: torch.dtype) -> None:
    case = FORMS[name]
    first, *rest = inputs(case, 6, 8, dtype, "cpu")
    for x in (first, *layouts(first).values(), first[:0]):
        others = [t if len(x) else t[:0] if t.dim() == 2 or not t.is_floating_point() else t for t in rest]
        if len(x) == 0:
            others = inputs(case, 0, 8, dtype, "cpu")[1:]
        with Recorded() as recorded:
            gradients(case, [x, *others])
        assert recorded.calls
        for func, args in recorded.calls:
            torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow  # traces much
@each_form
def test_the_compiler_makes_one_graph_of_any_length(name: str) -> None:
    case = FORMS[name]
    torch.compiler.reset()
    fast = case._replace(op=torch.compile(case.op, backend="aot_eager", fullgraph=True))
    for rows in (5, 9):
        given = inputs(case, rows, 32, torch.float32, "cpu")
        for a, b in zip(gradients(fast, given), gradients(case, given), strict=True):
            torch.testing.assert_close(a, b)
