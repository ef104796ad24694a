"""The report's files beside its page: every view as SVG and PNG from the page's own drawing code, and Markdown."""

from __future__ import annotations

import re
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest
from test_contents import capsule, figure, write
from test_page import EVIL, TWO, plant, rows_of

from andrea_ablate.report import RunRow, images
from andrea_ablate.report.contents import read
from andrea_ablate.report.markdown import inline, markdown

SVG = "{http://www.w3.org/2000/svg}"
drawn = pytest.mark.skipif(
    find_spec("quickjs") is None, reason="no quickjs-ng here, which draws; pip install 'andrea-ablate[figures]'"
)


@pytest.fixture
def two(tmp_path):
    folder, store = plant(tmp_path, TWO)
    write(store, "A-0", "step-00000007.json", capsule("A-0", 7, 3))
    return read(folder, store, "made by")


@pytest.fixture
def no_png(monkeypatch):
    """Pictures take a second each, and only one test looks at them."""
    monkeypatch.setattr(images, "to_png", lambda svg: b"")


def texts(root):
    return [node.text for node in root.iter(f"{SVG}text")]


@drawn
@pytest.mark.usefixtures("no_png")
def test_every_view_is_a_file_that_says_what_it_is_made_from(two, tmp_path):
    made = images.write_images([two], tmp_path / "figures")
    files = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert files == {name for found in made.values() for _, name in found}
    assert len(files) == sum(len(figure.views) for figure in two.figures) == 7
    for path in (tmp_path / "figures").glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        said = root.find(f"{SVG}desc").text
        assert "A-0" in said and "made by" in said and "python -m andrea_ablate -m A seed=0,1,2" in said
        assert not re.search(r"NaN|undefined|Infinity", path.read_text())
        assert any(text.startswith("planted: ") and "commit unknown" in text for text in texts(root))


@drawn
@pytest.mark.usefixtures("no_png")
def test_a_line_of_the_file_is_the_curve(two, tmp_path):
    images.write_images([two], tmp_path)
    root = ElementTree.parse(tmp_path / "curves-0-training-loss.svg").getroot()
    by_class = {node.get("class"): node for node in root.iter(f"{SVG}g")}
    (series,) = [one for one in figure(two, "curves").views[0]["series"] if one["name"] == "A"]
    (line,) = [path.get("d") for path in by_class["s0"] if path.get("class") == "line"] or [None]
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", line)[1:]]
    assert len(points) == len(series["x"]) == 40
    # One scale for all: the pixels are a line through the values, and lower losses stand lower.
    (x0, y0), (x1, y1) = points[0], points[-1]
    steps, losses = series["x"], series["mean"]
    for (x, y), step, loss in zip(points, steps, losses, strict=True):
        assert x == pytest.approx(x0 + (step - steps[0]) / (steps[-1] - steps[0]) * (x1 - x0), abs=0.11)
        assert y == pytest.approx(y0 + (loss - losses[0]) / (losses[-1] - losses[0]) * (y1 - y0), abs=0.11)
    assert x1 > x0 and y1 > y0 and losses[0] > losses[-1]


@drawn
@pytest.mark.usefixtures("no_png")
def test_a_map_has_a_cell_for_every_step_and_layer(two, tmp_path):
    images.write_images([two], tmp_path)
    root = ElementTree.parse(next(tmp_path.glob("capsule-*.svg"))).getroot()
    (cells,) = [node for node in root.iter(f"{SVG}g") if node.get("class") == "cells"]
    fills = [cell.get("fill") for cell in cells]
    assert len(fills) == 9 and fills[2] is None  # the value that was not finite
    assert fills[0] == fills[1] == "rgb(0,32,77)" and fills[-1] == "rgb(255,234,70)"


@drawn
@pytest.mark.usefixtures("no_png")
def test_hostile_names_stay_texts(tmp_path):
    evil = f"{EVIL}\x01</text></svg>"
    rows = [*rows_of(evil, [2.0, 2.1], id="a"), *rows_of("B", [2.5, 2.6])]
    folder, store = plant(tmp_path, rows)
    contents = read(folder, store, EVIL)
    images.write_images([contents], tmp_path / "figures")
    for path in (tmp_path / "figures").glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert not list(root.iter(f"{SVG}script"))
        if path.name.startswith("curves"):
            assert evil.replace("\x01", "\ufffd") in texts(root)


@drawn
@pytest.mark.slow  # a second for each picture
@pytest.mark.skipif(find_spec("resvg_py") is None, reason="no resvg-py here, which makes PNG of SVG")
def test_a_picture_has_the_size_and_colours_of_its_drawing(two, tmp_path):
    image = pytest.importorskip("PIL.Image")
    images.write_images([two], tmp_path)
    for path in tmp_path.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        picture = image.open(path.with_suffix(".png")).convert("RGB")
        assert picture.size == (2 * int(root.get("width")), 2 * int(root.get("height")))
        assert picture.getpixel((0, 0)) == (255, 255, 255)
    curves = image.open(tmp_path / "curves-0-training-loss.png").convert("RGB")
    seen = {colour for _, colour in curves.getcolors(1 << 20)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= seen  # the first two arms'


def test_colours_are_put_in_for_light_and_for_dark():
    light, dark = images.style().split("@media")
    assert "var(" not in light + dark
    assert ".s0 { color: #0072b2; }" in light and ".s0 { color: #5bb3f0; }" in dark


@pytest.mark.parametrize("absent, said", [("quickjs", "No SVG and PNG:"), ("resvg_py", "No PNG:")])
def test_without_a_drawing_or_converting_library_one_sentence_says_so(two, tmp_path, monkeypatch, absent, said):
    monkeypatch.setattr(images, "find_spec", lambda name: None if name == absent else object())
    assert images.missing().startswith(said) and "pip install 'andrea-ablate[figures]'" in images.missing()
    if absent == "quickjs":
        assert images.write_images([two], tmp_path / "figures") == {}


def test_a_machine_without_fonts_makes_no_picture_without_words(monkeypatch):
    monkeypatch.setattr(images, "find_spec", lambda name: object())
    monkeypatch.setattr(images, "_has_fonts", lambda: False)
    assert "no fonts" in images.missing()


# --- Markdown


def test_markdown_has_the_tables_of_the_page_and_shows_its_figures(two):
    text = markdown([two], {(0, "curves"): [("Loss curves: training loss", "figures/curves.svg")]})
    assert text.startswith("# A has the lowest loss\n")
    assert (
        "- **0.3100 nats lower** than the next best 'B', paired over 3 seeds: 95 % [+0.2852, +0.3348], *settled*"
        in text
    )
    assert "![Loss curves: training loss](figures/curves.svg)" in text
    assert "| 1 | A | 2.1000 ±0.2484 | baseline | 1.00k |" in text
    assert "| B | +0.3100 \\[+0.2852, +0.3348\\] |" in text
    for table in two.tables:
        assert f"## {inline(table.title)}\n" in text
    assert "```\npython -m andrea_ablate -m A seed=0,1,2\n" in text and "`A-0`, `A-1`" in text


def test_markdown_leaves_hostile_names_as_they_are(tmp_path):
    evil = f"{EVIL}|*a*_b_`c`[d](e)\n# f"
    rows = [*rows_of(evil, [2.0], id="a"), *rows_of("B", [2.5]), RunRow("C", 0, "failed", reason=evil, run_id="c")]
    folder, store = plant(tmp_path, rows)
    text = markdown([read(folder, store, "```\nout of the fence")], {})
    assert "<script" not in re.sub(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "````\n```\nout of the fence\n````" in text
    heads = [line for line in text.splitlines() if line.startswith("| rank |")]
    (ranking,) = re.findall(r"\| rank \|.*?\n\n", text, flags=re.DOTALL)
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in ranking.strip().splitlines()}
    assert len(heads) == 1 and bars == {9}
