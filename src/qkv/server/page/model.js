// The Model tab: facts and scores of each model, and examples of requests.

import { markdown } from "./markdown.js";
import { languageName, load, served, translates } from "./models.js";

const NAMES = { bleu: "BLEU", chrf: "chrF", ter: "TER" };
const count = number => typeof number === "number" ? number.toLocaleString("en") : number;

// A server that was still loading sent no details: request the models again.
export async function open() {
  if (served.models.every(model => model.parameters)) return;
  try {
    await load();
    draw();
  } catch (error) {
    find("model-error").textContent = error.message;
  }
}

export function draw() {
  find("models").replaceChildren(...served.models.map(card), calls());
}

function card(model) {
  const is = translates(model), { parameters, longest, scores } = model;
  const facts = {
    does: is ? `translates from ${languageName(model.source)} into ${model.targets.map(languageName).join(", ")}` : "completes text",
    kind: [model.kind, model.shape].filter(Boolean).join(", "),
    size: parameters ? `${count(parameters)} parameters` : "",
    vocabulary: model.vocabulary ?? "",
    engine: model.engine ?? "",
    longest: longest ? `${count(longest)} tokens; ${is ? "longer sentences are split and joined again" : "earlier text is forgotten"}` : "",
    scores: Object.entries(scores ?? {}).filter(([name, value]) => typeof value === "number" && name !== "step").map(([name, value]) =>
      `${NAMES[name] ?? name.replaceAll("_", " ")} ${+value.toPrecision(4)}`).join(" · "),
    made: model.made ? [model.made.begun?.slice(0, 10), model.made.qkv && `qkv ${model.made.qkv}`, model.made.torch && `torch ${model.made.torch}`].filter(Boolean).join(", ") : "",
  };
  const list = element("dl", {}, ...Object.entries(facts).filter(([, fact]) => fact).flatMap(([name, fact]) => [element("dt", {}, name), element("dd", {}, fact)]));
  const whole = model.card ? [element("details", {}, element("summary", {}, "The whole card"), element("div", { class: "card-text" }, ...markdown(model.card)))] : [];
  return element("article", { class: "card", "aria-label": model.name }, element("h2", {}, model.name), list, ...whole);
}

function calls() {
  const { charLimit } = served.settings, key = served.settings.keyRequired ? ` \\\n  -H 'Authorization: Bearer KEY'` : "";
  const post = (path, json) => `curl ${location.origin}${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(json).replaceAll("'", "'\\''")}'`;
  const [pair] = served.pairs, [completer] = served.completers;
  const examples = [
    pair && ["Translate, as LibreTranslate does", post("/translate", { q: "Your cat is a lovely cat.", source: pair.source, target: pair.target, alternatives: 2 })],
    pair && ["Translate a document", `curl '${location.origin}/documents?name=letter.md'${key} --data-binary @letter.md`],
    completer && ["Complete a text, as OpenAI does", post("/v1/completions", { model: completer.name, prompt: "It was", max_tokens: 50, stream: true })],
    ["Everything else", `curl ${location.origin}/openapi.json`],
  ].filter(Boolean);
  const limit = charLimit > 0 ? [element("p", { class: "hint" }, `At most ${count(charLimit)} characters in a request.`)] : [];
  return element("article", { class: "card", "aria-label": "How to call it" }, element("h2", {}, "How to call it"), ...limit,
    ...examples.flatMap(([title, code]) => [element("h3", {}, title), element("pre", { tabindex: 0, "aria-label": title }, element("code", {}, code))]));
}
