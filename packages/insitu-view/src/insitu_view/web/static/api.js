// Data of the server: JSON, binary pages of tokens, and events. In an exported file the same paths are embedded.

/** Set by an exported file: answers a path from embedded data instead of the network. */
/** @type {null | ((path: string) => Promise<Uint8Array|null>)} */
let embedded = null;

export function useEmbedded(answer) {
  embedded = answer;
}

export function isEmbedded() {
  return embedded !== null;
}

/** The newest answers that the server named by an entity tag. @type {Map<string, {tag: string, data: any}>} */
const kept = new Map();
const KEPT = 16;

/** Return the JSON at `path` ("runs", "run/NAME/overview"); the same object while the answer is the same. @param {string} path @param {AbortSignal} [signal] */
export async function get(path, signal) {
  const old = kept.get(path);
  const reply = embedded ? null : await request(path, signal, old ? { "If-None-Match": old.tag } : {});
  if (reply?.status === 304) return old?.data;
  const data = reply ? await reply.json() : JSON.parse(new TextDecoder().decode(await bytes(path, signal)));
  const tag = reply?.headers.get("ETag");
  kept.delete(path);
  if (tag) kept.set(path, { tag, data });
  if (kept.size > KEPT) kept.delete(kept.keys().next().value ?? "");
  return data;
}

/** Return the bytes at `path`. @param {string} path @param {AbortSignal} [signal] @returns {Promise<Uint8Array>} */
export async function bytes(path, signal) {
  if (embedded) {
    const found = await embedded(path);
    if (!found) throw new Error("this is not in the exported file");
    return found;
  }
  return new Uint8Array(await (await request(path, signal)).arrayBuffer());
}

/** @param {string} path @param {AbortSignal} [signal] @param {Record<string, string>} [headers] */
async function request(path, signal, headers = {}) {
  const reply = await fetch(`api/${path}`, { signal, headers, credentials: "same-origin", cache: "no-store" });
  if (reply.ok || reply.status === 304) return reply;
  if (reply.status === 401) throw new Error("the viewer was restarted: open the address that `insitu view` prints");
  let message = reply.statusText || `status ${reply.status}`;
  try {
    message = (await reply.json()).error ?? message;
  } catch {
    // Not JSON: the status line is the message.
  }
  throw new Error(message);
}

/** A path with encoded parts and a query; empty values are left out. */
export function apiPath(parts, query = {}) {
  const entries = Object.entries(query).filter(([, v]) => v !== "" && v !== null && v !== undefined);
  const search = entries.length ? `?${new URLSearchParams(entries.map(([k, v]) => [k, String(v)]))}` : "";
  return parts.map((part) => encodeURIComponent(String(part))).join("/") + search;
}
