"""Who imports whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted(SRC.rglob("*.py"))
AXES = {"norms", "ffn", "positions", "attention", "blocks", "stability", "loss", "init"}
ALWAYS = {"registry", "config", "parameters", "ops"}  # what any part may import
MODEL_HALF = {*AXES, *ALWAYS, "model", "accounting", "pairs"}


def files_of(part: str) -> list[Path]:
    """The file of a part, or the files of its package."""
    path = SRC / "andrea_ablate" / f"{part}.py"
    return [path] if path.exists() else sorted(path.with_suffix("").glob("*.py"))


def name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Every module that the file names in an import, at whatever depth, in full."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers(package: str) -> set[str]:
    """The files that import the package, by dotted name."""
    return {name(path) for path in FILES if any(i.split(".")[0] == package for i in imports(path))}


def ours(path: Path) -> set[str]:
    """First level of our own modules that the file imports."""
    return {i.split(".")[1] for i in imports(path) if i.startswith("andrea_ablate.")}


def calls(path: Path, dotted: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and ast.unparse(node.func) == dotted]


def test_the_files_are_found() -> None:
    assert {"andrea_ablate.model", "andrea_ablate.training.module"} <= {name(path) for path in FILES}


def test_hydra_stays_at_the_entry() -> None:
    entry = {f"andrea_ablate.{name}" for name in ("arms", "cli", "composition", "sweep", "bench.__main__")}
    for package in ("hydra", "omegaconf"):
        found = {module for module in importers(package) if not module.startswith("hydra_plugins")}
        assert found <= entry


def test_lightning_stays_in_training_and_data() -> None:
    allowed = ("andrea_ablate.training.", "andrea_ablate.data.")
    for package in ("lightning", "pytorch_lightning"):
        assert all(module.startswith(allowed) for module in importers(package))


def test_wandb_is_touched_by_its_mirror_alone() -> None:
    assert importers("wandb") <= {"andrea_ablate.tracking.wandb"}


def test_duckdb_is_an_extra_of_the_runs_command() -> None:
    assert importers("duckdb") == {"andrea_ablate.runs.index", "andrea_ablate.runs.__main__"}


def test_drawing_libraries_are_an_extra_of_the_report() -> None:
    for package in ("quickjs", "resvg_py"):
        assert importers(package) == {"andrea_ablate.report.images"}


@pytest.mark.parametrize("axis", sorted(AXES))
def test_axes_do_not_import_one_another(axis: str) -> None:
    for path in files_of(axis):
        assert ours(path) <= {axis, *ALWAYS}, path


def test_the_model_half_knows_nothing_of_the_rest() -> None:
    for part in MODEL_HALF:
        for path in files_of(part):
            assert ours(path) <= MODEL_HALF, path


def test_the_fused_operations_stand_on_the_registry_alone() -> None:
    for path in files_of("ops"):
        assert ours(path) <= {"ops", "registry"}, path


def test_the_bottom_imports_nothing_of_ours_and_no_torch() -> None:
    for module, allowed in (("registry", set()), ("config", {"registry"}), ("codehash", {"registry"})):
        path = SRC / "andrea_ablate" / f"{module}.py"
        assert ours(path) <= allowed
        assert {i.split(".")[0] for i in imports(path)} <= {*sys.stdlib_module_names, "andrea_ablate"}


def test_analysis_is_numpy_and_scipy() -> None:
    for path in (SRC / "andrea_ablate" / "analysis").glob("*.py"):
        assert ours(path) <= {"analysis"}
        others = {i.split(".")[0] for i in imports(path)} - {"andrea_ablate", *sys.stdlib_module_names}
        assert others <= {"numpy", "scipy"}


def test_imports_do_not_go_up() -> None:
    """cli -> training -> model -> parts; report and tracking never import what uses them."""
    entry = {"cli", "sweep", "conduct", "jobs", "composition"}
    above = {"training": entry, "data": entry | {"training", "model"}}
    above["tracking"] = above["report"] = entry | {"training", "model", "data"}
    for package, forbidden in above.items():
        for path in (SRC / "andrea_ablate" / package).rglob("*.py"):
            assert not ours(path) & forbidden, path


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("andrea_ablate.cli", ["torch", "lightning", "wandb", "numpy", "scipy"]),
        ("andrea_ablate.claims.__main__", ["torch", "lightning", "wandb", "numpy", "scipy"]),
        ("andrea_ablate.config", ["torch", "hydra", "omegaconf", "numpy", "yaml"]),
        ("andrea_ablate.registry", ["torch", "hydra", "numpy"]),
        ("andrea_ablate.runs.__main__", ["torch", "hydra", "lightning", "wandb", "numpy", "duckdb"]),
        ("andrea_ablate.training.identity", ["hydra", "omegaconf", "lightning", "wandb", "scipy"]),
        ("andrea_ablate.accounting", ["hydra", "omegaconf", "lightning", "wandb", "scipy"]),  # and model with it
    ],
)
def test_importing_a_module_does_not_load_what_it_does_without(module: str, without: list[str]) -> None:
    program = f"import sys, {module}; print([name for name in {without} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_checkpoints_are_read_without_running_code_from_them() -> None:
    for path in FILES:
        for call in calls(path, "torch.load"):
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert given.get("weights_only") == "True", f"{path}:{call.lineno}"
    assert not set().union(*(importers(package) for package in ("pickle", "dill", "cloudpickle", "joblib", "shelve")))
    for path in FILES:
        for call in (*calls(path, "np.load"), *calls(path, "numpy.load")):
            assert "allow_pickle" not in {word.arg for word in call.keywords}, f"{path}:{call.lineno}"


def test_the_model_half_refuses_with_config_errors_alone() -> None:
    for part in MODEL_HALF - {"ops"}:  # an operation refuses its arguments as torch does
        for path in files_of(part):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    assert ast.unparse(node.exc).startswith("ConfigError("), f"{path}:{node.lineno}"
