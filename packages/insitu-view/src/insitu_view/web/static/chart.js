// Charts: uPlot for curves, SVG for the small ones. Each has a sentence and a table for those who cannot see it.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-htm.module.js";
import { isNumber, num, when } from "./format.js";
import { moveAmong } from "./keys.js";

/* global uPlot */

const TABLE_ROWS = 1000;

/** The numbers of a chart as a table, built when it is opened: {label, texts} per column. */
export function AsTable({ title, columns }) {
  const [open, setOpen] = useState(false);
  const rows = columns[0].texts.length;
  const first = Math.max(0, rows - TABLE_ROWS);
  return html`<details class="as-table" onToggle=${(event) => setOpen(event.currentTarget.open)}><summary aria-label=${`${title} as a table`}>as a table</summary>
    ${open && html`<div class="scroll" tabindex="0" role="region" aria-label=${`${title}: table`}><table><thead><tr>${columns.map(({ label }) => html`<th scope="col">${label}</th>`)}</tr></thead>
      <tbody>${columns[0].texts.slice(first).map((text, i) => html`<tr><th scope="row">${text}</th>${columns.slice(1).map(({ texts }) => html`<td>${texts[first + i]}</td>`)}</tr>`)}</tbody></table>
      ${first > 0 && html`<p class="note">the last ${TABLE_ROWS} of ${rows} rows</p>`}</div>`}</details>`;
}

function textsOf(values, format, low, high) {
  return values.map((y, i) => (!isNumber(y) ? "" : low && isNumber(low[i]) ? `${format(y)} (${format(low[i])} – ${format(high[i])})` : format(y)));
}

/** The colour of a CSS variable as the canvas needs it. */
export function cssColour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/** Call `change` when the colour scheme changes. */
export function onScheme(change) {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(change);
  observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  media.addEventListener("change", change);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", change);
  };
}

/** "training solve rate: 36 points, from 0.17 to 0.94". */
export function summary(title, xs, ys) {
  const shown = ys.map((y, i) => [xs[i], y]).filter(([, y]) => isNumber(y));
  if (!shown.length) return `${title}: no values`;
  if (shown.length === 1) return `${title}: ${num(shown[0][1])}`;
  return `${title}: ${shown.length} points, from ${num(shown[0][1])} to ${num(shown.at(-1)?.[1])}`;
}

/**
 * Curves over one axis. `series` are {label, values, colour, kind?: "line"|"dots"|"both", width?, dash?, low?, high?}.
 * @param {{title: string, xs: number[], series: any[], height?: number, range?: any, log?: boolean, sync?: string, onPick?: any,
 *   format?: (y: number) => string, axis?: string}} props
 */
export function Chart({ title, xs, series, height = 160, range = undefined, log = false, sync = "", onPick = undefined, format = num, axis = "step", legend = false }) {
  const box = useRef(/** @type {HTMLElement|null} */ (null));
  const readout = useRef(/** @type {HTMLElement|null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const shape = series.map((s) => `${s.label}|${s.kind}|${s.colour}`).join();
  const data = useMemo(() => [xs, ...series.map((s) => s.values)], [xs, series]);
  const pick = useRef(onPick);
  pick.current = onPick;

  useLayoutEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      if (!box.current) return;
      const options = plotOptions({ series, range, log, sync, format, axis, height, width: box.current.clientWidth });
      options.hooks.setCursor = [(u) => showCursor(u, readout.current, series, format, axis)];
      plot.current = new uPlot(options, data, box.current);
      plot.current.over.addEventListener("click", () => {
        const at = plot.current.cursor.idx;
        if (isNumber(at) && pick.current && plot.current.select.width < 3) pick.current(plot.current.data[0][at]);
      });
    };
    draw();
    const watch = new ResizeObserver(() => {
      if (box.current && plot.current && box.current.clientWidth !== plot.current.width) plot.current.setSize({ width: box.current.clientWidth, height });
    });
    if (box.current) watch.observe(box.current);
    const stop = onScheme(draw);
    return () => {
      stop();
      watch.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, height, log, axis]);
  useEffect(() => plot.current?.setData(data), [data]);

  const main = series.find((s) => !s.hidden) ?? { values: [] };
  return html`<figure class="chart">
    ${legend ? html`<${Legend} series=${series} />` : ""}
    <div ref=${box} class=${`plot ${onPick ? "pickable" : ""}`} role="img" aria-label=${summary(title, xs, main.values)}></div>
    <div ref=${readout} class="readout" aria-hidden="true"></div>
    <${AsTable} title=${title} columns=${[{ label: axis, texts: xs.map((x) => (axis === "time" ? when(x) : num(x))) }, ...series.filter((s) => !s.quiet).map((s) => ({ label: s.label, texts: textsOf(s.values, format, s.low, s.high) }))]} />
  </figure>`;
}

export function Legend({ series }) {
  return html`<ul class="legend">${series.filter((s) => s.label && !s.quiet).map((s) => html`<li><span class=${`swatch ${s.kind === "dots" ? "dot" : ""}`} style=${{ background: `var(${s.colour})` }}></span>${s.label}</li>`)}</ul>`;
}

function showCursor(u, element, series, format, axis) {
  if (!element) return;
  const at = u.cursor.idx;
  if (!isNumber(at)) return void (element.textContent = "");
  const values = series.map((s, i) => [s, u.data[i + 1][at]]).filter(([s, y]) => isNumber(y) && !s.quiet);
  element.textContent = values.length ? `${axis === "time" ? when(u.data[0][at]) : `${axis} ${num(u.data[0][at])}`} · ${values.map(([s, y]) => (series.length > 1 ? `${s.label} ${format(y)}` : format(y))).join(" · ")}` : "";
}

/** A time as a tick: the date at midnight, else the time of day. */
function clock(time, incr) {
  const [date, clocked] = when(time).split(" ");
  return clocked === "00:00:00" ? date.slice(5) : clocked.slice(0, incr < 60 ? 8 : 5);
}

function plotOptions({ series, range, log, sync, format, axis, height, width }) {
  const [grid, text] = [cssColour("--grid"), cssColour("--dim")];
  const font = "11px system-ui, sans-serif";
  return {
    width, height, padding: [8, axis === "time" ? 26 : 10, 0, 0], hooks: {},
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false }, ...(sync ? { sync: { key: sync } } : {}) },
    scales: { x: { time: axis === "time" }, y: { distr: log ? 3 : 1, ...(range ? { range } : {}) } },
    axes: [
      { stroke: text, font, grid: { show: false }, ticks: { show: false }, size: 24, gap: 4, ...(axis === "time" ? { space: 64, values: (_u, ticks, _axis, _space, incr) => ticks.map((t) => clock(t, incr)) } : { space: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] }) },
      { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, size: (_u, labels) => Math.max(54, 12 + 6 * Math.max(0, ...(labels ?? []).map((label) => label.length))), gap: 4, space: 28, values: (_u, ticks) => ticks.map((y) => (isNumber(y) ? format(y) : "")) },
    ],
    series: [{}, ...series.map((s) => plotSeries(s))],
  };
}

function plotSeries({ label, colour, kind = "line", width = 1.75, dash, low, high }) {
  const stroke = cssColour(colour);
  const dots = kind !== "line";
  const bars = (u, i) => {
    if (!low) return;
    const { ctx } = u;
    ctx.save();
    ctx.setLineDash([]);
    ctx.strokeStyle = stroke;
    ctx.lineWidth = 1.25 * devicePixelRatio;
    ctx.beginPath();
    u.data[0].forEach((x, at) => {
      if (!isNumber(low[at]) || !isNumber(u.data[i][at])) return;
      const px = u.valToPos(x, "x", true);
      const cap = 3 * devicePixelRatio;
      const [top, bottom] = [u.valToPos(high[at], "y", true), u.valToPos(low[at], "y", true)];
      ctx.moveTo(px, top); ctx.lineTo(px, bottom);
      ctx.moveTo(px - cap, top); ctx.lineTo(px + cap, top);
      ctx.moveTo(px - cap, bottom); ctx.lineTo(px + cap, bottom);
    });
    ctx.stroke();
    ctx.restore();
  };
  return {
    label, stroke, width: kind === "dots" ? 0 : width, dash, spanGaps: true,
    points: { show: (u, i) => (bars(u, i), dots || u.data[i].filter(isNumber).length < 2), size: kind === "dots" ? 5 : 7, fill: stroke, stroke, width: 0 },
    ...(kind === "dots" ? { paths: () => null } : {}),
  };
}

/** A curve as small as a word. */
export function Sparkline({ values, title = "", width = 96, height = 22 }) {
  const shown = values.filter(isNumber);
  if (shown.length < 2) return html`<span class="dim">–</span>`;
  const [low, high] = [Math.min(...shown, 0), Math.max(...shown, low01(shown))];
  const point = (y, i) => `${(2 + (i * (width - 4)) / (shown.length - 1)).toFixed(1)} ${(height - 3 - ((y - low) * (height - 6)) / (high - low || 1)).toFixed(1)}`;
  return html`<svg class="spark" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${summary(title, [], shown)}>
    <path d=${`M${shown.map(point).join("L")}`} /><circle cx=${point(shown.at(-1), shown.length - 1).split(" ")[0]} cy=${point(shown.at(-1), shown.length - 1).split(" ")[1]} r="2.2" />
  </svg>`;
}

function low01(values) {
  return Math.max(...values) <= 1 ? 1 : -Infinity;
}

/**
 * Stacked bars, one per step. `parts` are {label, colour, values}; `onPick(step, part)` when a part is clicked.
 * @param {{title: string, xs: number[], parts: any[], height?: number, share?: boolean, link?: any, format?: any}} props
 */
export function Stack({ title, xs, parts, height = 110, share = false, link = undefined, format = num, axis = "step" }) {
  const width = 600;
  ({ xs, parts } = binned(xs, parts));
  const totals = xs.map((_, i) => parts.reduce((sum, part) => sum + (part.values[i] ?? 0), 0));
  const top = share ? 1 : Math.max(...totals, 1e-12);
  const slot = width / Math.max(xs.length, 1);
  const columns = xs.map((x, i) => {
    let y = height;
    return parts.map((part) => {
      const value = part.values[i] ?? 0;
      const tall = (height * (share ? value / (totals[i] || 1) : value)) / top;
      if (!(tall > 0)) return "";
      y -= tall;
      const bar = html`<rect x=${(i * slot + slot * 0.1).toFixed(2)} y=${y.toFixed(2)} width=${(slot * 0.8).toFixed(2)} height=${tall.toFixed(2)} fill=${`var(${part.colour})`}><title>${`${axis} ${x}: ${part.label} ${format(value)} of ${format(totals[i])}`}</title></rect>`;
      return link ? html`<a href=${link(x, part)} tabindex="-1" aria-label=${`${axis} ${x}: ${part.label} ${format(value)}`}>${bar}</a>` : bar;
    });
  });
  const last = totals.length - 1;
  return html`<figure class="chart stackchart">
    <${Legend} series=${parts.filter((part) => part.values.some((v) => v > 0))} />
    <svg viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" height=${height} role=${link ? "group" : "img"} aria-label=${`${title}: ${xs.length} bars, last ${last >= 0 ? format(totals[last]) : "none"}`}>${columns}</svg>
    <div class="ends" aria-hidden="true"><span>${xs.length ? `${axis} ${num(xs[0])}` : ""}</span><span>${share ? "" : `highest ${format(Math.max(...totals))}`}</span><span>${xs.length > 1 ? num(xs.at(-1)) : ""}</span></div>
    <${AsTable} title=${title} columns=${[{ label: axis, texts: xs.map(num) }, ...parts.map((part) => ({ label: part.label, texts: textsOf(part.values, format) }))]} />
  </figure>`;
}

/** The colours of what became of sampled tokens other than being trained, in order. */
export const FATES = ["--c2", "--c4", "--c5", "--c6", "--c3"];

/**
 * Horizontal bars over one axis from 0 to `to`. `rows` are {key, name?, note?, link?, title?, first? (of a group), parts: [{from, to, colour, kind?, title?, link?, mark?}]}:
 * a row with `link` is one link, else its parts are; arrow keys move among them. `kind` is a class: context, sampled, hatched.
 * @param {{title: string, rows: any[], to: number, ends?: string[], thin?: boolean}} props
 */
export function Bars({ title, rows, to, ends = [], thin = false }) {
  const style = (part) => ({ left: `${((100 * part.from) / (to || 1)).toFixed(3)}%`, width: `${((100 * (part.to - part.from)) / (to || 1)).toFixed(3)}%`, "--part": `var(${part.colour})` });
  const cls = (part) => `strip-part ${part.kind ?? ""}`.trim();
  return html`<ul class=${`strips ${thin ? "thin" : ""}`} aria-label=${title} onKeyDown=${(event) => moveAmong(event, ".strip-row")}>
    ${rows.map((row, i) => {
      const parts = row.parts.filter((part) => part.to > part.from).map((part, n) => (part.link
        ? html`<a class=${cls(part)} style=${style(part)} href=${part.link} title=${part.title} aria-label=${part.title} data-mark=${part.mark} tabindex=${i || n ? -1 : 0}></a>`
        : html`<span class=${cls(part)} style=${style(part)} title=${part.title}></span>`));
      const strip = row.link ? html`<a class="track" href=${row.link} title=${row.title} aria-label=${row.title} tabindex=${i ? -1 : 0}>${parts}</a>` : html`<span class="track">${parts}</span>`;
      return html`<li class=${`strip-row ${row.first ? "first" : ""}`} key=${row.key}>${row.name !== undefined && html`<span class="strip-name">${row.name}</span>`}${strip}${row.note !== undefined && html`<span class="strip-note">${row.note}</span>`}</li>`;
    })}${ends.length > 0 && html`<li class="ends" aria-hidden="true" key="ends">${ends.map((text) => html`<span>${text}</span>`)}</li>`}</ul>`;
}

/** Many steps as at most 120 bars: the means of neighbours, under the first one's number. */
function binned(xs, parts) {
  const size = Math.ceil(xs.length / 120);
  if (size <= 1) return { xs, parts };
  const mean = (values, i) => values.slice(i, i + size).reduce((sum, value) => sum + (value ?? 0), 0) / Math.min(size, values.length - i);
  const starts = xs.map((_, i) => i).filter((i) => i % size === 0);
  return { xs: starts.map((i) => xs[i]), parts: parts.map((part) => ({ ...part, values: starts.map((i) => mean(part.values, i)) })) };
}

/** Counts over equal bins. */
export function Histogram({ title, values, bins = 24, format = num, height = 72, colour = "--c1" }) {
  const shown = values.filter(isNumber);
  if (!shown.length) return html`<p class="empty">no values</p>`;
  const [low, high] = [Math.min(...shown), Math.max(...shown)];
  const counts = new Array(high > low ? bins : 1).fill(0);
  for (const value of shown) counts[Math.min(counts.length - 1, Math.floor(((value - low) / (high - low || 1)) * counts.length))]++;
  const top = Math.max(...counts);
  const slot = 240 / bins;
  return html`<figure class="chart">
    <svg class="histogram" viewBox=${`0 0 240 ${height}`} preserveAspectRatio="none" height=${height} role="img" aria-label=${`${title}: ${shown.length} values from ${format(low)} to ${format(high)}`}>
      ${counts.map((n, i) => n > 0 && html`<rect x=${(i * slot + 0.5).toFixed(2)} width=${(slot - 1).toFixed(2)} y=${(height - (height * n) / top).toFixed(2)} height=${((height * n) / top).toFixed(2)} fill=${`var(${colour})`}><title>${`${n} from ${format(low + (i * (high - low)) / counts.length)}`}</title></rect>`)}
    </svg>
    <div class="ends" aria-hidden="true"><span>${format(low)}</span><span>${high > low ? format(high) : ""}</span></div>
    <${AsTable} title=${title} columns=${[{ label: "from", texts: counts.map((_, i) => format(low + (i * (high - low)) / counts.length)) }, { label: "values", texts: counts.map(String) }]} />
  </figure>`;
}

/** The mean of the last 5 values; null without one. @param {(number|null)[]|undefined} values */
export function recentMean(values) {
  const shown = (values ?? []).filter(isNumber).slice(-5);
  return shown.length ? shown.reduce((a, b) => a + b, 0) / shown.length : null;
}

/** The centred moving mean over `size` values, without those that are missing. */
export function movingMean(values, size) {
  const half = Math.floor(size / 2);
  return values.map((_, i) => {
    const shown = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
    return shown.length ? shown.reduce((a, b) => a + b, 0) / shown.length : null;
  });
}
