// Addresses: #/RUN/page/part…?key=value. Each view state that matters is in the address.
import { useEffect, useState } from "./vendor/preact-htm.module.js";

/** @typedef {{run: string, page: string, parts: string[], query: Record<string, string>}} Route */

/** @param {string} hash @returns {Route} */
export function parseRoute(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decodePart);
  const query = Object.fromEntries(new URLSearchParams(search));
  if (parts[0] === "compare") return { run: "", page: "compare", parts: parts.slice(1), query };
  const [run = "", page = run ? "overview" : "runs", ...rest] = parts;
  return { run, page, parts: rest, query };
}

function decodePart(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The address of a page; empty query values are left out. */
export function href(run, page = "", parts = [], query = {}) {
  const path = [run, page, ...parts].filter((part) => part !== "").map((part) => encodeURIComponent(String(part)));
  return `#/${path.join("/")}${search(query)}`;
}

/** The address of a rollout, whose id is four parts joined by slashes. */
export function rolloutHref(run, id, query = {}) {
  return href(run, "rollout", String(id).split("/"), query);
}

export function compareHref(runs, query = {}) {
  return `#/compare/${runs.map(encodeURIComponent).join(",")}${search(query)}`;
}

function search(query) {
  const entries = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return entries.length ? `?${new URLSearchParams(entries.map(([k, v]) => [k, String(v)]))}` : "";
}

export function go(address) {
  location.hash = address.replace(/^#/, "");
}

/** Change parts of the query; `replace` leaves no entry in the history. */
export function setQuery(patch, replace = true) {
  const route = parseRoute(location.hash);
  const query = { ...route.query, ...patch };
  const path = location.hash.split("?")[0] || "#/";
  const address = `${path}${search(query)}`;
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address.slice(1);
}

/** @returns {Route} */
export function useRoute() {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const update = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", update);
    update(); // effects run a frame after the first rendering: the address may have changed in between
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}
