// Infrastructure, not learning: how attempts end, what is waited for, what fails.
import { html } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, pct, plural, secs, size, words } from "../format.js";
import { useRunVersion } from "../live.js";
import { href, rolloutHref } from "../router.js";
import { Badge, Empty, Panel, Stat, Table, useData, Waiting } from "../ui.js";
import { Block, Line } from "../text.js";
import { Chart } from "../chart.js";
import { Times } from "./rollout.js";
import { Gauges } from "./gauges.js";
import { Lanes } from "./lanes.js";

const TONES = { alarm: "bad", warning: "warn", hint: "info" };
const WAITS = [["queued_s", "queued"], ["engine_s", "engine"], ["grade_s", "grading"], ["total_s", "in all"]];

export function HealthPage({ route }) {
  const loaded = useData(apiPath([route.run, "health"]), useRunVersion(5));
  if (!loaded.data) return html`<h1>Health</h1><${Waiting} of=${loaded} />`;
  const { attempts, advice, failures, slowest, timeline, waits, lanes, status_outcome: matrix } = loaded.data;
  return html`<div class="title"><h1>Health</h1><span class="dim">infrastructure, not learning</span></div>
    ${advice.length ? advice.map((item) => html`<div class=${`notice ${TONES[item.level] ?? ""}`}><b>${item.level === "hint" ? "Hint" : words(item.level[0].toUpperCase() + item.level.slice(1))}:</b> <${Line} text=${item.text} /></div>`) : html`<div class="notice good"><b>✓ No alarm.</b></div>`}
    <section class="panel strip" aria-label="attempts by end"><div class="stats">${Object.entries(attempts).filter(([end, n]) => n > 0 || ["decided", "failed"].includes(end)).map(([end, n]) => html`<${Stat} label=${`Attempts ${ENDS[end] ?? words(end)}`} tone=${end === "failed" && n ? "bad" : ""}>${int(n)}<//>`)}</div></section>
    <div class="cols stretch">
      <${Panel} title="What failed" note="infrastructure failures by cause"><${Failures} failures=${failures} run=${route.run} /><//>
      <${Panel} title="How rollouts end" note="status and outcome"><${Matrix} matrix=${matrix} run=${route.run} /><//>
    </div>
    <${Panel} title="Waits per step" note="median and 90th percentile of training rollouts"><${Waits} waits=${waits} /><//>
    ${timeline && html`<${Panel} title="What ran when" note="phases of the trainer, and gauges"><${Gauges} timeline=${timeline} /><//>`}
    <${Panel} title="When rollouts ran" note="the newest ones, one lane each; click to open"><${Lanes} lanes=${lanes} run=${route.run} /><//>
    <${Panel} title="Slowest rollouts" note="what did they wait for?">${slowest.length ? html`<ul class="list">${slowest.slice(0, 8).map((row) => html`<li class="slow"><div class="rowlink"><a href=${rolloutHref(route.run, row.id)} class="mono"><${Line} text=${row.id} /></a> <${Badge} value=${row.outcome || row.status} /><span class="dim small"><${Line} text=${row.task} max=${60} /></span></div><${Times} row=${row} /></li>`)}</ul>` : html`<${Empty}>No rollout is decided yet.<//>`}<//>
    <${RunLog} run=${route.run} />`;
}

const ENDS = { decided: "decided", failed: "failed" };

function Failures({ failures, run }) {
  if (!failures.length) return html`<${Empty}>No attempt failed because of the infrastructure.<//>`;
  return html`<ul class="list">${failures.map((row) => html`<li><div class="rowlink"><b class="num">${int(row.n)}</b> <span class="cause"><${Line} text=${row.text || "(no error text)"} max=${200} /></span></div><div class="dim small">first <a href=${rolloutHref(run, row.first)}><${Line} text=${row.first} /></a>, last <a href=${rolloutHref(run, row.last)}><${Line} text=${row.last} /></a></div></li>`)}</ul>`;
}

function Matrix({ matrix, run }) {
  const statuses = [...new Set(matrix.map((row) => row.status))];
  const outcomes = [...new Set(matrix.map((row) => row.outcome))];
  const total = matrix.reduce((sum, row) => sum + row.n, 0) || 1;
  if (!matrix.length) return html`<${Empty}>No rollout is decided yet.<//>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="status and outcome"><table class="data"><thead><tr><th scope="col">Status</th>${outcomes.map((outcome) => html`<th scope="col" class="num">${words(outcome)}</th>`)}</tr></thead>
    <tbody>${statuses.map((status) => html`<tr><th scope="row"><${Badge} value=${status} /></th>${outcomes.map((outcome) => {
      const n = matrix.find((row) => row.status === status && row.outcome === outcome)?.n ?? 0;
      return html`<td class="num">${n ? html`<a href=${href(run, "rollouts", [], { status, outcome })}>${int(n)}</a> <span class="dim">${pct(n / total)}</span>` : html`<span class="dim">0</span>`}</td>`;
    })}</tr>`)}</tbody></table></div>`;
}

function Waits({ waits }) {
  const train = waits.filter((row) => row.phase === "train");
  const shown = train.length ? train : waits;
  if (!shown.length) return html`<${Empty}>No rollout is decided yet.<//>`;
  const xs = shown.map((row) => row.step);
  return html`<div class="small-multiples">${WAITS.map(([key, label]) => html`<div><h3><span class="grow">${label}</span><b>${secs(shown.at(-1)[key][0])}</b></h3>
    <${Chart} title=${`${label}, median`} xs=${xs} height=${120} format=${secs} sync="waits" series=${[{ label: "median", values: shown.map((row) => row[key][0]), colour: "--c1" }, { label: "90 %", values: shown.map((row) => row[key][1]), colour: "--c2", dash: [4, 3] }]} /></div>`)}</div>
    <ul class="legend"><li><span class="swatch swatch-1"></span>median</li><li><span class="swatch swatch-2"></span>90th percentile</li></ul>`;
}

function RunLog({ run }) {
  const { data } = useData(apiPath([run, "run_log"]));
  if (!data?.text) return "";
  return html`<${Panel} title="Log of insitu" note=${`${plural(data.lines, "line")}, ${size(data.bytes)}`}><${Block} text=${data.text.split("\n").slice(-400).join("\n")} lines=${40} ansi label="log of insitu" /><//>`;
}
