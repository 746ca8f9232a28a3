// Parts that pages share: data loading, panels, badges, tables.
import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.module.js";
import { get } from "./api.js";
import { int, NONE, num, plural } from "./format.js";
import { Line } from "./text.js";

/** Fetch `path`; fetched again when `path` or `version` changes, with the old data shown meanwhile. */
export function useData(path, version = 0) {
  const [state, setState] = useState({ path: "", data: null, error: "" });
  useEffect(() => {
    if (!path) return undefined;
    const abort = new AbortController();
    get(path, abort.signal).then(
      (data) => setState({ path, data, error: "" }),
      (error) => abort.signal.aborted || setState((old) => ({ path, data: old.path === path ? old.data : null, error: error.message })),
    );
    return () => abort.abort();
  }, [path, version]);
  const fresh = state.path === path;
  return { data: fresh ? state.data : null, error: fresh ? state.error : "", loading: !fresh };
}

/** What a page shows while it has no data, or its error. */
export function Waiting({ of }) {
  if (of.error) return html`<div class="notice bad" role="alert"><b>This could not be loaded.</b> <${Line} text=${of.error} /></div>`;
  return html`<div class="loading" role="status">Loading…</div>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/** A titled section. */
export function Panel({ title, note = "", side = "", children, id = undefined, cls = "" }) {
  return html`<section class=${`panel ${cls}`} aria-label=${title} id=${id}>
    <header><h2>${title}</h2>${note && html`<span class="note">${note}</span>`}<span class="grow"></span>${side}</header>
    ${children}
  </section>`;
}

/** One number with its label. */
export function Stat({ label, children, note = "", tone = "", title = undefined }) {
  return html`<div class="stat" title=${title}>
    <span class="label">${label}</span><span class=${`value ${tone}`}>${children}</span>${note && html`<span class="note">${note}</span>`}
  </div>`;
}

const TONES = {
  resolved: ["good", "✓"], ok: ["", ""], trained: ["good", "✓"], finished: ["good", "✓"], running: ["info", "●"], done: ["good", "✓"],
  unresolved: ["plain", "✗"], tampered: ["bad", "!"], refused: ["warn", "!"], test_timeout: ["warn", "◷"], infra: ["warn", "!"],
  truncated: ["warn", "…"], agent_failed: ["bad", "✗"], infra_failed: ["warn", "!"], stopped: ["warn", "■"],
  weak: ["warn", ""], strong: ["good", ""], standard: ["", ""],
};

/** An outcome, status or state: always a word, with a sign and a colour beside it. */
export function Badge({ value, text = "" }) {
  if (!value) return html`<span class="dim">${NONE}</span>`;
  const [tone, sign] = TONES[value] ?? ["", ""];
  return html`<span class=${`badge ${tone}`}>${sign && html`<span aria-hidden="true">${sign} </span>`}<${Line} text=${text || String(value).replaceAll("_", " ")} max=${60} /></span>`;
}

/** A reward as number, coloured and never by colour alone. */
export function Reward({ value }) {
  if (value === null || value === undefined) return html`<span class="dim" title="not graded">none</span>`;
  return html`<span class=${`reward ${value >= 1 ? "good-text" : value > 0 ? "warn-text" : "dim"}`}>${num(value)}</span>`;
}

/** A share as a horizontal bar behind its text. */
export function Meter({ share, children, tone = "" }) {
  return html`<span class=${`meter ${tone}`}><span class="fill" style=${{ width: `${100 * Math.min(1, Math.max(0, share || 0))}%` }}></span><span class="on">${children}</span></span>`;
}

/** Tabs as links; `tabs` are [id, label, href]. */
export function Tabs({ tabs, current, label }) {
  return html`<nav class="tabs" aria-label=${label}>
    ${tabs.map(([id, text, link]) => html`<a key=${id} href=${link} aria-current=${id === current ? "page" : undefined}>${text}</a>`)}
  </nav>`;
}

/** The first `first` items and a button for `step` more. `columns` > 0 in a table body. */
export function More({ items, first = 50, step = 200, columns = 0, noun = "row", children }) {
  const [count, setCount] = useState(first);
  const draw = Array.isArray(children) ? children[0] : children;
  const rest = items.length - count;
  const button = html`<button class="more" onClick=${() => setCount(count + step)}>Show ${rest <= step ? `${plural(rest, `more ${noun}`)}` : `${int(step)} of ${plural(rest, `more ${noun}`)}`}</button>`;
  return html`${items.slice(0, count).map(draw)}${rest > 0 ? (columns ? html`<tr><td colspan=${columns}>${button}</td></tr>` : button) : ""}`;
}

/**
 * A table with sortable columns. `columns` are {key, label, num?, cell?, value?, title?}; rows are all drawn, 100 first.
 * @param {{columns: any[], rows: any[], sort?: string, onOpen?: any, label: string, first?: number, keyOf?: any, rowClass?: any}} props
 */
export function Table({ columns, rows, sort = "", label, first = 100, keyOf = undefined, rowClass = undefined }) {
  const [order, setOrder] = useState(sort);
  const column = columns.find(({ key }) => key === order.replace(/^-/, ""));
  const sorted = column ? [...rows].sort(by(column, order.startsWith("-") ? -1 : 1)) : rows;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table class="data">
      <thead><tr>${columns.map((c) => html`<${HeadCell} column=${c} order=${order} onSort=${setOrder} />`)}</tr></thead>
      <tbody><${More} items=${sorted} first=${first} columns=${columns.length}>${(row, i) => html`<tr key=${keyOf ? keyOf(row) : i} class=${rowClass?.(row)}>
        ${columns.map((c) => html`<td class=${c.num ? "num" : c.cls ?? ""}>${c.cell ? c.cell(row) : html`<${Cell} value=${row[c.key]} />`}</td>`)}
      </tr>`}<//></tbody>
    </table>
  </div>`;
}

export function HeadCell({ column, order, onSort, fixed = false }) {
  const on = order.replace(/^-/, "") === column.key;
  const next = on && order.startsWith("-") ? column.key : on ? `-${column.key}` : column.num ? `-${column.key}` : column.key;
  const direction = on ? (order.startsWith("-") ? "descending" : "ascending") : undefined;
  return html`<th scope="col" class=${column.num ? "num" : ""} aria-sort=${direction} title=${column.title}>
    ${fixed || column.sort === false ? column.label : html`<button onClick=${() => onSort(next)}>${column.label}<span aria-hidden="true" class="arrow">${on ? (order.startsWith("-") ? "↓" : "↑") : ""}</span></button>`}
  </th>`;
}

function Cell({ value }) {
  if (value === null || value === undefined || value === "") return html`<span class="dim">${NONE}</span>`;
  return typeof value === "number" ? num(value) : html`<${Line} text=${value} max=${120} />`;
}

function by(column, direction) {
  const value = column.value ?? ((row) => row[column.key]);
  return (left, right) => {
    const [a, b] = [value(left), value(right)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (a < b ? -1 : 1) * direction;
  };
}

/** Which rows of a long list are in view; returns [ref of the scrolling element, first, last]. */
export function useWindow(count, rowHeight, margin = 20) {
  const box = useRef(/** @type {HTMLElement|null} */ (null));
  const [range, setRange] = useState([0, 60]);
  const measure = useCallback(() => {
    if (!box.current) return;
    const top = Math.floor(box.current.scrollTop / rowHeight) - margin;
    const bottom = Math.ceil((box.current.scrollTop + box.current.clientHeight) / rowHeight) + margin;
    setRange((old) => (old[0] === Math.max(0, top) && old[1] === bottom ? old : [Math.max(0, top), bottom]));
  }, [rowHeight]);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    measure();
    element.addEventListener("scroll", measure, { passive: true });
    addEventListener("resize", measure);
    return () => {
      element.removeEventListener("scroll", measure);
      removeEventListener("resize", measure);
    };
  }, [measure, count > 0]);
  return /** @type {const} */ ([box, Math.min(range[0], count), Math.min(range[1], count)]);
}

/** A value that is remembered in this browser. */
export function useStored(key, initial) {
  const [value, setValue] = useState(() => {
    try {
      return JSON.parse(localStorage.getItem(`insitu.${key}`) ?? "null") ?? initial;
    } catch {
      return initial;
    }
  });
  const store = (next) => {
    setValue(next);
    try {
      localStorage.setItem(`insitu.${key}`, JSON.stringify(next));
    } catch {
      // Storage is off: the value lasts as long as the page.
    }
  };
  return [value, store];
}

/** A list of label and value pairs. */
export function Facts({ items }) {
  return html`<dl class="facts">${items.filter(Boolean).map(([label, value]) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>`;
}
