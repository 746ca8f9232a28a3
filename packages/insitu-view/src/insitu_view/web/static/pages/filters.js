// Filters of the list of rollouts as chips with counts, and the search field.
import { html, useState } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, words } from "../format.js";
import { useRunVersion } from "../live.js";
import { setQuery } from "../router.js";
import { useData } from "../ui.js";
import { cleanRuns, Line } from "../text.js";

const CHIPS = ["task_set", "phase", "outcome", "status"];
const SWITCHES = [["dropped", "1", "protected paths changed"], ["egress", "1", "network attempts"], ["retried", "1", "retried"],
  ["malformed", "1", "malformed calls"], ["unknown_tool", "1", "unknown tools"], ["parts_left_out", "1", "images or files left out"]];

export function Filters({ run, query }) {
  const { data } = useData(apiPath([run, "facets"]), useRunVersion(15));
  const [text, setText] = useState(query.q ?? "");
  const search = (event) => {
    event.preventDefault();
    setQuery({ q: text });
  };
  const shown = new Set([...CHIPS, "q", "sort"]);
  const others = Object.entries(query).filter(([key]) => !shown.has(key) && !SWITCHES.some(([name]) => name === key));
  return html`<section class="filters" aria-label="Filters">
    <form class="facet" role="search" onSubmit=${search}>
      <input id="search" type="search" placeholder="id, task, error or reason" aria-label="Search in id, task, error and reason" value=${text} onInput=${(event) => setText(event.currentTarget.value)} />
      <button>Search</button>
      ${query.q && html`<${Chip} on label=${`“${query.q}”`} onClick=${() => (setText(""), setQuery({ q: "" }))} />`}
    </form>
    ${CHIPS.map((key) => html`<${Facet} key=${key} name=${key} counts=${countsOf(data?.facets ?? [], key, query)} chosen=${query[key] ?? ""} />`)}
    <div class="facet"><span class="label">only</span>${SWITCHES.map(([key, value, label]) => html`<${Chip} on=${query[key] === value} label=${label} onClick=${() => setQuery({ [key]: query[key] === value ? "" : value })} />`)}
      ${data?.causes.length > 1 ? html`<${Causes} all=${data.causes} query=${query} />` : ""}
      ${data?.categories.length > 1 ? html`<${Categories} all=${data.categories} chosen=${query.category ?? ""} />` : ""}</div>
    ${others.filter(([key]) => key !== "category").length > 0 && html`<div class="facet"><span class="label">also</span>${others.filter(([key]) => key !== "category").map(([key, value]) => html`<${Chip} on label=${`${words(key)} ${value}`} title="remove this filter" onClick=${() => setQuery({ [key]: "" })} />`)}</div>`}
  </section>`;
}

function countsOf(facets, key, query) {
  const counts = new Map();
  for (const facet of facets) {
    const fits = CHIPS.every((other) => other === key || !query[other] || String(facet[other]) === query[other]);
    counts.set(facet[key], (counts.get(facet[key]) ?? 0) + (fits ? facet.n : 0));
  }
  return [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12);
}

function Facet({ name, counts, chosen }) {
  if (counts.length < 2 && !chosen) return "";
  return html`<div class="facet"><span class="label">${words(name)}</span>${counts.map(([value, n]) => html`<${Chip} key=${value} on=${chosen === value} label=${words(value)} n=${n} onClick=${() => setQuery({ [name]: chosen === value ? "" : value })} />`)}</div>`;
}

function Chip({ on = false, label, n = undefined, title = undefined, onClick }) {
  return html`<button type="button" class="chip" aria-pressed=${on} title=${title} onClick=${onClick}><${Line} text=${label} max=${60} />${n !== undefined ? html`<span class="n">${int(n)}</span>` : ""}${on ? html` <span aria-hidden="true">×</span>` : ""}</button>`;
}

/** Why rollouts were not solved; the same causes as on the overview. */
function Causes({ all, query }) {
  const filters = [];
  for (const { text, n, of_error } of all) {
    const same = filters.find((cause) => cause.text === text);
    if (same) same.n += n;
    else if (text) filters.push({ n, text, key: of_error ? "error" : "why" });
  }
  const chosen = filters.findIndex((cause) => query[cause.key] === cause.text);
  const choose = (event) => {
    const cause = filters[Number(event.currentTarget.value)];
    setQuery({ why: "", error: "", ...(cause ? { [cause.key]: cause.text } : {}) });
  };
  return html`<select aria-label="why not solved" class="causes" value=${chosen} onChange=${choose}>
    <option value="-1">any cause</option>${filters.map((cause, i) => html`<option value=${i}>${cleanRuns(cause.text).map((part) => part.text).join("").slice(0, 90)} (${int(cause.n)})</option>`)}
  </select>`;
}

function Categories({ all, chosen }) {
  return html`<select aria-label="category" value=${chosen} onChange=${(event) => setQuery({ category: event.currentTarget.value })}>
    <option value="">all categories</option>${all.map(({ category, n }) => html`<option value=${category}>${category || "(none)"} (${n})</option>`)}
  </select>`;
}
