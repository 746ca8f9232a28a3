// Tasks by steps: one cell for each time that a task was drawn, coloured by its solve rate; a click opens the group.
import { html, useMemo } from "../vendor/preact-htm.module.js";
import { num, pct, words } from "../format.js";
import { moveAmong } from "../keys.js";
import { href, setQuery } from "../router.js";
import { Empty, useWindow } from "../ui.js";
import { Line } from "../text.js";

const ROW = 20;
const ORDERS = [["", "name"], ["mean", "solve rate"], ["change", "last change"]];
/** Pixels of a cell, by the number of places; a name of an evaluation takes more than a step's number. */
const WIDTHS = [[30, 26], [60, 16], [120, 9], [Infinity, 6]];
const NAMED = 92;

export function TaskGrid({ tasks, places, run, order, mix }) {
  const rows = useMemo(() => sorted(tasks, order), [tasks, order]);
  const [box, first, last] = useWindow(rows.length, ROW);
  const named = places[0]?.phase !== "train";
  const wide = named && places.length <= 8 ? NAMED : WIDTHS.find(([most]) => places.length <= most)?.[1] ?? 6;
  const every = Math.ceil((named ? NAMED : 34) / wide);
  const name = (place) => (place.phase === "train" ? num(place.step) : place.phase === "eval_during" ? `step ${num(place.step)}` : words(place.phase));
  return html`<div class="facet"><span class="label">sort by</span>${ORDERS.map(([id, label]) => html`<button class="chip" aria-pressed=${order === id} onClick=${() => setQuery({ order: id })}>${label}</button>`)}
      <ul class="legend">${[0, 0.5, 1].map((share) => html`<li><span class="swatch box share" style=${{ "--share": pct(share).replace(" ", "") }}></span>${pct(share)} solved</li>`)}<li><span class="swatch box heat-n hatched"></span>not graded</li><li>empty: not drawn</li></ul></div>
    ${!rows.length ? html`<${Empty}>No task of this phase passes these filters.<//>` : html`<div class="window grid" ref=${box} style=${{ "--cell": `${wide}px` }} role="group" aria-label="tasks by steps; arrow keys move, Enter opens the group" onKeyDown=${(event) => moveAmong(event, ".grid-row")}>
      <div class="grid-head" aria-hidden="true" style=${{ "--places": places.length }}><span class="grid-name"></span>${places.map((place, i) => i % every === 0 && html`<span class="grid-step" style=${{ "--at": i }}>${name(place)}</span>`)}</div>
      <ul style=${{ height: `${rows.length * ROW}px`, "--places": places.length }}>${rows.slice(first, last).map((task, i) => html`<${Row} key=${`${task.task_set}/${task.task}`} task=${task} top=${(first + i) * ROW} stop=${i ? -1 : 0} places=${places} run=${run} mix=${mix} name=${name} />`)}</ul>
    </div>`}`;
}

function Row({ task, top, stop, places, run, mix, name }) {
  return html`<li class="grid-row" style=${{ top: `${top}px` }}>
    <a class="grid-name" href=${href(run, "task", [task.task])} tabindex=${stop}><${Line} text=${task.task} max=${90} />${mix ? html` <span class="dim"><${Line} text=${task.task_set} max=${20} /></span>` : ""}</a>
    ${task.cells.map(([place, group, n, graded, solved]) => {
      const at = places[place];
      const said = `${at.phase === "train" ? "step " : ""}${name(at)}: ${graded ? `${solved} of ${graded} solved` : "not graded"}${graded && n > graded ? `, ${n - graded} not graded` : ""}`;
      return html`<a class=${graded ? "grid-cell share" : "grid-cell heat-n hatched"} style=${{ "--at": place, "--share": `${Math.round((100 * solved) / (graded || 1))}%` }} href=${href(run, "group", [at.phase, at.step, group])} title=${said} aria-label=${said} tabindex="-1"></a>`;
    })}
  </li>`;
}

const NAMES = new Intl.Collator("en", { numeric: true });

function sorted(tasks, order) {
  const byName = (a, b) => NAMES.compare(a.task, b.task) || NAMES.compare(a.task_set, b.task_set);
  if (order === "mean") return [...tasks].sort((a, b) => (b.rate ?? -1) - (a.rate ?? -1) || byName(a, b));
  if (order !== "change") return [...tasks].sort(byName);
  const changes = new Map(tasks.map((task) => [task, lastChange(task)]));
  const at = (task) => changes.get(task) ?? -1;
  return [...tasks].sort((a, b) => at(b) - at(a) || byName(a, b));
}

/** The newest place at which the solve rate was another than the time before; null where there is none. */
function lastChange({ cells }) {
  const graded = cells.filter(([, , , n]) => n > 0);
  for (let i = graded.length - 1; i > 0; i--) if (graded[i][4] / graded[i][3] !== graded[i - 1][4] / graded[i - 1][3]) return graded[i][0];
  return null;
}
