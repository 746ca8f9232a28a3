// Runs side by side, the same held-out tasks on two sides, or two rollouts turn by turn.
import { html, useMemo } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, isHeldOut, num, pct, plural, secs, signed, words } from "../format.js";
import { compareHref, href, rolloutHref, setQuery } from "../router.js";
import { Badge, Empty, More, Panel, Table, useData, Waiting } from "../ui.js";
import { Line } from "../text.js";
import { Chart, movingMean, recentMean } from "../chart.js";
import { Pair } from "./pair.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

export function ComparePage({ route }) {
  const names = (route.parts[0] ?? "").split(",").filter(Boolean);
  if (route.query.id_a) return html`<${Pair} names=${names} query=${route.query} />`;
  return html`<${Runs} names=${names} query=${route.query} />`;
}

function Runs({ names, query }) {
  const loaded = useData(apiPath(["compare"], { runs: names.join(",") }));
  const title = html`<div class="title"><h1>${names.length > 1 ? "Compare runs" : "Compare"}</h1><span class="sub">${names.map((name, i) => html`${i ? " · " : ""}<a href=${href(name)}><${Line} text=${name} /></a>`)}</span></div>`;
  if (!loaded.data) return html`${title}<${Waiting} of=${loaded} />`;
  const { runs, differences } = loaded.data;
  return html`${title}
    <${Panel} title="Training solve rate" note="mean over 5 steps"><${Curves} runs=${runs} /><//>
    <${Panel} title="Side by side"><${Side} runs=${runs} /><//>
    <${HeldOut} runs=${runs} names=${names} query=${query} />
    ${names.length > 1 && html`<${Panel} title="Configuration" note=${plural(differences.length, "key differs", "keys differ")}>${differences.length ? html`<${Table} label="differences" rows=${differences} columns=${[
      { key: "key", label: "Key", cls: "id" }, ...runs.map((run, i) => ({ key: `v${i}`, label: run.info.name, sort: false, cls: "wrap", cell: (row) => html`<span class="mono small"><${Line} text=${JSON.stringify(row.values[i] ?? null)} max=${120} /></span>` }))]} />` : html`<${Empty}>The configurations are equal.<//>`}<//>`}`;
}

function Curves({ runs }) {
  const { xs, series } = useMemo(() => {
    const steps = [...new Set(runs.flatMap((run) => run.steps.step))].sort((a, b) => a - b);
    return { xs: steps, series: runs.map((run, i) => {
      const means = movingMean(run.steps.step.map((_, at) => (run.steps.total[at] ? run.steps.solved[at] / run.steps.total[at] : null)), 5);
      return { label: run.info.name, colour: COLOURS[i % 6], values: steps.map((step) => means[run.steps.step.indexOf(step)] ?? null), width: 2 };
    }) };
  }, [runs]);
  if (!xs.length) return html`<${Empty}>No step is committed.<//>`;
  return html`<${Chart} title="training solve rate" xs=${xs} series=${series} height=${240} range=${[0, 1]} format=${pct} legend />`;
}

function heldPoints(run) {
  return run.heldout.filter((p) => p.category === "" && isHeldOut(p.phase));
}

function Side({ runs }) {
  const last = (run, key) => run.steps.metrics[key]?.findLast((v) => v !== null);
  const total = (run, key) => (run.steps.ledger[key] ?? []).reduce((a, b) => a + b, 0);
  const held = (point) => (point ? html`${pct(point.rate)} <span class="dim">${pct(point.low)} – ${pct(point.high)}</span>` : "–");
  const rows = [
    ["State", (run) => html`<${Badge} value=${run.info.state} />`], ["Agent", (run) => html`<${Line} text=${run.info.agent} />`], ["Model", (run) => html`<${Line} text=${run.info.model} max=${40} />`],
    ["Steps", (run) => `${int(run.info.step)} of ${int(run.info.steps)}`], ["Rollouts", (run) => int(run.info.rollouts)],
    ["Held-out before", (run) => held(heldPoints(run)[0])], ["Held-out now", (run) => held(heldPoints(run).length > 1 ? heldPoints(run).at(-1) : null)],
    ["Tokens trained, without evaluations", (run) => html`${int(total(run, "trained"))} <span class="dim">of ${int(total(run, "captured"))}</span>`],
    ["Time per step, mean of the last 5", (run) => secs(recentMean(run.steps.metrics.step_s))], ["Largest logprob gap", (run) => num(Math.max(0, ...(run.steps.metrics.max_logprob_gap ?? []).filter((v) => v !== null)))], ["Entropy, last", (run) => num(last(run, "entropy"))],
  ];
  return html`<div class="scroll" tabindex="0" role="region" aria-label="runs side by side"><table class="data"><thead><tr><th scope="col">Figure</th>${runs.map((run) => html`<th scope="col"><${Line} text=${run.info.name} max=${40} /></th>`)}</tr></thead>
    <tbody>${rows.map(([label, cell]) => html`<tr><th scope="row">${label}</th>${runs.map((run) => html`<td>${cell(run)}</td>`)}</tr>`)}</tbody></table></div>`;
}

/** The same held-out tasks on two sides: before and after, or the ends of two runs. */
function HeldOut({ runs, names, query }) {
  const sides = runs.flatMap((run, i) => [...new Map(heldPoints(run).map((p) => [`${p.phase}:${p.step}`, p])).keys()].map((of) => ({ run: i, of, label: `${runs.length > 1 ? `${run.info.name}: ` : ""}${words(of.split(":")[0])} (step ${of.split(":")[1]})` })));
  const [first, last] = [runs[0], runs.at(-1)].map((run, i) => sides.filter((side) => runs[side.run] === run).at(runs.length > 1 || i ? -1 : 0));
  const a = query.of_a ?? first?.of;
  const b = query.of_b ?? last?.of;
  const [nameA, nameB] = [names[0], names.at(-1)];
  const loaded = useData(a && b && sides.length > 1 ? apiPath(["compare"], { runs: names.length > 1 ? `${nameA},${nameB}` : nameA, of_a: a, of_b: b }) : "");
  if (sides.length < 2) return "";
  const select = (key, value, run, label) => html`<label class="facet">${label} <select value=${value} onChange=${(event) => setQuery({ [key]: event.currentTarget.value })}>${sides.filter((side) => runs[side.run] === run).map((side) => html`<option value=${side.of}>${side.label}</option>`)}</select></label>`;
  return html`<${Panel} title="The same held-out tasks" note="how side B differs from side A">
    <div class="chips">${select("of_a", a, runs[0], "A")}${select("of_b", b, runs.at(-1), "B")}</div>
    ${loaded.data ? html`<${Square} data=${loaded.data} query=${query} names=${[nameA, nameB]} />` : html`<${Waiting} of=${loaded} />`}<//>`;
}

const CELLS = { both: "solved on both", only_a: "solved on only A", only_b: "solved on only B", neither: "solved on neither", better: "better on B", worse: "better on A", equal: "equally often solved" };

function Square({ data, query, names }) {
  const { change, table } = data;
  const once = "both" in table;
  const changed = once ? ["only_b", "only_a"] : ["better", "worse"];
  const cell = query.cell in table ? query.cell : changed[table[changed[0]] ? 0 : 1];
  const pairs = data.pairs.filter((pair) => pair.cell === cell);
  const n = data.pairs.length;
  if (!n) return html`<${Empty}>The two sides have no task in common.<//>`;
  const points = (share) => signed(100 * share, 2);
  return html`<div class="square">${Object.keys(table).map((id) => html`<button class=${`quad ${id}`} aria-pressed=${cell === id} onClick=${() => setQuery({ cell: id })}><b>${int(table[id])}</b><span>${CELLS[id]}</span><span class="dim small">${pct(table[id] / n)}</span></button>`)}</div>
    <p>Change ${points(change.value)} percentage points (95 % ${points(change.low)} to ${points(change.high)}) over ${plural(n, "task")}; ${once ? "McNemar's exact" : "sign-flip"} test: p = <b>${num(data.p)}</b>${data.p < 0.05 ? ", unlikely to be chance" : ", may be chance"}.</p>
    <ul class="list paired"><${More} items=${pairs} first=${12} step=${200} noun="task">${(pair) => html`<li class="rowlink"><b><${Line} text=${pair.task} max=${80} /></b>${pair.task_set ? html`, task set <${Line} text=${pair.task_set} max=${32} />` : ""}${once ? "" : html` <span class="dim">${pct(pair.rates[0])} → ${pct(pair.rates[1])}</span>`}<span class="grow"></span><a href=${rolloutHref(names[0], pair.a[0])}>A</a> <a href=${rolloutHref(names[1], pair.b[0])}>B</a> <a href=${compareHref([...new Set(names)], { id_a: pair.a[0], id_b: pair.b[0] })}>side by side</a></li>`}<//></ul>`;
}
