// All tasks with their solve rates over the run, and the page of one task.
import { html, useState } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { ago, int, num, pct, plural, secs, words } from "../format.js";
import { useRun, useRunVersion } from "../live.js";
import { compareHref, href, rolloutHref, setQuery } from "../router.js";
import { Badge, Empty, Panel, Reward, Stat, Table, useData, Waiting } from "../ui.js";
import { Block, Line } from "../text.js";
import { TaskGrid } from "./grid.js";
import { Cell, RewardLegend } from "./step.js";

const CHOICES = [["", "all"], ["changed", "most changed"], ["never", "never solved"], ["always", "always solved"]];
const VIEWS = [["", "table"], ["grid", "grid of steps"]];

export function TasksPage({ route }) {
  const { phase = "", show = "", q = "", view = "", order = "" } = route.query;
  const loaded = useData(apiPath([route.run, "tasks"], { phase }), useRunVersion(10));
  const [text, setText] = useState(q);
  const mix = useRun().run?.task_sets.length > 0;
  if (!loaded.data) return html`<h1>Tasks</h1><${Waiting} of=${loaded} />`;
  const { tasks, phases, parts, places } = loaded.data;
  const chosen = tasks.filter((task) => (!q || task.task.toLowerCase().includes(q.toLowerCase())) && (show === "never" ? task.solved === 0 : show === "always" ? task.solved === task.n - task.failed && task.solved > 0 : show === "changed" ? Boolean(change(task)) : true));
  if (show === "changed") chosen.sort((a, b) => Math.abs(change(b)) - Math.abs(change(a)));
  const names = [...new Set(phases.map((p) => p.phase))];
  const held = names.findLast((name) => name.startsWith("eval"));
  const columns = [
    { key: "task", label: "Task", cls: "wrap", cell: (row) => html`<a href=${href(route.run, "task", [row.task])}><${Line} text=${row.task} max=${90} /></a>` },
    ...(mix ? [{ key: "task_set", label: "Task set" }] : []),
    { key: "category", label: "Category", cell: (row) => html`<${Line} text=${row.category || "–"} max=${40} />` },
    { key: "n", label: "Rollouts", num: true }, { key: "solved", label: "Solved", num: true },
    { key: "rate", label: "Rate", num: true, cell: (row) => (row.rate === null ? "–" : html`<b>${pct(row.rate)}</b> <span class="dim">${pct(row.low)} – ${pct(row.high)}</span>`) },
    { key: "thirds", label: "Over the run", title: parts.map(words).join(", then "), value: change, cell: (row) => html`<${Parts} solved=${row.parts} names=${parts} />` },
    { key: "last_solved", label: "Last solved", num: true, cell: (row) => (row.last_solved === null ? html`<span class="dim">never</span>` : `step ${row.last_solved}`) },
    { key: "failed", label: "Not graded", num: true, cell: (row) => (row.failed ? int(row.failed) : html`<span class="dim">0</span>`) },
  ];
  const never = tasks.filter((task) => task.solved === 0).length;
  const always = tasks.filter((task) => task.solved > 0 && task.solved === task.n - task.failed).length;
  return html`<div class="title"><h1>Tasks</h1><span class="dim">${plural(tasks.length, "task")}: ${int(never)} never solved, ${int(always)} always solved (both without a gradient)</span></div>
    <div class="filters"><form class="facet" role="search" onSubmit=${(event) => (event.preventDefault(), setQuery({ q: text }))}><input id="search" type="search" placeholder="name of a task" aria-label="Search tasks" value=${text} onInput=${(event) => setText(event.currentTarget.value)} /><button>Search</button></form>
      ${names.length > 1 && html`<div class="facet"><span class="label">phase</span>${names.map((name) => html`<button class="chip" aria-pressed=${name === loaded.data.phase} onClick=${() => setQuery({ phase: name })}>${words(name)}</button>`)}</div>`}
      <div class="facet"><span class="label">as</span>${VIEWS.map(([id, label]) => html`<button class="chip" aria-pressed=${view === id} onClick=${() => setQuery({ view: id })}>${label}</button>`)}</div>
      <div class="facet"><span class="label">show</span>${CHOICES.map(([id, label]) => html`<button class="chip" aria-pressed=${show === id} onClick=${() => setQuery({ show: id })}>${label}</button>`)}</div></div>
    <section class="panel">${show === "changed" && !chosen.length ? html`<${Empty}>No task of this phase was solved at another rate in another part of the run.${held && held !== loaded.data.phase ? html` <button onClick=${() => setQuery({ phase: held })}>Held-out tasks</button>` : ""}<//>` : view === "grid" ? html`<${TaskGrid} key=${loaded.data.phase} tasks=${chosen} places=${places} run=${route.run} order=${order} mix=${mix} />` : html`<${Table} key=${`${show}${phase}`} label="tasks" columns=${columns} rows=${chosen} keyOf=${(row) => `${row.task_set}/${row.task}`} />`}</section>`;
}

/** The solve rate of the last part of the run that has rollouts minus that of the first; null with fewer than two. */
function change({ parts }) {
  const seen = parts.filter(([, n]) => n > 0).map(([solved, n]) => solved / n);
  return seen.length > 1 ? seen.at(-1) - seen[0] : null;
}

/** Solve rate by parts of the run as small bars. */
function Parts({ solved: counts, names }) {
  const text = counts.map(([solved, n], i) => `${words(names[i])}: ${n ? `${solved} of ${n}` : "none"}`).join(", ");
  return html`<span class="parts" role="img" aria-label=${text} title=${text}>${counts.map(([solved, n]) => html`<span class=${n ? "" : "none"}><span style=${{ height: `${n ? Math.max(6, (100 * solved) / n) : 0}%` }}></span></span>`)}</span>`;
}

export function TaskPage({ route }) {
  const task = route.parts.join("/");
  const loaded = useData(apiPath([route.run, "task"], { task }), useRunVersion(10));
  const mix = useRun().run?.task_sets.length > 0;
  if (!loaded.data) return html`<h1><${Line} text=${task} /></h1><${Waiting} of=${loaded} />`;
  const { rollouts, prompt, category } = loaded.data;
  const graded = rollouts.filter((row) => row.reward !== null);
  const solved = graded.filter((row) => row.reward >= 1);
  const places = new Map();
  for (const row of rollouts) {
    const place = row.phase === "train" ? `step ${row.step}` : words(row.phase);
    places.set(place, [...(places.get(place) ?? []), row]);
  }
  const held = rollouts.filter((row) => row.phase.startsWith("eval"));
  const train = rollouts.filter((row) => row.phase === "train");
  const ends = (rows) => [rows[0], rows.findLast((row) => row.task_set === rows[0].task_set)];
  const pair = held.length > 1 ? ends(held) : train.length > 1 ? ends(train) : null;
  return html`<div class="title"><h1><${Line} text=${task} /></h1><span class="sub">${category ? html`<${Line} text=${category} /> · ` : ""}<a href=${href(route.run, "rollouts", [], { task })}>all its rollouts as a table</a>${pair && html` · <a href=${compareHref([route.run], { id_a: pair[0].id, id_b: pair[1].id })}>compare the first with the last rollout</a>`}</span></div>
    <section class="panel strip" aria-label="figures"><div class="stats">
      <${Stat} label="Solved">${int(solved.length)} <span class="dim">of ${int(graded.length)}</span><//>
      <${Stat} label="First solved">${solved.length ? (solved[0].phase === "train" ? `step ${solved[0].step}` : words(solved[0].phase)) : "never"}<//>
      <${Stat} label="Calls, mean">${num(mean(rollouts.map((row) => row.calls)))}<//>
      <${Stat} label="Time, mean">${secs(mean(rollouts.map((row) => row.total_s)))}<//></div></section>
    <${Panel} title="Prompt"><${Block} text=${prompt || "(the prompt cannot be decoded here)"} lines=${20} label="prompt" /><//>
    <${Panel} title="Its rollouts over the run"><${RewardLegend} /><ul class="heat">${[...places].map(([place, rows]) => html`<li><span class="place">${place}</span><span class="cells">${rows.map((row) => html`<${Cell} row=${row} run=${route.run} />`)}</span></li>`)}</ul><//>
    <${Panel} title="Verdicts"><${Table} label="rollouts of the task" rows=${rollouts} first=${50} columns=${[
      { key: "id", label: "Rollout", cls: "id", cell: (row) => html`<a href=${rolloutHref(route.run, row.id)}><${Line} text=${row.id} /></a>` },
      ...(mix ? [{ key: "task_set", label: "Task set" }] : []),
      { key: "outcome", label: "Outcome", cell: (row) => html`<${Badge} value=${row.outcome || row.status} />` }, { key: "reward", label: "Reward", num: true, cell: (row) => html`<${Reward} value=${row.reward} />` },
      { key: "reason", label: "Why", cls: "wrap", cell: (row) => html`<${Line} text=${row.reason || row.error || "–"} max=${160} />` },
      { key: "calls", label: "Calls", num: true }, { key: "sampled", label: "Tokens", num: true }, { key: "total_s", label: "Time", num: true, cell: (row) => secs(row.total_s) }, { key: "ended_s", label: "Ended", num: true, cell: (row) => ago(row.ended_s) },
    ]} /><//>`;
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}
