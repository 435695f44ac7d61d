// Complete a text with a language model, streamed, with the most likely tokens at each position.

import { events, LatestRequest, requestJson, send } from "./api.js";
import { served } from "./models.js";

const LIKELY = 10, PAUSE = 400;
const latest = new LatestRequest();
let tokens = [], timer = 0, following = true;  // each token: { text, token, top, probability }

const shownToken = text => text.replaceAll(" ", "▁").replaceAll("\n", "⏎") || "∅";

export function begin() {
  find("language-model").replaceChildren(...served.completers.map(({ name }) => new Option(name)));
  find("language-model").disabled = served.completers.length < 2;
  for (const id of ["temperature", "top-p", "max-tokens"]) {
    const showValue = () => { document.querySelector(`output[for=${id}]`).textContent = find(id).value; };
    find(id).addEventListener("input", showValue);
    showValue();
  }
  find("complete-form").addEventListener("submit", event => { event.preventDefault(); goOn(); });
  find("stop").addEventListener("click", () => { latest.stop(); find("prompt").focus(); });
  find("prompt").addEventListener("input", () => { latest.stop(); clearTimeout(timer); timer = setTimeout(peek, PAUSE); });
  find("language-model").addEventListener("change", peek);
  find("token-at").addEventListener("input", () => { following = false; look(+find("token-at").value); });
  for (const name of ["pointerover", "click"]) find("written").addEventListener(name, event => {
    const at = event.target.dataset?.at;
    if (at !== undefined && !running()) look(+at);
  });
}

export const open = () => { if (served.completers.length && !tokens.length && !running()) peek(); };

const running = () => !find("stop").disabled;

const requestBody = () => ({ model: find("language-model").value, prompt: find("prompt").value, logprobs: LIKELY });

function clear() {
  tokens = [];
  find("written").replaceChildren(element("span", { class: "given" }, find("prompt").value));
  find("token-stepper").hidden = true;
  find("next").replaceChildren();
  find("complete-error").textContent = find("complete-said").textContent = find("next-about").textContent = "";
}

// Show the most likely next tokens for the prompt.
async function peek() {
  try {
    const response = await latest.run(signal => requestJson("/v1/completions", { json: { ...requestBody(), max_tokens: 1, temperature: 0 }, signal }));
    if (!response) return;
    clear();
    const [top] = response.choices[0].logprobs.top_logprobs;
    find("next-about").textContent = find("prompt").value ? "Most likely next tokens:" : "Most likely first tokens:";
    bars(top, null);
  } catch (error) {
    find("complete-error").textContent = error.message;
  }
}

async function goOn() {
  clearTimeout(timer);
  clear();
  following = true;
  find("stop").disabled = false;
  find("complete-said").textContent = "Writing …";
  const sampling = { max_tokens: +find("max-tokens").value, temperature: +find("temperature").value, top_p: +find("top-p").value };
  let ended = null, mine = true;
  try {
    ended = await latest.run(async signal => {
      let reason = "stop";
      signal.addEventListener("abort", () => { find("stop").disabled = true; });
      for await (const event of events(await send("/v1/completions", { json: { ...requestBody(), ...sampling, stream: true }, signal }))) {
        if (event.error) throw new Error(event.error.message ?? event.error);
        if (signal.aborted) break;
        for (const choice of event.choices ?? []) { add(choice); reason = choice.finish_reason ?? reason; }
      }
      return reason;
    });
  } catch (error) {
    mine = false;
    find("complete-error").textContent = error.message;
  }
  find("stop").disabled = true;
  const count = `${tokens.length} token${tokens.length === 1 ? "" : "s"}`;
  if (mine) find("complete-said").textContent = ended === null ? `Stopped after ${count}.` : ended === "length" ? `${count}: the limit.` : `Ended after ${count}.`;
}

function add({ text = "", logprobs }) {
  const written = find("written"), low = written.scrollTop + written.clientHeight >= written.scrollHeight - 30;
  const added = (logprobs?.tokens ?? []).map((token, i) => ({ token, probability: Math.exp(logprobs.token_logprobs[i]), top: logprobs.top_logprobs?.[i] ?? {} }));
  tokens.push(...added);
  const at = Math.max(0, tokens.length - 1), sure = added.at(-1)?.probability;
  if (text) written.append(element("span", { "data-at": at, style: sure === undefined ? "" : `--doubt: ${(1 - Math.sqrt(sure)).toFixed(2)}` }, text));
  if (low) written.scrollTop = written.scrollHeight;
  if (!tokens.length) return;
  find("token-stepper").hidden = false;
  find("token-at").max = tokens.length - 1;
  if (following) look(tokens.length - 1);
}

function look(at) {
  const { token, probability, top } = tokens[at];
  find("token-at").value = at;
  find("token-at").setAttribute("aria-valuetext", `token ${at + 1}, ${shownToken(token)}`);
  find("token-number").textContent = `${at + 1} of ${tokens.length}`;
  find("written").querySelector(".here")?.classList.remove("here");
  find("written").querySelector(`[data-at="${at}"]`)?.classList.add("here");
  if (!running()) find("next-about").textContent = `${shownToken(token)} was chosen, with probability ${percent(probability)}.`;
  bars(top, token);
}

function bars(top, chosen) {
  const likely = Object.entries(top ?? {}).map(([token, logprob]) => [token, Math.exp(logprob)]).sort((a, b) => b[1] - a[1]);
  find("next").replaceChildren(...likely.map(([token, probability]) => element("li", { class: token === chosen ? "chosen" : "", style: `--share: ${100 * probability}%` },
    element("span", { class: "name" }, shownToken(token)), element("span", { class: "bar" }), element("span", {}, percent(probability)))));
}
