// The page itself: what the data holds, what is chosen, and the views kept in step with it.

const data = JSON.parse(find("data").textContent);
const KINDS = {
  encoder: { title: "Encoder self-attention", rows: "source", columns: "source" },
  decoder: { title: "Decoder self-attention", rows: "written", columns: "fed" },
  cross: { title: "Cross-attention", rows: "written", columns: "source" },
};
const SIGNS = { "previous token": "←", "next token": "→", positional: "↕", "rare token": "◆", alignment: "⤡" };

const kindOf = name => name.startsWith("encoder") ? "encoder" : name.endsWith("cross") ? "cross" : "decoder";

function unpack(text) {
  const bytes = atob(text), numbers = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < numbers.length; i++) numbers[i] = bytes.charCodeAt(2 * i) | bytes.charCodeAt(2 * i + 1) << 8;
  return numbers;
}

const heads = Object.entries(data.weights).flatMap(([name, { shape: [count, rows, columns], data: text }]) => {
  const all = unpack(text), layer = +name.split(".")[1], kind = kindOf(name);
  return Array.from({ length: count }, (_, head) => ({ name, kind, layer, head, rows, columns, about: data.heads[name][head],
    label: `layer ${layer}, head ${head}`, values: all.subarray(head * rows * columns, (head + 1) * rows * columns) }));
});

const state = { chosen: new Set(), words: false, row: null, column: null, step: null };

// ---- the matrix that is shown ---------------------------------------------------------------------------------------

const wordOf = (tokens, [begin, end]) => tokens.slice(begin, end).join("").replace(/^▁/, "") || "▁";

// The mean of the chosen heads; in words, the mean of a word's rows and the sum of its columns.
function matrixShown() {
  const chosen = [...state.chosen], { kind, rows: high, columns: wide } = chosen[0], { rows, columns } = KINDS[kind];
  const mean = new Float64Array(high * wide);
  for (const head of chosen) for (let i = 0; i < mean.length; i++) mean[i] += head.values[i];
  for (let i = 0; i < mean.length; i++) mean[i] /= data.units * chosen.length;
  if (!state.words) return { rows: data[rows], columns: data[columns], values: mean };
  const down = data.words[rows], across = data.words[columns], values = new Float64Array(down.length * across.length);
  down.forEach(([top, bottom], i) => across.forEach(([left, right], j) => {
    for (let y = top; y < bottom; y++) for (let x = left; x < right; x++) values[i * across.length + j] += mean[y * wide + x];
    values[i * across.length + j] /= bottom - top;
  }));
  return { rows: down.map(span => wordOf(data[rows], span)), columns: across.map(span => wordOf(data[columns], span)), values };
}

// The row of the current step; the encoder has none.
function stepRow() {
  const kind = [...state.chosen][0].kind;
  if (state.step === null || kind === "encoder") return null;
  return state.words ? data.words.written.findIndex(([begin, end]) => begin <= state.step && state.step < end) : state.step;
}

// ---- looking at a cell, a row or a column ---------------------------------------------------------------------------

const greatest = (names, weights) => names.map((name, i) => [name, weights[i]]).sort((a, b) => b[1] - a[1]).slice(0, 3)
  .map(([name, weight]) => `${name} ${four(weight)}`).join(", ");

function point(row, column) {
  Object.assign(state, { row, column });
  const { rows, columns, values } = shown, n = columns.length;
  let told = "Point at a cell or a token, or move to one with the keys, to read its weights.";
  if (row !== null && column !== null) told = `${rows[row]} looks at ${columns[column]}: ${four(values[row * n + column])}`;
  else if (row !== null) told = `${rows[row]} looks most at ${greatest(columns, values.subarray(row * n, row * n + n))}`;
  else if (column !== null) told = `${columns[column]} is looked at most by ${greatest(rows, rows.map((_, i) => values[i * n + column]))}`;
  find("readout").textContent = told;
  outline();
}

function outline() {
  heatMap.outline(state.row, state.column, stepRow());
  lines.outline(state.row, state.column, stepRow());
}

// ---- choosing heads -------------------------------------------------------------------------------------------------

function choose(some) {
  state.chosen = new Set(some);
  for (const head of heads) {
    const is = state.chosen.has(head);
    head.button.setAttribute("aria-pressed", is);
    head.box.checked = is;
  }
  redraw();
}

// Add a head to the average, or take it out; heads of another kind of attention have other rows and columns.
function toggle(head) {
  const same = [...state.chosen].filter(other => other.kind === head.kind && other !== head);
  choose(state.chosen.has(head) && same.length ? same : state.chosen.has(head) ? [head] : [...same, head]);
}

let shown;
function redraw() {
  const chosen = [...state.chosen], { kind, about, label } = chosen[0], one = chosen.length === 1;
  shown = matrixShown();
  find("view-title").textContent = `${KINDS[kind].title}, ${one ? label : `mean of ${chosen.length} heads`}`;
  find("about").replaceChildren(...(one ? [...about.roles.map(badge), measures(about)] : [chosen.map(head => head.label).join("; ")]));
  find("heat").setAttribute("aria-label", `${find("view-title").textContent}, ${shown.rows.length} rows, ${shown.columns.length} columns`);
  heatMap.draw(shown);
  lines.draw(shown);
  if (find("numbers").open) table();
  point(null, null);
}

const badge = role => element("span", { class: "badge" }, `${SIGNS[role]} ${role}`);

function measures({ confidence, entropy, distance, offset, mass, rare, order, coverage }) {
  const parts = [`confidence ${confidence.toFixed(2)}`, `entropy ${entropy.toFixed(2)} bits`, `distance ${distance.toFixed(1)}`];
  if (offset !== null) parts.push(`offset ${offset > 0 ? "+" : ""}${offset} (${mass.toFixed(2)})`);
  if (rare !== null) parts.push(`rare ${rare.toFixed(2)}`);
  if (order !== null) parts.push(`order ${order.toFixed(2)}`, `coverage ${coverage.toFixed(2)}`);
  return parts.join(" · ");
}

function table() {
  const { rows, columns, values } = shown, n = columns.length;
  const head = element("tr", {}, element("td"), ...columns.map(word => element("th", { scope: "col" }, word)));
  const body = rows.map((word, i) => element("tr", {}, element("th", { scope: "row" }, word),
    ...columns.map((_, j) => element("td", {}, four(values[i * n + j])))));
  find("numbers").lastElementChild.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

// ---- the grid -------------------------------------------------------------------------------------------------------

const grid = [];  // buttons by row, through all kinds, for the arrow keys

function buildGrid() {
  for (const [kind, { title }] of Object.entries(KINDS)) {
    const mine = heads.filter(head => head.kind === kind);
    if (!mine.length) continue;
    const all = element("button", { type: "button", class: "mean" }, "mean of all");
    all.addEventListener("click", () => choose(mine));
    all.setAttribute("aria-label", `${title}: mean of all heads`);
    const group = element("div", { class: "kind", role: "group", "aria-label": title }, element("h3", {}, title, mine.length > 1 ? all : ""));
    for (const layer of new Set(mine.map(head => head.layer))) {
      const row = mine.filter(head => head.layer === layer);
      const mean = element("button", { type: "button", class: "mean", "aria-label": `${title}: mean of layer ${layer}`, title: `mean of layer ${layer}` }, `${layer}`);
      mean.addEventListener("click", () => choose(row));
      group.append(element("div", { class: "layer", style: `--heads: ${row.length}` }, mean, ...row.map(cell)));
      grid.push(row.map(head => head.button));
    }
    find("grid").append(group);
  }
  grid[0][0].tabIndex = 0;
  find("grid").addEventListener("keydown", moveInGrid);
  // Space would press the button as Enter does; here it adds to the average.
  find("grid").addEventListener("keyup", event => { if (event.key === " " && event.target.matches(".head")) event.preventDefault(); });
}

function cell(head) {
  const roles = head.about.roles, words = `${KINDS[head.kind].title}, ${head.label}${roles.map(role => `, ${role}`).join("")}`;
  head.canvas = element("canvas", { "aria-hidden": "true" });
  head.button = element("button", { type: "button", class: "head", tabindex: -1, "aria-pressed": "false", "aria-label": words,
    "aria-describedby": "grid-hint", title: words, "data-head": `${head.name}.${head.head}` }, head.canvas,
  element("span", { class: "roles", "aria-hidden": "true" }, roles.map(role => SIGNS[role]).join("")));
  head.box = element("input", { type: "checkbox", tabindex: -1, "aria-label": `${words}: in the average` });
  head.button.addEventListener("click", () => choose([head]));
  head.box.addEventListener("click", () => toggle(head));
  return element("div", { class: "cell" }, head.button, head.box);
}

function moveInGrid(event) {
  const y = grid.findIndex(row => row.includes(event.target)), x = y < 0 ? -1 : grid[y].indexOf(event.target);
  if (y < 0) return;
  const to = { ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1] }[event.key];
  if (event.key === " ") { event.preventDefault(); toggle(heads.find(head => head.button === event.target)); }
  if (!to) return;
  event.preventDefault();
  const row = grid[Math.max(0, Math.min(grid.length - 1, to[0]))], next = row[Math.max(0, Math.min(row.length - 1, to[1]))];
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function explain() {
  const used = new Set(heads.flatMap(head => head.about.roles));
  find("legend").append(...Object.keys(data.legend).filter(role => used.has(role)).map(role => element("li", {}, badge(role))));
  find("rules").lastElementChild.append(...[...Object.entries(data.legend), ...Object.entries(data.explained)].flatMap(([name, rule]) =>
    [element("dt", {}, SIGNS[name] ? `${SIGNS[name]} ${name}` : name), element("dd", {}, rule)]));
}

const thumbnails = () => heads.forEach(head => thumbnail(head.canvas, head.rows, head.columns, head.values, data.units));

// ---- start ----------------------------------------------------------------------------------------------------------

document.querySelector("main").hidden = false;
const heatMap = new HeatMap(find("heat"), point);
const lines = new Lines(find("lines"), point);
buildGrid();
explain();
thumbnails();
if (data.written.length) new Steps(data, step => { state.step = step; outline(); });
if (data.beam) new Beam(data.beam);
find("words").addEventListener("change", event => { state.words = event.target.checked; redraw(); });
find("numbers").addEventListener("toggle", () => { if (find("numbers").open) table(); });
const crosses = heads.filter(head => head.kind === "cross");
const sharpest = crosses.reduce((best, head) => !best || head.about.confidence > best.about.confidence ? head : best, null);
choose([sharpest ?? heads[0]]);

const repaint = () => { thumbnails(); redraw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => { root.toggleAttribute("data-print", printing); repaint(); });  // on paper, always light
}
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
