// All runs: one row each; two or more can be compared.
import { html, useEffect, useState } from "../vendor/preact-htm.module.js";
import { isEmbedded } from "../api.js";
import { ago, NONE, pct, plural, size } from "../format.js";
import { useKeys } from "../keys.js";
import { compareHref, go, href } from "../router.js";
import { Badge, Meter, Table, useData, Waiting } from "../ui.js";
import { Line } from "../text.js";
import { Sparkline } from "../chart.js";

export function RunsPage() {
  const loaded = useData("runs");
  const [marked, setMarked] = useState(/** @type {string[]} */ ([]));
  const [at, setAt] = useState(-1);
  const runs = loaded.data?.runs ?? [];
  const only = isEmbedded() && runs.length === 1 ? runs[0].name : "";
  useEffect(() => void (only && location.replace(href(only))), [only]);
  const toggle = (name) => setMarked(marked.includes(name) ? marked.filter((other) => other !== name) : [...marked, name]);
  const move = (by) => {
    const next = Math.max(0, Math.min(runs.length - 1, at + by));
    setAt(next);
    document.querySelectorAll(".runs tbody tr")[next]?.scrollIntoView({ block: "nearest" });
  };
  const current = runs[at];
  useKeys({
    j: ["next run", () => move(1)],
    k: ["previous run", () => move(-1)],
    Enter: ["open the run", () => current && go(href(current.name))],
    x: ["mark the run for comparison", () => current && toggle(current.name)],
    c: ["compare the marked runs", () => marked.length > 1 && go(compareHref(marked))],
  });
  if (!loaded.data) return html`<h1>Runs</h1><${Waiting} of=${loaded} />`;
  if (!runs.length) return html`<h1>Runs</h1><div class="notice">There is no run here yet. A run directory appears as soon as <code>insitu train</code> or <code>insitu demo</code> starts.</div>`;
  const columns = [
    { key: "mark", label: "", sort: false, cell: (run) => html`<input type="checkbox" checked=${marked.includes(run.name)} onChange=${() => toggle(run.name)} aria-label=${`compare ${run.name}`} />` },
    { key: "name", label: "Run", cls: "wrap", cell: (run) => html`<a href=${href(run.name)} class=${run === current ? "current" : ""}><b><${Line} text=${run.name} max=${60} /></b></a><div class="dim small"><${Line} text=${[run.tasks, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(", ")} /></div>` },
    { key: "state", label: "State", cell: (run) => html`<${Badge} value=${run.state} />` },
    { key: "agent", label: "Agent and model", cell: (run) => html`<${Line} text=${run.agent} max=${40} /><div class="dim small"><${Line} text=${run.model} max=${48} /></div>` },
    { key: "step", label: "Step", num: true, cell: (run) => (run.kind !== "train" ? html`<span class="dim">${run.kind}</span>` : html`<${Meter} share=${run.step / (run.steps || 1)}>${run.step} of ${run.steps ?? NONE}<//>`) },
    { key: "spark", label: "Training solve rate", sort: false, cell: (run) => html`<${Sparkline} title="training solve rate" values=${run.spark} />` },
    { key: "heldout_now", label: "Held-out", num: true, title: "solve rate on held-out tasks, before and now", cell: (run) => html`<${BeforeNow} run=${run} />` },
    { key: "rollouts", label: "Rollouts", num: true },
    { key: "store_bytes", label: "Size", num: true, cell: (run) => size(run.store_bytes) },
    { key: "last_write_s", label: "Last write", num: true, cell: (run) => ago(run.last_write_s) },
  ];
  const problems = runs.filter((run) => run.problem);
  const open = isEmbedded() ? 0 : runs.filter((run) => !run.private).length;
  return html`
    <div class="title"><h1>Runs</h1><span class="dim">${plural(runs.length, "run")}</span><span class="grow"></span>
      <button disabled=${marked.length < 2} onClick=${() => go(compareHref(marked))}>Compare ${marked.length > 1 ? plural(marked.length, "run") : "marked runs"}</button></div>
    <section class="panel runs"><${Table} label="runs" columns=${columns} rows=${runs} keyOf=${(run) => run.name} rowClass=${(run) => (run === current ? "here" : "")} /></section>
    ${problems.length > 0 && html`<section class="panel" aria-label="problems"><h2>Not everything could be read</h2><ul class="list">${problems.map((run) => html`<li><b><${Line} text=${run.name} /></b> <span class="dim"><${Line} text=${run.problem} /></span></li>`)}</ul></section>`}
    ${open > 0 && html`<p class="note">Other users of this machine can read ${open === runs.length ? (open === 1 ? "this run directory" : "these run directories") : `${open} of these run directories`}: prompts, code and hidden tests are in there.</p>`}`;
}

function BeforeNow({ run }) {
  if (run.heldout_before === null) return html`<span class="dim">${NONE}</span>`;
  if (run.heldout_now === null) return html`${pct(run.heldout_before)} <span class="dim">before</span>`;
  const up = run.heldout_now > run.heldout_before;
  return html`<span class="dim">${pct(run.heldout_before)} →</span> <b class=${up ? "good-text" : ""}>${pct(run.heldout_now)}</b>`;
}
