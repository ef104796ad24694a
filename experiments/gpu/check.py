"""On a machine with a CUDA device: build the ops, test them, time them; one JSON for the record (`make gpu-check`).

    python experiments/gpu/check.py [-o experiments/results/gpu.json]

Needs torch with CUDA, pytest, cmake, ninja, g++ and nvcc (on PATH, in CUDA_HOME or from pip), not the rest of this
package's requirements. Ends within eight minutes: what no time was left for is in the JSON as skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
LIMIT_S = 460.0
STARTED = time.monotonic()

SANITIZED = """
import torch
from andrea_ablate import ops
from gpu.cases import CASES, inputs
from ops.checks import run
with ops.using("compiled"):
    for case in CASES.values():
        for rows, width in ((0, 64), (3, 1), (5, 41), (130, 64), (7, 768), (3, 3420), (2, 8192)):
            for dtype in (torch.float32, torch.bfloat16):
                run(case.op, inputs(case, rows, width, dtype))
torch.cuda.synchronize()
"""


def left() -> float:
    return LIMIT_S - (time.monotonic() - STARTED)


def step(name: str, command: list[str], at_most: float) -> dict[str, Any]:
    """Run a command within the time left; what it ended with and the end of what it printed."""
    allowed = min(at_most, left())
    if allowed < 10:
        return {"status": "skipped: no time left"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=allowed,
        )
        status, tail = ("passed" if done.returncode == 0 else f"failed with {done.returncode}"), done.stdout[-6000:]
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        status, tail = (
            f"stopped after {allowed:.0f} s",
            (printed.decode() if isinstance(printed, bytes) else printed)[-6000:],
        )
    seconds = round(time.monotonic() - began, 1)
    print(f"{name}: {status} ({seconds} s)", flush=True)
    if status != "passed":
        print(tail, flush=True)
    return {"status": status, "seconds": seconds, "tail": tail.splitlines()[-60:]}


def device() -> dict[str, Any]:
    import torch

    from andrea_ablate.ops.build import find_nvcc

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    nvcc = find_nvcc()
    release = [line for line in said(str(nvcc), "--version").splitlines() if "release" in line] if nvcc else []
    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nvcc": release[0].split("release ")[-1] if release else None,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
        "python": platform.python_version(),
        "commit": said("git", "-C", str(ROOT), "rev-parse", "HEAD") or None,
    }


def milliseconds(call: Callable[[], object], rounds: int = 30) -> float:
    """Median time on the device, with nothing of the operands left in the second-level cache."""
    import torch

    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(rounds + 3):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """GB/s, read plus written, of torch's own copy of 1 GiB."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return round(2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6, 1)


def time_case(op: Callable[..., Any], given: list[Any]) -> dict[str, float]:
    """Forward and backward in ms, and GB/s of the bytes that each has to move at least."""
    import torch

    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    out = op(*leaves)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    grads, wanted = [torch.randn_like(o) for o in outputs], [t for t in leaves if t.requires_grad]
    forward = milliseconds(lambda: op(*leaves))
    backward = milliseconds(lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True))

    def bytes_of(*tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    return {
        "forward_ms": round(forward, 4),
        "backward_ms": round(backward, 4),
        "forward_gb_s": round(bytes_of(*leaves, *outputs) / forward / 1e6, 1),
        # One matrix of what was saved, the gradients that come in and those that go out.
        "backward_gb_s": round(bytes_of(leaves[0], *grads, *wanted) / backward / 1e6, 1),
    }


def timings(copy_gb_s: float) -> list[dict[str, Any]]:
    """Every case of tests/gpu/cases.py in bf16: the op, torch's own operations, and once those under torch.compile."""
    import torch

    from andrea_ablate import ops
    from gpu.cases import CASES, inputs

    rows = []
    for name, case in CASES.items():
        for i, (n, width) in enumerate(case.timed):
            if left() < 45:
                print("timings: no time left for the rest", flush=True)
                return rows
            given = inputs(case, n, width, torch.bfloat16)
            row: dict[str, Any] = {"op": name, "rows": n, "width": width, "dtype": "bfloat16"}
            with ops.using("compiled"):
                row["ours"] = time_case(case.op, given)
            row["eager"] = time_case(case.reference, given)
            if i == 0:
                try:
                    row["torch_compile"] = time_case(torch.compile(case.reference, dynamic=False), given)
                except Exception as error:  # whatever the compiler of this machine lacks
                    row["torch_compile"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            row["forward_of_copy"] = round(row["ours"]["forward_gb_s"] / copy_gb_s, 3)
            row["backward_of_copy"] = round(row["ours"]["backward_gb_s"] / copy_gb_s, 3)
            rows.append(row)
            print(f"  {name:12s} {n:6d} x {width:5d}  {row['ours']}  eager {row['eager']}", flush=True)
    return rows


def missing() -> str | None:
    """Why the check can't run here, in one sentence."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; the check needs a build of it with CUDA"
    if not torch.cuda.is_available():
        return f"this needs a machine with a CUDA GPU; torch {torch.__version__} sees none here"
    try:
        import pytest  # noqa: F401
    except ImportError:
        return "pytest is not installed; pip install pytest cmake ninja"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "experiments" / "results" / "gpu.json")
    arguments = parser.parse_args()
    if why := missing():
        print(f"gpu-check: {why}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {**device(), "steps": {}}
    steps = report["steps"]
    python = sys.executable
    try:
        steps["build"] = step("build", [python, "-m", "andrea_ablate.ops", "--kernels"], 200)
        if steps["build"]["status"] == "passed":
            tests = [python, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "tests/gpu"]
            steps["tests"] = step("tests", tests, 180)
            copy_gb_s = report["copy_gb_s"] = copy_bandwidth()
            print(f"copy: {copy_gb_s} GB/s", flush=True)
            report["timings"] = timings(copy_gb_s)
            sanitizer = shutil.which("compute-sanitizer") or shutil.which(
                "compute-sanitizer", path="/usr/local/cuda/bin"
            )
            for tool in ("memcheck", "racecheck"):
                name = f"sanitizer_{tool}"
                if sanitizer is None:
                    steps[name] = {"status": "skipped: compute-sanitizer is not installed"}
                    continue
                command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=andrea"]
                steps[name] = step(name, [*command, python, "-c", SANITIZED], 90)
    finally:
        report["seconds"] = round(time.monotonic() - STARTED, 1)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {arguments.output}", flush=True)
    return int(
        any("failed" in s["status"] or "stopped" in s["status"] for s in steps.values()) or "timings" not in report
    )


if __name__ == "__main__":
    sys.exit(main())
