"""The report's page: one HTML file that fetches nothing. What is drawn stands as JSON in its element `data`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from andrea_ablate.report.contents import Contents
from andrea_ablate.report.parts import Figure, Table

HERE = Path(__file__).parent
STYLES = ("colours.css", "chart.css", "page.css")
SCRIPTS = ("draw.js", "page.js")
_OPEN = 3, 8  # more warnings, or more arms in the ranking, are folded, so that a phone reaches the figures


def page(sweeps: Sequence[Contents]) -> str:
    """The page of one or several sweeps."""
    return document(*render(sweeps))


def render(sweeps: Sequence[Contents]) -> tuple[str, str]:
    """Title and body of a page on sweeps."""
    data = [
        {
            "sweep": sweep.name,
            "figures": [
                {"id": place(figure, index), "kind": figure.kind, "content": figure.views} for figure in sweep.figures
            ],
        }
        for index, sweep in enumerate(sweeps)
    ]
    sections = [_sweep(sweep, index) for index, sweep in enumerate(sweeps)]
    # In a script element only "<" could end it or begin a comment.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    code = "".join(map(asset, SCRIPTS))
    scripts = f'<script type="application/json" id="data">{text}</script>\n<script>\n{code}</script>\n'
    return ", ".join(sweep.name for sweep in sweeps), f"{chr(10).join(sections)}\n{scripts}"


def document(title: str, body: str, *, head: str = "", script: str = "") -> str:
    """A whole HTML file that fetches nothing. `head`, `body` and `script` are put in as they are."""
    scripts = f"<script>\n{script}</script>\n" if script else ""
    styles = "".join(map(asset, STYLES))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"{head}<title>{escape(title)}</title>\n<style>\n{styles}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n{scripts}</body>\n</html>\n"
    )


def asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def place(figure: Figure, index: int) -> str:
    """The element of a figure; `index` is that of its sweep on the page."""
    return f"{figure.id}-{index}"


def _sweep(sweep: Contents, index: int) -> str:
    ranking, *tables = sweep.tables
    drawn = [_figure(figure, index, sweep) for figure in sweep.figures]
    parts = [
        f'<section class="sweep" aria-labelledby="sweep-{index}">',
        _headline(sweep, index),
        *drawn[:1],  # the effects with their doubt, where there are two arms: what is seen without scrolling
        _table(ranking, folded=len(ranking.lines) > _OPEN[1]),
        _warnings(sweep.warnings),
        *drawn[1:],
        *map(_table, tables),
        "</section>",
    ]
    return "\n".join(parts)


def _headline(sweep: Contents, index: int) -> str:
    leads = "".join(
        f'<p class="effect"><strong>{escape(lead.size)}</strong> nats {escape(lead.way)} '
        f'<b class="{"settled" if lead.firm else "open"}">{escape(lead.doubt)}</b></p>\n'
        f"<p>{escape(lead.against)}: {escape(lead.interval)}</p>\n"
        for lead in sweep.leads
    )
    verdict = f'<p class="verdict">{escape(sweep.comparison.verdict)}</p>\n'
    if sweep.leads and all(lead.firm for lead in sweep.leads):  # it says the same in sentences, and no doubt
        verdict = f"<details><summary>The verdict in sentences</summary>\n{verdict}</details>\n"
    commands = escape("\n".join(sweep.commands))
    return (
        f'<header>\n<p class="name">{escape(sweep.name)}</p>\n<h1 id="sweep-{index}">{escape(sweep.winner)}</h1>\n'
        f"{leads}{verdict}"
        f"<details><summary>The commands of this sweep and page</summary>\n<pre>{commands}</pre></details>\n</header>"
    )


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return '<p class="note">No warnings.</p>'
    items = "".join(f"<li>{escape(warning)}</li>\n" for warning in warnings)
    title, listed = f"Warnings ({len(warnings)})", f"<ul>\n{items}</ul>"
    if len(warnings) > _OPEN[0]:
        return f'<details class="warnings">\n<summary>{title}</summary>\n{listed}\n</details>'
    return f'<section class="warnings">\n<h2>{title}</h2>\n{listed}\n</section>'


def _figure(figure: Figure, index: int, sweep: Contents) -> str:
    ids, commits = sweep.run_ids(figure), sweep.commits(figure)
    runs = f"{len(ids)} run{'s' * (len(ids) != 1)}"
    code = f", commit {', '.join(commits)}" if commits else ""
    listed = " ".join(f"<code>{escape(run_id)}</code>" for run_id in ids)
    return (
        f'<figure id="{place(figure, index)}">\n<h2>{escape(figure.title)}</h2>\n<div class="chart"></div>\n'
        f"<figcaption>{escape(figure.caption)}\n<details><summary>Commands and {runs}{escape(code)}</summary>\n"
        f"<pre>{escape(chr(10).join(sweep.commands_of(figure)))}</pre>\n<p>{listed}</p>\n"
        "</details></figcaption>\n</figure>"
    )


def _table(table: Table, *, folded: bool = False) -> str:
    """A table whose cells know their heads: on a narrow screen each line is a card."""
    rows = []
    for line in table.lines:
        cells = (f"<code>{escape(cell)}</code>" if i in table.code else escape(cell) for i, cell in enumerate(line))
        labelled = (
            f'<td data-head="{escape(head)}">{cell}</td>' for head, cell in zip(table.heads, cells, strict=True)
        )
        rows.append(f"<tr>{''.join(labelled)}</tr>")
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    note = f'<p class="note">{escape(table.note)}</p>\n' if table.note else ""
    body = (
        f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>\n" if rows else ""
    )
    return f"<section>\n<h2>{escape(table.title)}</h2>\n{note}{body}</section>"
