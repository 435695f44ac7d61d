// The served models: language pairs, language models and limits.

import { requestJson } from "./api.js";

const names = new Intl.DisplayNames(["en"], { type: "language", fallback: "code" });

export function languageName(code) {
  try {
    return names.of(code.replace("_", "-")) ?? code;
  } catch {
    return code;  // not a language code: show it unchanged
  }
}

export const served = { models: [], pairs: [], completers: [], settings: {} };

export async function load() {
  const [settings, { models }] = await Promise.all([requestJson("/frontend/settings").catch(() => ({})), requestJson("/models")]);
  Object.assign(served, {
    settings, models,
    completers: models.filter(model => !translates(model)),
    pairs: models.filter(translates).flatMap(({ name, source, targets }) => targets.map(target => ({ model: name, source, target }))),
  });
}

export const translates = model => model.does === "translate";

export function pairName({ model, source, target }, all = served.pairs) {
  const pair = `${languageName(source)} → ${languageName(target)}`;
  const alone = all.filter(other => other.source === source && other.target === target).length === 1;
  return alone ? pair : `${pair} (${model})`;
}

// The language choices of all tabs are kept equal.
export function fillPairs(...selects) {
  for (const select of selects) {
    select.replaceChildren(...served.pairs.map((pair, i) => new Option(pairName(pair), i)));
    select.disabled = served.pairs.length < 2;
    select.addEventListener("change", () => {
      for (const other of selects) other.value = select.value;
      for (const listener of listeners) listener();
    });
  }
}

const listeners = [];
export const onPair = listener => listeners.push(listener);
export const pairOf = select => served.pairs[+select.value];
