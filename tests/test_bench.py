"""What is timed against each other computes the same, and the table says what was measured."""

from __future__ import annotations

import pytest
import torch

from andrea_ablate import ops
from andrea_ablate.bench.cases import CASES
from andrea_ablate.bench.ops import bench_ops
from andrea_ablate.registry import ConfigError
from ops.checks import needs_library


@needs_library
@pytest.mark.parametrize("name", CASES)
def test_rivals_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name](2048 if "2048" in name else 256, 64, torch.float32, "cpu")
    assert case is not None
    results = {}
    with ops.using("compiled"):
        for rival, function in {"ours": case.ours, "eager": case.eager, **case.torch}.items():
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
    result = bench_ops(["rmsnorm", "swiglu"], "cpu", ["float32"], [8, 24], 64, 2, with_compile=False)
    assert [(row["op"], row["width"]) for row in result["table"]] == [
        (op, width) for op in ("rmsnorm", "swiglu") for width in (8, 24)
    ]
    for row in result["table"]:
        times = {name: time["both_s"] for name, time in row["times"].items()}
        assert set(times) == {"ours", "eager"} | ({"torch"} if row["op"] == "rmsnorm" else set())
        assert row["ratio"] == {name: time / times["ours"] for name, time in times.items() if name != "ours"}
        assert all(time > 0 for time in times.values())


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="bench ops: 'rmsnrm' is not one of .*rmsnorm"):
        bench_ops(["rmsnrm"], "cpu", ["float32"], [8], 4, 1, with_compile=False)
