"""One sweep under two rules of matching: the verdicts beside each other, and where they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from andrea_ablate.report.compare.comparison import Comparison, markdown_table
from andrea_ablate.report.compare.text import with_interval

if TYPE_CHECKING:
    from rich.console import RenderableType


def rule_lines(found: Mapping[str, Comparison]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: per arm the difference to the baseline and the verdict under each rule."""
    columns = ["arm", *(f"{what}, match={rule}" for rule in found for what in ("difference", "verdict"))]
    by_rule = [{arm.arm: arm for arm in comparison.arms} for comparison in found.values()]
    lines = []
    for name, arm in by_rule[0].items():
        if arm.effect is not None:
            sides = [arms[name] for arms in by_rule]
            cells = [cell for one in sides if one.effect for cell in (with_interval(one.effect), str(one.verdict))]
            lines.append([name, *cells])
    return columns, lines


def rule_sentence(found: Mapping[str, Comparison]) -> str:
    """Where the verdict depends on the rule."""
    verdicts: dict[str, list[str]] = {}
    for comparison in found.values():
        for arm in comparison.arms:
            if arm.verdict:
                verdicts.setdefault(arm.arm, []).append(arm.verdict)
    changed = [f"'{arm}' ({', then '.join(said)})" for arm, said in verdicts.items() if len({*said}) > 1]
    rules = " and ".join(f"match={rule}" for rule in found)
    if changed:
        return f"Between {rules} the verdict changes for {', '.join(changed)}."
    return f"Under {rules} every verdict is the same."


def rules_markdown(found: Mapping[str, Comparison]) -> str:
    """Table and sentence."""
    return "\n".join([*markdown_table(*rule_lines(found)), "", rule_sentence(found)]) + "\n"


def rules_table(found: Mapping[str, Comparison]) -> RenderableType:
    """Table and sentence for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from andrea_ablate.report.cells import ArmName

    columns, lines = rule_lines(found)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.replace(", ", "\n"), overflow="fold")
    for name, *cells in lines:
        table.add_row(ArmName(name), *(Text(cell.replace(" [", "\n[")) for cell in cells))
    return Group(Text("\nthe same arms under both rules", style="bold"), table, Text(rule_sentence(found)))
