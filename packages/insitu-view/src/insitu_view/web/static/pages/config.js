// The resolved configuration: each key with value and meaning, marked where it differs from the default.
import { html, useState } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { plural } from "../format.js";
import { Panel, useData, Waiting } from "../ui.js";
import { Copy, Line } from "../text.js";

export function ConfigPage({ route }) {
  const loaded = useData(apiPath([route.run, "config"]));
  const [filter, setFilter] = useState("");
  const [all, setAll] = useState(false);
  if (!loaded.data) return html`<h1>Config</h1><${Waiting} of=${loaded} />`;
  const text = filter.toLowerCase();
  const fits = (table, row) => (all || row.changed || text) && `${table}.${row.key} ${row.meaning} ${JSON.stringify(row.value)}`.toLowerCase().includes(text);
  const tables = loaded.data.tables.map((table) => ({ ...table, keys: table.keys.filter((row) => fits(table.table, row)) })).filter((table) => table.keys.length);
  const changed = loaded.data.tables.flatMap((table) => table.keys).filter((row) => row.changed).length;
  return html`<div class="title"><h1>Config</h1><span class="dim">${plural(changed, "key differs", "keys differ")} from the default</span></div>
    <div class="filters"><div class="facet"><input id="search" type="search" placeholder="key, value or meaning" aria-label="Filter the configuration" value=${filter} onInput=${(event) => setFilter(event.currentTarget.value)} />
      <button class="chip" aria-pressed=${all} onClick=${() => setAll(!all)}>show defaults too</button></div></div>
    ${loaded.data.resume && html`<div class="notice chips"><span>Continue this run:</span><code><${Line} text=${loaded.data.resume} /></code><span class="grow"></span><${Copy} text=${loaded.data.resume} /></div>`}
    ${tables.map(({ table, keys }) => html`<${Panel} key=${table} title=${`[${table}]`}><dl class="config">${keys.map((row) => html`<div key=${row.key} class=${row.changed ? "changed" : ""}>
      <dt class="mono"><${Line} text=${row.key} /></dt><dd><span class="mono"><${Line} text=${show(row.value)} max=${400} /></span>${row.changed ? html` <span class="dim small">default <span class="mono"><${Line} text=${show(row.default)} max=${120} /></span></span>` : ""}<p class="note"><${Line} text=${row.meaning} max=${600} /></p></dd></div>`)}</dl><//>`)}
    ${!tables.length && html`<p class="empty">No key matches.</p>`}`;
}

function show(value) {
  if (value === null) return "none";
  return typeof value === "string" ? (value === "" ? '""' : value) : JSON.stringify(value);
}
