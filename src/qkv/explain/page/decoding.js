// The search: the decoder's steps with their candidates, and the beam as a tree.

const percent = p => p < 0.00005 ? "< 0.01 %" : p >= 0.0995 ? `${Math.round(100 * p)} %` : `${(100 * p).toFixed(p >= 0.00095 ? 1 : 2)} %`;

class Steps {
  constructor(data, onStep, onForce) {
    this.data = data;
    this.onStep = onStep;
    this.onForce = onForce;
    this.slider = find("step");
    this.slider.max = data.written.length - 1;
    this.slider.addEventListener("input", () => this.show(+this.slider.value));
    find("back").addEventListener("click", () => this.show(+this.slider.value - 1));
    find("on").addEventListener("click", () => this.show(+this.slider.value + 1));
    find("whole").addEventListener("click", () => onStep(null));
    find("sentence").append(...data.written.map(token => element("span", { class: "coming" }, token)));
    this.describe(0);
  }

  show(step) {
    step = Math.max(0, Math.min(this.data.written.length - 1, step));
    this.describe(step);
    this.onStep(step);
  }

  describe(step) {
    const { written, fed, source, steps } = this.data, recorded = steps?.[step];
    this.slider.value = step;
    this.slider.setAttribute("aria-valuetext", `step ${step + 1}, writes ${written[step]}`);
    find("step-number").textContent = `${step + 1} of ${written.length}`;
    [...find("sentence").children].forEach((token, i) => {
      token.className = i < step ? "done" : i === step ? "now" : "coming";
    });
    const read = step === 0 ? `The encoder has read the ${source.length} source tokens. ` : "";
    const sure = recorded ? ` with probability ${percent(recorded.probability)} (entropy ${recorded.entropy.toFixed(2)})` : "";
    find("step-about").textContent = `${read}Fed ${fed[step]}, the decoder writes ${written[step]}${sure}.`;
    find("candidates").replaceChildren(...(recorded?.candidates ?? []).map(candidate => this.candidate(step, candidate, recorded.chosen)));
  }

  // A candidate and its probability; a button that forces it in place of the chosen token, if the page has the model.
  candidate(step, { token, id, probability }, chosen) {
    const forced = this.onForce && token !== chosen && token !== "</s>";
    const name = forced ? element("button", { type: "button", class: "name", "aria-label": `Force ${token} at this step`, title: "Force this token" }, token)
      : element("span", { class: "name" }, token);
    if (forced) name.addEventListener("click", () => this.onForce(step, { token, id }));
    return element("li", { class: token === chosen ? "chosen" : "", style: `--share: ${100 * probability}%` },
      name, element("span", { class: "bar" }), element("span", {}, percent(probability)));
  }
}

// ---- beam -----------------------------------------------------------------------------------------------------------

const FATES = { winner: ["★", "won"], finished: ["■", "finished with a lower score"], pruned: ["✕", "pruned"], "went on": [""] };
const ACROSS = 104, DOWN = 34, TALL = 26, BROAD = 80;

class Beam {
  constructor(beam) {
    this.nodes = new Map(beam.nodes.map(node => [node.id, { ...node, children: [] }]));
    this.columns = new Map();
    for (const node of this.nodes.values()) {
      this.nodes.get(node.parent)?.children.push(node);
      if (!this.columns.has(node.step)) this.columns.set(node.step, []);
      this.columns.get(node.step).push(node);
    }
    for (let node = [...this.nodes.values()].find(n => n.fate === "winner"); node; node = this.nodes.get(node.parent)) node.best = true;
    this.place();
    find("beam").hidden = false;
    find("beam-title").textContent = `The beam, ${beam.width} hypotheses wide`;
    find("fates").append(...Object.entries(FATES).filter(([, [sign]]) => sign).map(([fate, [sign, words]]) =>
      element("li", { class: fate.replace(" ", "-") }, `${sign} ${words}`.trim())));
    this.draw();
    find("tree").addEventListener("keydown", event => this.move(event));
  }

  // The winner's path is the top line; below it are each step's hypotheses, the most probable first.
  place() {
    for (const column of this.columns.values()) {
      column.sort((a, b) => (b.best ?? false) - (a.best ?? false) || b.logprob - a.logprob);
      column.forEach((node, line) => { node.line = line + (column[0].best ? 0 : 1); });
    }
    const steps = [...this.columns.keys()].sort((a, b) => a - b);
    steps.forEach((step, number) => this.columns.get(step).forEach(node => { node.number = number; }));
    this.steps = steps;
  }

  draw() {
    const tree = find("tree"), lines = Math.max(...[...this.nodes.values()].map(node => node.line)) + 1;
    const width = this.steps.length * ACROSS, height = lines * DOWN + 22;
    const edge = (node, parent) => {
      const x0 = parent.number * ACROSS + BROAD, y0 = this.y(parent) + TALL / 2, x1 = node.number * ACROSS, y1 = this.y(node) + TALL / 2;
      return `<path class="${node.best ? "best" : node.fate === "pruned" ? "pruned" : ""}" d="M${x0} ${y0} C${x0 + 14} ${y0} ${x1 - 14} ${y1} ${x1} ${y1}"/>`;
    };
    const edges = [...this.nodes.values()].filter(node => this.nodes.has(node.parent)).map(node => edge(node, this.nodes.get(node.parent)));
    const drawing = element("div", { "aria-hidden": "true" });
    drawing.innerHTML = `<svg width="${width}" height="${height}">${edges.join("")}</svg>`;
    const heads = this.steps.map((step, number) => element("span", { class: "at", style: `left:${number * ACROSS}px` }, `${step}`));
    tree.style.width = `${width}px`;
    tree.style.setProperty("--fit", Math.min(1, 700 / width));  // scale down to fit a printed page
    tree.style.height = `${height}px`;
    tree.replaceChildren(drawing, ...heads, ...[...this.nodes.values()].map(node => this.button(node)));
    tree.querySelector("button").tabIndex = 0;
  }

  y(node) { return node.line * DOWN + 20; }

  button(node) {
    const sign = FATES[node.fate][0], text = this.describe(node);
    node.button = element("button", { type: "button", tabindex: -1, class: `${node.fate.replace(" ", "-")}${node.best ? " best" : ""}`,
      style: `left:${node.number * ACROSS}px;top:${this.y(node)}px`, title: text, "aria-label": text, "data-node": node.id },
    sign ? `${node.token} ${sign}` : node.token);
    const show = () => { find("fate").textContent = text; };
    node.button.addEventListener("focus", show);
    node.button.addEventListener("pointerenter", show);
    return node.button;
  }

  describe(node) {
    const score = node.score === null ? "" : `, score ${node.score.toFixed(4)}`;
    return `Step ${node.step}, ${node.token}: log-probability ${node.logprob.toFixed(4)}${score}; ${node.fate}${node.why ? `: ${node.why}` : ""}`;
  }

  move(event) {
    const node = [...this.nodes.values()].find(other => other.button === event.target);
    if (!node) return;
    const column = this.columns.get(node.step), place = column.indexOf(node);
    const best = node.children.find(child => child.best) ?? [...node.children].sort((a, b) => b.logprob - a.logprob)[0];
    const to = { ArrowLeft: this.nodes.get(node.parent), ArrowRight: best, ArrowUp: column[place - 1], ArrowDown: column[place + 1] }[event.key];
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (!to) return;
    node.button.tabIndex = -1;
    to.button.tabIndex = 0;
    to.button.focus();
  }
}
