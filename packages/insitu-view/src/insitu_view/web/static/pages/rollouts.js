// A windowed table of rollouts: filters, sort and search are in the address; new rows wait until they are asked for.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.module.js";
import { apiPath, get } from "../api.js";
import { int, plural } from "../format.js";
import { useKeys } from "../keys.js";
import { useRun } from "../live.js";
import { compareHref, go, rolloutHref, setQuery } from "../router.js";
import { HeadCell, useStored, useWindow } from "../ui.js";
import { Line } from "../text.js";
import { COLUMNS, DEFAULT_COLUMNS } from "./columns.js";
import { Filters } from "./filters.js";

const ROW = 33;

export function RolloutsPage({ route }) {
  const { sort = "", ...filters } = route.query;
  const list = useRows(route.run, filters, sort);
  const [at, setAt] = useState(-1);
  const [marked, setMarked] = useState(/** @type {string[]} */ ([]));
  const [chosen, setChosen] = useStored("columns", DEFAULT_COLUMNS);
  const [box, first, last] = useWindow(list.rows.length, ROW);
  const { run } = useRun();
  const offered = COLUMNS.filter(({ mix }) => !mix || run?.task_sets.length);
  const columns = offered.filter(({ key }) => chosen.includes(key));
  useEffect(() => {
    if (last >= list.rows.length - 60) list.more();
  }, [last, list.rows.length, list.next]);
  useEffect(() => keepList(list.rows), [list.rows]);

  const move = (by) => {
    const next = Math.max(0, Math.min(list.rows.length - 1, at + by));
    setAt(next);
    const element = box.current;
    if (!element) return;
    const top = next * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + 2 * ROW + 12 > element.scrollTop + element.clientHeight) element.scrollTop = top + 2 * ROW + 12 - element.clientHeight;
  };
  const toggle = (id) => setMarked((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id].slice(-2)));
  const compare = () => marked.length === 2 && go(compareHref([route.run], { id_a: marked[0], id_b: marked[1] }));
  useKeys({
    j: ["next row", () => move(1)],
    k: ["previous row", () => move(-1)],
    Enter: ["open the rollout", () => list.rows[at] && go(rolloutHref(route.run, list.rows[at].id))],
    x: ["mark the row", () => list.rows[at] && toggle(list.rows[at].id)],
    c: ["compare two marked rollouts", compare],
    "/": ["search", () => document.getElementById("search")?.focus()],
    f: ["go to the filters", () => /** @type {HTMLElement|null} */ (document.querySelector(".facet button"))?.focus()],
    ".": ["show new rollouts", list.refresh],
  });
  const onSort = (next) => setQuery({ sort: next === "-row" ? "" : next });
  const head = html`<thead><tr>${columns.map((column) => html`<${HeadCell} key=${column.key} column=${column} order=${sort || "-row"} onSort=${onSort} fixed=${!column.sortable} />`)}</tr></thead>`;
  return html`
    <div class="title"><h1>Rollouts</h1><span class="dim">${list.count === null ? "" : plural(list.count, "rollout")}</span>
      ${list.fresh > 0 && html`<button class="chip" aria-pressed="true" onClick=${list.refresh}>${int(list.fresh)} new, show</button>`}
      <span class="grow"></span>
      <button disabled=${marked.length !== 2} onClick=${compare}>Compare ${marked.length === 2 ? "2 marked" : `(mark 2 with x)`}</button>
      <${ColumnMenu} offered=${offered} chosen=${chosen} onChange=${setChosen} /></div>
    <${Filters} run=${route.run} query=${route.query} />
    ${list.error ? html`<div class="notice bad" role="alert"><${Line} text=${list.error} /></div>` : ""}
    <div class="window" ref=${box} tabindex="0" role="region" aria-label="rollouts" aria-busy=${list.loading}>
      <table class="data" aria-rowcount=${list.count ?? -1}>${head}<tbody>
        ${first > 0 && html`<tr aria-hidden="true"><td colspan=${columns.length} class="spacer" style=${{ height: `${first * ROW}px` }}></td></tr>`}
        ${list.rows.slice(first, last).map((row, i) => html`<${Row} key=${row.id} row=${row} index=${first + i} here=${first + i === at} marked=${marked.includes(row.id)} columns=${columns} run=${route.run} onPick=${() => setAt(first + i)} />`)}
        ${list.rows.length > last && html`<tr aria-hidden="true"><td colspan=${columns.length} class="spacer" style=${{ height: `${(list.rows.length - last) * ROW}px` }}></td></tr>`}
      </tbody></table>
      ${!list.rows.length && html`<p class="empty center">${list.loading ? "Loading…" : "No rollout passes these filters."}</p>`}
    </div>`;
}

function Row({ row, index, here, marked, columns, run, onPick }) {
  return html`<tr class=${`${here ? "here" : ""} ${marked ? "marked" : ""}`} aria-rowindex=${index + 2} onClick=${onPick}>
    ${columns.map((column) => html`<td key=${column.key} class=${column.num ? "num" : column.cls ?? ""}>${column.key === "id" ? html`${marked ? html`<span class="mark" title="marked">●</span> ` : ""}<a href=${rolloutHref(run, row.id)}><${Line} text=${row.id} /></a>` : column.cell(row, run)}</td>`)}
  </tr>`;
}

function ColumnMenu({ offered, chosen, onChange }) {
  return html`<details class="menu"><summary class="button">Columns</summary><div class="pop">
    ${offered.map(({ key, label }) => html`<label><input type="checkbox" checked=${chosen.includes(key)} disabled=${key === "id"} onChange=${(event) => onChange(event.currentTarget.checked ? [...chosen, key] : chosen.filter((other) => other !== key))} /> ${label}</label>`)}
    <button class="quiet" onClick=${() => onChange(DEFAULT_COLUMNS)}>Reset</button>
  </div></details>`;
}

/** Pages of rows by cursor. New rows are counted by events and put in front only when asked for. */
function useRows(run, filters, sort) {
  const { live } = useRun();
  const key = JSON.stringify([run, filters, sort]);
  const [state, setState] = useState({ key: "", rows: /** @type {any[]} */ ([]), next: null, count: null, error: "", loading: true, seen: null });
  const busy = useRef("");
  const newest = useRef(live.rollouts);
  newest.current = live.rollouts;
  const load = async (cursor) => {
    const mark = `${key}${cursor}`;
    if (busy.current === mark) return;
    busy.current = mark;
    const seen = newest.current;
    try {
      const page = await get(apiPath([run, "rollouts"], { ...filters, sort, cursor }));
      if (busy.current !== mark) return;
      setState((old) => ({
        key, error: "", loading: false, next: page.next,
        rows: cursor ? [...old.rows, ...page.rows] : page.rows,
        count: page.count ?? old.count,
        seen: cursor ? old.seen : Math.max(seen ?? 0, ...page.rows.map((row) => row.row)),
      }));
    } catch (error) {
      if (busy.current === mark) setState((old) => ({ ...old, key, error: error.message, loading: false }));
    } finally {
      if (busy.current === mark) busy.current = "";
    }
  };
  useEffect(() => {
    setState((old) => ({ ...old, loading: true }));
    void load("");
  }, [key]);
  const plain = Object.values(filters).every((value) => value === "");
  const fresh = plain && live.rollouts !== null && state.seen !== null && state.key === key ? Math.max(0, live.rollouts - state.seen) : 0;
  useEffect(() => {
    // In the order of arrival new rows are put above what is read; the scroll place is kept by the browser's anchor below.
    if (fresh > 0 && plain && !sort) void prepend();
  }, [fresh]);
  const prepend = async () => {
    const element = document.querySelector(".window");
    if (element && element.scrollTop > 0) return;
    await load("");
  };
  // Rows of another key count as loading until the first page of this key is there.
  const loading = state.loading || state.key !== key;
  return useMemo(() => ({ ...state, loading, fresh, more: () => state.next && !busy.current && void load(state.next), refresh: () => void load("") }), [state, loading, fresh]);
}

/** The rows that h and l walk through on the rollout page. */
export const listed = { ids: /** @type {string[]} */ ([]) };

function keepList(rows) {
  listed.ids = rows.map((row) => row.id);
}
