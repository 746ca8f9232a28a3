// Is it learning, is it healthy, where do I look?
import { html, useEffect, useMemo, useState } from "../vendor/preact-htm.module.js";
import { apiPath, get } from "../api.js";
import { ago, int, isHeldOut, num, pct, plural, secs, words } from "../format.js";
import { useRun, useRunVersion } from "../live.js";
import { compareHref, go, href, rolloutHref } from "../router.js";
import { Badge, Empty, Panel, Reward, Stat, useData, Waiting } from "../ui.js";
import { Line } from "../text.js";
import { Chart, FATES, movingMean, recentMean, Stack } from "../chart.js";
import { strongOf } from "./cheats.js";
import { Metrics, StepTime } from "./metrics.js";

export function OverviewPage({ route }) {
  const loaded = useOverview(route.run);
  if (!loaded.data) return html`<h1><${Line} text=${route.run} /></h1><${Waiting} of=${loaded} />`;
  const { run, steps, empty } = loaded.data;
  if (empty) return html`<h1><${Line} text=${run.name} /></h1><div class="notice info">No rollout is stored yet. This page updates by itself.</div>`;
  return html`
    <${Head} data=${loaded.data} />
    <${Alarms} data=${loaded.data} run=${route.run} />
    <${Checks} run=${route.run} />
    ${run.kind === "train" || steps.step.length > 0 ? html`<div class="cols wide-left stretch"><${Curve} data=${loaded.data} run=${route.run} /><${Why} why=${loaded.data.why} run=${route.run} /></div>`
      : html`<div class="cols stretch"><${HeldOut} points=${loaded.data.heldout} /><${Why} why=${loaded.data.why} run=${route.run} /></div>`}
    <div class="cols stretch"><${Telling} rows=${loaded.data.telling} run=${route.run} />
      <div class="column"><${LedgerPanel} steps=${steps} run=${route.run} /><${StepTime} steps=${steps} run=${route.run} /><${Standing} data=${loaded.data} run=${route.run} /></div></div>
    ${steps.step.length > 0 && html`<${Metrics} steps=${steps} run=${route.run} />`}`;
}

/** The overview; when the run has grown, only its new steps are fetched. */
function useOverview(run) {
  const [state, setState] = useState({ run: "", data: /** @type {any} */ (null), error: "", seconds: 0 });
  // A large run takes longer to sum up: it is looked at less often.
  const version = useRunVersion(Math.max(3, 20 * state.seconds));
  useEffect(() => {
    const abort = new AbortController();
    const old = state.run === run ? state.data : null;
    const started = performance.now();
    const after = old?.steps?.step.at(-1) ?? "";
    get(apiPath([run, "overview"], { after }), abort.signal).then(
      (data) => setState({ run, data: { ...data, steps: joined(old?.steps, data.steps) }, error: "", seconds: (performance.now() - started) / 1000 }),
      (error) => abort.signal.aborted || setState((last) => ({ ...last, run, data: old, error: error.message })),
    );
    return () => abort.abort();
  }, [run, version]);
  return state.run === run ? state : { data: null, error: "" };
}

/** Columns of steps with new ones behind them. */
function joined(old, added) {
  if (!old || !added) return added ?? old;
  const n = old.step.length;
  const column = (before, now, none) => [...(before ?? new Array(n).fill(none)), ...(now ?? new Array(added.step.length).fill(none))];
  const table = (before, now, none) => Object.fromEntries([...new Set([...Object.keys(before), ...Object.keys(now)])].map((key) => [key, column(before[key], now[key], none)]));
  const plain = Object.keys(added).filter((key) => Array.isArray(added[key]));
  return { ...Object.fromEntries(plain.map((key) => [key, column(old[key], added[key], null)])), ledger: table(old.ledger, added.ledger, 0), metrics: table(old.metrics, added.metrics, null) };
}

function Head({ data }) {
  const { run, steps, heldout } = data;
  const last = steps.step.length - 1;
  const mean = recentMean(steps.metrics.step_s);
  const left = run.state === "running" && mean && run.steps ? mean * (run.steps - run.step) : null;
  const totals = heldout.filter((point) => point.category === "" && isHeldOut(point.phase));
  const [before, now] = [totals[0], totals.length > 1 ? totals.at(-1) : null];
  const tokens = last >= 0 && steps.metrics.tokens_sampled ? (steps.metrics.tokens_sampled[last] ?? 0) / (steps.metrics.step_s?.[last] || 1) : null;
  const rate = last >= 0 && steps.total[last] ? steps.solved[last] / steps.total[last] : null;
  return html`
    <div class="title"><h1><${Line} text=${run.name} /></h1><span class="sub"><${Line} text=${[run.agent, run.model, run.tasks, run.engine && `${run.engine} engine`, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(" · ")} /></span></div>
    <section class="panel strip" aria-label="figures"><div class="stats">
      ${run.kind === "train" && html`<${Stat} label="Step">${run.step} <span class="dim">of ${run.steps}</span><//>`}
      ${rate !== null && html`<${Stat} label="Training solve rate" note="last step">${pct(rate)}<//>`}
      ${before && html`<${Stat} label="Held-out tasks solved" note=${now ? "before → now" : "before training"}>${now ? html`<span class="dim">${pct(before.rate)} →</span> <span class=${now.low > before.high ? "good-text" : ""}>${pct(now.rate)}</span>` : pct(before.rate)}<//>`}
      <${Stat} label="Rollouts">${int(run.rollouts)}<//>
      ${tokens !== null && html`<${Stat} label="Tokens sampled" note="last step">${num(Math.round(tokens))} <span class="dim">/ s</span><//>`}
      ${mean !== null && html`<${Stat} label="Time per step" note=${`mean of the last 5${left ? `, ${secs(left)} left` : ""}`}>${secs(mean)}<//>`}
      <${Stat} label="Last write">${ago(run.last_write_s)}<//>
    </div></section>`;
}

function Alarms({ data, run }) {
  const { steps, states } = data;
  // The answer counts alarms of the steps in it; these are of all steps.
  const alarms = Object.keys(steps.metrics).filter((key) => key.endsWith("_alarm")).map((name) => ({ name, at: steps.step.filter((_, i) => steps.metrics[name][i]) })).filter(({ at }) => at.length);
  const failed = states.filter((s) => s.reason === "infra").reduce((sum, s) => sum + s.n, 0);
  if (!alarms.length) return "";
  return html`<div class="notice warn" role="note"><b>${plural(alarms.length, "alarm")}:</b> ${alarms.map((alarm, i) => html`${i ? ", " : " "}<a href=${href(run, "step", [alarm.at.at(-1)])}>${words(alarm.name.replace(/_alarm$/, ""))}</a> in ${plural(alarm.at.length, "step")}`)}${failed ? html`, ${plural(failed, "infrastructure failure")}` : ""}. <a href=${href(run, "health")}>Health</a></div>`;
}

/** What the pages Cheats and Health found, in a line. */
function Checks({ run }) {
  const version = useRunVersion(30);
  const found = useData(apiPath([run, "checks"]), version).data;
  if (!found) return "";
  const { kinds, advice } = found;
  const strong = strongOf(kinds);
  return html`<p class="checks">${strong.length ? html`<b>Look for cheating:</b> ${strong.map((kind) => `${kind.evidence} (${int(kind.n)})`).join(", ")}.` : html`<span class="good-text">✓</span> No ${kinds.some((kind) => kind.n) ? "strong evidence" : "evidence"} of cheating.`} <a href=${href(run, "cheats")}>Cheats</a>
    ${advice.length > 0 && html` · <${Line} text=${advice[0].text} max=${240} /> <a href=${href(run, "health")}>Health</a>${advice.length > 1 ? html` <span class="dim">and ${int(advice.length - 1)} more</span>` : ""}`}</p>`;
}

function Curve({ data, run }) {
  const { steps, heldout } = data;
  const curve = useMemo(() => curveOf(steps, heldout), [steps, heldout]);
  return html`<${Panel} title="Is it learning?" note="share of tasks solved; click a step to open it">
    ${curve.xs.length ? html`<${Chart} title="training solve rate" xs=${curve.xs} series=${curve.series} height=${320} range=${[0, curve.top]} format=${pct} legend onPick=${(x) => steps.step.includes(x) && go(href(run, "step", [x]))} />` : html`<${Empty}>No step is committed yet.<//>`}
    <${HeldOutLine} heldout=${heldout} run=${run} />
  <//>`;
}

/** One axis for training steps and held-out points. */
function curveOf(steps, heldout) {
  const points = heldout.filter((p) => p.category === "" && isHeldOut(p.phase));
  const xs = [...new Set([...steps.step, ...points.map((p) => p.step)])].sort((a, b) => a - b);
  const rates = steps.step.map((_, i) => (steps.total[i] ? steps.solved[i] / steps.total[i] : null));
  const means = movingMean(rates, 5);
  const at = (values) => xs.map((x) => values[steps.step.indexOf(x)] ?? null);
  const held = (key) => xs.map((x) => points.findLast((p) => p.step === x)?.[key] ?? null);
  const series = [
    { label: "training tasks", values: at(rates), colour: "--c1-faint", kind: "dots" },
    { label: "their mean over 5 steps", values: at(means), colour: "--c1", width: 2.25 },
    { label: "held-out tasks, 95 % interval", values: held("rate"), low: held("low"), high: held("high"), colour: "--c2", kind: "both", dash: [3, 4] },
  ];
  const rewards = steps.step.map((_, i) => (steps.total[i] ? steps.reward_sum[i] / steps.total[i] : null));
  if (rewards.some((reward, i) => reward !== null && Math.abs(reward - (rates[i] ?? 0)) > 1e-9)) series.push({ label: "mean reward", values: at(rewards), colour: "--c3", width: 1.5 });
  const highest = Math.max(...points.map((p) => p.high), ...rates.map((rate) => rate ?? 0), ...rewards.map((reward) => reward ?? 0));
  return { xs, series, top: Math.min(1, Math.ceil(highest * 10.5) / 10) || 1 };
}

function HeldOutLine({ heldout, run }) {
  const totals = heldout.filter((p) => p.category === "");
  if (!totals.length) return "";
  return html`<p class="note">${totals.map((p, i) => html`${i ? " · " : ""}${words(p.phase)}: <b class="nowrap">${pct(p.rate)}</b> (${int(p.solved)} of ${int(p.total)}, ${pct(p.low)} – ${pct(p.high)})`)}${totals.length > 1 ? html` · <a href=${compareHref([run])}>task by task</a>` : ""}</p>`;
}

function HeldOut({ points }) {
  return html`<${Panel} title="Solved" note="with 95 % intervals"><ul class="list">${points.filter((p) => p.phase !== "train").map((p) => html`<li class="rowlink"><b class="num">${pct(p.rate)}</b> <${Line} text=${p.category || "all tasks"} /> <span class="dim">${int(p.solved)} of ${int(p.total)}, ${pct(p.low)} – ${pct(p.high)}</span></li>`)}</ul><//>`;
}

const CAUSES = 6;

function Why({ why, run }) {
  const total = why.reduce((sum, row) => sum + row.n, 0);
  const cause = (row) => html`<li><a class="bar-row" href=${whyHref(run, row)}>
      <span class="fill" style=${{ width: `${(100 * row.n) / why[0].n}%` }}></span>
      <span class="on"><b class="num">${int(row.n)}</b> <span class="cause"><${Line} text=${row.text || causeOf(row)} max=${110} /></span> ${row.outcome && row.outcome !== "unresolved" ? html`<${Badge} value=${row.outcome} />` : row.status !== "ok" ? html`<${Badge} value=${row.status} />` : ""}</span>
    </a></li>`;
  return html`<${Panel} title="Why not solved" note=${total ? `${plural(total, "rollout")}, by cause` : ""}>
    ${why.length ? html`<ul class="bars">${why.slice(0, CAUSES).map(cause)}</ul>${why.length > CAUSES ? html`<details><summary class="note">${plural(why.length - CAUSES, "more cause", "more causes")}</summary><ul class="bars">${why.slice(CAUSES).map(cause)}</ul></details>` : ""}` : html`<${Empty}>Nothing failed.<//>`}
  <//>`;
}

/** The rollouts behind a cause. */
export function whyHref(run, row) {
  const cause = row.text ? (row.of_error ? { error: row.text } : { why: row.text }) : {};
  return href(run, "rollouts", [], { status: row.status, outcome: row.outcome || "none", solved: 0, ...cause });
}

function causeOf(row) {
  if (row.outcome === "unresolved") return "checks failed";
  return words(row.outcome || row.status);
}

function Telling({ rows, run }) {
  return html`<${Panel} title="Look at these" note="the most telling rollouts">
    ${rows.length ? html`<ul class="list">${rows.map((row) => html`<li><a class="rowlink" href=${rolloutHref(run, row.id)}>
      <b class="go first-letter"><${Line} text=${row.telling} /></b><span class="grow"></span><${Outcome} row=${row} />
      <span class="dim small full"><${Line} text=${row.task} max=${60} />, ${row.phase === "train" ? `step ${row.step}` : words(row.phase)} · ${plural(row.calls, "call")} · ${int(row.sampled)} tokens · ${secs(row.total_s)}</span>
    </a></li>`)}</ul>` : html`<${Empty}>No rollout is decided yet.<//>`}
  <//>`;
}

/** Outcome and reward of a row in one line. */
export function Outcome({ row }) {
  return html`<span class="nowrap">${row.outcome ? html`<${Badge} value=${row.outcome} />` : html`<${Badge} value=${row.status} />`} <span class="dim small">reward</span> <${Reward} value=${row.reward} /></span>`;
}

function LedgerPanel({ steps, run }) {
  const entries = Object.keys(steps.ledger).filter((name) => !["captured", "trained"].includes(name) && steps.ledger[name].some((n) => n > 0));
  if (!steps.step.length) return "";
  const parts = [
    { label: "trained", name: "", colour: "--c1", values: steps.ledger.trained ?? [] },
    ...entries.map((name, i) => ({ label: words(name.replace(/^excluded\./, "")), name: name.replace(/^excluded\./, ""), colour: FATES[i % FATES.length], values: steps.ledger[name] })),
  ];
  return html`<${Panel} title="Every sampled token" note="trained, or excluded for a named reason"><${Stack} title="tokens per step" xs=${steps.step} parts=${parts} format=${int}
    link=${(step, part) => href(run, "rollouts", [], { account: step, excluded: part.name })} /><//>`;
}

const STANDING = ["planned", "queued", "running", "grading", "ready", "decided", "accepted", "trained", "discarded"];

function Standing({ data, run }) {
  const rows = [...data.states].sort((a, b) => STANDING.indexOf(a.state) - STANDING.indexOf(b.state));
  return html`<${Panel} title="Where rollouts stand">
    <ul class="chips">${rows.map((row) => html`<li><a class="chip" href=${href(run, "rollouts", [], { state: row.state, fate: row.reason })}>${words(row.state)}${row.reason ? html` <span class="dim">${words(row.reason)}</span>` : ""}<span class="n">${int(row.n)}</span></a></li>`)}</ul>
    ${data.running.length > 0 && html`<p class="note">Under way: ${data.running.slice(0, 6).map((row, i) => html`${i ? ", " : ""}<a href=${rolloutHref(run, row.id)}><${Line} text=${row.id} /></a>`)}${data.running.length > 6 ? ` and ${data.running.length - 6} more` : ""}</p>`}
  <//>`;
}
