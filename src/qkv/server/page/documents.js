// Documents: uploaded by button or drop, polled while they are translated, then downloaded.

import { requestJson, send } from "./api.js";
import { pairOf, served } from "./models.js";

const EVERY = 500;  // milliseconds between two requests for the progress of a document
const KNOWN = ["txt", "md", "html", "srt", "docx", "pptx", "xlsx", "odt", "epub"];

export function begin() {
  const formats = served.settings.supportedFilesFormat?.map(name => name.replace(/^\./, "")) ?? KNOWN;
  find("formats").textContent = `${formats.map(name => `.${name}`).join(", ")}; the layout stays, the words change.`;
  find("files").accept = formats.map(name => `.${name}`).join(",");
  find("files").addEventListener("change", () => { [...find("files").files].forEach(translate); find("files").value = ""; });
  for (const name of ["dragover", "drop"]) document.addEventListener(name, event => event.preventDefault());  // otherwise the browser opens a file dropped elsewhere
  const drop = find("drop"), over = is => event => { event.preventDefault(); drop.classList.toggle("over-it", is); };
  drop.addEventListener("dragover", over(true));
  drop.addEventListener("dragleave", over(false));
  drop.addEventListener("drop", event => { over(false)(event); [...event.dataTransfer.files].forEach(translate); });
}

const pause = () => new Promise(resolve => setTimeout(resolve, EVERY));
const say = words => { find("jobs-said").textContent = words; };

async function translate(file) {
  const bar = element("progress", { max: 1, "aria-label": `Progress of ${file.name}` });
  const about = element("span", { class: "hint" }, "sending …"), end = element("span", { class: "end" });
  find("jobs").prepend(element("li", {}, element("strong", {}, file.name), bar, about, end));
  try {
    const { model, source, target } = pairOf(find("document-pair"));
    const { id, total } = await patiently(async () =>
      requestJson(`/documents?${new URLSearchParams({ name: file.name, source, target, model })}`, { body: await file.arrayBuffer() }), about);
    bar.max = Math.max(1, total);
    await watch(id, bar, about);
    end.append(download(id, translated(file.name, target)));
    say(`${file.name} is translated.`);
  } catch (error) {
    bar.remove();
    about.className = "error";
    about.textContent = error.message.replace(`${file.name}: `, "");  // the name is shown beside it
    say(`${file.name}: ${about.textContent}`);
  }
}

// Repeat a request that a busy server refused, after the time it gave.
async function patiently(work, about) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 429 && error.status !== 503) throw error;
      about.textContent = error.message;
      await new Promise(resolve => setTimeout(resolve, 1000 * (error.wait || 2)));
    }
  }
}

async function watch(id, bar, about) {
  for (;;) {
    const job = await patiently(() => requestJson(`/documents/${encodeURIComponent(id)}`), about);
    if (job.state === "failed") throw new Error(job.error || "The translation failed.");
    bar.value = job.state === "done" ? bar.max : job.done;
    about.textContent = job.state === "done" ? `${job.total} sentences, done` : `${job.done} of ${job.total} sentences`;
    if (job.state === "done") return;
    await pause();
  }
}

const translated = (name, target) => name.replace(/(\.[^.]*)?$/, suffix => `${target ? `.${target}` : ".translated"}${suffix}`);

// A plain link cannot send the API key, so the file is fetched and then saved.
function download(id, name) {
  const button = element("button", { type: "button", class: "button", "aria-label": `Download ${name}` }, "Download");
  button.addEventListener("click", async () => {
    try {
      const data = await (await send(`/documents/${encodeURIComponent(id)}/file`)).blob();
      const link = element("a", { href: URL.createObjectURL(data), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    } catch (error) {
      find("documents-error").textContent = `${name}: ${error.message}`;
    }
  });
  return button;
}
