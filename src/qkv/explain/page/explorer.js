// The explorer: grid of heads, selection, and views of the selected heads.

const KINDS = {
  encoder: { title: "Encoder self-attention", rows: "source", columns: "source" },
  decoder: { title: "Decoder self-attention", rows: "written", columns: "fed" },
  cross: { title: "Cross-attention", rows: "written", columns: "source" },
};
const SIGNS = { "previous token": "←", "next token": "→", positional: "↕", "rare token": "◆", alignment: "⤡" };

const kindOf = name => name.startsWith("encoder") ? "encoder" : name.endsWith("cross") ? "cross" : "decoder";
const wordOf = (tokens, [begin, end]) => tokens.slice(begin, end).join("").replace(/^▁/, "") || "▁";
const badge = role => element("span", { class: "badge" }, `${SIGNS[role]} ${role}`);

function unpack(text) {
  const bytes = atob(text), numbers = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < numbers.length; i++) numbers[i] = bytes.charCodeAt(2 * i) | bytes.charCodeAt(2 * i + 1) << 8;
  return numbers;
}

function headsOf(data) {
  return Object.entries(data.weights).flatMap(([name, { shape: [count, rows, columns], data: text }]) => {
    const all = unpack(text), layer = +name.split(".")[1], kind = kindOf(name);
    return Array.from({ length: count }, (_, head) => ({ name, kind, layer, head, rows, columns, about: data.heads[name][head],
      key: `${name}.${head}`, label: `layer ${layer}, head ${head}`, values: all.subarray(head * rows * columns, (head + 1) * rows * columns) }));
  });
}

function measures({ confidence, entropy, distance, offset, mass, rare, order, coverage }) {
  const parts = [`confidence ${confidence.toFixed(2)}`, `entropy ${entropy.toFixed(2)} bits`, `distance ${distance.toFixed(1)}`];
  if (offset !== null) parts.push(`offset ${offset > 0 ? "+" : ""}${offset} (${mass.toFixed(2)})`);
  if (rare !== null) parts.push(`rare ${rare.toFixed(2)}`);
  if (order !== null) parts.push(`order ${order.toFixed(2)}`, `coverage ${coverage.toFixed(2)}`);
  return parts.join(" · ");
}

const greatest = (names, weights) => names.map((name, i) => [name, weights[i]]).sort((a, b) => b[1] - a[1]).slice(0, 3)
  .map(([name, weight]) => `${name} ${four(weight)}`).join(", ");

const SECTIONS = `
  <section id="alignment" aria-labelledby="alignment-title" hidden>
    <h2 id="alignment-title">Source words without a counterpart</h2>
    <p id="aligned-text"></p>
    <p class="hint" id="alignment-about"></p>
  </section>
  <section id="overview" aria-labelledby="overview-title">
    <h2 id="overview-title">Heads</h2>
    <p class="hint" id="grid-hint">Choose a head to enlarge it. The box in its corner or the space bar adds it to an
      average; the arrow keys move between heads.</p>
    <div id="grid"></div>
    <ul id="legend" aria-label="Roles of heads"></ul>
    <details id="rules"><summary>Definitions of roles and measures</summary><dl></dl></details>
  </section>
  <section id="view" aria-labelledby="view-title">
    <h2 id="view-title"></h2>
    <p id="about"></p>
    <div class="controls">
      <label><input type="checkbox" id="words"> Words instead of tokens</label>
      <span class="scale" aria-hidden="true">0 <span></span> 1</span>
    </div>
    <output id="readout" aria-live="polite"></output>
    <div class="both">
      <div id="heat" class="canvas" tabindex="0" role="application" aria-roledescription="heat-map" aria-describedby="heat-hint">
        <canvas></canvas>
      </div>
      <div id="lines" role="group" aria-label="Lines from each query on the left to the keys it attends to on the right"></div>
    </div>
    <p class="hint" id="heat-hint">Each row sums to 1 over the columns. Shades grow with the square root of the weight,
      opacities of lines with the weight. Arrow keys move through the heat-map, Home and End along a row.</p>
    <details id="numbers"><summary>Numbers as a table</summary><div class="scroll"></div></details>
  </section>
  <section id="decoding" aria-labelledby="decoding-title">
    <h2 id="decoding-title">Step by step</h2>
    <p class="stepper">
      <button type="button" id="back" aria-label="Step back">◀</button>
      <input type="range" id="step" min="0" value="0" aria-label="Step of the decoding">
      <button type="button" id="on" aria-label="Step on">▶</button>
      <span id="step-number"></span>
      <button type="button" id="whole">All steps</button>
    </p>
    <p id="sentence"></p>
    <p id="step-about" aria-live="polite"></p>
    <ol id="candidates" aria-label="The likeliest next tokens"></ol>
  </section>
  <section id="beam" aria-labelledby="beam-title" hidden>
    <h2 id="beam-title"></h2>
    <p class="hint">Each column is a step; the bold path is the best hypothesis. Arrow keys: left to the parent, right to
      the best child, up and down within a step.</p>
    <ul id="fates" aria-label="Outcome of a hypothesis"></ul>
    <output id="fate" aria-live="polite"></output>
    <div class="scroll"><div id="tree" role="group" aria-label="The hypotheses of the beam"></div></div>
  </section>`;

// Fills an element of the document. `chosen` are the keys of the heads selected first. Pages with access to the model pass
// `onChoose`, called with the selected heads, and `onForce`, called with the word to force.
class Explorer {
  constructor(box, data, { chosen = [], words = false, onChoose = () => {}, onForce = null } = {}) {
    box.innerHTML = SECTIONS;
    this.data = data;
    this.heads = headsOf(data);
    this.onChoose = onChoose;
    this.state = { chosen: new Set(), words, row: null, column: null, step: null };
    this.left = new AbortController();  // removes the listeners when another sentence replaces this one
    const point = (row, column) => this.point(row, column);
    this.heatMap = new HeatMap(find("heat"), point);
    this.lines = new Lines(find("lines"), point);
    this.grid = [];  // buttons by row, over all kinds, for the arrow keys
    this.buildGrid();
    this.explain();
    this.thumbnails();
    if (data.written.length) new Steps(data, step => { this.state.step = step; this.outline(); }, onForce);
    if (data.beam) new Beam(data.beam);
    if (data.unaligned) this.markUnaligned();
    find("words").checked = words;
    find("words").addEventListener("change", event => { this.state.words = event.target.checked; this.redraw(); });
    find("numbers").addEventListener("toggle", () => { if (find("numbers").open) this.table(); });
    this.choose(this.first(chosen));
    this.listen();
  }

  close() { this.left.abort(); }

  // The heads given by key, or else the cross-attention head with the highest confidence.
  first(keys) {
    const given = this.heads.filter(head => keys.includes(head.key));
    if (given.length) return given;
    const crosses = this.heads.filter(head => head.kind === "cross");
    const sharpest = crosses.reduce((best, head) => !best || head.about.confidence > best.about.confidence ? head : best, null);
    return [sharpest ?? this.heads[0]];
  }

  listen() {
    const until = { signal: this.left.signal }, repaint = () => { this.thumbnails(); this.redraw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint, until);
    for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
      addEventListener(name, () => { root.toggleAttribute("data-print", printing); repaint(); }, until);  // print in the light colours
    }
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; this.redraw(); } }, until);
  }

  // ---- the matrix that is shown -------------------------------------------------------------------------------------

  // The mean of the selected heads; with words, the mean of a word's rows and the sum of its columns.
  matrixShown() {
    const { data, state } = this, chosen = [...state.chosen], { kind, rows: high, columns: wide } = chosen[0];
    const { rows, columns } = KINDS[kind], mean = new Float64Array(high * wide);
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

  // The row of the current step; null for the encoder.
  stepRow() {
    const { data, state: { chosen, step, words } } = this;
    if (step === null || [...chosen][0].kind === "encoder") return null;
    return words ? data.words.written.findIndex(([begin, end]) => begin <= step && step < end) : step;
  }

  // ---- reading a cell, a row or a column ----------------------------------------------------------------------------

  point(row, column) {
    Object.assign(this.state, { row, column });
    const { rows, columns, values } = this.shown, n = columns.length;
    let text = "Point at a cell or a token, or move to one with the arrow keys, to read its weights.";
    if (row !== null && column !== null) text = `${rows[row]} attends to ${columns[column]}: ${four(values[row * n + column])}`;
    else if (row !== null) text = `${rows[row]} attends most to ${greatest(columns, values.subarray(row * n, row * n + n))}`;
    else if (column !== null) text = `${columns[column]} is attended to most by ${greatest(rows, rows.map((_, i) => values[i * n + column]))}`;
    find("readout").textContent = text;
    this.outline();
  }

  outline() {
    const { row, column } = this.state, step = this.stepRow();
    this.heatMap.outline(row, column, step);
    this.lines.outline(row, column, step);
  }

  // ---- choosing heads -----------------------------------------------------------------------------------------------

  choose(some) {
    this.state.chosen = new Set(some);
    for (const head of this.heads) {
      const is = this.state.chosen.has(head);
      head.button.setAttribute("aria-pressed", is);
      head.box.checked = is;
    }
    this.redraw();
    this.onChoose([...this.state.chosen]);
  }

  // Add a head to the average, or remove it; only heads of the same kind of attention can be averaged.
  toggle(head) {
    const { chosen } = this.state, same = [...chosen].filter(other => other.kind === head.kind && other !== head);
    this.choose(chosen.has(head) && same.length ? same : chosen.has(head) ? [head] : [...same, head]);
  }

  redraw() {
    const chosen = [...this.state.chosen], { kind, about, label } = chosen[0], one = chosen.length === 1, shown = this.matrixShown();
    this.shown = shown;
    find("view-title").textContent = `${KINDS[kind].title}, ${one ? label : `mean of ${chosen.length} heads`}`;
    find("about").replaceChildren(...(one ? [...about.roles.map(badge), measures(about)] : [chosen.map(head => head.label).join("; ")]));
    find("heat").setAttribute("aria-label", `${find("view-title").textContent}, ${shown.rows.length} rows, ${shown.columns.length} columns`);
    this.heatMap.draw(shown);
    this.lines.draw(shown);
    if (find("numbers").open) this.table();
    this.point(null, null);
  }

  table() {
    const { rows, columns, values } = this.shown, n = columns.length;
    const head = element("tr", {}, element("td"), ...columns.map(word => element("th", { scope: "col" }, word)));
    const body = rows.map((word, i) => element("tr", {}, element("th", { scope: "row" }, word),
      ...columns.map((_, j) => element("td", {}, four(values[i * n + j])))));
    find("numbers").lastElementChild.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  }

  // ---- the grid -----------------------------------------------------------------------------------------------------

  buildGrid() {
    for (const [kind, { title }] of Object.entries(KINDS)) {
      const mine = this.heads.filter(head => head.kind === kind);
      if (!mine.length) continue;
      const all = element("button", { type: "button", class: "mean", "aria-label": `${title}: mean of all heads` }, "mean of all");
      all.addEventListener("click", () => this.choose(mine));
      const group = element("div", { class: "kind", role: "group", "aria-label": title }, element("h3", {}, title, mine.length > 1 ? all : ""));
      for (const layer of new Set(mine.map(head => head.layer))) {
        const row = mine.filter(head => head.layer === layer);
        const mean = element("button", { type: "button", class: "mean", "aria-label": `${title}: mean of layer ${layer}`, title: `mean of layer ${layer}` }, `${layer}`);
        mean.addEventListener("click", () => this.choose(row));
        group.append(element("div", { class: "layer", style: `--heads: ${row.length}` }, mean, ...row.map(head => this.cell(head))));
        this.grid.push(row.map(head => head.button));
      }
      find("grid").append(group);
    }
    this.grid[0][0].tabIndex = 0;
    find("grid").addEventListener("keydown", event => this.moveInGrid(event));
    // Space would activate the button like Enter; here it adds to the average.
    find("grid").addEventListener("keyup", event => { if (event.key === " " && event.target.matches(".head")) event.preventDefault(); });
  }

  cell(head) {
    const roles = head.about.roles, words = `${KINDS[head.kind].title}, ${head.label}${roles.map(role => `, ${role}`).join("")}`;
    head.canvas = element("canvas", { "aria-hidden": "true" });
    head.button = element("button", { type: "button", class: "head", tabindex: -1, "aria-pressed": "false", "aria-label": words,
      "aria-describedby": "grid-hint", title: words, "data-head": head.key }, head.canvas,
    element("span", { class: "roles", "aria-hidden": "true" }, roles.map(role => SIGNS[role]).join("")));
    head.box = element("input", { type: "checkbox", tabindex: -1, "aria-label": `${words}: in the average` });
    head.button.addEventListener("click", () => this.choose([head]));
    head.box.addEventListener("click", () => this.toggle(head));
    return element("div", { class: "cell" }, head.button, head.box);
  }

  // Mark the heads that are switched off.
  markOff(keys) {
    for (const { key, button } of this.heads) {
      button.classList.toggle("off", keys.has(key));
      button.setAttribute("aria-label", button.title + (keys.has(key) ? ", switched off" : ""));
    }
  }

  moveInGrid(event) {
    const { grid } = this, y = grid.findIndex(row => row.includes(event.target)), x = y < 0 ? -1 : grid[y].indexOf(event.target);
    if (y < 0) return;
    const to = { ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1] }[event.key];
    if (event.key === " ") { event.preventDefault(); this.toggle(this.heads.find(head => head.button === event.target)); }
    if (!to) return;
    event.preventDefault();
    const row = grid[Math.max(0, Math.min(grid.length - 1, to[0]))], next = row[Math.max(0, Math.min(row.length - 1, to[1]))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  explain() {
    const { legend, explained } = this.data, used = new Set(this.heads.flatMap(head => head.about.roles));
    find("legend").append(...Object.keys(legend).filter(role => used.has(role)).map(role => element("li", {}, badge(role))));
    find("rules").lastElementChild.append(...[...Object.entries(legend), ...Object.entries(explained)].flatMap(([name, rule]) =>
      [element("dt", {}, SIGNS[name] ? `${SIGNS[name]} ${name}` : name), element("dd", {}, rule)]));
  }

  // The source with the words marked that no word of the translation is aligned with; spans count code points.
  markUnaligned() {
    const { text, unaligned } = this.data, letters = Array.from(text), part = (begin, end) => letters.slice(begin, end).join("");
    const edges = [0, ...unaligned.flat(), letters.length];
    for (let i = 0; i + 1 < edges.length; i++) find("aligned-text").append(i % 2 ? element("mark", {}, part(edges[i], edges[i + 1])) : part(edges[i], edges[i + 1]));
    find("alignment-about").textContent = unaligned.length
      ? "No word of the translation is aligned with the marked words. Function words often have none; a marked name or number may be missing."
      : "Every word of the source is aligned with a word of the translation.";
    find("alignment").hidden = false;
  }

  thumbnails() {
    this.heads.forEach(head => thumbnail(head.canvas, head.rows, head.columns, head.values, this.data.units));
  }
}
