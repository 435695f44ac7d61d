// What-if: switch heads off, force a word, drop source words; the result is shown beside the original translation.

import { LatestRequest, requestJson } from "./api.js";

const number = value => value.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "−");
const change = (after, before) => `${after - before >= 0 ? "+" : ""}${number(after - before)}`;
const MARK = /^<2.*>$|^<\/?s>$/;

export class WhatIf {
  // `requestBody` returns the request of the explorer; the changes are added to it.
  constructor(requestBody) {
    this.requestBody = requestBody;
    this.explorer = null;
    this.latest = new LatestRequest();
    find("off-head").addEventListener("click", () => this.switchHeads(this.chosen));
    find("off-layer").addEventListener("click", () => this.switchHeads(this.layer()));
    find("undo").addEventListener("click", () => { this.clear(); this.changed(); });
    find("force").addEventListener("submit", event => {
      event.preventDefault();
      const word = find("force-word").value.trim();
      if (word) this.force(+find("force-step").value, { token: word });
    });
  }

  // Start with a new sentence and no changes.
  begin(explorer) {
    const { data } = explorer;
    Object.assign(this, { explorer, data, chosen: [...explorer.state.chosen] });
    this.clear();
    find("force-step").replaceChildren(...data.written.map((token, step) => new Option(`${step + 1} ${token}`, step)));
    this.changed();
  }

  clear() {
    this.off = new Set();  // keys of heads
    this.forced = null;  // { step, token, id }
    this.dropped = new Set();  // numbers of words
    find("force-word").value = "";
    this.words();
  }

  // ---- heads --------------------------------------------------------------------------------------------------------

  choose(heads) {
    this.chosen = heads;
    if (this.explorer) this.name();
  }

  layer() { return this.explorer.heads.filter(head => this.chosen.some(one => one.name === head.name)); }

  name() {
    const { chosen } = this, one = chosen.length === 1, layers = new Set(chosen.map(head => head.name));
    const verb = heads => heads.every(head => this.off.has(head.key)) ? "Switch on again" : "Switch off";
    find("off-head").textContent = `${verb(chosen)}: ${one ? chosen[0].label : `these ${chosen.length} heads`}`;
    find("off-layer").hidden = layers.size > 1 || this.layer().length === chosen.length;
    if (!find("off-layer").hidden) find("off-layer").textContent = `${verb(this.layer())}: all of layer ${chosen[0].layer}`;
  }

  switchHeads(heads) {
    const on = heads.every(head => this.off.has(head.key));
    for (const { key } of heads) on ? this.off.delete(key) : this.off.add(key);
    this.changed();
  }

  // Whole layers by name, single heads by [name, number].
  without() {
    const names = new Map();
    for (const head of this.explorer.heads) names.set(head.name, [...names.get(head.name) ?? [], head]);
    return [...names].flatMap(([name, heads]) => {
      const off = heads.filter(head => this.off.has(head.key));
      return off.length === heads.length ? [name] : off.map(({ head }) => [name, head]);
    });
  }

  // ---- words --------------------------------------------------------------------------------------------------------

  force(step, word) {
    this.forced = { step, ...word };
    find("force-step").value = step;
    find("force-word").value = word.token;
    this.changed();
    find("outcome").scrollIntoView({ block: "nearest" });
  }

  // The numbered source words: without the language tag and the end token.
  words() {
    const { source, words } = this.data;
    const spans = words.source.filter(([begin]) => !MARK.test(source[begin]));
    find("drop-words").replaceChildren(...spans.map(([begin, end], number) => {
      const word = source.slice(begin, end).join("").replaceAll("▁", "");
      const button = element("button", { type: "button", class: "small", "aria-pressed": "false", "aria-label": `Drop ${word}` }, word);
      button.addEventListener("click", () => {
        const is = !this.dropped.has(number);
        is ? this.dropped.add(number) : this.dropped.delete(number);
        button.setAttribute("aria-pressed", is);
        this.changed();
      });
      return button;
    }));
  }

  // ---- requests -----------------------------------------------------------------------------------------------------

  list() {
    const heads = this.without().map(head => typeof head === "string" ? `without ${head}` : `without ${head[0]} head ${head[1]}`);
    const forced = this.forced ? [`${this.forced.token} at step ${this.forced.step + 1}`] : [];
    const pressed = [...find("drop-words").querySelectorAll("[aria-pressed=true]")].map(button => `without “${button.textContent}”`);
    return [...heads, ...forced, ...pressed];
  }

  async changed() {
    this.explorer.markOff(this.off);
    this.name();
    const changes = this.list();
    find("changes").hidden = !changes.length;
    find("changes-list").replaceChildren(...changes.map(one => element("span", { class: "badge" }, one)));
    find("what-if-error").textContent = "";
    if (!changes.length) {
      this.latest.stop();
      find("outcome").hidden = true;
      return;
    }
    find("outcome").hidden = false;
    find("outcome").replaceChildren(element("p", { class: "hint" }, "Loading …"));
    const json = { ...this.requestBody(), without: this.without(), drop: [...this.dropped] };
    if (this.forced) json.force = [this.forced.step, this.forced.id ?? this.forced.token];
    try {
      const response = await this.latest.run(signal => requestJson("/attention", { json, signal }));
      if (response?.what_if) this.show(response.what_if);
    } catch (error) {
      find("outcome").hidden = true;
      find("what-if-error").textContent = error.message;
    }
  }

  show(effect) {
    const { before, after, likelier } = effect;
    const row = (name, { score, logprob }, text, deltas) => element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "said" }, ...text),
      ...[score, logprob].map((value, i) => element("td", {}, number(value), deltas ? element("small", {}, ` ${deltas[i]}`) : "")));
    const head = element("tr", {}, element("td"), ...["Translation", "Score", "Log-probability"].map(name => element("th", { scope: "col" }, name)));
    const deltas = ["score", "logprob"].map(name => `(${change(after[name], before[name])})`);
    const table = element("table", {}, element("thead", {}, head), element("tbody", {},
      row("original", before, marked(after.translation, before.translation)),
      row("changed", after, marked(before.translation, after.translation), deltas)));
    const summary = [before.translation === after.translation ? "The translation stays the same." : "The translation changes."];
    if (Math.abs(likelier) > 0.005) {
      summary.push(` The original became ${number(Math.abs(likelier))} nats ${likelier > 0 ? "likelier" : "less likely"}.`);
    }
    find("outcome").hidden = false;
    find("outcome").replaceChildren(element("div", { class: "scroll" }, table), element("p", { class: "hint" }, ...summary));
  }
}

// The words of the second text; words outside the longest common subsequence with the first are marked.
function marked(first, second) {
  if (!second) return ["(empty)"];
  const cut = text => [...text.matchAll(/(\s*)([\p{L}\p{N}\p{M}_]+|\S)/gu)].map(([, space, word]) => ({ space, word }));
  const a = cut(first), b = cut(second), longest = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
    longest[i][j] = a[i].word === b[j].word ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  }
  let i = 0;
  return b.flatMap(({ space, word }, j) => {
    while (i < a.length && a[i].word !== word && longest[i + 1][j] >= longest[i][j + 1]) i++;
    const same = i < a.length && a[i].word === word;
    if (same) i++;
    return [space, same ? word : element("mark", {}, word)];
  });
}
