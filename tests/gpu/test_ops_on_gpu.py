"""Each op on a CUDA device: precision, streams, devices, determinism, contracts. `make gpu-check` runs these."""

from __future__ import annotations

import pytest
import torch

from andrea_ablate import ops
from gpu.cases import CASES, Case, inputs
from ops.checks import LOW, assert_as_precise_as, layouts, needs_library, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_library,
]


@pytest.fixture(autouse=True)
def _compiled():
    torch.manual_seed(1)
    with ops.using("compiled") as taken:
        yield
    assert all(path == "compiled" for path in taken.values()), taken


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize("dtype", LOW)
def test_precision(case: Case, dtype: torch.dtype) -> None:
    for width in case.widths:
        for rows in (7, 1000) if width < 1000 else (7,):
            assert_as_precise_as(case.op, case.reference, case.reference, inputs(case, rows, width, dtype))


def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    leaves = [t.double().requires_grad_() if t.is_floating_point() else t for t in inputs(case, 3, 8, torch.float32)]
    assert torch.autograd.gradcheck(case.op, leaves, nondet_tol=1e-12)


def test_memory_that_is_not_packed_or_not_aligned(case: Case) -> None:
    first, *rest = inputs(case, 6, 64, torch.float32)
    expected = run(case.op, [first, *rest])
    for name, strided in layouts(first).items():
        for got, want in zip(run(case.op, [strided, *rest]), expected, strict=True):
            torch.testing.assert_close(got, want, msg=name)
    # A clone is aligned, so these go to the op as they are.
    shifted = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t) for t in (first, *rest)]
    for got, want in zip(_outputs(case, shifted), _outputs(case, [first, *rest]), strict=True):
        torch.testing.assert_close(got, want)


def _outputs(case: Case, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = case.op(*given)
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def test_no_rows(case: Case) -> None:
    for value in run(case.op, inputs(case, 0, 64, torch.float32)):
        assert value.numel() == 0 or not value.any()


def test_the_same_bits_every_time(case: Case) -> None:
    given = inputs(case, 5000, 768, torch.bfloat16)
    first = run(case.op, given)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case.op, given), strict=True))


def test_a_side_stream_is_the_stream_that_runs(case: Case) -> None:
    given = inputs(case, 4096, 1024, torch.float32)
    expected = _outputs(case, given)
    late = [torch.zeros_like(t) if t.is_floating_point() else t.clone() for t in given]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # on any other stream the op would read the zeros
        for to, value in zip(late, given, strict=True):
            to.copy_(value)
        got = _outputs(case, late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_graph_captures_the_op(case: Case) -> None:
    given = inputs(case, 64, 768, torch.float32)
    _outputs(case, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _outputs(case, given)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, _outputs(case, given), strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_tensor_of_another_than_the_current_device(case: Case) -> None:
    given = inputs(case, 100, 768, torch.float32)
    there = [t.to("cuda:1") for t in given]
    for a, b in zip(run(case.op, there), run(case.op, given), strict=True):
        assert a.device.index == 1 and torch.equal(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", LOW)
def test_contracts_of_torch_library(case: Case, dtype: torch.dtype) -> None:
    called: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "andrea_ablate":
                called.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        run(case.op, inputs(case, 3, 8, dtype))
    assert called
    for func, args in called:
        leaves = tuple(
            t.detach().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t for t in args
        )
        torch.library.opcheck(
            func, args if "backward" in func.name() else leaves, test_utils=("test_schema", "test_faketensor")
        )
