"use strict";
// Shows one list of sentences, filtered by a text. Without this script the page shows all lists.
const controls = document.getElementById("controls"), lists = [...document.querySelectorAll("[data-list]")];

function show() {
  const wanted = controls.elements.list.value, text = controls.elements.text.value.trim().toLowerCase();
  let shown = 0, all = 0;
  for (const list of lists) {
    list.hidden = list.dataset.list !== wanted;
    if (list.hidden) continue;
    for (const article of list.querySelectorAll("article")) {
      article.hidden = ![...article.querySelectorAll("dd")].some(part => part.textContent.toLowerCase().includes(text));
      all += 1;
      shown += !article.hidden;
    }
  }
  controls.elements.count.value = text ? `${shown} of ${all} sentences` : `${all} sentences`;
}

controls.hidden = false;
controls.addEventListener("input", show);
controls.addEventListener("submit", event => event.preventDefault());
show();
