"""The hash of a choice's code: what changes it, what does not, and that it names runs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from andrea_ablate.codehash import code_hash
from andrea_ablate.norms import NORMS
from andrea_ablate.registry import ConfigError
from andrea_ablate.training.identity import identify
from support import Cli, Compose

MODULE = '''\
"""A module of parts."""
import math
from math import sqrt

SCALE: float = 2.0
if math.pi > 3:
    def shift(x):
        return x + 1


def half(x: float) -> float:
    """Half of x."""
    return SCALE * x / 4


class Base:
    """What parts share."""

    def grow(self, x):
        # A remark.
        return half(x)


class Part(Base):
    """A part."""

    kind = "part"

    def __call__(self, x: float, *, power: int = 2) -> float:
        return shift(self.grow(x)) ** power


class Other:
    def __call__(self, x):
        return sqrt(x)
'''


@pytest.fixture
def part_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """``part_hash(text)``: the hash of the class Part of a module with that text."""
    numbers = itertools.count()

    def hash_of(text: str) -> str:
        name = f"parts_{next(numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return code_hash(module.Part)

    return hash_of


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("** power", "* power"),  # its own code
        ("power: int = 2", "power: int = 3"),
        ('kind = "part"', 'kind = "Part"'),
        ("class Part(Base)", "class Part(Base, dict)"),
        ("return half(x)", "return half(-x)"),  # its base class
        ("x / 4", "x / 5"),  # what that calls
        ("SCALE: float = 2.0", "SCALE: float = 2.5"),  # what that reads
        ("x + 1", "x + 2"),  # a function defined inside an if
        ("math.pi > 3", "math.pi > 4 or True"),
    ],
)
def test_code_that_can_change_a_number_changes_the_hash(
    part_hash: Callable[[str], str], before: str, after: str
) -> None:
    assert before in MODULE
    assert part_hash(MODULE.replace(before, after)) != part_hash(MODULE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# A remark.", "# Another, longer remark\n        # on two lines."),
        ('"""A part."""', '"""Another docstring."""'),
        ('    """What parts share."""\n\n', ""),
        ("SCALE * x / 4", "(SCALE * x) / 4"),
        ("half(x: float) -> float", "half(x)"),
        ("x: float, *, power: int = 2", "\n        x: float,\n        *,\n        power: int = 2,\n    "),
        ("return sqrt(x)", "return sqrt(2 * x)"),  # another class
        ("class Other:", "class Third:\n    pass\n\n\nclass Other:"),
        ("import math\n", "import json\nimport math\n"),
    ],
)
def test_what_cannot_leaves_it_alone(part_hash: Callable[[str], str], before: str, after: str) -> None:
    assert before in MODULE
    assert part_hash(MODULE.replace(before, after)) == part_hash(MODULE)


def test_the_hash_depends_on_neither_process_nor_python(part_hash: Callable[[str], str]) -> None:
    # As 3.11, 3.12 and 3.13 gave it; a version that gives another would train every run anew.
    assert part_hash(MODULE) == "53dd6923823956be"


def test_code_without_a_file_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("class Part: pass", namespace)
    for item in (namespace["Part"], dict, [].append):
        with pytest.raises(ConfigError, match="has no source file"):
            code_hash(item)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_an_edited_class_makes_new_runs_and_no_others(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(size: str) -> list[str]:
        monkeypatch.setitem(NORMS._items, "rmsnorm", type(size, (nn.Module,), {"__module__": __name__}))
        return [identify(tiny(f"norm_type={norm}"))[0] for norm in ("layernorm", "rmsnorm")]

    (layernorm, rmsnorm), again, edited = named("FirstNorm"), named("FirstNorm"), named("SecondNorm")
    assert again == [layernorm, rmsnorm]
    assert edited[0] == layernorm and edited[1] != rmsnorm


class FirstNorm(nn.Module):
    eps = 1e-5


class SecondNorm(nn.Module):
    eps = 1e-6


def test_a_record_says_which_code_made_it(tmp_path: Path, cli: Cli) -> None:
    assert cli("trainer.tokens=128").status == 0
    (path,) = tmp_path.glob("runs/*/record.json")
    code = json.loads(path.read_text())["code"]
    assert code["norm_type"] == code_hash(NORMS.get("layernorm"))
    assert set(code) == {"norm", "block", "norm_type", "ffn", "pos", "scaling", "attn", "init", "optim", "schedule"}
