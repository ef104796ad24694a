"""The report's page: one HTML file that fetches nothing. What is drawn stands as JSON in its element `data`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from andrea_ablate.report.compare import Comparison, RunRow, load
from andrea_ablate.report.figures import Figure, StoredRun, command, figures, read_runs
from andrea_ablate.tracking.store import Store

HERE = Path(__file__).parent


def page(sweeps: Sequence[Path], store: Store, made_by: str) -> str:
    """The page of one or several sweeps.

    Args:
        sweeps: folders that hold a comparison.json. made_by: the command that makes this page, shown under each figure.
    Raises: ConfigError for a folder without a comparison that can be read.
    """
    return document(*render([(folder.resolve().name, load(folder)) for folder in sweeps], store, made_by))


def render(found: Sequence[tuple[str, Comparison]], store: Store, made_by: str) -> tuple[str, str]:
    """Title and body of a page on sweeps, given by name and comparison; `made_by` as in `page`."""
    sections: list[str] = []
    data: list[dict[str, Any]] = []
    for index, (name, comparison) in enumerate(found):
        runs, missing = read_runs(comparison, store)
        drawn = figures(comparison, runs)
        shown = [{"id": f"{one.id}-{index}", "kind": one.kind, "content": one.content} for one in drawn]
        data.append({"sweep": name, "figures": shown})
        sections.append(_sweep(name, index, comparison, runs, missing, drawn, made_by, store))
    # In a script element only "<" could end it or begin a comment.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = f'<script type="application/json" id="data">{text}</script>\n<script>\n{_asset("page.js")}</script>\n'
    return ", ".join(name for name, _ in found), f"{chr(10).join(sections)}\n{scripts}"


def document(title: str, body: str, *, head: str = "", script: str = "") -> str:
    """A whole HTML file that fetches nothing. `head`, `body` and `script` are put in as they are."""
    scripts = f"<script>\n{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"{head}<title>{escape(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n"
        f"{body}</main>\n{scripts}</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _sweep(
    name: str,
    index: int,
    comparison: Comparison,
    runs: Mapping[str, StoredRun],
    missing: Sequence[str],
    drawn: Sequence[Figure],
    made_by: str,
    store: Store,
) -> str:
    parts = [
        f'<section class="sweep" aria-labelledby="sweep-{index}">',
        _headline(name, index, comparison),
        _warnings((*comparison.warnings, *missing)),
        *(_figure(figure, index, comparison, runs, made_by) for figure in drawn),
        _spikes(comparison, runs, store),
        _runs(comparison.rows),
        "</section>",
    ]
    return "\n".join(parts)


def _headline(name: str, index: int, comparison: Comparison) -> str:
    best = next((arm for arm in comparison.ranked if arm.rank is not None), None)
    lead = comparison.lead
    winner = best.arm if best else "No run finished"
    said = ""
    if lead is not None and lead.effect.mean is not None:
        effect = lead.effect
        bounds = "no interval" if effect.low is None else f"[{effect.low:+.4f}, {effect.high:+.4f}]"
        word = ("settled", "settled") if comparison.settled else ("open", "not settled")
        seeds = "1 seed" if effect.n == 1 else f"{effect.n} seeds"
        said = (
            f'<p class="effect"><strong>{effect.mean:+.4f}</strong> nats <span>{bounds}</span> '
            f'<b class="{word[0]}">{word[1]}</b></p>\n<p>ahead of <b>{escape(lead.rival.arm)}</b>: paired lead in '
            f"validation loss per token over {seeds}, with its 95 % interval</p>\n"
        )
    return (
        f'<header>\n<p class="name">{escape(name)}</p>\n<h1 id="sweep-{index}">{escape(winner)}'
        f"{' has the lowest loss' if best and len(comparison.arms) > 1 else ''}</h1>\n{said}"
        f'<p class="verdict">{escape(comparison.verdict)}</p>\n'
        f'<p class="note">{escape(comparison.title)}</p>\n</header>'
    )


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return '<p class="note">No warnings.</p>'
    items = "".join(f"<li>{escape(warning)}</li>\n" for warning in warnings)
    return f'<section class="warnings">\n<h2>Warnings ({len(warnings)})</h2>\n<ul>\n{items}</ul>\n</section>'


def _figure(figure: Figure, index: int, comparison: Comparison, runs: Mapping[str, StoredRun], made_by: str) -> str:
    ids = [row.run_id for row in comparison.rows if row.arm in figure.arms and row.run_id]
    commands = [*(command(comparison, arm, runs) for arm in figure.arms), made_by]
    listed = " ".join(f"<code>{escape(run_id)}</code>" for run_id in ids)
    return (
        f'<figure id="{figure.id}-{index}">\n<h2>{escape(figure.title)}</h2>\n<div class="chart"></div>\n'
        f"<figcaption>{escape(figure.caption)}\n<details><summary>Commands and {len(ids)} runs</summary>\n"
        f"<pre>{escape(chr(10).join(commands))}</pre>\n<p>{listed}</p>\n"
        "</details></figcaption>\n</figure>"
    )


def _spikes(comparison: Comparison, runs: Mapping[str, StoredRun], store: Store) -> str:
    found = [(row, spike) for row in comparison.rows for spike in runs.get(row.run_id, StoredRun()).spikes]
    found.sort(key=lambda pair: -pair[1].height)
    if not found:
        return '<section>\n<h2>Loss spikes</h2>\n<p class="note">None in the runs read.</p>\n</section>'
    lines = [
        (
            row.run_id,
            f"{row.arm} seed={row.seed}",
            f"{spike.start}",
            "not finite" if math.isinf(spike.height) else f"{spike.height:.3f}",
            "none"
            if spike.recovery_steps is None
            else f"{spike.recovery_steps} step{'s' * (spike.recovery_steps != 1)}",
            f"{spike.lost:.3f}",
            shlex.join(
                ["python", "-m", "andrea_ablate.replay", row.run_id, str(spike.start), "--runs", str(store.root)]
            ),
        )
        for row, spike in found
    ]
    heads = ("run", "arm", "step", "height, nats", "recovery", "loss lost, nats", "look inside")
    return f"<section>\n<h2>Loss spikes ({len(found)})</h2>\n{_table(heads, lines, code=(0, 6))}\n</section>"


def _runs(rows: Sequence[RunRow]) -> str:
    lines = [
        (
            row.run_id or "-",
            f"{row.arm} seed={row.seed}",
            row.status,
            "-" if row.val_loss is None else f"{row.val_loss:.4f}",
            "-" if row.tokens is None else f"{row.tokens:,}",
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            row.reason or "-",
        )
        for row in rows
    ]
    heads = ("run", "arm", "status", "validation loss", "tokens", "tokens/s", "reason")
    return f"<section>\n<h2>Runs ({len(rows)})</h2>\n{_table(heads, lines, code=(0,))}\n</section>"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], code: Sequence[int]) -> str:
    """A table whose cells know their heads: on a narrow screen each line is a card."""
    rows = []
    for line in lines:
        cells = (f"<code>{escape(cell)}</code>" if i in code else escape(cell) for i, cell in enumerate(line))
        labelled = (f'<td data-head="{escape(head)}">{cell}</td>' for head, cell in zip(heads, cells, strict=True))
        rows.append(f"<tr>{''.join(labelled)}</tr>")
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    return f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>"
