// The rollouts of one group side by side, and the turn at which they part.
import { html } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, num, plural, secs, signed, words } from "../format.js";
import { compareHref, href, rolloutHref } from "../router.js";
import { Badge, Empty, Panel, Reward, useData, Waiting } from "../ui.js";
import { Block, Line } from "../text.js";
import { useRun, useRunVersion } from "../live.js";
import { Proof } from "./step.js";

export function GroupPage({ route }) {
  const [phase, step, group] = route.parts;
  const loaded = useData(apiPath([route.run, "group"], { phase, step, group }), useRunVersion(5));
  const { run } = useRun();
  const title = html`<div class="title"><h1>Group ${group} <span class="dim">of ${phase === "train" ? `step ${Number(step)}` : words(phase)}</span></h1>
    ${loaded.data?.task && html`<span class="sub">Task <a href=${href(route.run, "task", [loaded.data.task])}><${Line} text=${loaded.data.task} /></a>${run?.task_sets.length ? html`, task set <${Line} text=${loaded.data.task_set} />` : ""}${loaded.data.account !== null && html` · trained in <a href=${href(route.run, "step", [loaded.data.account])}>step ${loaded.data.account}</a>`}</span>`}</div>`;
  if (!loaded.data) return html`${title}<${Waiting} of=${loaded} />`;
  const { rollouts, reference, states } = loaded.data;
  const waiting = states.filter((state) => !rollouts.some((row) => row.id === state.id));
  return html`${title}
    ${loaded.data.proof !== null && html`<${Proof} proof=${loaded.data.proof} problem=${loaded.data.problem} />`}
    <${Panel} title="Task"><${Block} text=${loaded.data.prompt || "(the prompt cannot be decoded here)"} lines=${12} label="prompt of the task" /><//>
    <div class="members">${rollouts.map((row) => html`<${Member} key=${row.id} row=${row} run=${route.run} reference=${reference} rows=${rollouts} />`)}</div>
    ${!rollouts.length && html`<${Empty}>No rollout of this group is decided yet.<//>`}
    ${waiting.length > 0 && html`<p class="note">Not decided: ${waiting.map((state) => html`<span class="nowrap">slot ${state.slot} <${Badge} value=${state.state} text=${words(state.fate || state.state)} /></span> `)}</p>`}`;
}

function Member({ row, run, reference, rows }) {
  const base = rows.find((other) => other.id === reference);
  const parts = row.id === reference ? "the others are compared with this one" : row.same_turns >= row.calls ? "all replies equal the reference's" : row.same_turns ? `same as slot ${base?.slot} for ${plural(row.same_turns, "turn")}, parts at turn ${row.same_turns}` : `parts from slot ${base?.slot} at the first turn`;
  return html`<article class=${`panel member ${row.id === reference ? "reference" : ""}`} aria-label=${`slot ${row.slot}`}>
    <header><h2><a href=${rolloutHref(run, row.id)}>Slot ${row.slot}</a></h2><span class="grow"></span>${row.status !== "ok" && row.outcome && html`<${Badge} value=${row.status} />`}<${Badge} value=${row.outcome || row.status} /></header>
    <dl class="pairs">
      <div><dt>reward</dt><dd><${Reward} value=${row.reward} /></dd></div>
      <div><dt>calls</dt><dd>${int(row.calls)}</dd></div>
      <div><dt>advantage</dt><dd>${row.advantage === null ? html`<span class="dim">${words(row.untrained || "none")}</span>` : signed(row.advantage)}</dd></div>
      <div><dt>weight</dt><dd>${num(row.weight)}</dd></div>
      <div><dt>tokens</dt><dd>${int(row.untrained ? 0 : row.trained)} <span class="dim">of ${int(row.sampled)}</span></dd></div>
      <div><dt>time</dt><dd>${secs(row.total_s)}</dd></div>
    </dl>
    ${row.reason && html`<p class="small"><span class="dim">Verdict:</span> <${Line} text=${row.reason} max=${160} /></p>`}
    <p class="small dim">${parts}${row.id !== reference && reference ? html` · <a href=${compareHref([run], { id_a: reference, id_b: row.id })}>compare</a>` : ""}</p>
    ${row.last_words && html`<${Block} text=${row.last_words} lines=${6} label="last reply" />`}
  </article>`;
}
