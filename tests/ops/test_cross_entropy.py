"""linear_cross_entropy against float64 NumPy, torch's own kernels, the model's loss, the contracts of torch.library."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.loss import IGNORE
from andrea_ablate.ops import cross_entropy
from andrea_ablate.ops.cross_entropy import chunk_rows, linear_cross_entropy_reference
from ops.checks import LOW, error, layouts, needs_library

pytestmark = needs_library
OPTIONS = [{"softcap": cap, "z_weight": z} for cap, z in itertools.product((0.0, 2.0), (0.0, 0.1))]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"cap{o['softcap']}-z{o['z_weight']}")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocab, device: 3)


def op(x: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor | None = None, **options: float):
    with ops.using("compiled"):
        return ops.linear_cross_entropy(x, weight, target, token_weight, **options)


def draw(n: int, width: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + width + vocab)
    x, weight = (torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype) for rows in (n, vocab))
    target = torch.randint(0, vocab, (n,), generator=generator)
    target[1::4] = IGNORE
    return x, weight, target, torch.rand(n, generator=generator, dtype=torch.float64).to(dtype)


def oracle(x: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor | None, softcap: float, z_weight: float):
    """Sums and their gradients in logits, row by row, in NumPy."""
    nll = penalty = 0.0
    for r, t in enumerate(target.tolist()):
        if t == IGNORE:
            continue
        s = weight.double().numpy() @ x[r].double().numpy()
        s = softcap * np.tanh(s / softcap) if softcap else s
        w, z = 1.0 if token_weight is None else token_weight[r].item(), np.logaddexp.reduce(s)
        nll, penalty = nll + w * (z - s[t]), penalty + w * z_weight * z**2
    return nll, penalty


@each_option
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_the_formula_in_float64(options: dict[str, float], weighted: bool, small_chunks: None) -> None:
    for n, width, vocab in ((0, 4, 5), (1, 1, 1), (7, 5, 33), (12, 3, 257)):
        x, weight, target, w = draw(n, width, vocab)
        given = w if weighted else None
        got = [t.item() for t in op(x, weight, target, given, **options)]
        assert got == pytest.approx(oracle(x, weight, target, given, **options), rel=1e-12)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@each_option
@pytest.mark.parametrize("which", [c for n in (1, 2, 3) for c in itertools.combinations((0, 1, 2), n)])
def test_gradients_are_those_of_finite_differences(
    options: dict[str, float], which: tuple[int, ...], small_chunks: None
) -> None:
    x, weight, target, w = draw(4, 2, 3)
    for weighted in (True, False):
        inputs = [x, weight, w] if weighted else [x, weight]
        inputs = [t.detach().requires_grad_(i in which) for i, t in enumerate(inputs)]
        if not any(t.requires_grad for t in inputs):
            continue

        def two(x: Tensor, weight: Tensor, w: Tensor | None = None) -> tuple[Tensor, ...]:
            return op(x, weight, target, w, **options)

        # Each sum alone: gradients that differ, so computed anew. Then both with one gradient: those kept, and on the
        # second backward of the same graph computed anew, equal but for the last bits.
        assert torch.autograd.gradcheck(two, inputs, nondet_tol=1e-12)
        assert torch.autograd.gradcheck(lambda *inputs: 0.3 * sum(two(*inputs)), inputs, nondet_tol=1e-12)


@pytest.mark.parametrize("dtype", LOW)
@each_option
def test_precision_at_odd_widths(
    options: dict[str, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocab, device: 50)
    for product in (torch.float32, dtype):  # as where the machine multiplies in this dtype, and where not
        monkeypatch.setattr(cross_entropy, "_product_dtype", lambda x, p=product: torch.promote_types(p, x.dtype))
        for n, width, vocab in ((7, 5, 3), (120, 33, 127), (31, 16, 999)):
            x, weight, target, w = draw(n, width, vocab, dtype)
            weight = weight * width**-0.5 * 2
            inputs = [x, weight, w.float()]

            def ours(x: Tensor, weight: Tensor, w: Tensor, target: Tensor = target) -> Tensor:
                return sum(op(x, weight, target, w, **options))

            def theirs(x: Tensor, weight: Tensor, w: Tensor, target: Tensor = target) -> Tensor:
                return sum(linear_cross_entropy_reference(x, weight, target, w, **options))

            true, eager, got = (
                [loss.detach(), *torch.autograd.grad(loss, leaves)]
                for function, given in ((theirs, [t.double() for t in inputs]), (theirs, inputs), (ours, inputs))
                for leaves in [[t.clone().requires_grad_() for t in given]]
                for loss in [function(*leaves)]
            )
            # The error of one sum is a matter of luck: its rounding and a random walk over n rows are granted.
            granted = torch.finfo(got[0].dtype).eps + torch.finfo(dtype).eps / n**0.5
            assert error(got[0], true[0]) <= 2 * error(eager[0], true[0]) + granted * true[0].item()
            for g, e, t in zip(got[1:], eager[1:], true[1:], strict=True):
                assert g.dtype == e.dtype
                assert error(g, t) <= 2 * error(e, t) + 0.5 * torch.finfo(g.dtype).eps * t.abs().max().item()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_what_an_ignored_row_holds_does_not_matter(value: float, small_chunks: None) -> None:
    x, weight, target, _ = draw(9, 4, 6, torch.float32)
    results = []
    for fill in (0.0, value):
        leaves = [x.clone().masked_fill_((target == IGNORE)[:, None], fill), weight.clone()]
        leaves = [t.requires_grad_() for t in leaves]
        sums = op(*leaves, target, softcap=5.0, z_weight=0.1)
        results.append([*sums, *torch.autograd.grad(sum(sums), leaves)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert (results[1][2][target == IGNORE] == 0).all()


def test_batches_without_targets_rows_or_width_are_zero_with_zero_gradients() -> None:
    for n, width, ignored in ((4, 3, True), (0, 3, True), (4, 0, False)):
        x, weight = (torch.ones(rows, width, requires_grad=True) for rows in (n, 5))
        target = torch.full((n,), IGNORE if ignored else 2)
        sums = op(x, weight, target, z_weight=0.1)
        sum(sums).backward()
        assert sums[0].item() == pytest.approx(0.0 if ignored else n * np.log(5))
        assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
        assert not x.grad.any() and not weight.grad.any()


def test_rows_that_hold_infinities_have_the_loss_of_torch() -> None:
    weight = torch.eye(4)
    for row in ([torch.inf, 0.0, 0.0, 0.0], [-torch.inf] * 4, [torch.nan, 0.0, 0.0, 0.0]):
        logits = torch.tensor([row])
        got = torch.empty(1), torch.empty(1)
        library_op = torch.ops.andrea_ablate.cross_entropy
        library_op(logits.clone(), torch.tensor([1]), None, None, None, 0.0, 0.0, False, *got)
        torch.testing.assert_close(got[0][0], F.cross_entropy(logits, torch.tensor([1])), equal_nan=True)
    assert op(torch.full((1, 4), -1e30), weight, torch.tensor([1]))[0].isfinite()


def test_memory_that_is_not_packed_gives_the_same_numbers(small_chunks: None) -> None:
    x, weight, target, _ = draw(10, 4, 8)
    padded = torch.cat([weight, torch.full((3, 4), torch.nan)])
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(sum(op(*leaves, target)), leaves)
    for name, a in {"packed": x, **layouts(x)}.items():
        for other, b in {"slice": padded[:8], **layouts(weight)}.items():
            leaves = [t.detach().requires_grad_() for t in (a, b)]
            got = torch.autograd.grad(sum(op(*leaves, target.repeat_interleave(2)[::2])), leaves)
            for g, e in zip(got, expected, strict=True):
                torch.testing.assert_close(g, e, msg=f"x {name}, weight {other}")


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_the_kernel_takes_rows_at_any_distance_and_alignment(dtype: torch.dtype) -> None:
    for vocab in (1, 5, 37, 1000, 4099):
        logits, target = (torch.randn(4, vocab) * 3).to(dtype), torch.tensor([0, vocab - 1, IGNORE, vocab // 2])
        results = []
        for distance, offset in ((vocab + -vocab % 8, 0), (vocab, 0), (vocab + 1, 1)):
            memory = torch.full((4 * distance + offset,), 7.0, dtype=dtype)
            rows = memory[offset:].view(4, distance)[:, :vocab]
            rows.copy_(logits)
            nll, z = (torch.empty(4, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
            torch.ops.andrea_ablate.cross_entropy(rows, target, None, None, None, 5.0, 0.1, True, nll, z)
            assert (memory == 7.0).sum() >= 4 * (distance - vocab) + offset  # nothing beside the rows is written
            results.append((rows, nll, z))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps + 1e-14, atol=2e-6)
        s = 5 * torch.tanh(logits.double() / 5)
        expected = s.logsumexp(-1) * (target != IGNORE)
        torch.testing.assert_close(results[0][2].double(), expected, rtol=1e-6, atol=1e-6)


def test_a_second_backward_of_one_graph_and_other_gradients_are_right(small_chunks: None) -> None:
    x, weight, target, _ = draw(10, 4, 8)
    leaves = [t.requires_grad_() for t in (x, weight)]
    nll, penalty = op(*leaves, target, z_weight=0.1)
    expected_nll, expected_penalty = linear_cross_entropy_reference(*leaves, target, None, softcap=0.0, z_weight=0.1)
    for a, b in ((2.0, 2.0), (3.0, 3.0), (0.0, 1.0), (5.0, 5.0)):
        got = torch.autograd.grad(a * nll + b * penalty, leaves, retain_graph=True)
        kept = [g.clone() for g in got]
        want = torch.autograd.grad(a * expected_nll + b * expected_penalty, leaves, retain_graph=True)
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e)
        op(*leaves, target)[0].backward()  # leaves what was handed out as it is
        assert all(torch.equal(g, k) for g, k in zip(got, kept, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(op(*leaves, target)[0], leaves, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_multiplies_in_its_dtype_and_keeps_those_of_the_gradients(dtype: torch.dtype) -> None:
    x, weight, target, _ = draw(40, 16, 30, torch.float32)
    leaves = [t.requires_grad_() for t in (x.to(dtype), weight)]
    with torch.autocast("cpu", torch.bfloat16):
        got = op(*leaves, target)[0]
    exact = op(x.bfloat16().double(), weight.double(), target)[0]
    torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=0)
    dx, dweight = torch.autograd.grad(got, leaves)
    assert got.dtype == torch.float32 and dx.dtype == dtype and dweight.dtype == torch.float32


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    n, vocab = 9000, 600
    logits = torch.randn(n, vocab)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        rows, nll, z = logits.clone(), torch.empty(n), torch.empty(n)
        target = torch.arange(n) % vocab
        torch.ops.andrea_ablate.cross_entropy(rows, target, None, None, None, 0.0, 0.1, True, nll, z)
        results.append((rows, nll, z, cross_entropy._total(nll)))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_chunks_have_a_bounded_number_of_logits() -> None:
    for vocab, rows in ((257, 8160), (8449, 256), (50304, 256), (1, 8192), (0, 8192)):
        assert chunk_rows(vocab, torch.device("cpu")) == rows


def test_errors_name_what_was_given() -> None:
    x, weight, target, w = draw(4, 3, 5, torch.float32)
    for bad in (5, -1, -101):
        target[2] = bad
        with pytest.raises(RuntimeError, match=rf"target {bad} is neither in \[0, 5\) nor -100"):
            op(x, weight, target)
    target[2] = 0
    with pytest.raises(ValueError, match=r"x \(4, 3\) and weight \(5, 2\) are not"):
        op(x, weight[:, :2], target)
    with pytest.raises(ValueError, match=r"target is torch.int32 \(4,\), expected int64 \(4,\)"):
        op(x, weight, target.int())
    with pytest.raises(ValueError, match=r"token_weight \(3,\) is not \(4,\)"):
        op(x, weight, target, w[:3])
    with pytest.raises(TypeError, match="x is torch.int64"):
        op(x.long(), weight, target)


@pytest.mark.slow  # opcheck imports and traces much
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contracts_of_torch_library(dtype: torch.dtype) -> None:
    x, weight, target, w = draw(7, 5, 11, dtype)
    for leaf in (x, weight, w):
        leaf.requires_grad_()
    forward = torch.ops.andrea_ablate.linear_cross_entropy.default
    for given in (None, w):
        torch.library.opcheck(forward, (x, weight, target, given, 2.0, 0.1, False, False))
        # Gradients that are kept are scaled in place by backward: no caller may look at them, as the last check does.
        kept = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(forward, (x, weight, target, given, 2.0, 0.1, True, True), test_utils=kept)
    x, weight, w, one = x.detach(), weight.detach(), w.detach(), torch.ones(())
    backward = torch.ops.andrea_ablate.linear_cross_entropy_backward.default
    for dx, dw in itertools.product((None, x.clone()), (None, weight.float())):
        torch.library.opcheck(backward, (one, 2 * one, x, weight, target, w, 0.0, 0.1, dx, dw, False))
    rows = torch.zeros(7), torch.zeros(7)
    inputs = (torch.randn(7, 16).to(dtype)[:, :11], target, w, one, one, 2.0, 0.1, True, *rows)
    torch.library.opcheck(torch.ops.andrea_ablate.cross_entropy.default, inputs)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("same", [True, False])
def test_compiled_by_torch_it_gives_the_same_gradients(same: bool) -> None:
    x, weight, target, _ = draw(7, 5, 11, torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight)]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        nll, penalty = ops.linear_cross_entropy(2 * x, weight, target, z_weight=0.1)
        return nll + penalty if same else nll - penalty

    with ops.using("compiled"):
        fast = torch.compile(loss, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            got, want = (torch.autograd.grad(0.3 * f(*leaves), leaves) for f in (fast, loss))
            for g, e in zip(got, want, strict=True):
                torch.testing.assert_close(g, e)


MEMORY = """
import re, torch, torch.nn.functional as F
from pathlib import Path
from andrea_ablate import ops
torch.set_num_threads(1)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
def step(loss_of, n, vocab=8449, width=64):
    x, weight = torch.randn(n, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    target = torch.randint(0, vocab, (n,))
    before = peak()
    (loss_of(x, weight, target) * 0.5).backward()
    return peak() - before
def ours(*inputs):
    return sum(ops.linear_cross_entropy(*inputs))
def plain(x, weight, target):
    return F.cross_entropy(F.linear(x, weight), target, reduction="sum")
for loss_of in (ours, plain):
    step(loss_of, 4)  # what is allocated once
    print(step(loss_of, 2048))
"""


@pytest.mark.slow  # measures a Python of its own
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell the peak of a process")
def test_peak_memory_is_an_eighth_of_that_with_all_logits() -> None:
    """MiB above the inputs, gradients included; 64 wide: the gradient of the weight is small beside the logits."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    ours, plain = map(float, done.stdout.split())
    assert 1 < ours < plain / 8, (ours, plain)
