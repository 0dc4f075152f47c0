// Requests to this server: the key, errors in words, server-sent events.

import { Kept } from "./store.js";

const kept = new Kept("sessionStorage", "monoloop-key");

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  kept.set(key || null);
}

export const hasKey = () => kept.text !== null;

// Paths are relative, so that the page also works below a prefix of a proxy.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (hasKey()) headers.Authorization = `Bearer ${asBytes(kept.text)}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  throw new ApiError(await problem(response), response.status);
}

// Headers hold bytes: a key with other characters is sent in UTF-8.
function asBytes(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function problem(response) {
  const known = await response.json().catch(() => null);
  return known?.error?.message ?? `The server answered ${response.status}.`;
}

// Yields the data of each event. Throws ApiError if the connection breaks.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data: "));
        if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
