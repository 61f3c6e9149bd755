/** Calls of the gateway: the key, errors as it words them, and streams of server-sent events. */

import { apiKey } from "/page/settings.js";

/** A call that was refused or broken off, with what the gateway says about it. */
export class ApiError extends Error {
  constructor(error, status) {
    super(worded(error) ?? `The gateway answered with status ${status}.`);
    this.param = error?.param ?? null;
    this.status = status;
  }
}

/** Most messages begin with the name of the field that is wrong; the others get it here. */
function worded(error) {
  const { message, param } = error ?? {};
  return message && param && !message.includes(param) ? `${param}: ${message}` : message;
}

export async function getJson(path) {
  return (await call(path, { headers: headers() })).json();
}

/** Posts a request, given as JSON text, and yields the chunks that it is answered with. */
export async function* postStream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body,
    signal,
  });
  let done = false;
  for await (const data of events(response.body)) {
    done = data === "[DONE]";
    if (done) continue; // the connection is used again if it is read to its end
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error, response.status);
    yield withSeedsDigits(chunk, data);
  }
  if (!done) throw new ApiError({ message: "The connection ended before the answer did." });
}

function headers() {
  const key = apiKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, options) {
  const response = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ message: `The gateway cannot be reached (${error.message}).` });
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new ApiError(said.error, response.status);
}

/** Yields the data of each event; comments and other fields of the format are passed over. */
async function* events(stream) {
  let data = [];
  for await (const line of lines(stream)) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    if (line === "" && data.length) {
      yield data.join("\n");
      data = [];
    }
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      const parts = (rest + read.value).split(/\r?\n/);
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that is broken already cannot be ended
  }
}

/** A seed has 64 bits, more than a number of this language holds: its digits are kept. */
function withSeedsDigits(chunk, data) {
  const digits = chunk.metrics?.ssd && /"seed":\s*(-?\d+)/.exec(data)?.[1];
  if (digits) chunk.metrics.ssd.seed = digits;
  return chunk;
}
