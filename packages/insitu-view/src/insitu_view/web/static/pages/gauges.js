// What ran when: phases of the trainer as a strip, gauges below it.
import { html } from "../vendor/preact-htm.module.js";
import { int, num, secs, size, words } from "../format.js";
import { Empty } from "../ui.js";
import { Chart, Legend } from "../chart.js";

const COLOURS = { collect: "--c1", train: "--c2", publish: "--c3", evaluate: "--c4" };
const GAUGES = [
  ["rollouts_running", "rollouts running", int], ["rollouts_queued", "rollouts queued", int], ["rollouts_grading", "rollouts graded now", int], ["agents", "agents", int],
  ["tokens_per_s", "tokens per second", num], ["rss_bytes", "memory of the controller", size], ["disk_free_bytes", "free disk", size],
];

/** Gauges that each GPU has: end of the key, label, format. */
const OF_GPUS = [["use", "use of the GPUs", (x) => `${num(x)} %`], ["memory_bytes", "memory of the GPUs", size]];
const SERIES = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

/** One chart with a curve for each GPU; nothing where the run recorded none. */
function Gpus({ gauges, xs }) {
  return OF_GPUS.map(([end, label, format]) => {
    const keys = Object.keys(gauges).filter((key) => new RegExp(`^gpu\\d+_${end}$`).test(key));
    const series = keys.map((key, i) => ({ label: `GPU ${key.slice(3, -end.length - 1)}`, values: gauges[key], colour: SERIES[i % SERIES.length], width: 1.5 }));
    return series.length > 0 && html`<div key=${end}><h3><span class="grow">${label}</span></h3><${Chart} title=${label} xs=${xs} height=${100} axis="time" format=${format} sync="gauges" series=${series} legend=${series.length > 1} /></div>`;
  });
}

export function Gauges({ timeline }) {
  const { gauges, phases } = timeline;
  const xs = gauges.time_s ?? [];
  if (!xs.length && !phases.length) return html`<${Empty}>Nothing is recorded yet.<//>`;
  const from = Math.min(xs[0] ?? Infinity, ...phases.map((phase) => phase.began_s));
  const to = Math.max(xs.at(-1) ?? 0, ...phases.map((phase) => phase.ended_s ?? phase.began_s));
  const x = (time) => (1000 * (time - from)) / (to - from || 1);
  const shown = GAUGES.filter(([key]) => gauges[key]?.some((value) => value !== null && value !== 0));
  return html`
    <figure class="chart"><${Legend} series=${Object.entries(COLOURS).filter(([name]) => phases.some((phase) => phase.phase === name)).map(([label, colour]) => ({ label, colour }))} />
      <svg class="lanes" viewBox="0 0 1000 18" height="18" preserveAspectRatio="none" role="img" aria-label=${`${phases.length} phases over ${secs(to - from)}`}>${phases.map((phase) => {
        const end = phase.ended_s ?? to;
        return html`<rect x=${x(phase.began_s).toFixed(1)} width=${Math.max(0.8, x(end) - x(phase.began_s)).toFixed(1)} y="0" height="18" fill=${`var(${COLOURS[phase.phase] ?? "--c6"})`}><title>${`${words(phase.phase)}, step ${phase.step}: ${secs(end - phase.began_s)}${phase.ended_s ? "" : " so far"}`}</title></rect>`;
      })}</svg></figure>
    <div class="small-multiples">${shown.map(([key, label, format]) => html`<div key=${key}><h3><span class="grow">${label}</span><b>${format(gauges[key].findLast((value) => value !== null))}</b></h3>
      <${Chart} title=${label} xs=${xs} height=${100} axis="time" format=${format} sync="gauges" series=${[{ label, values: gauges[key], colour: "--c1", width: 1.5 }]} /></div>`)}<${Gpus} gauges=${gauges} xs=${xs} /></div>`;
}
