"""The figures as files: SVG from the page's own drawing code, run by QuickJS, and PNG of that by resvg."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from andrea_ablate.report.contents import Contents
from andrea_ablate.report.page import asset, place
from andrea_ablate.report.parts import Figure
from andrea_ablate.tracking.store import write_atomic

EXTRA = "pip install 'andrea-ablate[figures]'"
_ZOOM = 2  # pixels of a PNG per pixel of the drawing


def missing() -> str:
    """Why there will be no SVG or PNG, in one sentence; empty where both can be made."""
    if find_spec("quickjs") is None:
        return f"No SVG and PNG: their drawing code needs quickjs-ng, {EXTRA}."
    if find_spec("resvg_py") is None:
        return f"No PNG: that needs resvg-py, {EXTRA}."
    if not _has_fonts():
        return "No PNG: this machine has no fonts to write their texts with; install some, such as DejaVu."
    return ""


def write_images(sweeps: Sequence[Contents], folder: Path) -> dict[tuple[int, str], list[tuple[str, str]]]:
    """Write every view of every figure into `folder`, as far as the machine can.

    Returns: (index of the sweep, id of the figure) -> (what it shows, name of the file) of each SVG.
    """
    if find_spec("quickjs") is None:
        return {}
    draw, png = _drawing(), not missing()
    found: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for index, sweep in enumerate(sweeps):
        for figure in sweep.figures:
            for view in figure.views:
                shows = f"{figure.title}: {view['name']}" if view["name"] else figure.title
                name = re.sub(r"[^\w.]+", "-", f"{place(figure, index)} {view['name']}".strip())
                svg = draw(figure.kind, shows, view, _about(sweep, figure))
                write_atomic(folder / f"{name}.svg", svg)
                if png:
                    write_atomic(folder / f"{name}.png", to_png(svg))
                found.setdefault((index, figure.id), []).append((shows, f"{name}.svg"))
    return found


def to_png(svg: str) -> bytes:
    """A picture of an SVG, in the light colours."""
    import resvg_py

    # The converter reads a style's first rules, not those behind @media.
    plain = re.sub(r"@media .*?(?=</style>)", "", svg, flags=re.DOTALL)
    return bytes(resvg_py.svg_to_bytes(svg_string=plain, zoom=_ZOOM, sans_serif_family="DejaVu Sans"))


def style() -> str:
    """The rules of a chart with their colours put in, for light and for dark: a file has no page to take them from."""
    light, dark = (dict(re.findall(r"--([\w-]+): ([^;]+);", part)) for part in asset("colours.css").split("@media"))
    rules = asset("chart.css")

    def put(colours: Mapping[str, str]) -> str:
        return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)

    return f"{put(light)}@media (prefers-color-scheme: dark) {{\n{put(dark)}}}\n"


def _drawing() -> Any:
    """A function of kind, title, view and foot that gives the SVG, from draw.js."""
    import quickjs

    engine = quickjs.Context()
    engine.eval(asset("draw.js"))
    # As JSON, which is one piece: a string that is still a rope of its parts does not pass the binding.
    engine.eval("function file(given) { return JSON.stringify(standalone(...JSON.parse(given))) }")
    call, rules = engine.get("file"), style()

    def draw(kind: str, title: str, view: Mapping[str, Any], about: tuple[str, str]) -> str:
        figure = {"kind": kind, "title": title, "foot": about[0], "about": about[1]}
        return str(json.loads(call(json.dumps([figure, view, rules], allow_nan=False)))) + "\n"

    return draw


def _about(sweep: Contents, figure: Figure) -> tuple[str, str]:
    """The line under a figure, and all that it is made from, for its description."""
    ids, commits = sweep.run_ids(figure), sweep.commits(figure)
    listed = f" {', '.join(ids)}" if len(ids) <= 12 else f" {', '.join(ids[:11])} and {len(ids) - 11} more"
    foot = f"{sweep.name}: {len(ids)} run{'s' * (len(ids) != 1)}{listed}; commit {', '.join(commits) or 'unknown'}."
    return foot, "\n".join([figure.caption, f"runs: {' '.join(ids)}", *sweep.commands_of(figure)])


def _has_fonts() -> bool:
    unix = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
    folders = (*unix, "/Library/Fonts", "/System/Library/Fonts", "C:/Windows/Fonts")
    kinds = (".ttf", ".otf", ".ttc")
    return any(path.suffix in kinds for folder in folders for path in Path(folder).expanduser().rglob("*"))
