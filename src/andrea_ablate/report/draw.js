"use strict";
// Draws figures: from what one holds to a tree of SVG nodes, which a page makes elements of and Python a file. Nothing
// here touches a document; texts stay texts.
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "14 4"];
const COLOURS = 7;
const DOTS = ["circle", "diamond", "down", "square", "triangle", "cross"];
const MARKS = { "spike": "triangle", "not finite": "cross", "end": "square" };
const RAMP = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [203, 186, 105], [255, 234, 70]]; // cividis

const node = (name, attributes = {}, ...children) => ({ name, attributes, children: children.flat() });
const colour = style => `s${style % COLOURS}`;
const dash = style => DASHES[style % DASHES.length];
const dot = (style, x, y, r = 4) => node("path", { class: "dot", d: shape(DOTS[style % DOTS.length], x, y, r) });
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const signed = value => (value < 0 ? "" : "+") + value.toFixed(4);

function markup({ name, attributes, children }) {
  const inert = value => String(value).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd")
    .replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const given = Object.entries(attributes).map(([key, value]) => ` ${key}="${inert(value)}"`).join("");
  return `<${name}${given}>${children.map(child => child.name ? markup(child) : inert(child)).join("")}</${name}>`;
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

function ticks(low, high, count, log) {
  if (log && high - low > .35) {
    const tried = [[1, 2, 5], [1]].map(digits => {
      const found = [];
      for (let e = Math.floor(low); e <= Math.ceil(high); e++)
        for (const t of digits.map(m => e + Math.log10(m))) if (t >= low - 1e-9 && t <= high + 1e-9) found.push(t);
      return found;
    });
    const every = Math.ceil(tried[1].length / count);
    return tried[0].length <= count || tried[1].length < 2 ? tried[0] : tried[1].filter((_, i) => i % every === 0);
  }
  if (log) return ticks(10 ** low, 10 ** high, count, false).map(Math.log10);
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

function scale(domain, from, to, log = false) {
  const raw = v => from + (v - domain[0]) / (domain[1] - domain[0]) * (to - from);
  const back = at => domain[0] + (at - from) / (to - from) * (domain[1] - domain[0]);
  return Object.assign(v => raw(log ? Math.log10(v) : v), { raw, back, domain });
}

// `given`: where the ticks are to stand, as far as there is room.
function below({ left, top, right, bottom }, x, label, log, given) {
  let found = ticks(...x.domain, Math.max(2, (right - left) / 80), log);
  if (given) {
    found = [];
    for (const t of given.map(v => log ? Math.log10(v) : v))
      if (x.raw(t) >= left && x.raw(t) <= right && (!found.length || x.raw(t) - x.raw(found.at(-1)) > 44)) found.push(t);
  }
  const texts = tickTexts(found.map(t => log ? 10 ** t : t));
  return [
    ...found.flatMap((t, i) => [node("line", { class: "grid", x1: x.raw(t), x2: x.raw(t), y1: top, y2: bottom }),
      node("text", { x: x.raw(t), y: bottom + 16, "text-anchor": "middle" }, texts[i])]),
    node("text", { class: "soft", x: right, y: bottom + 33, "text-anchor": "end" }, label),
  ];
}

function beside({ left, right }, y, label, count = 6) {
  const found = ticks(...y.domain, count, false), texts = tickTexts(found);
  return [
    ...found.flatMap((t, i) => [node("line", { class: "grid", x1: left, x2: right, y1: y.raw(t), y2: y.raw(t) }),
      node("text", { x: left - 6, y: y.raw(t) + 4, "text-anchor": "end" }, texts[i])]),
    node("text", { class: "soft", x: 2, y: 12 }, label),
  ];
}

// A place on the x axis with a name: where a spike began, how long the windows of training were.
function pointer({ left, top, right, bottom }, x, at) {
  if (!at || x(at.x) < left || x(at.x) > right) return [];
  const before = x(at.x) > (left + right) / 2;
  return [node("line", { class: "zero", x1: x(at.x), x2: x(at.x), y1: top, y2: bottom }),
    node("text", { class: "soft", x: x(at.x) + (before ? -5 : 5), y: top + 12, "text-anchor": before ? "end" : "start" }, at.text)];
}

// What an xy figure shows of a range: `domain` of x, in powers of ten where x is logarithmic, and y up to `top`.
function xyScene(view, width, { hidden = new Set(), domain = null, top = Infinity } = {}) {
  const height = Math.round(clamp(width * .5, 260, 440));
  const frame = { left: 48, top: 22, right: width - 14, bottom: height - 40 };
  const raw = view.log ? Math.log10 : v => v;
  const shown = view.series.filter(s => !hidden.has(s.name));
  const whole = wider(span(shown.flatMap(s => [...s.x, ...s.marks.map(m => m.x)]).map(raw)), view.band === "bar" ? .08 : 0);
  const x = scale(domain ?? whole, frame.left, frame.right, view.log);
  const inside = v => raw(v) >= x.domain[0] && raw(v) <= x.domain[1];
  const seen = (s, side) => s[side].filter((v, i) => inside(s.x[i]) && v <= top);
  const means = shown.flatMap(s => seen(s, "mean"));
  let range = span(means);
  // A bar over two seeds can be far wider than all the differences; it may double the range, not more.
  const single = means.length < 2, size = range[1] - range[0];
  const ends = span([...means, ...shown.flatMap(s => [...seen(s, "low"), ...seen(s, "high")]),
    ...shown.flatMap(s => s.marks.filter(m => inside(m.x) && m.y <= top).map(m => m.y))]);
  range = view.band === "bar" && !single ? [Math.max(ends[0], range[0] - size / 2), Math.min(ends[1], range[1] + size / 2)] : ends;
  const y = scale(wider(range, .04), frame.bottom, frame.top);
  return { view, width, height, frame, whole, shown, x, y, inside };
}

const xyAxes = ({ view, frame, x, y }) => [...below(frame, x, view.x, view.log, view.ticks), ...beside(frame, y, view.y), ...pointer(frame, x, view.at)];

// The series, within the range and as far again to either side of it, so that it can be pushed along.
function xySeries({ view, frame, x, y, shown }) {
  const raw = view.log ? Math.log10 : v => v, [from, to] = wider(x.domain, 1);
  return shown.map(s => {
    const near = s.x.map((_, i) => i).filter(i => raw(s.x[i]) >= from && raw(s.x[i]) <= to);
    const px = near.map(i => x(s.x[i]).toFixed(1)), at = (side, i) => s[side][near[i]], group = [];
    const point = (side, i) => `${px[i]} ${y(at(side, i)).toFixed(1)}`;
    const known = near.map((_, i) => i).filter(i => at("low", i) !== null);
    if (view.band === "area") {
      if (known.length) group.push(node("path", { class: "area", d: `M${[...known.map(i => point("high", i)), ...[...known].reverse().map(i => point("low", i))].join("L")}Z` }));
    } else {
      for (const i of known) group.push(node("path", { class: "line", d: `M${point("low", i)}V${y(at("high", i)).toFixed(1)}` }));
    }
    let d = "", pen = "M";
    near.forEach((_, i) => { if (at("mean", i) === null) pen = "M"; else { d += pen + point("mean", i); pen = "L"; } });
    group.push(node("path", { class: "line", d, "stroke-dasharray": dash(s.style) }));
    if (view.band === "bar" || s.x.length <= 20) near.forEach((_, i) => { if (at("mean", i) !== null) group.push(dot(s.style, +px[i], y(at("mean", i)))); });
    for (const m of s.marks.filter(m => raw(m.x) >= from && raw(m.x) <= to))
      group.push(node("path", { class: "mark", d: shape(MARKS[m.kind], x(m.x), m.y === null ? frame.top + 5 : Math.max(y(m.y), frame.top + 5), 5) }, node("title", {}, m.text)));
    return node("g", { class: colour(s.style) }, group);
  });
}

function forestScene(view, width) {
  const narrow = width < 600, row = narrow ? 62 : 44, height = view.rows.length * row + 46;
  const frame = { left: 14, top: 4, right: width - 14, bottom: height - 40 };
  const means = span([0, ...view.rows.map(r => r.mean)]), size = means[1] - means[0];
  const ends = span([0, -view.margin, view.margin, ...view.rows.flatMap(r => [r.mean, r.low, r.high])]);
  const x = scale(wider([Math.max(ends[0], means[0] - size), Math.min(ends[1], means[1] + size)], .05), frame.left, frame.right);
  const inside = v => clamp(x(v), frame.left - 10, frame.right + 10);
  const said = r => r.mean === null ? "no shared seed" : r.noise ? `±${r.high.toFixed(4)}`
    : signed(r.mean) + (r.low === null ? " (1 seed, no interval)" : ` [${signed(r.low)}, ${signed(r.high)}]`)
    + (r.p_holm === null ? "" : `, p ${r.p_holm < .0001 ? "< 0.0001" : "= " + r.p_holm.toFixed(4)}`);
  const nodes = [
    node("rect", { class: "margin", x: inside(-view.margin), width: inside(view.margin) - inside(-view.margin), y: frame.top, height: frame.bottom - frame.top }),
    ...below(frame, x, view.x, false),
    node("line", { class: "zero", x1: x(0), x2: x(0), y1: frame.top, y2: frame.bottom }),
    node("text", { class: "soft", x: frame.left, y: frame.bottom + 33 }, narrow ? "" : `shaded: margin ±${view.margin}`),
  ];
  view.rows.forEach((r, i) => {
    const at = frame.top + (i + 1) * row - 14, verdict = r.verdict ?? "";
    const numbers = narrow || !verdict ? said(r) : `${said(r)}: ${verdict}`;
    const room = Math.floor((width - 30) / 6.6) - (narrow ? verdict.length + 1 : numbers.length);
    const name = r.name.length > room ? `${r.name.slice(0, Math.max(6, room - 1))}…` : r.name;
    const cap = v => inside(v) === x(v) ? `M${x(v)} ${at - 4}v8` : ""; // an interval that goes on beyond the frame has no end
    const bar = r.low === null ? [] : node("path", { class: "line", d: `M${inside(r.low)} ${at}H${inside(r.high)}${cap(r.low)}${cap(r.high)}` });
    const end = { x: frame.right, "text-anchor": "end" };
    nodes.push(node("g", { class: r.noise ? "noise" : colour(r.style) },
      node("text", { x: frame.left, y: at - (narrow ? 30 : 13) }, name, node("title", {}, r.name)),
      narrow ? node("text", { ...end, y: at - 30 }, verdict) : [],
      node("text", { class: "soft", y: at - 13, ...(narrow ? { x: frame.left } : end) }, numbers),
      bar, r.mean === null || r.noise ? [] : dot(r.style, x(r.mean), at, 5)));
  });
  return { height, nodes, label: view.rows.map(r => `${r.name} ${said(r)} ${r.verdict ?? ""}`).join("; ") };
}

function ramp(share) {
  const at = clamp(share, 0, 1) * (RAMP.length - 1), i = Math.min(Math.floor(at), RAMP.length - 2);
  return `rgb(${RAMP[i].map((c, k) => Math.round(c + (RAMP[i + 1][k] - c) * (at - i))).join()})`;
}

// A map of one value per step and layer, under the loss of the same steps.
function heatScene(view, width) {
  const rows = view.values.length, steps = view.steps.length, high = clamp(220 / rows, 12, 26);
  const strip = { left: 48, top: 22, right: width - 14, bottom: 92 };
  const frame = { ...strip, top: 106, bottom: 106 + rows * high };
  const height = frame.bottom + 74;
  const x = scale([view.steps[0] - .5, view.steps[steps - 1] + .5], frame.left, frame.right);
  const loss = scale(wider(span(view.loss), .08), strip.bottom, strip.top);
  const log = view.values.flat().every(v => v === null || v > 0), raw = log ? Math.log10 : v => v;
  const [low, top] = span(view.values.flat().filter(v => v !== null).map(raw));
  const fill = v => v === null ? { class: "gap" } : { fill: ramp((raw(v) - low) / (top - low)) };
  const wide = (frame.right - frame.left) / steps;
  let d = "", pen = "M";
  view.loss.forEach((v, i) => { if (v === null) pen = "M"; else { d += `${pen}${x(view.steps[i]).toFixed(1)} ${loss(v).toFixed(1)}`; pen = "L"; } });
  const bar = { left: frame.left, right: Math.min(frame.left + 220, frame.right), y: frame.bottom + 42 };
  const nodes = [
    ...beside(strip, loss, `loss, ${view.unit}; below it, by layer: ${view.y}`, 3), node("g", { class: colour(0) }, node("path", { class: "line", d })),
    node("g", { class: "cells" }, view.values.flatMap((row, layer) => row.map((v, i) =>
      node("rect", { ...fill(v), x: (frame.left + i * wide).toFixed(2), y: frame.top + layer * high, width: wide.toFixed(2), height: high - 1 })))),
    ...view.values.map((_, layer) => node("text", { x: frame.left - 6, y: frame.top + (layer + .5) * high + 4, "text-anchor": "end" }, `${layer}`)),
    ...below({ ...frame, top: frame.bottom }, x, view.x, false), ...pointer({ ...strip, bottom: frame.bottom }, x, view.at),
    ...Array.from({ length: 44 }, (_, i) => node("rect", { fill: ramp(i / 43), x: bar.left + i * (bar.right - bar.left) / 44, width: (bar.right - bar.left) / 44 + .3, y: bar.y, height: 10 })),
    node("text", { x: bar.left, y: bar.y + 24 }, text(log ? 10 ** low : low, 3)),
    node("text", { x: bar.right, y: bar.y + 24, "text-anchor": "end" }, `${text(log ? 10 ** top : top, 3)}${log ? ", log scale" : ""}`),
  ];
  return { height, nodes, frame, high, wide, strip, label: `${view.y}, ${rows} layers, steps ${view.steps[0]} to ${view.steps[steps - 1]}` };
}

function clipped({ left, top, right, bottom }, nodes) {
  const box = node("rect", { x: left - 5, y: top - 5, width: right - left + 10, height: bottom - top + 10 });
  return [node("clipPath", { id: "frame" }, box), node("g", { "clip-path": "url(#frame)" }, nodes)];
}

const sample = style => [node("path", { class: "line", d: "M0 6H34", "stroke-dasharray": dash(style) }), dot(style, 17, 6)];

// One view of a figure as a file of its own: title, legend, drawing and what it is made from.
function standalone(figure, view, style) {
  const width = 960, lines = [];
  const scene = { forest: forestScene, heat: heatScene }[figure.kind]?.(view, width) ?? xyScene(view, width);
  let top = 40, across = 14;
  const legend = (figure.kind === "xy" ? view.series : []).map(s => {
    const room = 60 + 6.8 * s.name.length;
    if (across > 14 && across + room > width) { across = 14; top += 20; }
    const item = node("g", { class: colour(s.style), transform: `translate(${across} ${top})` }, sample(s.style), node("text", { x: 40, y: 10 }, s.name));
    across += room;
    return item;
  });
  top += legend.length ? 28 : 0;
  for (const word of figure.foot.split(" ")) {
    if (lines.length && lines.at(-1).length + word.length < 150) lines.push(`${lines.pop()} ${word}`); else lines.push(word);
  }
  const height = top + scene.height + 16 * lines.length + 14;
  const drawn = scene.nodes ?? [...xyAxes(scene), ...clipped(scene.frame, xySeries(scene))];
  return markup(node("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" },
    node("title", {}, figure.title), node("desc", {}, figure.about), node("style", {}, style),
    node("rect", { class: "page", width, height }),
    node("text", { class: "title", x: 14, y: 26 }, figure.title), legend, node("g", { transform: `translate(0 ${top})` }, drawn),
    lines.map((line, i) => node("text", { class: "soft", x: 14, y: top + scene.height + 16 * (i + 1) }, line))));
}
