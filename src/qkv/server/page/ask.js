// Requests to the server, and its errors in words.

let key = "";  // in memory only
const refused = new EventTarget();  // fires "key" when the server requires a key

export const useKey = given => { key = given.trim(); };
export const onKeyWanted = listener => refused.addEventListener("key", listener);

export class Refusal extends Error {
  constructor(status, said, wait) {
    super(words(status, said, wait));
    Object.assign(this, { status, wait });
  }
}

function words(status, said, wait) {
  const later = wait ? `Try again in ${wait} s.` : "Try again in a moment.";
  const full = text => text ? `${text.replace(/\.$/, "")}. ` : "";
  switch (status) {
    case 0: return "The server does not answer. Is it still running?";
    case 401: case 403: return `${full(said)}Enter a key at the top of the page.`;
    case 413: return `This is more than the server takes at once. ${full(said)}`.trim();
    case 429: return `The server is busy. ${full(said)}${later}`;
    case 503: return `The server is loading or about to stop. ${full(said)}${later}`;
    case 504: return `The server did not finish in time. ${full(said)}`.trim();
    default: return said || `The server failed (${status}).`;
  }
}

// Send a request and return its response, or throw a Refusal; the signal aborts it.
export async function send(path, { method = "GET", json, body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (json) headers["Content-Type"] = "application/json";
  else if (body) headers["Content-Type"] = "application/octet-stream";
  let answer;
  try {
    answer = await fetch(path, { method: json || body ? "POST" : method, headers, body: json ? JSON.stringify(json) : body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "", 0);
  }
  if (answer.ok) return answer;
  const { error = "" } = await answer.json().catch(() => ({}));
  if (answer.status === 401 || answer.status === 403) refused.dispatchEvent(new Event("key"));
  throw new Refusal(answer.status, error.message ?? String(error), +answer.headers.get("Retry-After") || 0);
}

export const ask = async (path, options) => (await send(path, options)).json();

// One request at a time: a newer one aborts the older, whose result becomes null.
export class Latest {
  constructor() { this.call = null; }

  stop() { this.call?.abort(); }

  async run(work) {
    this.stop();
    const call = this.call = new AbortController();
    try {
      return await work(call.signal);
    } catch (error) {
      if (error.name === "AbortError" || call.signal.aborted) return null;
      throw error;
    } finally {
      if (this.call === call) this.call = null;
    }
  }
}

// Yield the data of server-sent events as they arrive.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // the reader closes the connection
  }
}
