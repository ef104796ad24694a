"""The page in a headless Chromium, at the width of a desk and of a phone."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
from test_contents import capsule, write
from test_page import EVIL, TWO, page, plant, rows_of

from andrea_ablate.report import RunRow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium to run this"),
]

# Runs in the page that holds the report in a frame: collects what a person would see and do there.
PROBE = """
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const doc = frame.contentDocument, view = frame.contentWindow, seen = {};
  const curves = doc.getElementById("curves-0");
  const lines = () => curves.querySelectorAll(".over path.line").length;
  const press = (target, key) => target.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
  seen.scripts = view.alerted ?? 0;
  seen.overflow = doc.documentElement.scrollWidth - view.innerWidth;
  seen.charts = [...doc.querySelectorAll("figure")].map(f => [f.id, f.querySelectorAll("svg[role=img]").length]);
  seen.unnamed = [...doc.querySelectorAll("button, select")].filter(b => !(b.textContent || b.ariaLabel)).length;
  const drawn = [...doc.querySelectorAll("figure .chart")].map(chart => chart.innerHTML).join();
  seen.notANumber = /NaN|undefined|Infinity/.test(drawn);
  seen.before = lines();
  curves.querySelector("button[aria-pressed]").click();
  seen.after = lines();
  seen.pressed = curves.querySelector("button[aria-pressed]").getAttribute("aria-pressed");
  const svg = curves.querySelector("svg[role=img]");
  svg.focus();
  press(svg, "Home"); seen.first = curves.querySelector("output").textContent;
  press(svg, "ArrowRight"); seen.second = curves.querySelector("output").textContent;
  const select = curves.querySelector("select");
  select.value = 1; select.dispatchEvent(new view.Event("change"));
  seen.labels = [...curves.querySelectorAll("svg text.soft")].map(t => t.textContent);
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
frame.srcdoc = document.getElementById("page").textContent;
"""

# The same for zooming, pushing along and the map of a spike.
MOVES = """
const frame = document.querySelector("iframe");
frame.addEventListener("load", async () => {
  const doc = frame.contentDocument, view = frame.contentWindow, seen = {};
  view.Element.prototype.setPointerCapture = () => {}; // of a pointer that no hand holds
  const curves = doc.getElementById("curves-0"), svg = () => curves.querySelector("svg[role=img]");
  const labelled = (name) => curves.querySelector(`button[aria-label="${name}"]`);
  const places = () => [...svg().querySelectorAll("text[text-anchor=middle]")].map(t => t.getAttribute("x")).join();
  const send = (target, kind, name, more) =>
    target.dispatchEvent(new view[kind](name, { bubbles: true, cancelable: true, ...more }));
  const press = (target, key, more) => send(target, "KeyboardEvent", "keydown", { key, ...more });
  const point = (name, x, more) =>
    send(svg(), "PointerEvent", name, { pointerId: 1, clientX: x, clientY: 300, ...more });
  // The first and the last step that is shown; the cursor stays at the last one, and zooming is about the cursor.
  const domain = () => ["Home", "End"].map(key => {
    press(svg(), key);
    return +curves.querySelector("output").textContent.split(/[ :]/)[1];
  });
  seen.whole = domain();
  labelled("zoom in").click(); seen.zoomed = domain();
  labelled("pan left").click(); seen.left = domain();
  labelled("pan left").click(); labelled("pan left").click(); seen.start = domain();
  press(svg(), "0"); seen.again = domain();
  press(svg(), "+"); press(svg(), "+"); seen.plus = domain();
  press(svg(), "ArrowLeft", { shiftKey: true }); seen.shifted = domain();
  const before = places(), old = svg();
  point("pointerdown", 300, { buttons: 1 });
  point("pointermove", 360, { buttons: 1 });
  await new Promise(view.requestAnimationFrame);
  seen.pushed = old === svg() && parseFloat(curves.querySelector(".over svg").style.transform.slice(11));
  seen.ticks = places() !== before;
  seen.width = svg().clientWidth;
  point("pointerup", 360);
  seen.dragged = domain();
  send(svg(), "WheelEvent", "wheel", { deltaY: 100, ctrlKey: true, clientX: 300 });
  seen.out = domain();
  const capsule = doc.querySelector("figure[id^=capsule]"), map = capsule.querySelector("svg[role=img]");
  const read = () => capsule.querySelector("output").textContent;
  press(map, "ArrowDown"); seen.cell = read();
  press(map, "ArrowDown"); press(map, "ArrowRight"); seen.next = read();
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
frame.srcdoc = document.getElementById("page").textContent;
"""


def look(html, tmp_path, width, probe=PROBE):
    """What a probe saw of the page in a frame of this width, and what the browser wrote to its console."""
    holder = (
        f'<!doctype html><meta charset="utf-8"><iframe style="width:{width}px;height:900px;border:0"></iframe>'
        f'<textarea id="page">{escape(html)}</textarea><pre id="seen"></pre><script>{probe}</script>'
    )
    path = tmp_path / f"holder-{width}.html"
    path.write_text(holder, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--enable-logging=stderr",
    ]
    size = f"--window-size={max(width, 600)},1000"
    call = [CHROMIUM, *flags, size, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60)
    (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(unescape(seen)), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [390, 1280])
def test_a_reader_can_toggle_arms_and_read_values_without_a_mouse(tmp_path, width):
    folder, store = plant(tmp_path, TWO)
    seen, console = look(page([folder], store, "made by"), tmp_path, width)
    assert console == []
    assert seen["overflow"] <= 0
    assert seen["charts"] == [["effects-0", 1], ["curves-0", 1], ["costs-0", 1]]
    assert (seen["before"], seen["after"], seen["pressed"]) == (2, 1, "false")
    assert seen["first"].startswith("step 1: B 5") and seen["second"].startswith("step 2: B 4")
    assert "validation loss, nats per token" in seen["labels"]
    assert not seen["notANumber"] and seen["unnamed"] == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_a_reader_can_zoom_push_along_and_read_the_map_of_a_spike(tmp_path, width):
    folder, store = plant(tmp_path, TWO)
    write(store, "A-0", "step-00000007.json", capsule("A-0", 7, 3))
    seen, console = look(page([folder], store, "made by"), tmp_path, width, MOVES)
    assert console == []

    # Of 39 steps half, a quarter; half of that to the left; a fifth of what is shown to the left.
    assert (seen["whole"], seen["zoomed"], seen["left"]) == ([1, 40], [21, 40], [11, 30])
    assert (seen["start"], seen["again"]) == ([1, 20], [1, 40])
    assert (seen["plus"], seen["shifted"]) == ([31, 40], [29, 38])
    # Pushed to the right, what is to the left comes into view: as one piece first, drawn anew when it is let go.
    assert seen["pushed"] == pytest.approx(60) and seen["ticks"]
    by = 60 / (seen["width"] - 62) * 9.75  # 62 pixels are the axis and the margins
    assert seen["dragged"] == [math.ceil(28.3 - by), math.floor(38.05 - by)]
    assert seen["out"][0] < seen["dragged"][0]
    assert seen["cell"] == "step 5, layer 0: activation RMS 1; loss 2"
    assert seen["next"] == "step 6, layer 1: activation RMS 2; loss 2"


def test_hostile_and_long_names_neither_run_nor_widen_the_page(tmp_path):
    evil = f"{EVIL}<img src=x onerror='alerted=1'>{'long' * 60}"
    rows = [*rows_of(evil, [2.0, 2.1], id="a", design="d", lr=1e-3), *rows_of("B", [2.5, 2.7], design="d", lr=1e-2)]
    rows.append(RunRow("C", 0, "diverged", reason=evil, run_id="c", design="d", lr=1.0))
    folder, store = plant(tmp_path, rows, {"c": [(1, 5.0), (2, float("nan"))]})
    seen, console = look(page([folder], store, evil), tmp_path, 390)
    assert console == []
    assert seen["scripts"] == 0
    assert seen["overflow"] <= 0
    assert ["rates-0", 1] in seen["charts"]
    assert not seen["notANumber"]
