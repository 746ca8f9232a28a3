// Data of an exported file: packs of compressed answers by path. The server's pages are not served this module.
import { useEmbedded } from "./api.js";

/** @type {Map<number, Promise<Uint8Array>>} */
const opened = new Map();

/** The bytes of a pack; pack 0 is the index. @param {number} number */
function pack(number) {
  if (!opened.has(number)) opened.set(number, unpack(document.querySelectorAll("script.pack")[number].textContent ?? ""));
  return /** @type {Promise<Uint8Array>} */ (opened.get(number));
}

async function unpack(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function json(bytes) {
  return JSON.parse(new TextDecoder().decode(await bytes));
}

async function stored(key) {
  const index = await json(pack(0));
  if (!Object.hasOwn(index, key)) return null;
  const [number, start, length] = index[key];
  return (await pack(number + 1)).slice(start, start + length);
}

/** @param {string} path */
async function answer(path) {
  const [place, search = ""] = path.split("?", 2);
  const parts = place.split("/").map(decodeURIComponent);
  const query = Object.fromEntries(new URLSearchParams(search));
  if (parts[1] === "rollouts") {
    const list = await json(stored(parts.join("\n")));
    return new TextEncoder().encode(JSON.stringify(chosen(list, query)));
  }
  if (place === "compare" && search.startsWith("runs=") && !search.includes("&")) {
    const found = columnsOf(await json(stored("compare")), query.runs.split(","));
    return found && new TextEncoder().encode(JSON.stringify(found));
  }
  return stored([...parts, ...Object.entries(query).sort(([a], [b]) => (a < b ? -1 : 1)).map(([k, v]) => `${k}=${v}`)].join("\n"));
}

/** The comparison of some runs, from that of all runs of the file. */
function columnsOf(all, names) {
  const at = names.map((name) => all.runs.findIndex((run) => run.info.name === name));
  if (at.includes(-1)) return null;
  const differences = all.differences.map(({ key, values }) => ({ key, values: at.map((i) => values[i]) }));
  const differs = ({ values }) => values.some((value) => JSON.stringify(value) !== JSON.stringify(values[0]));
  return { runs: at.map((i) => all.runs[i]), differences: differences.filter(differs) };
}

const varying = (text) => (text ?? "").replace(/0x[0-9a-fA-F]+|[0-9a-fA-F]{12,}|\d+/g, "#");
const is = (fact, value) => Number(fact) === Number(value);
/** The filters of the list that are not "equal to the value of the row". */
const FILTERS = {
  outcome: (row, v) => (row.outcome ?? "none") === v,
  excluded: (row, v) => row.excluded[v] > 0,
  why: (row, v) => varying(row.reason) === v,
  error: (row, v) => varying(row.error) === v,
  solved: (row, v) => is(row.reward >= 1, v),
  min_reward: (row, v) => row.reward !== null && row.reward >= Number(v),
  max_reward: (row, v) => row.reward !== null && row.reward <= Number(v),
  dropped: (row, v) => is(row.dropped.length > 0, v),
  egress: (row, v) => is(row.egress > 0, v),
  retried: (row, v) => is(row.attempt > 1, v),
  unparsed: (row, v) => is(row.malformed || row.unknown_tool, v),
  q: (row, v) => [row.id, row.task, row.error, row.reason].some((text) => (text ?? "").toLowerCase().includes(v.toLowerCase())),
};

/** The list of all rollouts, filtered and sorted as the server does. */
function chosen(list, { sort = "", cursor: _, limit: __, ...filters }) {
  const rows = list.rows.filter((row) => Object.entries(filters).every(([name, v]) => (Object.hasOwn(FILTERS, name) ? FILTERS[name](row, v) : String(row[name] ?? "") === v)));
  const key = sort.replace(/^-/, "");
  const way = sort.startsWith("-") ? -1 : 1;
  const value = (row) => (key === "version" ? row.oldest : row[key]) ?? (typeof list.rows[0]?.[key] === "string" ? "" : -1e9);
  if (key) rows.sort((a, b) => way * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.row - b.row));
  return { rows, next: null, count: rows.length };
}

useEmbedded(answer);
