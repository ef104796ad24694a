"""activation, gated and softcap against float64, torch's own functions and the contracts of torch.library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops.activation import REFERENCE_ONLY, REFERENCES, activation_reference
from andrea_ablate.ops.softcap import softcap_reference
from andrea_ablate.registry import ConfigError
from ops.checks import LOW, ODD_WIDTHS, assert_as_precise_as, layouts, needs_library

pytestmark = needs_library
KINDS = [kind for kind in REFERENCES if kind not in REFERENCE_ONLY]


def compiled(function: Callable[..., Tensor], *settings: object) -> Callable[..., Tensor]:
    def call(*tensors: Tensor | None) -> Tensor:
        with ops.using("compiled"):
            return function(*tensors, *settings)

    return call


def gated_reference(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: activation_reference(kind)(gate) * up


UNARY = {kind: (compiled(ops.activation, kind), activation_reference(kind)) for kind in KINDS}
for cap in (30.0, 0.7):
    UNARY[f"softcap {cap}"] = compiled(ops.softcap, cap), partial(softcap_reference, cap=cap)


@pytest.mark.parametrize("name", UNARY)
def test_every_function_in_float64_with_its_gradient(name: str) -> None:
    op, reference = UNARY[name]
    for shape in ((), (0,), (1,), (7, 41), (2, 3, 1025)):
        x = (4 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
        expected = x.detach().clone().requires_grad_()
        y, z = op(x), reference(expected)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-13)
        grad = torch.randn_like(z)
        torch.testing.assert_close(
            *(torch.autograd.grad(out, leaf, grad)[0] for out, leaf in ((y, x), (z, expected))), rtol=1e-12, atol=1e-13
        )
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", LOW)
def test_precision_at_odd_widths_and_sizes(name: str, dtype: torch.dtype) -> None:
    op, reference = UNARY[name]
    for width in ODD_WIDTHS:
        assert_as_precise_as(op, reference, reference, [(3 * torch.randn(7, width)).to(dtype)])
    for scale in (1e-6, 1e-2, 1.0, 30.0):
        assert_as_precise_as(op, reference, reference, [(scale * torch.randn(5000)).to(dtype)])


@pytest.mark.parametrize("name", [name for name in UNARY if name != "identity"])
def test_fp32_over_its_whole_range(name: str) -> None:
    op, reference = UNARY[name]
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.logspace(-30, 4, 100_001), -torch.logspace(-30, 4, 100_001)])
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, z = op(leaf), reference(exact)
    (dx,), (dz,) = torch.autograd.grad(y.sum(), leaf), torch.autograd.grad(z.sum(), exact)
    unit = torch.finfo(torch.float32).eps / 2
    tail = 0.1 if name.startswith("gelu") else 0.0  # GELU's tails lose digits to x^2 / 2
    assert ((y - z).abs() <= 6 * unit * (z.abs() + tail) + 1e-36).all()
    assert ((dx - dz).abs() <= 4 * unit * (dz.abs() + 0.5)).all()


@pytest.mark.parametrize("name", UNARY)
def test_infinities_and_nan_as_in_torch(name: str) -> None:
    op, reference = UNARY[name]
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e3, -1e3, 1e18, -1e18, 1e-40, -1e-40])
    for grad in (1.0, inf, nan):
        results = []
        for function in (op, reference):
            x = values.repeat(5).requires_grad_()  # within a vector and after the last whole one
            y = function(x)
            results.append((y, torch.autograd.grad(y, x, torch.full_like(x, grad))[0]))
        torch.testing.assert_close(results[0][0], results[1][0], equal_nan=True)
        if grad == 1 or "relu" in name:  # elsewhere inf * 0 depends on how a derivative is factored
            torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_the_product_in_float64_with_its_gradients(kind: str) -> None:
    op = compiled(ops.gated, kind)
    for needs in ((True, True), (True, False), (False, True)):
        gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=need) for need in needs)
        assert torch.autograd.gradcheck(op, (gate, up))
    both = torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compiled(ops.gated)(x, None, kind), (both,))
    gate, up = torch.randn(2, 3, 1030, dtype=torch.float64).chunk(2, -1)
    torch.testing.assert_close(op(gate, up), gated_reference(kind)(gate, up), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW)
def test_gated_precision_at_odd_widths(kind: str, dtype: torch.dtype) -> None:
    op, reference = compiled(ops.gated, kind), gated_reference(kind)
    for width in ODD_WIDTHS:
        gate, up = (2 * torch.randn(7, width)).to(dtype), torch.randn(7, width).to(dtype)
        assert_as_precise_as(op, reference, reference, [gate, up])


def test_halves_of_one_matrix_are_read_in_place() -> None:
    for shape in ((6, 20), (2, 3, 66), (1, 1, 8), (5, 1026), (0, 8), (3, 0)):
        x, grad = torch.randn(shape), torch.randn(*shape[:-1], shape[-1] // 2)
        packed = [half.contiguous().requires_grad_() for half in x.chunk(2, -1)]
        y = compiled(ops.gated, "silu")(*packed)
        expected = torch.cat(torch.autograd.grad(y, packed, grad), -1)
        for call in (
            lambda x: compiled(ops.gated, "silu")(*x.chunk(2, -1)),
            lambda x: compiled(ops.gated, "silu")(x, None),
        ):
            leaf = x.clone().requires_grad_()
            z = call(leaf)
            assert z.is_contiguous() and torch.equal(y, z)
            assert torch.equal(torch.autograd.grad(z, leaf, grad)[0], expected)


def test_memory_that_is_not_packed_gives_the_same_numbers() -> None:
    x, up = torch.randn(6, 10), torch.randn(6, 10)
    functions = {name: op for name, (op, _) in UNARY.items()}
    functions["gated"] = lambda x: compiled(ops.gated, "silu")(x, up)
    views = {**layouts(x), "expanded": x[:1].expand(6, 10), "batched": x.view(2, 3, 10).transpose(0, 1)}
    for name, op in functions.items():
        for layout, strided in views.items():
            if name == "gated" and strided.dim() == 3:
                continue
            leaves = [t.detach().requires_grad_() for t in (strided, strided.contiguous())]
            y, z = map(op, leaves)
            assert torch.equal(y, z), (name, layout)
            one = torch.ones(()).expand_as(y)  # an expanded gradient
            grads = torch.autograd.grad(y, leaves[0], one)[0], torch.autograd.grad(z, leaves[1], one.contiguous())[0]
            assert torch.equal(*grads), (name, layout)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, up = torch.randn(2, 300, 1000)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(compiled(ops.gated, "gelu")(x, up))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    x, up = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for call in (
        lambda: ops.activation(x, "gelu"),
        lambda: ops.softcap(x, 30.0),
        lambda: ops.gated(x, up, "silu"),
    ):
        kept: list[Tensor] = []

        def keep(t: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), ops.using("compiled"):
            call()
        assert {t.data_ptr() for t in kept} <= {x.data_ptr(), up.data_ptr()} and kept


@pytest.mark.parametrize("kind", REFERENCE_ONLY)
def test_a_kind_without_a_kernel_takes_the_reference_and_the_record_says_so(kind: str) -> None:
    x, up = torch.randn(2, 3, 5)
    with ops.using("compiled") as taken:
        assert torch.equal(ops.activation(x, kind), activation_reference(kind)(x))
        assert torch.equal(ops.gated(x, up, kind), activation_reference(kind)(x) * up)
        assert taken == {"activation": "reference", "gated": "reference"}
    with pytest.raises(RuntimeError, match=f"kind '{kind}' is not one of"):
        torch.ops.andrea_ablate.activation(x, kind)


def test_what_is_not_supported_is_named() -> None:
    with pytest.raises(ConfigError, match="activation='gelo' is not one of identity, relu, .*gelu"):
        ops.activation(torch.ones(3), "gelo")
    with pytest.raises(ConfigError, match="cap=0"):
        ops.softcap(torch.ones(3), 0)
    with pytest.raises(RuntimeError, match="gated: kind 'tanh' is not one of identity"):
        torch.ops.andrea_ablate.gated(torch.ones(3), torch.ones(3), "tanh")
    with pytest.raises(RuntimeError, match=r"softcap: cap is -1.*expected a finite number above 0"):
        torch.ops.andrea_ablate.softcap(torch.ones(3), -1.0)
    with pytest.raises(RuntimeError, match="activation: dtype .* is not one of float32, float64, bfloat16, float16"):
        torch.ops.andrea_ablate.activation(torch.ones(3, dtype=torch.int64), "relu")
    for up in (torch.ones(2, 3), torch.ones(2, 4).bfloat16()):
        with pytest.raises(RuntimeError, match=r"gated: up has shape .*and x \(2, 4\); expected the same shape"):
            compiled(ops.gated, "silu")(torch.ones(2, 4), up)
    with pytest.raises(RuntimeError, match=r"gated: gate has shape \(2, 3\); without up .* must be even"):
        compiled(ops.gated)(torch.ones(2, 3), None, "silu")


@pytest.mark.slow  # opcheck imports and traces much
@pytest.mark.parametrize("dtype", LOW)
def test_contracts_of_torch_library(dtype: torch.dtype) -> None:
    library = torch.ops.andrea_ablate
    x = torch.randn(6, 3, dtype=dtype).t().detach().requires_grad_()
    torch.library.opcheck(library.activation.default, (x, "gelu"))
    torch.library.opcheck(library.softcap.default, (x, 30.0))
    torch.library.opcheck(library.gated.default, (x, None, "silu"))
    for gate in (torch.randn(3, 6), torch.randn(3, 12)[:, 6:], torch.randn(0, 6)):
        gate = gate.to(dtype).detach().requires_grad_()
        torch.library.opcheck(library.gated.default, (gate, torch.randn_like(gate).requires_grad_(), "silu"))
