"use strict";
// Charts of the training log: inline SVG, exact values under the pointer or the arrow keys, and as tables.
const data = JSON.parse(document.getElementById("data").textContent);
const controls = document.getElementById("controls");
const HEIGHT = 230, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 34;
const AXES = { step: "steps", seconds: "time (h:min:s)", tokens: "target tokens" };
const several = data.runs.length > 1;
const redraws = [];

function html(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---- numbers --------------------------------------------------------------------------------------------------------

function clock(seconds) {
  const whole = Math.floor(seconds), two = n => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
function short(value) { // for an axis: 12k, 3.4M, 0.002, 5e-4
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${letter}`;
  return Math.abs(value) >= 1e-3 || !value ? String(+value.toPrecision(3)) : value.toExponential();
}
const exact = value => value === null ? "–" : Math.abs(value) >= 1e4 ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : String(value);
const place = (axis, value) => value === null ? "–" : axis === "seconds" ? clock(value) : exact(value);

function ticks(low, high, count, axis) {
  const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map(n => n * size).find(n => n >= rough);
  if (axis === "seconds") step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400].find(n => n >= rough) || step;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(+(i * step).toPrecision(12));
  return values;
}
function logTicks(low, high) {
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const n of high / low > 300 ? [1] : high / low > 20 ? [1, 3] : [1, 2, 3, 5, 7]) {
      const value = +(n * 10 ** power).toPrecision(6);
      if (value >= low * 0.999 && value <= high * 1.001) values.push(value);
    }
  return values;
}

// ---- a chart --------------------------------------------------------------------------------------------------------

const table = line => data.runs[line.run][line.table];
function label(line, chart) { // in a chart with one line for each run, the run's name is the label
  const alone = chart.lines.filter(other => other.run === line.run).length === 1, name = data.runs[line.run].name;
  return !several ? line.label : alone ? name : `${name}: ${line.label}`;
}
function points(line, axis, log) {
  const xs = table(line)[axis], ys = table(line)[line.column];
  return ys.map((y, i) => ({ x: xs[i], y })).map(p => p.x === null || p.y === null || (log && p.y <= 0) ? null : p);
}
function mark(line, x, y) {
  const shape = line.run ? svg("rect", { x: x - 3, y: y - 3, width: 6, height: 6 }) : svg("circle", { cx: x, cy: y, r: 3.2 });
  shape.setAttribute("class", `mark run-${line.run}`);
  shape.setAttribute("opacity", line.shade);
  return shape;
}
function swatch(line) {
  const drawn = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
  drawn.append(svg("path", { d: "M0 5H26", class: `series run-${line.run} ${line.style}`, opacity: line.shade }));
  if (line.style === "dots") drawn.append(mark(line, 13, 5));
  return drawn;
}

function scales(lines, chart, width, axis, log) {
  const all = lines.flat().filter(Boolean), xs = all.map(p => p.x), ys = all.map(p => p.y);
  const least = values => values.reduce((a, b) => Math.min(a, b), Infinity), most = values => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const x0 = Math.min(0, least(xs)), x1 = Math.max(most(xs), x0 + 1e-9);
  let y0 = chart.zero && !log ? Math.min(0, least(ys)) : least(ys), y1 = most(ys);
  if (y0 === y1) [y0, y1] = log ? [y0 / 2, y1 * 2] : [y0 - (chart.zero ? 0 : Math.abs(y0) / 10 || 1), y1 + (Math.abs(y1) / 10 || 1)];
  const yTicks = log ? logTicks(y0, y1) : ticks(y0, y1, 4);
  if (!log && !chart.zero) { const gap = (y1 - y0) * 0.04; y0 -= gap; y1 += gap; }
  if (chart.zero) y1 += (y1 - y0) * 0.04;
  const f = log ? Math.log : v => v;
  return {
    xTicks: ticks(x0, x1, Math.max(2, Math.floor(width / 90)), axis), yTicks,
    x: v => LEFT + (v - x0) / (x1 - x0) * (width - LEFT - RIGHT),
    y: v => HEIGHT - BOTTOM - (f(v) - f(y0)) / (f(y1) - f(y0)) * (HEIGHT - TOP - BOTTOM),
  };
}

function paint(plot, chart, axis, log) {
  const width = Math.max(220, plot.clientWidth), lines = chart.lines.map(line => points(line, axis, log));
  plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  plot.replaceChildren();
  if (!lines.flat().some(Boolean)) {
    plot.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, `the log has no ${AXES[axis]}`));
    return null;
  }
  const scale = scales(lines, chart, width, axis, log);
  for (const value of scale.yTicks) {
    plot.append(svg("path", { d: `M${LEFT} ${scale.y(value)}H${width - RIGHT}`, class: "grid" }));
    plot.append(svg("text", { x: LEFT - 6, y: scale.y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of scale.xTicks)
    plot.append(svg("text", { x: scale.x(value), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, axis === "seconds" ? clock(value) : short(value)));
  plot.append(svg("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, AXES[axis]));
  chart.lines.forEach((line, i) => {
    let path = "", pen = "M";
    for (const p of lines[i]) {
      if (!p) { pen = "M"; continue; }
      path += `${pen}${scale.x(p.x).toFixed(1)} ${scale.y(p.y).toFixed(1)}`;
      pen = "L";
    }
    plot.append(svg("path", { d: path, class: `series run-${line.run} ${line.style}`, opacity: line.shade }));
    const real = lines[i].filter(Boolean);
    if (line.style === "dots" || real.length === 1) plot.append(...real.map(p => mark(line, scale.x(p.x), scale.y(p.y))));
  });
  return { scale, lines, width, stops: [...new Set(lines.flat().filter(Boolean).map(p => p.x))].sort((a, b) => a - b) };
}

function nearest(line, x) {
  return line.filter(Boolean).reduce((best, p) => !best || Math.abs(p.x - x) < Math.abs(best.x - x) ? p : best, null);
}
function point(plot, tip, chart, drawn, axis, x) { // show the values at x, one of the stops
  for (const old of plot.querySelectorAll(".pointer")) old.remove();
  if (!drawn || x === null) { tip.replaceChildren(); return; }
  const at = drawn.scale.x(x), group = svg("g", { class: "pointer" }), rows = [html("b", {}, `${axis === "seconds" ? "time" : axis} ${place(axis, x)}`)];
  group.append(svg("path", { d: `M${at} ${TOP}V${HEIGHT - BOTTOM}`, class: "rule" }));
  chart.lines.forEach((line, i) => {
    const p = nearest(drawn.lines[i], x);
    if (!p || Math.abs(drawn.scale.x(p.x) - at) > 14) return;
    group.append(mark(line, drawn.scale.x(p.x), drawn.scale.y(p.y)));
    rows.push(html("div", {}, swatch(line), `${label(line, chart)} `, html("b", {}, exact(p.y)), p.x === x ? "" : ` (at ${place(axis, p.x)})`));
  });
  plot.append(group);
  tip.replaceChildren(...rows);
  const left = (at < drawn.width / 2 ? at + 12 : at - 12 - tip.offsetWidth);
  tip.style.left = `${Math.max(4, left)}px`;
}

function numbers(chart) { // tables of a chart's numbers, built when they are first opened
  const box = html("details", {}, html("summary", {}, "Numbers"));
  box.addEventListener("toggle", () => {
    if (box.children.length > 1) return;
    for (const [run, { name, ...tables }] of data.runs.entries()) for (const [kind, columns] of Object.entries(tables)) {
      const lines = chart.lines.filter(line => line.run === run && line.table === kind);
      if (!lines.length) continue;
      const caption = `${name}: ${kind === "train" ? "training" : "validation"}`;
      const head = ["step", "time", "tokens", ...lines.map(line => line.label)].map(text => html("th", { scope: "col" }, text));
      const rows = columns.step.map((step, i) => html("tr", {}, html("th", { scope: "row" }, exact(step)),
        ...["seconds", "tokens"].map(axis => html("td", {}, place(axis, columns[axis][i]))), ...lines.map(line => html("td", {}, exact(columns[line.column][i])))));
      box.append(html("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
        html("table", {}, html("caption", {}, caption), html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows))));
    }
  });
  return box;
}

function add(chart) {
  const plot = svg("svg", { class: "plot", role: "img", tabindex: 0 }), tip = html("div", { class: "tip", role: "status" });
  const ends = chart.lines.map(line => { const y = table(line)[line.column].filter(v => v !== null); return `${label(line, chart)} from ${exact(y[0])} to ${exact(y.at(-1))}`; });
  plot.setAttribute("aria-label", `${chart.title}: ${ends.join("; ")}. Arrow keys read the values; all of them are in the table under Numbers.`);
  const legend = html("ul", { class: "legend" }, ...(chart.lines.length > 1 ? chart.lines : []).map(line => html("li", {}, swatch(line), label(line, chart))));
  const caption = html("figcaption", {}, html("h3", {}, chart.title), html("p", {}, chart.note), legend);
  document.getElementById("charts").append(html("figure", {}, caption, html("div", { class: "frame" }, plot, tip), numbers(chart)));
  let drawn = null, axis = "step", stop = -1;
  const show = i => { stop = i; point(plot, tip, chart, drawn, axis, drawn && i >= 0 ? drawn.stops[i] : null); };
  redraws.push(() => {
    axis = controls.elements.x.value;
    drawn = paint(plot, chart, axis, chart.log && controls.elements.log.checked);
    show(-1);
  });
  plot.addEventListener("pointermove", event => {
    if (!drawn) return;
    const x = event.clientX - plot.getBoundingClientRect().left;
    show(drawn.stops.reduce((best, v, i) => Math.abs(drawn.scale.x(v) - x) < Math.abs(drawn.scale.x(drawn.stops[best]) - x) ? i : best, 0));
  });
  plot.addEventListener("pointerleave", () => show(-1));
  plot.addEventListener("blur", () => show(-1));
  plot.addEventListener("keydown", event => {
    const last = drawn ? drawn.stops.length - 1 : -1;
    const to = { ArrowRight: Math.min(last, stop + 1), ArrowLeft: stop < 0 ? last : Math.max(0, stop - 1), Home: 0, End: last, Escape: -1 }[event.key];
    if (to === undefined) return; // not a key of the chart
    event.preventDefault();
    show(to);
  });
}

const redraw = () => redraws.forEach(each => each());
if (data.charts.length) {
  document.getElementById("nothing").remove();
  controls.hidden = false;
  data.charts.forEach(add);
  controls.addEventListener("change", redraw);
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => { if (contentRect.width !== width) { width = contentRect.width; redraw(); } }).observe(document.getElementById("charts"));
  window.addEventListener("beforeprint", redraw);
  redraw();
}
