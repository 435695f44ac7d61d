// The page: tabs, API key, and start of each tab once the models are loaded.

import { onKeyRequired, useKey } from "./api.js";
import * as attention from "./attention.js";
import * as complete from "./complete.js";
import * as documents from "./documents.js";
import * as model from "./model.js";
import { fillPairs, load, served } from "./models.js";
import * as translate from "./translate.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const panelOf = tab => find(tab.getAttribute("aria-controls"));
let began = false;  // true once the models are loaded
const opened = { attention, complete, model };  // tabs with an open() function, called when they are shown

function show(tab, focus = false) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    panelOf(other).hidden = other !== tab;
  }
  if (focus) tab.focus();
  tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  const name = tab.id.replace("tab-", "");
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  if (began) opened[name]?.open();
}

const tabOfUrl = () => tabs.find(tab => `#${tab.id.replace("tab-", "")}` === location.hash);

for (const tab of tabs) tab.addEventListener("click", () => show(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const at = tabs.indexOf(document.activeElement), last = tabs.length - 1;
  const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  show(tabs[to], true);
});
addEventListener("hashchange", () => tabOfUrl() && show(tabOfUrl()));

// ---- the key --------------------------------------------------------------------------------------------------------

onKeyRequired(() => { find("key-form").hidden = false; });
find("key-form").addEventListener("submit", event => {
  event.preventDefault();
  useKey(find("key").value);
  begin();
});

// ---- start ----------------------------------------------------------------------------------------------------------

function without(panel, missing) {
  const none = find(panel).querySelector(".none");
  none.hidden = !missing;
  none.textContent = missing;
  find(panel).querySelector(".work").hidden = Boolean(missing);
}

async function begin() {
  find("status").textContent = "";
  try {
    await load();
  } catch (error) {
    find("status").textContent = error.message;
    if (error.status === 503 || error.status === 0) setTimeout(begin, 1000 * (error.wait || 3));
    return;
  }
  if (served.settings.keyRequired) find("key-form").hidden = false;
  const pairs = served.pairs.length, completers = served.completers.length;
  const start = (what, needs) => `No ${what} is loaded. Start the server with one: qkv serve ${needs}`;
  for (const panel of ["panel-translate", "panel-documents", "panel-attention"]) without(panel, pairs ? "" : start("translation model", "runs/demo"));
  without("panel-complete", completers ? "" : start("language model", "runs/demo runs/book"));
  model.draw();
  if (began) return translate.now();
  began = true;
  fillPairs(find("pair"), find("document-pair"), find("look-pair"));
  if (pairs) { translate.begin(); documents.begin(); attention.begin(); }
  if (completers) complete.begin();
  const firstTab = tabOfUrl() ?? tabs[pairs || !completers ? 0 : 3];
  show(firstTab);
  if (firstTab === tabs[0] && pairs) find("source-text").focus();
}

begin();
