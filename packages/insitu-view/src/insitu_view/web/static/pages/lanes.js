// When the newest rollouts ran: one lane each, with queue, agent and grading.
import { html } from "../vendor/preact-htm.module.js";
import { plural, secs } from "../format.js";
import { rolloutHref } from "../router.js";
import { Empty } from "../ui.js";
import { Legend } from "../chart.js";

const WIDTH = 1000;
const MAX = 160;

export function Lanes({ lanes, run }) {
  const shown = lanes.slice(0, MAX).reverse();
  if (!shown.length) return html`<${Empty}>No rollout is decided yet.<//>`;
  const from = Math.min(...shown.map((lane) => lane.began_s));
  const to = Math.max(...shown.map((lane) => lane.ended_s));
  const x = (time) => ((time - from) / (to - from || 1)) * WIDTH;
  const tall = shown.length > 80 ? 3 : 5;
  const bars = shown.map((lane, i) => {
    const graded = lane.ended_s - lane.grade_s;
    const started = Math.min(graded, lane.began_s + lane.queued_s);
    const rect = (a, b, colour) => (b > a ? html`<rect x=${x(a).toFixed(1)} width=${Math.max(0.6, x(b) - x(a)).toFixed(1)} y=${i * tall} height=${tall - 1} fill=${`var(${colour})`} />` : "");
    return html`<a href=${rolloutHref(run, lane.id)} tabindex="-1" aria-label=${`${lane.id}, ${secs(lane.total_s)}`}><title>${`${lane.id}: ${secs(lane.total_s)}`}</title>${rect(lane.began_s, started, "--c6")}${rect(started, graded, lane.phase === "train" ? "--c1" : "--c3")}${rect(graded, lane.ended_s, "--c2")}</a>`;
  });
  return html`<figure class="chart">
    <${Legend} series=${[["queued", "--c6"], ["agent, training", "--c1"], ["agent, evaluation", "--c3"], ["grading", "--c2"]].map(([label, colour]) => ({ label, colour }))} />
    <svg class="lanes" viewBox=${`0 0 ${WIDTH} ${shown.length * tall}`} height=${shown.length * tall} preserveAspectRatio="none" role="group" aria-label=${`${plural(shown.length, "rollout")} over ${secs(to - from)}`}>${bars}</svg>
    <div class="ends" aria-hidden="true"><span>${secs(to - from)} before the last</span><span>last rollout ended</span></div>
  </figure>`;
}
