// Translate while typing: a pause sends a request, newer text aborts the previous one.

import { LatestRequest, requestJson } from "./api.js";
import { languageName, onPair, pairOf, served } from "./models.js";

const PAUSE = 300;  // milliseconds
const OTHERS = 4;  // number of alternatives
const latest = new LatestRequest(), latestOthers = new LatestRequest();
let timer = 0, shown = null;  // the request of the displayed translation

export function begin() {
  find("source-text").addEventListener("input", () => { count(); soon(); });
  find("source-clear").addEventListener("click", () => { find("source-text").value = ""; count(); now(); find("source-text").focus(); });
  find("target-copy").addEventListener("click", copy);
  find("target-others").addEventListener("click", () => find("others").hidden ? openOthers(WHOLE) : closeOthers());
  find("other-word").addEventListener("change", loadOthers);
  find("target-text").addEventListener("click", event => { if (event.target.dataset.word && !String(getSelection())) openOthers(event.target.dataset.word); });
  onPair(() => { name(); now(); });
  name();
  count();
  now();
}

export const text = () => find("source-text").value;

function name() {
  const { source, target } = pairOf(find("pair"));
  find("source-label").textContent = languageName(source || "Text");
  find("target-label").textContent = languageName(target || "Translation");
  find("source-text").lang = source;
  find("target-text").lang = target;
}

function count() {
  const length = [...text()].length, limit = served.settings.charLimit ?? -1;
  find("source-clear").hidden = !length;
  find("source-count").textContent = !length ? "" : limit > 0 ? `${length.toLocaleString("en")} of ${limit.toLocaleString("en")} characters`
    : `${length.toLocaleString("en")} character${length === 1 ? "" : "s"}`;
}

function soon(pause = PAUSE) {
  clearTimeout(timer);
  timer = setTimeout(now, pause);
}

function requestBody(alternatives = 0) {
  const { model, source, target } = pairOf(find("pair"));
  return { q: text(), source, target, format: "text", alternatives, model };
}

export async function now() {
  clearTimeout(timer);
  closeOthers();
  if (!text().trim()) {
    latest.stop();
    return display("", null);
  }
  find("target-sheet").setAttribute("aria-busy", "true");
  const body = requestBody();
  try {
    const response = await latest.run(signal => requestJson("/translate", { json: body, signal }));
    if (!response) return;  // a newer request is in progress
    shown = body;
    find("translate-error").textContent = "";
    display(response.translatedText, response.details);
  } catch (error) {
    find("translate-error").textContent = error.message;
    if (error.status === 429 || error.status === 503) soon(1000 * (error.wait || 2));
  }
  find("target-sheet").removeAttribute("aria-busy");
}

function display(translated, details) {
  put(translated);
  find("target-sheet").removeAttribute("aria-busy");
  for (const id of ["target-copy", "target-others"]) find(id).hidden = !translated;
  if (!translated) find("translate-error").textContent = "";
  find("target-about").textContent = translated
    ? `score ${details.score.toFixed(2)} · log-probability ${details.logprob.toFixed(2)}`.replaceAll("-0.00", "0.00").replaceAll(/ -(?=\d)/g, " −") : "";
  find("flags").replaceChildren(...(translated ? flags(details) : []).map(flag => element("li", {}, flag)));
}

// Warnings about a translation.
function flags({ truncated, looped, length_ratio: ratio, flags: doubts = [] }) {
  return [
    truncated && "The translation was cut off at the greatest length allowed.",
    looped && "The model ran in a loop here; this is the better of two attempts.",
    ratio > 3 && `The translation is ${ratio.toFixed(1)} times as long as the text.`,
    doubts.includes("protected") && "A link, a placeholder or the like stands in a doubtful place.",
    (ratio < 1 / 3 || doubts.includes("omission")) && "The translation is short for the text: something may be missing.",
  ].filter(Boolean);
}

async function copy() {
  const button = find("target-copy");
  try {
    await navigator.clipboard.writeText(find("target-text").textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(find("target-text"));  // no access to the clipboard: select the text for Ctrl-C
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// ---- alternatives ---------------------------------------------------------------------------------------------------

// Words as the server counts them: punctuation marks separately, an apostrophe with the word before it.
const WORD = /o'clock|'s(?![\p{L}\p{N}\p{M}_])|[\p{L}\p{N}\p{M}_]+(?:-[\p{L}\p{N}\p{M}_]+)*(?:'(?!s(?![\p{L}\p{N}\p{M}_])))?|[^\p{L}\p{N}\p{M}_\s]\p{M}*/gu;
const WHOLE = "whole";  // the value of a word is "line number"

// Show the translation with clickable words; the select beside the alternatives does the same by keyboard.
function put(translated) {
  const parts = [];
  translated.split("\n").forEach((line, row) => {
    let done = 0;
    [...line.matchAll(WORD)].forEach((found, at) => {
      const word = /[\p{L}\p{N}]/u.test(found[0]) ? element("span", { "data-word": `${row} ${at}` }, found[0]) : found[0];
      parts.push(line.slice(done, found.index), word);
      done = found.index + found[0].length;
    });
    parts.push(`${line.slice(done)}\n`);
  });
  parts.push(parts.pop().slice(0, -1));
  find("target-text").replaceChildren(...parts);
  const words = [...find("target-text").children].map(word => new Option(`“${word.textContent}”`, word.dataset.word));
  find("other-word").replaceChildren(new Option("the whole text", WHOLE), ...words);
}

function closeOthers() {
  latestOthers.stop();
  find("others").hidden = true;
  find("target-others").setAttribute("aria-expanded", "false");
}

function openOthers(at) {
  find("target-others").setAttribute("aria-expanded", "true");
  find("others").hidden = false;
  find("other-word").value = at;
  loadOthers();
}

async function loadOthers() {
  const at = find("other-word").value, list = find("others").querySelector("ol");
  find("others-hint").textContent = "Loading …";
  list.replaceChildren();
  try {
    const others = await latestOthers.run(signal => at === WHOLE ? wholeAlternatives(signal) : wordAlternatives(at, signal));
    if (!others) return;
    find("others-hint").textContent = others.length ? "Choose one to replace the translation." : "The model has no other suggestion.";
    list.replaceChildren(...others.map(other => element("li", {}, choice(other))));
  } catch (error) {
    find("others-hint").textContent = error.message;
  }
}

async function wholeAlternatives(signal) {
  const { alternatives = [] } = await requestJson("/translate", { json: { ...shown, alternatives: OTHERS }, signal });
  return [...new Set(alternatives)].filter(text => text !== find("target-text").textContent).map(text => ({ text }));
}

// Other words at a position, each with the best continuation of its line; the other lines stay.
async function wordAlternatives(place, signal) {
  const [row, position] = place.split(" ").map(Number), lines = find("target-text").textContent.split("\n"), sources = shown.q.split("\n");
  if (lines.length !== sources.length) throw new Error("The lines of the text and of its translation do not correspond here.");
  const json = { source: sources[row], target: lines[row], position, n: OTHERS, model: shown.model };
  const others = (await requestJson("/alternatives", { json, signal })).words.filter(({ text }) => text !== lines[row]);
  return others.map(other => ({ ...other, line: other.text, text: lines.with(row, other.text).join("\n") }));
}

function choice({ text, word, probability, line }) {
  const label = word === undefined ? [text] : [element("strong", {}, word), element("span", { class: "hint" }, ` ${percent(probability)} `), line];
  const button = element("button", { type: "button", class: "choice", lang: find("target-text").lang }, ...label);
  button.addEventListener("click", () => {
    put(text);
    find("target-about").textContent = "chosen by you";
    closeOthers();
    find("target-others").focus();
  });
  return button;
}
