"use strict";
// Draws the figures of the element `data` as SVG, and again when the width changes. Texts go in as text, never as HTML.
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "14 4"];
const COLOURS = 7, AT_FIRST = 8; // colours; curves shown before anyone asks for more

function el(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "title", "circle"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(kind, x, y, r) {
  const at = (dx, dy) => `${(x + dx * r).toFixed(1)} ${(y + dy * r).toFixed(1)}`;
  const polygon = (...points) => `M${points.map(([dx, dy]) => at(dx, dy)).join("L")}Z`;
  const kinds = {
    circle: () => `M${at(-1, 0)}A${r} ${r} 0 1 0 ${at(1, 0)}A${r} ${r} 0 1 0 ${at(-1, 0)}Z`,
    square: () => polygon([-1, -1], [1, -1], [1, 1], [-1, 1]),
    diamond: () => polygon([0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]),
    triangle: () => polygon([0, -1.3], [1.2, 1], [-1.2, 1]),
    down: () => polygon([0, 1.3], [1.2, -1], [-1.2, -1]),
    cross: () => polygon([-1.3, -.8], [-.8, -1.3], [0, -.5], [.8, -1.3], [1.3, -.8], [.5, 0], [1.3, .8], [.8, 1.3], [0, .5], [-.8, 1.3], [-1.3, .8], [-.5, 0]),
  };
  return kinds[kind]();
}
const DOTS = ["circle", "diamond", "down", "square", "triangle", "cross"];
const MARKS = { "spike": "triangle", "not finite": "cross", "end": "square" };
const colour = style => `s${style % COLOURS}`;
const dash = style => DASHES[style % DASHES.length];
const dot = (style, x, y, r = 4) => el("path", { class: "dot", d: shape(DOTS[style % DOTS.length], x, y, r) });

function text(value, digits = 5) {
  const size = Math.abs(value);
  if (size >= 1e4) {
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit) return `${+(value / unit).toPrecision(digits)}${suffix}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : `${+value.toPrecision(digits)}`;
}
// As few digits as tell the ticks apart.
function tickTexts(values) {
  const texts = [2, 3, 4, 5, 6, 8, 10].map(digits => values.map(v => text(v, digits)));
  return texts.find((t, i) => new Set(t).size === t.length && t.every((one, j) => one === text(values[j], 8))) ?? texts.at(-1);
}
const signed = value => (value < 0 ? "" : "+") + value.toFixed(4);

function ticks(low, high, count, log) {
  if (log) {
    const found = [];
    for (let e = Math.floor(low); e <= Math.ceil(high); e++)
      for (const m of high - low < 1.5 ? [1, 2, 5] : [1]) {
        const t = e + Math.log10(m);
        if (t >= low - 1e-9 && t <= high + 1e-9) found.push(t);
      }
    const every = Math.ceil(found.length / count);
    return found.filter((_, i) => i % every === 0);
  }
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function span(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return [0, 1];
  if (low === high) { const by = Math.abs(low) * .05 || 1; return [low - by, high + by]; }
  return [low, high];
}

function wider([low, high], share) { const by = (high - low) * share; return [low - by, high + by]; }

function axes(svg, frame, x, y, labels, log) {
  const { left, top, right, bottom } = frame;
  const below = ticks(...x.domain, Math.max(2, (right - left) / 80), log);
  const texts = tickTexts(below.map(t => log ? 10 ** t : t));
  below.forEach((t, i) => {
    const at = x.raw(t);
    svg.append(el("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }),
      el("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, texts[i]));
  });
  svg.append(el("text", { class: "soft", x: right, y: bottom + 33, "text-anchor": "end" }, labels.x));
  if (!y) return;
  const beside = ticks(...y.domain, 6, false), heights = tickTexts(beside);
  beside.forEach((t, i) => {
    const at = y.raw(t);
    svg.append(el("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
      el("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, heights[i]));
  });
  svg.append(el("text", { class: "soft", x: 2, y: 12 }, labels.y));
}

function scale(domain, from, to, log = false) {
  const raw = v => from + (v - domain[0]) / (domain[1] - domain[0]) * (to - from);
  return Object.assign(v => raw(log ? Math.log10(v) : v), { raw, domain });
}

function xyChart(host, views, title) {
  let view = views[0], zoom = view.zooms[0], cursor = null;
  const names = [...new Map(views.flatMap(v => v.series.map(s => [s.name, s.style])))];
  const hidden = new Set(names.slice(view.band === "area" ? AT_FIRST : names.length).map(([name]) => name));
  const controls = el("div", { class: "controls" }), legend = el("div", { class: "controls legend", role: "group", "aria-label": "arms" });
  const plot = el("div"), readout = el("output", { "aria-live": "polite" });
  host.append(controls, legend, plot, readout);

  function choice(label, options, pick) {
    const select = el("select", { "aria-label": `${title}: ${label}` }, ...options.map((name, i) => el("option", { value: i }, name)));
    select.addEventListener("change", () => { pick(+select.value); cursor = null; draw(); });
    controls.append(select);
  }
  function drawControls() {
    controls.replaceChildren();
    if (views.length > 1) {
      choice("quantity", views.map(v => v.name), i => { view = views[i]; zoom = view.zooms[0]; drawControls(); controls.firstChild.focus(); });
      controls.firstChild.value = views.indexOf(view);
    }
    if (view.zooms.length > 1) choice("range", view.zooms.map(z => z.name), i => { zoom = view.zooms[i]; });
  }
  const buttons = names.map(([name, style]) => {
    const sample = el("svg", { class: colour(style), viewBox: "0 0 34 12", "aria-hidden": "true" },
      el("path", { class: "line", d: "M0 6H34", "stroke-dasharray": dash(style) }), dot(style, 17, 6));
    const button = el("button", { type: "button", "aria-pressed": !hidden.has(name) }, sample, name);
    button.addEventListener("click", () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); press(); });
    return button;
  });
  function press() {
    names.forEach(([name], i) => buttons[i].setAttribute("aria-pressed", !hidden.has(name)));
    draw();
  }
  function both(label, change) {
    const button = el("button", { type: "button" }, label);
    button.addEventListener("click", () => { names.forEach(([name]) => change(name)); press(); });
    return button;
  }
  legend.append(...buttons);
  if (names.length > 2) legend.append(both("all", name => hidden.delete(name)), both("none", name => hidden.add(name)));

  function draw() {
    const width = plot.clientWidth, height = Math.round(Math.max(260, Math.min(440, width * .5)));
    const frame = { left: 48, top: 22, right: width - 14, bottom: height - 40 };
    const shown = view.series.filter(s => !hidden.has(s.name));
    const inside = v => v >= (zoom.x0 ?? -Infinity);
    const seen = (s, side) => s[side].filter((v, i) => inside(s.x[i]) && v <= (zoom.y1 ?? Infinity));
    const xs = shown.flatMap(s => [...s.x, ...s.marks.map(m => m.x)]).filter(inside).map(v => view.log ? Math.log10(v) : v);
    const x = scale(wider(span(xs), view.band === "bar" ? .08 : 0), frame.left, frame.right, view.log);
    const means = shown.flatMap(s => seen(s, "mean"));
    let range = span(means);
    // A bar over two seeds can be far wider than all the differences; it may double the range, not more.
    const single = means.length < 2, size = range[1] - range[0];
    const ends = span([...means, ...shown.flatMap(s => [...seen(s, "low"), ...seen(s, "high")]),
      ...shown.flatMap(s => s.marks.filter(m => inside(m.x) && m.y <= (zoom.y1 ?? Infinity)).map(m => m.y))]);
    range = view.band === "bar" && !single ? [Math.max(ends[0], range[0] - size / 2), Math.min(ends[1], range[1] + size / 2)] : ends;
    const y = scale(wider(range, .04), frame.bottom, frame.top);
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `${title}. Arrow keys read the values.` });
    const clip = `clip-${host.parentNode.id}`;
    const clipPath = document.createElementNS(SVG, "clipPath"), box = document.createElementNS(SVG, "rect");
    clipPath.id = clip;
    for (const [key, value] of Object.entries({ x: frame.left - 5, y: frame.top - 5, width: Math.max(0, frame.right - frame.left + 10), height: frame.bottom - frame.top + 10 })) box.setAttribute(key, value);
    clipPath.append(box);
    svg.append(clipPath);
    axes(svg, frame, x, y, view, view.log);
    const layer = el("g", { "clip-path": `url(#${clip})` });
    for (const s of shown) layer.append(drawSeries(s, x, y, frame, view.band));
    const line = el("line", { class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
    svg.append(layer, line);
    plot.replaceChildren(svg);

    const stops = [...new Set(shown.flatMap(s => [...s.x, ...s.marks.map(m => m.x)]))].filter(inside).sort((a, b) => a - b);
    function show(value) {
      cursor = value;
      const at = x(value), near = v => Math.abs(x(v) - at) < 3;
      line.setAttribute("x1", at); line.setAttribute("x2", at); line.setAttribute("visibility", "visible");
      const found = [];
      for (const s of shown) {
        let best = -1;
        s.x.forEach((v, i) => { if (near(v) && s.mean[i] !== null && (best < 0 || Math.abs(v - value) < Math.abs(s.x[best] - value))) best = i; });
        if (best >= 0) found.push([s.mean[best], `${s.name} ${text(s.mean[best])}` + (s.low[best] === null ? "" : ` [${text(s.low[best])}, ${text(s.high[best])}]`)]);
        for (const m of s.marks) if (near(m.x)) found.push([Infinity, m.text]);
      }
      found.sort((a, b) => a[0] - b[0]);
      const more = found.length > 8 ? `; ${found.length - 8} more` : "";
      readout.textContent = `${view.x} ${text(value)}: ${found.slice(0, 8).map(f => f[1]).join("; ")}${more}`;
    }
    svg.addEventListener("pointermove", event => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      let best = null;
      for (const v of stops) if (best === null || Math.abs(x(v) - at) < Math.abs(x(best) - at)) best = v;
      if (best !== null) show(best);
    });
    svg.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
      if (by === undefined || !stops.length) return;
      event.preventDefault();
      const from = cursor === null ? (by > 0 ? -1 : stops.length) : stops.indexOf(cursor);
      show(stops[Math.max(0, Math.min(stops.length - 1, from + by))]);
    });
    if (cursor !== null && stops.includes(cursor)) show(cursor); else readout.textContent = "";
  }
  drawControls();
  draw();
  return draw;
}

function drawSeries(s, x, y, frame, band) {
  const group = el("g", { class: colour(s.style) });
  const px = s.x.map(v => x(v).toFixed(1));
  const path = side => {
    let d = "", pen = "M";
    s[side].forEach((v, i) => { if (v === null) pen = "M"; else { d += `${pen}${px[i]} ${y(v).toFixed(1)}`; pen = "L"; } });
    return d;
  };
  if (band === "area") {
    const known = s.x.map((_, i) => i).filter(i => s.low[i] !== null);
    const point = (side, i) => `${px[i]} ${y(s[side][i]).toFixed(1)}`;
    if (known.length) group.append(el("path", { class: "area", d: `M${[...known.map(i => point("high", i)), ...known.reverse().map(i => point("low", i))].join("L")}Z` }));
  } else {
    s.x.forEach((_, i) => { if (s.low[i] !== null) group.append(el("path", { class: "line", d: `M${px[i]} ${y(s.low[i]).toFixed(1)}V${y(s.high[i]).toFixed(1)}` })); });
  }
  group.append(el("path", { class: "line", d: path("mean"), "stroke-dasharray": dash(s.style) }));
  if (band === "bar" || s.x.length <= 20) s.mean.forEach((v, i) => { if (v !== null) group.append(dot(s.style, +px[i], y(v))); });
  for (const m of s.marks) {
    const at = m.y === null ? frame.top + 5 : Math.max(y(m.y), frame.top + 5);
    group.append(el("path", { class: "mark", d: shape(MARKS[m.kind], x(m.x), at, 5) }, el("title", {}, m.text)));
  }
  return group;
}

function forestChart(host, content, title) {
  const plot = el("div");
  host.append(plot);
  function draw() {
    const width = plot.clientWidth, narrow = width < 600, row = narrow ? 62 : 44, height = content.rows.length * row + 46;
    const frame = { left: 14, top: 4, right: width - 14, bottom: height - 40 };
    const means = span([0, ...content.rows.map(r => r.mean)]), size = means[1] - means[0];
    const ends = span([0, ...content.rows.flatMap(r => [r.mean, r.low, r.high])]);
    const x = scale(wider([Math.max(ends[0], means[0] - size), Math.min(ends[1], means[1] + size)], .05), frame.left, frame.right);
    const said = r => r.mean === null ? "no shared seed" : signed(r.mean) + (r.low === null ? " (1 seed, no interval)" : ` [${signed(r.low)}, ${signed(r.high)}]`)
      + (r.p_holm === null ? "" : `, p ${r.p_holm < .0001 ? "< 0.0001" : "= " + r.p_holm.toFixed(4)}`);
    const label = content.rows.map(r => `${r.name} ${said(r)}`).join("; ");
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}: ${label}` });
    axes(svg, frame, x, null, content, false);
    svg.append(el("line", { class: "zero", x1: x(0), x2: x(0), y1: frame.top, y2: frame.bottom }));
    content.rows.forEach((r, i) => {
      const at = frame.top + (i + 1) * row - 14, group = el("g", { class: colour(r.style) });
      const inside = v => Math.max(frame.left - 10, Math.min(frame.right + 10, x(v)));
      const numbers = said(r), room = Math.floor((width - 30) / 6.6) - (narrow ? 0 : numbers.length);
      const name = r.name.length > room ? `${r.name.slice(0, Math.max(6, room - 1))}…` : r.name;
      group.append(el("text", { x: frame.left, y: at - (narrow ? 30 : 13) }, name, el("title", {}, r.name)),
        el("text", { class: "soft", y: at - 13, ...(narrow ? { x: frame.left } : { x: frame.right, "text-anchor": "end" }) }, numbers));
      if (r.low !== null) group.append(el("path", { class: "line", d: `M${inside(r.low)} ${at}H${inside(r.high)}M${inside(r.low)} ${at - 4}v8M${inside(r.high)} ${at - 4}v8` }));
      if (r.mean !== null) group.append(dot(r.style, x(r.mean), at, 5));
      svg.append(group);
    });
    plot.replaceChildren(svg);
  }
  draw();
  return draw;
}

const redraws = JSON.parse(document.getElementById("data").textContent).flatMap(sweep => sweep.figures).map(figure => {
  const place = document.getElementById(figure.id);
  const chart = { xy: xyChart, forest: forestChart }[figure.kind];
  return chart(place.querySelector(".chart"), figure.content, place.querySelector("h2").textContent);
});
let drawnAt = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnAt) { drawnAt = innerWidth; redraws.forEach(draw => draw()); }
});
