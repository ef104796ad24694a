"""``python -m andrea_ablate.choices``: what can be chosen, from the registries and the YAML files.

python -m andrea_ablate.choices                     every choice with its formula, and how many there are
python -m andrea_ablate.choices diff gpt2 llama3    the choices in which two presets differ
python -m andrea_ablate.choices --markdown          write docs/choices.md: formula, source, who uses it
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from andrea_ablate.command import command
from andrea_ablate.composition import Option, choice_options, compose, resource_root
from andrea_ablate.registry import ConfigError, Registry, nearest
from andrea_ablate.yamltext import load_yaml

PAGE = Path("docs/choices.md")


class Choice(NamedTuple):
    """One option of a group. settings: its values, where options share a class; users: presets that choose it."""

    group: str
    name: str
    formula: str
    source: str
    settings: str
    users: list[str]

    def __str__(self) -> str:
        return f"{self.formula} ({self.settings})" if self.settings else self.formula


@lru_cache
def registries() -> dict[str, Registry[Any]]:
    """The registry behind each group that is a choice of the model or its training."""
    from andrea_ablate.attention import ATTENTIONS
    from andrea_ablate.blocks import BLOCKS, NORM_POSITIONS
    from andrea_ablate.ffn import FFNS
    from andrea_ablate.init import INITS
    from andrea_ablate.norms import NORMS
    from andrea_ablate.positions import POSITIONS, SCALINGS
    from andrea_ablate.stability import STABILITY
    from andrea_ablate.training.optim import OPTIMIZERS
    from andrea_ablate.training.schedules import SCHEDULES

    return {
        "norm": NORM_POSITIONS,
        "norm_type": NORMS,
        "block": BLOCKS,
        "ffn": FFNS,
        "attn": ATTENTIONS,
        "pos": POSITIONS,
        "scaling": SCALINGS,
        "stability": STABILITY,
        "init": INITS,
        "optim": OPTIMIZERS,
        "schedule": SCHEDULES,
    }


def choices() -> list[Choice]:
    """Every choice, group by group."""
    return [_choice(option) for group in registries() for option in choice_options() if option.group == group]


def _choice(option: Option) -> Choice:
    formula, source = describe(class_of(option))
    content = {key: value for key, value in option.content.items() if key in _TOLD_APART and value is not None}
    settings = ", ".join(f"{key} {value}" for key, value in content.items())
    users = [name for name in preset_names() if option.name in _chosen(name).get(option.group, ())]
    return Choice(option.group, option.name, formula, source, settings, users)


def class_of(option: Option) -> Any:
    """What is registered for an option of a group."""
    registered = option.content.get("norm_position", option.content.get("type", option.name))
    return registries()[option.group].get(registered)


_TOLD_APART = ("activation", "ratio", "n_kv_heads", "bias")


def describe(item: Any) -> tuple[str, str]:
    """The first paragraph of a docstring, and what follows ``Source:`` in it or its base classes' (or a reference)."""
    text = inspect.getdoc(item) or ""
    formula = " ".join(text.split("\n\n")[0].split()).split(" Source: ")[0]
    for text in (inspect.cleandoc(known.__doc__ or "") for known in getattr(item, "__mro__", [item])):
        if given := re.search(r"Source: (.*?)(?:\n\n|\Z)", text, re.DOTALL):
            return formula, " ".join(given[1].split()).rstrip(".")
        if references := re.findall(r"arXiv:\d{4}\.\d{5}", text):
            return formula, ", ".join(references)
    return formula, ""


# ---------------------------------------------------------------------------------------------------------------------
# presets


@lru_cache
def preset_names() -> list[str]:
    return sorted(path.stem for path in (resource_root() / "conf" / "preset").glob("*.yaml"))


@lru_cache
def _preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise ConfigError(f"'{name}' is not one of {', '.join(preset_names())}{nearest(name, preset_names())}")
    text = (resource_root() / "conf" / "preset" / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = load_yaml(text)
    return found


def _chosen(name: str) -> dict[str, list[str]]:
    """What a preset chooses in each group."""
    pairs = [(key, value) for entry in _preset(name)["defaults"] for key, value in entry.items()]
    return {key.removeprefix("override /"): value if isinstance(value, list) else [value] for key, value in pairs}


def diff(a: str, b: str) -> list[tuple[str, str, str]]:
    """The choices in which two presets differ, then the values in which their like choices do."""
    ours, theirs = _chosen(a), _chosen(b)
    rows = [
        (group, "+".join(ours[group]) or "none", "+".join(theirs[group]) or "none")
        for group in ours
        if ours[group] != theirs[group]
    ]
    written = [dict(_leaves(_preset(name).get("model", {}))) for name in (a, b)]
    models = [dict(_leaves(asdict(compose([f"preset={name}", "logger=none"]).model))) for name in (a, b)]
    for key in sorted(written[0].keys() | written[1].keys()):
        # As the file has it, a fraction perhaps; what a file does not say is as composed.
        left, right = (str(w.get(key, m.get(key, "-"))) for w, m in zip(written, models, strict=True))
        if left != right:
            rows.append((f"model.{key}", left, right))
    return rows


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------------------------------------------------------------
# what is printed


def markdown() -> str:
    """The page with every choice, one table per group."""
    lines = [
        "# Choices",
        "",
        "Written by `python -m andrea_ablate.choices --markdown` from the registries and `conf/`.",
        "",
    ]
    for group in registries():
        lines += [f"## `{group}=`", "", "| choice | computes | source | presets |", "| --- | --- | --- | --- |"]
        for choice in (choice for choice in choices() if choice.group == group):
            cells = (f"`{choice.name}`", str(choice), choice.source, ", ".join(choice.users))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m andrea_ablate.choices", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help=f"write {PAGE}")
    commands = parser.add_subparsers(dest="what")
    compared = commands.add_parser("diff", help="the choices in which two presets differ")
    compared.add_argument("a")
    compared.add_argument("b")
    given = parser.parse_args(argv)
    if given.what == "diff":
        rows = [("", given.a, given.b), *diff(given.a, given.b)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        print(
            "\n".join(
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
            )
        )
    elif given.markdown:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(markdown(), encoding="utf-8")
        print(PAGE)
    else:
        for choice in choices():
            print(f"{f'{choice.group}={choice.name}':<30} {choice}")
        print(f"{len(choices())} choices in {len(registries())} groups; {len(preset_names())} presets")


if __name__ == "__main__":
    sys.exit(main())
