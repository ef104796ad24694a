"""Building, finding and choosing the compiled library: what is missing is said, and nothing is chosen in silence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from andrea_ablate import ops
from andrea_ablate.ops import build as building
from andrea_ablate.ops import library
from andrea_ablate.registry import ConfigError
from andrea_ablate.training.run import run
from support import Answer, Compose

BUILD_TOOLS = ("cmake", "ninja", "c++", "g++")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with no library in it; what is loaded in this process already is out of reach."""
    monkeypatch.setattr(library, "loaded", library.loaded.__wrapped__)
    monkeypatch.setattr(library, "folder", lambda: tmp_path)
    yield tmp_path
    monkeypatch.undo()
    ops.choose("auto")


def test_without_a_library_auto_is_the_reference_and_compiled_is_refused(empty: Path) -> None:
    assert library.loaded().reason == "not built for these sources; run python -m andrea_ablate.ops"
    assert ops.path("auto", "cpu") == ops.path("reference", "cpu") == "reference"
    with pytest.raises(ConfigError, match="ops=compiled, but the library is not built for these sources; run"):
        ops.path("compiled", "cpu")


@pytest.mark.parametrize(
    ("record", "content", "reason"),
    [
        ({"torch": torch.__version__, "cuda": False}, b"not a library", "stale or broken"),
        ({"torch": torch.__version__, "cuda": False}, None, "stale or broken"),
        ({"torch": "1.13.0", "cuda": False}, b"", f"built for torch 1.13.0, not {torch.__version__}"),
        ("torn {", b"", "not built for these sources"),
    ],
)
def test_a_library_that_cannot_be_used_is_named_with_the_way_out(
    empty: Path, record: object, content: bytes | None, reason: str
) -> None:
    (empty / "build.json").write_text(record if isinstance(record, str) else json.dumps(record))
    if content is not None:
        (empty / "libandrea_ops.so").write_bytes(content)
    assert library.loaded().path is None
    assert library.loaded().reason.startswith(reason) and "run python -m andrea_ablate.ops" in library.loaded().reason
    with ops.using("auto"):  # goes on
        x = torch.randn(2, 3)
        torch.testing.assert_close(
            ops.norm(x, None, eps=1e-5, center=True), torch.nn.functional.layer_norm(x, (3,), None, None, 1e-5)
        )
    assert library.taken == {} and ops.path("auto", "cpu") == "reference"


def test_the_command_line_refuses_compiled_before_anything_is_written(
    empty: Path, cli: Callable[..., Answer], tmp_path: Path
) -> None:
    answer = cli("ops=compiled")
    assert answer.status == 2 and "ops=compiled, but the library is not built" in answer.err
    assert "Traceback" not in answer.err and not (tmp_path / "runs").exists()
    wrong = cli("ops=fused")
    assert wrong.status == 2 and "ops=fused is not one of auto, compiled, reference" in wrong.err


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_sweep_without_a_library_says_so(empty: Path, cli: Callable[..., Answer]) -> None:
    answer = cli("trainer.tokens=128")
    assert answer.status == 0
    assert "ops=auto: torch's own operations run, the compiled library is not built for these" in answer.out
    assert "ops=auto" not in cli("trainer.tokens=128", "ops=reference", "seed=1").out


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_the_record_holds_the_path_of_every_op_and_the_name_of_the_run_tells_them_apart(tiny: Compose) -> None:
    reference = run(tiny("ops=reference"))
    assert reference["paths"]["norm"] == "reference"
    auto = run(tiny())
    assert auto["paths"]["norm"] == ops.path("auto", "cpu")
    assert (auto["run_id"] == reference["run_id"]) == (ops.path("auto", "cpu") == "reference")


@pytest.mark.parametrize("tool", ["cmake", "ninja"])
def test_a_missing_build_tool_is_named(tool: str, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(sys, "executable", str(empty / "python"))  # nothing lies beside it
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else (which(name) or f"/usr/bin/{name}"))
    monkeypatch.setattr(building, "folder", lambda: empty)
    with pytest.raises(ConfigError, match=f"{tool} is not installed; pip install {tool}"):
        building.build()
    assert {path.name for path in empty.iterdir()} == {"lock"}


def test_a_missing_compiler_leaves_the_reference_path(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(building, "folder", lambda: empty)
    with pytest.raises(ConfigError, match="no C.. compiler .* is installed; install g.., or go on with ops=reference"):
        building.build()


def test_without_nvcc_the_other_half_is_built_and_the_reason_is_kept(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(work: Path, *options: str) -> str:
        assert options == ()
        (work / "libandrea_ops.so").touch()
        return ""

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(building, "folder", lambda: empty)
    monkeypatch.setattr(building, "find_nvcc", lambda: None)
    monkeypatch.setattr(building, "compile_in", compiles)
    built = building.build()
    assert not built["cuda"] and built["why_no_cuda"].startswith("nvcc not found on PATH")
    with pytest.raises(ConfigError, match="nvcc not found .*; install the CUDA toolkit, or leave --cuda out"):
        building.build(cuda=True)


def test_installing_compiles_nothing_so_an_isolated_build_needs_no_torch() -> None:
    project = tomllib.loads((library.sources().parent / "pyproject.toml").read_text())
    assert project["build-system"]["requires"] == ["hatchling"]
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["csrc"] == "andrea_ablate/csrc"


def test_nvcc_is_looked_for_in_cuda_home_then_on_the_path(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(building.sysconfig, "get_paths", lambda: {"purelib": str(empty)})
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert building.find_nvcc() is None
    packaged = empty / "nvidia" / "cu13" / "bin" / "nvcc"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    assert building.find_nvcc() == packaged
    own = empty / "bin" / "nvcc"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setenv("CUDA_HOME", str(empty))
    assert building.find_nvcc() == own


@pytest.mark.slow  # compiles everything
def test_builds_without_nvcc_once_and_says_so(tmp_path: Path) -> None:
    tools = tmp_path / "tools"  # a PATH without nvcc
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if not (tools / name).exists() and name != "nvcc":
                (tools / name).symlink_to(Path(folder) / name)
    environment = {**os.environ, "PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("CUDA_HOME", None)
    command = [sys.executable, "-m", "andrea_ablate.ops"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "ops: cpu only (" in first.stdout and ("nvcc not found" in first.stdout or "has no CUDA" in first.stdout)
    (made,) = (tmp_path / "cache").rglob("libandrea_ops.so")
    before = made.stat().st_mtime_ns
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.stdout == first.stdout and made.stat().st_mtime_ns == before
    assert {path.name for path in made.parent.iterdir()} == {"lock", "build.json", "libandrea_ops.so"}


@pytest.mark.slow  # nvcc takes longer than the rest together
@pytest.mark.skipif(building.find_nvcc() is None, reason="nvcc is not installed")
def test_nvcc_builds_every_kernel_without_spills_and_the_library_loads_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "andrea_ablate.ops", "--cuda", "--kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ops: cpu and cuda (sm_80, sm_90, PTX)" in done.stdout
    (record,) = tmp_path.rglob("build.json")
    kernels = json.loads(record.read_text())["kernels"]
    assert {name.split()[0] for name in kernels} == {"sm_80", "sm_90"}
    assert {name: use["spilled_bytes"] for name, use in kernels.items() if use["spilled_bytes"]} == {}
    assert done.stdout.count("registers") == len(kernels)


@pytest.mark.slow  # starts two Pythons
@pytest.mark.skipif(library.loaded().path is None, reason=f"the compiled library is {library.loaded().reason}")
def test_instruction_sets_agree() -> None:
    """The scalar code and that of this machine's instruction set compute the same to rounding."""
    program = (
        "import torch; from andrea_ablate import ops; torch.manual_seed(0); x = torch.randn(7, 41)\n"
        "with ops.using('compiled'): print(ops.norm(x, torch.ones(41), eps=1e-5, center=True).double().sum(1).tolist())"
    )
    sums = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "ANDREA_ABLATE_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for isa in ("scalar", "avx512")
    ]
    torch.testing.assert_close(torch.tensor(json.loads(sums[0])), torch.tensor(json.loads(sums[1])), atol=1e-5, rtol=0)
