// The account of one optimizer step: proof, groups, advantages, ledger, timings.
import { html } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { ago, int, isNumber, num, pct, plural, secs, signed, when, words } from "../format.js";
import { useKeys } from "../keys.js";
import { useRun } from "../live.js";
import { go, href, rolloutHref } from "../router.js";
import { Empty, Facts, Panel, Stat, useData, Waiting } from "../ui.js";
import { Line } from "../text.js";
import { Histogram } from "../chart.js";
import { Batch } from "./batch.js";

const SHOWN = new Set(["step", "skipped", "weights", "alarm"]);

export function StepPage({ route }) {
  if (!/^\d+$/.test(route.parts[0] ?? "")) return html`<h1>Step</h1><div class="notice warn">There is no step <b><${Line} text=${route.parts[0] ?? ""} max=${40} /></b>. <a href=${href(route.run)}>Overview</a></div>`;
  return html`<${OneStep} route=${route} />`;
}

function OneStep({ route }) {
  const step = Number(route.parts[0]);
  const loaded = useData(apiPath([route.run, "step"], { step }));
  const { run } = useRun();
  const more = run?.state === "running" || step < run?.step;
  const to = (n) => go(href(route.run, "step", [n]));
  useKeys({ h: ["previous step", () => step > 1 && to(step - 1)], l: ["next step", () => more && to(step + 1)] });
  const title = html`<div class="title"><h1>Step ${step}</h1><span class="grow"></span>
    ${step > 1 && html`<a href=${href(route.run, "step", [step - 1])}>← step ${step - 1}</a>`} ${more && html`<a href=${href(route.run, "step", [step + 1])}>step ${step + 1} →</a>`}</div>`;
  if (!loaded.data) return html`${title}<${Waiting} of=${loaded} />`;
  const { metrics, ledger, groups } = loaded.data;
  const members = groups.flatMap((group) => group.rollouts);
  const alarms = Object.keys(metrics).filter((key) => key.endsWith("_alarm") && metrics[key]);
  return html`${title}
    <section class="panel strip" aria-label="figures"><div class="stats">
      <${Stat} label="Mean reward">${num(metrics.reward_mean)}<//>
      <${Stat} label="Groups with a gradient">${int(metrics.effective_groups ?? groups.filter((g) => !g.untrained).length)} <span class="dim">of ${groups.length}</span><//>
      <${Stat} label="Rollouts">${int(members.length)}<//>
      <${Stat} label="Tokens trained">${int(ledger.trained ?? 0)} <span class="dim">of ${int(ledger.captured ?? 0)}</span><//>
      <${Stat} label="Time">${secs(metrics.step_s)}<//>
      <${Stat} label="Committed" title=${when(loaded.data.committed_s)}>${ago(loaded.data.committed_s)}<//>
    </div></section>
    <${Proof} proof=${loaded.data.proof} problem=${loaded.data.problem} hash=${loaded.data.plan_hash} />
    ${alarms.length > 0 && html`<div class="notice warn"><b>Alarms of this step:</b> ${alarms.map((key) => words(key.replace(/_alarm$/, ""))).join(", ")}</div>`}
    ${metrics.alarm && html`<div class="notice"><b>The trainer says:</b> <${Line} text=${metrics.alarm} max=${1000} /></div>`}
    ${metrics.skipped && html`<div class="notice warn"><b>No update:</b> <${Line} text=${metrics.skipped} /></div>`}
    <${Groups} groups=${groups} run=${route.run} />
    <${Batch} groups=${groups} run=${route.run} order=${route.query.bars ?? ""} />
    <div class="cols narrow stretch">
      <${Panel} title="Advantages" note="of the trained rollouts"><${Histogram} title="advantages" values=${members.map((row) => row.advantage)} format=${(x) => signed(x)} /><//>
      <${Panel} title="Staleness" note="versions behind the trainer"><${Staleness} rows=${members} step=${step} /><//>
      <${Panel} title="Tokens" note="captured = trained + excluded"><${Ledger} ledger=${ledger} run=${route.run} step=${step} /><//>
    </div>
    <${Panel} title="All metrics"><${Facts} items=${Object.entries(metrics).filter(([key, value]) => !SHOWN.has(key) && isNumber(value)).map(([key, value]) => [words(key), key.endsWith("_s") ? secs(value) : num(value)])} /><//>`;
}

/** Whether the recomputed plan is the one that was trained. */
export function Proof({ proof, problem, hash }) {
  const digest = hash ? html` <span class="mono dim" title=${hash}>${String(hash).slice(0, 12)}</span>` : "";
  if (proof === "identical") return html`<div class="notice good"><b>✓ Advantages are proven.</b> The plan, recomputed here from the stored rollouts, has the digest of the plan that was trained.${digest}</div>`;
  if (proof === "differs") return html`<div class="notice bad"><b>! The recomputed plan differs</b> from the one that was trained: advantages below are not the trained ones.${digest}</div>`;
  return html`<div class="notice"><b>Advantages are not proven.</b> <${Line} text=${problem || "The plan cannot be recomputed here."} /></div>`;
}

function Groups({ groups, run }) {
  const mix = useRun().run?.task_sets.length > 0;
  return html`<${Panel} title="Groups" note="one cell per rollout; hatched = not trained">
    <${RewardLegend} />
    <ul class="heat">${groups.map((group) => html`<li key=${`${group.step}/${group.group}`}>
      <a class="mono" href=${href(run, "group", [group.phase, group.step, group.group])}>${group.step}/${group.group}</a>
      <span class="cells">${group.rollouts.map((row) => html`<${Cell} row=${row} run=${run} />`)}</span>
      <span class="dim what"><${Line} text=${group.task} max=${60} />${mix ? html`, task set <${Line} text=${group.task_set} max=${32} />` : ""} · ${group.solved} of ${group.graded} solved${group.untrained ? html` · <b class="warn-text">${words(group.untrained)}</b>` : ""}</span>
    </li>`)}</ul>
    ${!groups.length && html`<${Empty}>No rollout belongs to this step.<//>`}
  <//>`;
}

export function RewardLegend() {
  return html`<ul class="legend"><li><span class="swatch box heat-1"></span>reward 1</li><li><span class="swatch box heat-p"></span>between</li><li><span class="swatch box heat-0"></span>reward 0</li><li><span class="swatch box heat-n"></span>not graded</li><li><span class="swatch box heat-0 hatched"></span>not trained</li></ul>`;
}

/** One rollout as a coloured cell with its reward as text. */
export function Cell({ row, run }) {
  const kind = row.reward === null ? "n" : row.reward >= 1 ? "1" : row.reward > 0 ? "p" : "0";
  const text = row.reward === null ? "–" : row.reward >= 1 ? "1" : row.reward > 0 ? num(row.reward).replace(/^0/, "") : "0";
  // Lists of a task have no plan: there, the fate of the rollout says it.
  const why = row.untrained || row.fate;
  const fate = why ? `, not trained: ${words(why)}` : isNumber(row.advantage) ? `, advantage ${signed(row.advantage)}` : "";
  return html`<a class=${`cell heat-${kind} ${why ? "hatched" : ""}`} href=${rolloutHref(run, row.id)} title=${`${row.id}: reward ${num(row.reward)}${fate}`} aria-label=${`rollout ${row.slot}: reward ${num(row.reward)}${fate}`}>${text}</a>`;
}

function Staleness({ rows, step }) {
  const ages = rows.filter((row) => isNumber(row.oldest) && isNumber(row.version)).map((row) => step - 1 - row.oldest);
  if (!ages.length) return html`<${Empty}>No trained token has a version.<//>`;
  if (ages.every((age) => age === ages[0])) return html`<p>${ages[0] <= 0 ? "All rollouts were sampled with the newest weights." : `All rollouts are ${plural(ages[0], "version")} old.`}</p>`;
  return html`<${Histogram} title="staleness" values=${ages} bins=${12} format=${int} />`;
}

function Ledger({ ledger, run, step }) {
  const captured = ledger.captured || 1;
  const entries = Object.entries(ledger).filter(([key, n]) => key !== "captured" && n > 0).sort((a, b) => b[1] - a[1]);
  return html`<ul class="bars">${entries.map(([key, n]) => html`<li><a class="bar-row" href=${href(run, "rollouts", [], { account: step, excluded: key === "trained" ? "" : key.replace(/^excluded\./, "") })}><span class="fill" style=${{ width: `${(100 * n) / captured}%` }}></span><span class="on"><b class="num">${int(n)}</b><span class="cause">${words(key.replace(/^excluded\./, ""))}</span><span class="dim">${pct(n / captured)}</span></span></a></li>`)}</ul>`;
}
