// The attention explorer for one sentence.

import { LatestRequest, requestJson } from "./api.js";
import { onPair, pairOf } from "./models.js";
import { text } from "./translate.js";
import { WhatIf } from "./whatif.js";

const latest = new LatestRequest();
let explorer = null, shown = "", typed = false;
const requestBody = () => ({ text: find("look-text").value.trim(), model: pairOf(find("look-pair")).model });
const requestKey = () => JSON.stringify(requestBody());
const whatIf = new WhatIf(requestBody);

export function begin() {
  find("look").addEventListener("submit", event => { event.preventDefault(); typed = true; look(); });
  find("look-text").addEventListener("input", () => { typed = true; });
  onPair(() => { if (!find("panel-attention").hidden) look(); });
}

// Show the first line of the Translate tab, unless a sentence was typed here.
export function open() {
  const current = text().trim().split("\n")[0];
  if (current && !(typed && find("look-text").value.trim())) find("look-text").value = current;
  if (find("look-text").value.trim() && requestKey() !== shown) look();
  else if (!find("look-text").value.trim()) find("attention-said").textContent = "Write a sentence to see the model's attention while it translates.";
  else explorer?.redraw();  // the width may have changed
}

async function look() {
  if (!find("look-text").value.trim()) return;
  const key = requestKey();
  find("attention-said").textContent = "Loading …";
  find("attention-error").textContent = "";
  try {
    const response = await latest.run(signal => requestJson("/attention", { json: requestBody(), signal }));
    if (!response) return;
    shown = key;
    draw(response);
    find("attention-said").textContent = "";
  } catch (error) {
    find("attention-said").textContent = "";
    find("attention-error").textContent = error.message;
    find("attention-found").hidden = true;
    shown = "";
  }
}

function draw(data) {
  const before = explorer ? { chosen: [...explorer.state.chosen].map(head => head.key), words: explorer.state.words } : {};
  explorer?.close();
  find("attention-found").hidden = false;
  find("looked-at").textContent = data.text;
  find("looked-into").textContent = data.translation;
  whatIf.explorer = null;
  explorer = new Explorer(find("explorer"), data, { ...before, onChoose: heads => whatIf.choose(heads), onForce: (step, word) => whatIf.force(step, word) });
  whatIf.begin(explorer);
}
