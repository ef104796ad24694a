"""What is timed against each other computes the same, and the table says what was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from andrea_ablate import ops
from andrea_ablate.bench.cases import CASES
from andrea_ablate.bench.ops import bench_ops
from andrea_ablate.registry import ConfigError
from ops.checks import needs_library


@needs_library
@pytest.mark.parametrize("name", CASES)
def test_rivals_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name](2048 if "2048" in name else 256, 128, torch.float32, "cpu")
    assert case is not None
    results = {}
    with ops.using("compiled"):
        for rival, function in {"ours": case.ours, "eager": case.eager, **case.rivals}.items():
            out = function(*case.inputs)
            outputs = (out,) if isinstance(out, torch.Tensor) else out
            results[rival] = [*outputs, *torch.autograd.grad(outputs, case.wanted, case.grads[: len(outputs)])]
    for rival, values in results.items():
        for value, want in zip(values, results["eager"], strict=True):
            torch.testing.assert_close(
                value, want, rtol=2e-4, atol=2e-4, msg=lambda text, rival=rival: f"{rival}: {text}"
            )


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@needs_library
def test_the_table_holds_every_rival_at_every_width() -> None:
    result = bench_ops(["rmsnorm", "swiglu"], "cpu", ["float32"], [8, 24], 64, 2, without=["compile"])
    assert [(row["op"], row["width"]) for row in result["table"]] == [
        (op, width) for op in ("rmsnorm", "swiglu") for width in (8, 24)
    ]
    for row in result["table"]:
        times = row["seconds"]
        assert set(times) == {"ours", "eager"} | ({"torch"} if row["op"] == "rmsnorm" else set())
        for name, ratios in row["ratio"].items():
            assert ratios == {part: times[name][part] / times["ours"][part] for part in ("forward", "backward", "both")}
        assert all(seconds > 0 for parts in times.values() for seconds in parts.values())


@pytest.mark.slow  # compiles
@needs_library
def test_a_compiled_rival_is_measured_and_one_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*inputs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not on this machine")

    make = CASES["rmsnorm"]
    monkeypatch.setitem(CASES, "rmsnorm", lambda *given: make(*given)._replace(rivals={"other": fails}))
    (row,) = bench_ops(["rmsnorm"], "cpu", ["float32"], [8], 64, 2)["table"]
    assert set(row["ratio"]) == {"eager", "compile"}
    assert row["failed"] == {"other": "NotImplementedError: not on this machine"}


def test_liger_kernel_is_a_rival_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions, with their signatures in release 0.8, as torch would compute them."""
    functions = SimpleNamespace(
        liger_rms_norm=lambda X, W, eps, offset=0.0, casting_mode="llama", in_place=True: F.rms_norm(
            X, W.shape, W, eps
        ),
        liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps),
        liger_fused_add_rms_norm=lambda X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True: (
            F.rms_norm(X + R, W.shape, W, eps),
            X + R,
        ),
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_geglu=lambda a, b: F.gelu(a, approximate="tanh") * b,
        liger_relu_squared=lambda x: F.relu(x).square(),
        liger_fused_linear_cross_entropy=lambda input, weight, target, reduction="mean": F.cross_entropy(
            input @ weight.t(), target, reduction=reduction
        ),
    )
    monkeypatch.setattr("importlib.import_module", lambda name: functions)
    found = {name: make(256, 128, torch.float32, "cpu") for name, make in CASES.items() if "2048" not in name}
    rivals = {name: case for name, case in found.items() if case is not None and "liger" in case.rivals}
    assert set(rivals) == {
        *("rmsnorm", "layernorm", "add_rmsnorm", "swiglu", "geglu_tanh", "relu2"),
        *("cross_entropy_8449", "cross_entropy_50304"),
    }
    for case in rivals.values():
        torch.testing.assert_close(case.rivals["liger"](*case.inputs), case.eager(*case.inputs), rtol=1e-4, atol=1e-4)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="bench ops: 'rmsnrm' is not one of .*rmsnorm"):
        bench_ops(["rmsnrm"], "cpu", ["float32"], [8], 4, 1)
