"use strict";
// Shows the figures of the element `data`, drawn by draw.js, and lets a reader choose, read values, zoom and pan.
const AT_FIRST = 8; // curves shown before anyone asks for more
const KEYS = "Arrow keys read the values, + and - zoom, Shift with an arrow or dragging pans, 0 shows all.";

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function drawn({ name, attributes, children }) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map(child => child.name ? drawn(child) : child));
  return made;
}
const image = (width, height, attributes, ...nodes) =>
  drawn(node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", ...attributes }, ...nodes));

function choice(label, names, chosen, pick) {
  const select = el("select", { "aria-label": label }, ...names.map((name, i) => el("option", { value: i }, name)));
  select.value = chosen;
  select.addEventListener("change", () => pick(+select.value));
  return select;
}
function button(label, act, attributes = {}) {
  const made = el("button", { type: "button", ...attributes }, label);
  made.addEventListener("click", act);
  return made;
}

function xyChart(host, views, title) {
  let view = views[0], zoom = view.zooms[0], domain = null, cursor = null, scene = null;
  const names = [...new Map(views.flatMap(v => v.series.map(s => [s.name, s.style])))];
  const hidden = new Set(names.slice(view.band === "area" ? AT_FIRST : names.length).map(([name]) => name));
  const controls = el("div", { class: "controls" }), legend = el("div", { class: "controls legend", role: "group", "aria-label": "arms" });
  const plot = el("div", { class: "plot" }), readout = el("output", { "aria-live": "polite" });
  host.append(controls, legend, plot, readout);
  const raw = v => view.log ? Math.log10(v) : v;

  function choose(v, z) { view = v; zoom = z; domain = null; cursor = null; drawControls(); draw(); }
  function drawControls() {
    const found = [];
    if (views.length > 1) found.push(choice(`${title}: quantity`, views.map(v => v.name), views.indexOf(view), i => { choose(views[i], views[i].zooms[0]); controls.firstChild.focus(); }));
    if (view.zooms.length > 1) found.push(choice(`${title}: range`, view.zooms.map(z => z.name), view.zooms.indexOf(zoom), i => { zoom = view.zooms[i]; domain = null; cursor = null; draw(); }));
    if (view.band === "area") found.push(el("span", { class: "steps" },
      button("−", () => zoomBy(2), { "aria-label": "zoom out" }), button("+", () => zoomBy(.5), { "aria-label": "zoom in" }),
      button("◀", () => panBy(-.5), { "aria-label": "pan left" }), button("▶", () => panBy(.5), { "aria-label": "pan right" })));
    controls.replaceChildren(...found);
  }
  const buttons = names.map(([name, style]) => {
    const made = button("", () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); press(); }, { "aria-pressed": !hidden.has(name) });
    made.append(drawn(node("svg", { class: colour(style), viewBox: "0 0 34 12", "aria-hidden": "true" }, ...sample(style))), name);
    return made;
  });
  function press() {
    names.forEach(([name], i) => buttons[i].setAttribute("aria-pressed", !hidden.has(name)));
    draw();
  }
  const both = (label, change) => button(label, () => { names.forEach(([name]) => change(name)); press(); });
  legend.append(...buttons);
  if (names.length > 2) legend.append(both("all", name => hidden.delete(name)), both("none", name => hidden.add(name)));

  // The range [from, to], moved into what there is.
  function within([from, to]) {
    const [low, high] = scene.whole, size = Math.min(to - from, high - low);
    const start = clamp(from, low, high - size);
    return [start, start + size];
  }
  function zoomBy(factor, at = null) {
    const [from, to] = scene.x.domain, about = at ?? (cursor !== null ? raw(cursor) : (from + to) / 2);
    const least = (scene.whole[1] - scene.whole[0]) / 2000;
    const size = Math.max(least, (to - from) * factor);
    domain = within([about - (about - from) / (to - from) * size, about + (to - about) / (to - from) * size]);
    draw();
  }
  function panBy(share) {
    const [from, to] = scene.x.domain, by = (to - from) * share;
    domain = within([from + by, to + by]);
    draw();
  }

  function draw() {
    const width = plot.clientWidth;
    const top = zoom.y1 ?? Infinity;
    const whole = () => xyScene(view, width, { hidden, top }).whole;
    scene = xyScene(view, width, { hidden, top, domain: domain ?? (zoom.x0 === undefined ? null : [raw(zoom.x0), whole()[1]]) });
    const { frame, x } = scene;
    const svg = image(width, scene.height, { tabindex: 0, "aria-label": `${title}. ${KEYS}` });
    const axes = drawn(node("g", {}, ...xyAxes(scene)));
    const line = drawn(node("line", { class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden" }));
    svg.append(axes, line);
    // The series are an image of their own over the frame, three frames wide: a browser pushes it without drawing it anew.
    const dx = frame.left - 5, dy = frame.top - 5, across = 3 * width;
    const layer = drawn(node("svg", { viewBox: `${-width} 0 ${across} ${scene.height}`, width: across, height: scene.height, "aria-hidden": "true" }, ...xySeries(scene)));
    layer.style.cssText = `width: ${across}px; left: ${-width - dx}px; top: ${-dy}px`;
    const over = el("div", { class: "over" }, layer);
    over.style.cssText = `left: ${dx}px; top: ${dy}px; width: ${Math.max(0, frame.right - dx + 5)}px; height: ${frame.bottom - dy + 5}px`;
    plot.replaceChildren(svg, over);

    const stops = [...new Set(scene.shown.flatMap(s => [...s.x, ...s.marks.map(m => m.x)]))].filter(scene.inside).sort((a, b) => a - b);
    function show(value) {
      cursor = value;
      const at = x(value), near = v => Math.abs(x(v) - at) < 3;
      line.setAttribute("x1", at); line.setAttribute("x2", at); line.setAttribute("visibility", "visible");
      const found = [];
      for (const s of scene.shown) {
        let best = -1;
        s.x.forEach((v, i) => { if (near(v) && s.mean[i] !== null && (best < 0 || Math.abs(v - value) < Math.abs(s.x[best] - value))) best = i; });
        if (best >= 0) found.push([s.mean[best], `${s.name} ${text(s.mean[best])}` + (s.low[best] === null ? "" : ` [${text(s.low[best])}, ${text(s.high[best])}]`)]);
        for (const m of s.marks) if (near(m.x)) found.push([Infinity, m.text]);
      }
      found.sort((a, b) => a[0] - b[0]);
      const more = found.length > 8 ? `; ${found.length - 8} more` : "";
      readout.textContent = `${view.x} ${text(value)}: ${found.slice(0, 8).map(f => f[1]).join("; ")}${more}`;
    }
    svg.addEventListener("keydown", event => {
      const act = {
        ArrowLeft: () => event.shiftKey ? panBy(-.2) : move(-1), ArrowRight: () => event.shiftKey ? panBy(.2) : move(1),
        PageUp: () => move(-20), PageDown: () => move(20), Home: () => move(-Infinity), End: () => move(Infinity),
        "+": () => zoomBy(.5), "=": () => zoomBy(.5), "-": () => zoomBy(2), 0: () => choose(view, view.zooms[0]),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      act();
      plot.firstChild.focus();
    });
    function move(by) {
      if (!stops.length) return;
      const from = cursor === null ? (by > 0 ? -1 : stops.length) : stops.indexOf(cursor);
      show(stops[clamp(from + by, 0, stops.length - 1)]);
    }
    if (view.band === "area") pushed(svg, axes, layer);
    svg.addEventListener("pointermove", event => {
      if (event.buttons) return;
      const at = event.clientX - svg.getBoundingClientRect().left;
      let best = null;
      for (const v of stops) if (best === null || Math.abs(x(v) - at) < Math.abs(x(best) - at)) best = v;
      if (best !== null) show(best);
    });
    if (cursor !== null && stops.includes(cursor)) show(cursor); else { cursor = null; readout.textContent = ""; }
  }

  // Pushed along with a pointer, the series are moved as one piece and drawn anew when it is let go; two fingers zoom.
  function pushed(svg, axes, layer) {
    const { frame, x } = scene, held = new Map();
    let start = 0, moved = 0, gap = 0;
    const place = event => event.clientX - svg.getBoundingClientRect().left;
    const apart = () => { const [a, b] = [...held.values()]; return Math.abs(a - b) || 1; };
    svg.addEventListener("pointerdown", event => {
      held.set(event.pointerId, place(event));
      if (held.size === 1) { start = place(event); moved = gap = 0; }
      if (held.size === 2) gap = apart();
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", event => {
      if (!held.has(event.pointerId)) return;
      held.set(event.pointerId, place(event));
      if (held.size !== 1 || gap) return;
      const by = x.back(frame.left) - x.back(frame.left + place(event) - start);
      const to = within([x.domain[0] + by, x.domain[1] + by]);
      moved = x.raw(x.domain[0]) - x.raw(to[0]);
      requestAnimationFrame(() => {
        layer.style.transform = `translateX(${moved}px)`;
        axes.replaceChildren(...xyAxes({ ...scene, x: scale(to, frame.left, frame.right, view.log) }).map(drawn));
      });
    });
    const let_go = event => {
      if (!held.has(event.pointerId)) return;
      const factor = held.size === 2 ? gap / apart() : 1;
      held.delete(event.pointerId);
      if (factor !== 1) zoomBy(clamp(factor, .1, 10), x.back(place(event)));
      else if (Math.abs(moved) > 1) { domain = within(x.domain.map(v => x.back(x.raw(v) - moved))); draw(); }
    };
    svg.addEventListener("pointerup", let_go);
    svg.addEventListener("pointercancel", let_go);
    svg.addEventListener("wheel", event => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !(sideways && domain)) return; // the page's own scrolling
      event.preventDefault();
      if (event.ctrlKey) zoomBy(2 ** (clamp(event.deltaY, -100, 100) / 100), x.back(place(event)));
      else panBy(event.deltaX / (frame.right - frame.left));
    }, { passive: false });
  }
  drawControls();
  draw();
  return draw;
}

function forestChart(host, [view], title) {
  const plot = el("div");
  host.append(plot);
  const draw = () => {
    const width = plot.clientWidth, scene = forestScene(view, width);
    plot.replaceChildren(image(width, scene.height, { "aria-label": `${title}: ${scene.label}` }, ...scene.nodes));
  };
  draw();
  return draw;
}

function heatChart(host, views, title) {
  let view = views[0], at = null;
  const controls = el("div", { class: "controls" }), plot = el("div"), readout = el("output", { "aria-live": "polite" });
  host.append(controls, plot, readout);
  if (views.length > 1) controls.append(choice(`${title}: quantity`, views.map(v => v.name), 0, i => { view = views[i]; draw(); }));
  function draw() {
    const width = plot.clientWidth, scene = heatScene(view, width), { frame, high, wide, strip } = scene;
    const svg = image(width, scene.height, { tabindex: 0, "aria-label": `${title}: ${scene.label}. Arrow keys read the values.` }, ...scene.nodes);
    const cursor = drawn(node("rect", { class: "cell", width: wide, height: high, visibility: "hidden" }));
    svg.append(cursor);
    plot.replaceChildren(svg);
    function show(step, layer) {
      at = [clamp(step, 0, view.steps.length - 1), clamp(layer, 0, view.values.length - 1)];
      for (const [key, value] of Object.entries({ x: frame.left + at[0] * wide, y: frame.top + at[1] * high, visibility: "visible" })) cursor.setAttribute(key, value);
      const value = view.values[at[1]][at[0]], loss = view.loss[at[0]], said = v => v === null ? "not finite" : text(v);
      readout.textContent = `step ${view.steps[at[0]]}, layer ${at[1]}: ${view.y} ${said(value)}; loss ${said(loss)}`;
    }
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const step = Math.floor((event.clientX - box.left - frame.left) / wide), y = event.clientY - box.top;
      if (y > strip.top && y < frame.bottom) show(step, Math.floor((y - frame.top) / high));
    });
    svg.addEventListener("keydown", event => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!by) return;
      event.preventDefault();
      at === null ? show(0, 0) : show(at[0] + by[0], at[1] + by[1]);
    });
    if (at === null) readout.textContent = ""; else show(...at);
  }
  draw();
  return draw;
}

const redraws = JSON.parse(document.getElementById("data").textContent).flatMap(sweep => sweep.figures).map(figure => {
  const place = document.getElementById(figure.id);
  const chart = { xy: xyChart, forest: forestChart, heat: heatChart }[figure.kind];
  return chart(place.querySelector(".chart"), figure.content, place.querySelector("h2").textContent);
});
let drawnAt = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnAt) { drawnAt = innerWidth; redraws.forEach(draw => draw()); }
});
