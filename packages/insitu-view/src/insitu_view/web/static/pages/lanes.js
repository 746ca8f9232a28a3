// When the newest rollouts ran: one lane each, with queue, agent and grading.
import { html } from "../vendor/preact-htm.module.js";
import { plural, secs } from "../format.js";
import { rolloutHref } from "../router.js";
import { Empty } from "../ui.js";
import { AsTable, Bars, Legend } from "../chart.js";

const MAX = 160;

export function Lanes({ lanes, run }) {
  const shown = lanes.slice(0, MAX).reverse();
  if (!shown.length) return html`<${Empty}>No rollout is decided yet.<//>`;
  const from = Math.min(...shown.map((lane) => lane.began_s));
  const to = Math.max(...shown.map((lane) => lane.ended_s));
  const rows = shown.map((lane) => {
    const graded = lane.ended_s - lane.grade_s;
    const started = Math.min(graded, lane.began_s + lane.queued_s);
    const part = (a, b, colour) => ({ from: a - from, to: b - from, colour });
    const parts = [part(lane.began_s, started, "--c6"), part(started, graded, lane.phase === "train" ? "--c1" : "--c3"), part(graded, lane.ended_s, "--c2")];
    return { key: lane.id, link: rolloutHref(run, lane.id), title: `${lane.id}: ${secs(lane.total_s)}`, parts };
  });
  return html`<figure class="chart">
    <${Legend} series=${[["queued", "--c6"], ["agent, training", "--c1"], ["agent, evaluation", "--c3"], ["grading", "--c2"]].map(([label, colour]) => ({ label, colour }))} />
    <div class="lanes"><${Bars} title=${`${plural(shown.length, "rollout")} over ${secs(to - from)}`} rows=${rows} to=${to - from} ends=${[`${secs(to - from)} before the last`, "last rollout ended"]} thin /></div>
    <${AsTable} title="when rollouts ran" columns=${[{ label: "rollout", texts: shown.map((lane) => lane.id) }, ...[["queued", "queued_s"], ["agent", "agent_s"], ["grading", "grade_s"], ["in all", "total_s"]].map(([label, key]) => ({ label, texts: shown.map((lane) => secs(lane[key])) }))]} />
  </figure>`;
}
