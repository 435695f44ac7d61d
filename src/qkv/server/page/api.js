// Requests to the server, and its errors in words.

let key = "";  // in memory only
const keyEvents = new EventTarget();  // fires "key" when the server requires a key

export const useKey = text => { key = text.trim(); };
export const onKeyRequired = listener => keyEvents.addEventListener("key", listener);

export class Refusal extends Error {
  constructor(status, reason, wait) {
    super(describe(status, reason, wait));
    Object.assign(this, { status, wait });
  }
}

function describe(status, reason, wait) {
  const later = wait ? `Try again in ${wait} s.` : "Try again in a moment.";
  const sentence = text => text ? `${text.replace(/\.$/, "")}. ` : "";
  switch (status) {
    case 0: return "The server does not respond. Is it still running?";
    case 401: case 403: return `${sentence(reason)}Enter a key at the top of the page.`;
    case 413: return `This is more than the server takes at once. ${sentence(reason)}`.trim();
    case 429: return `The server is busy. ${sentence(reason)}${later}`;
    case 503: return `The server is loading or about to stop. ${sentence(reason)}${later}`;
    case 504: return `The server did not finish in time. ${sentence(reason)}`.trim();
    default: return reason || `The server failed (${status}).`;
  }
}

// Send a request and return its response, or throw a Refusal; the signal aborts it.
export async function send(path, { method = "GET", json, body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (json) headers["Content-Type"] = "application/json";
  else if (body) headers["Content-Type"] = "application/octet-stream";
  let response;
  try {
    response = await fetch(path, { method: json || body ? "POST" : method, headers, body: json ? JSON.stringify(json) : body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "", 0);
  }
  if (response.ok) return response;
  const { error = "" } = await response.json().catch(() => ({}));
  if (response.status === 401 || response.status === 403) keyEvents.dispatchEvent(new Event("key"));
  throw new Refusal(response.status, error.message ?? String(error), +response.headers.get("Retry-After") || 0);
}

export const requestJson = async (path, options) => (await send(path, options)).json();

// One request at a time: a newer one aborts the older, whose result becomes null.
export class LatestRequest {
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
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
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
