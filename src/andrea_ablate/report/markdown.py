"""The report as Markdown: the page's tables, and its figures as images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from andrea_ablate.report.compare.comparison import markdown_table
from andrea_ablate.report.contents import Contents
from andrea_ablate.report.parts import Figure, Table


def markdown(sweeps: Sequence[Contents], images: Mapping[tuple[int, str], Sequence[tuple[str, str]]]) -> str:
    """One file on all sweeps.

    Args:
        images: (index of a sweep, id of a figure) -> what each image shows, and its path as a link; none where there is
            no image.
    """
    return "\n\n".join(part for i, sweep in enumerate(sweeps) for part in _sweep(i, sweep, images)) + "\n"


def _sweep(index: int, sweep: Contents, images: Mapping[tuple[int, str], Sequence[tuple[str, str]]]) -> list[str]:
    ranking, *tables = sweep.tables
    leads = [
        f"- **{lead.size} nats {lead.way}** {inline(lead.against)}: {lead.interval}, *{lead.doubt}*"
        for lead in sweep.leads
    ]
    parts = [f"# {inline(sweep.winner)}", inline(sweep.name), "\n".join(leads), inline(sweep.comparison.verdict)]
    parts += [_code(sweep.commands), *_table(ranking)]
    if sweep.warnings:
        parts += [f"## Warnings ({len(sweep.warnings)})", "\n".join(f"- {inline(said)}" for said in sweep.warnings)]
    for figure in sweep.figures:
        parts += _figure(figure, sweep, images.get((index, figure.id), ()))
    for table in tables:
        parts += _table(table)
    return [part for part in parts if part]


def _figure(figure: Figure, sweep: Contents, images: Sequence[tuple[str, str]]) -> list[str]:
    ids, commits = sweep.run_ids(figure), sweep.commits(figure)
    made = f"Runs {', '.join(f'`{run_id}`' for run_id in ids)}" + f"; commit {', '.join(commits)}" * bool(commits)
    return [
        f"## {inline(figure.title)}",
        *(f"![{inline(shows)}]({path})" for shows, path in images),
        inline(figure.caption),
        f"{made}.",
        _code(sweep.commands_of(figure)),
    ]


def _table(table: Table) -> list[str]:
    lines = [
        [f"`{cell}`" if i in table.code and cell != "-" else inline(cell, "") for i, cell in enumerate(line)]
        for line in table.lines
    ]
    body = "\n".join(markdown_table(table.heads, lines)) if lines else ""
    return [f"## {inline(table.title)}", inline(table.note), body]


def _code(commands: Sequence[str]) -> str:
    text = "\n".join(commands)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}" if text else ""


def inline(text: str, marks: str = "*|") -> str:
    """A text that Markdown and the HTML in it leave as it is, on one line; `markdown_table` escapes `marks`."""
    for mark in f"\\`_[]#<>{marks}":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return " ".join(text.split())
