// All metrics of the steps as small multiples in named groups.
import { html, useMemo, useState } from "../vendor/preact-htm.module.js";
import { num, pct, secs, words } from "../format.js";
import { go, href } from "../router.js";
import { Panel, useStored } from "../ui.js";
import { Chart, movingMean, Stack } from "../chart.js";

const GROUPS = [
  ["Learning", ["reward_mean", "entropy", "loss", "mismatch_kl", "clip_fraction", "grad_norm", "effective_groups"]],
  ["Tool calls", ["unparsed_share", "malformed_calls", "unknown_tools"]],
  ["Exactness", ["max_logprob_gap", "max_logprob_gap_seen", "mismatched", "off_policy_kl", "ess"]],
  ["Freshness", ["staleness_max", "staleness_mean", "waited_s", "wasted", "dropped"]],
  ["Speed", ["sampled_per_s", "trained_per_s", "mfu", "tokens_sampled", "tokens_trained", "calls_mean", "micro_batches", "rows"]],
];

const LABELS = { mfu: "share of the GPUs' peak (MFU)", sampled_per_s: "tokens sampled per second", trained_per_s: "tokens trained per second" };

/** The metrics of the steps with tokens per second: sampled while rollouts ran, trained during the update. */
function withRates(metrics) {
  const rate = (tokens, seconds) => tokens?.map((n, i) => (n !== null && seconds?.[i] > 0 ? n / seconds[i] : null));
  // Rollouts of an asynchronous run do not wait for the trainer.
  const sampling = metrics.collect_s?.map((s, i) => ((metrics.waited_s?.[i] ?? null) === null ? s : metrics.cycle_s?.[i]));
  const rates = { sampled_per_s: rate(metrics.tokens_sampled, sampling), trained_per_s: rate(metrics.tokens, metrics.seconds) };
  return { ...metrics, ...Object.fromEntries(Object.entries(rates).filter(([, values]) => values)) };
}

export function Metrics({ steps: stored, run }) {
  const steps = useMemo(() => ({ ...stored, metrics: withRates(stored.metrics) }), [stored]);
  const [filter, setFilter] = useState("");
  const [options, setOptions] = useStored("metrics", { smooth: false, log: false, time: false });
  const named = new Set(GROUPS.flatMap(([, keys]) => keys));
  const numbers = Object.keys(steps.metrics).filter((key) => steps.metrics[key].some((v) => typeof v === "number") && !key.endsWith("_alarm"));
  const matcher = matching(filter);
  const groups = filter ? [[`Matching ${filter}`, numbers.filter((key) => matcher(key))]]
    : GROUPS.map(([title, keys]) => [title, keys.filter((key) => numbers.includes(key) && varies(steps.metrics[key]))]);
  const rest = numbers.filter((key) => !named.has(key)).length;
  const xs = options.time ? steps.committed_s : steps.step;
  const toggle = (key) => html`<button class="chip" aria-pressed=${options[key]} onClick=${() => setOptions({ ...options, [key]: !options[key] })}>${{ smooth: "smooth", log: "log scale", time: "by time" }[key]}</button>`;
  const side = html`<span class="chips"><input type="search" placeholder=${`filter ${numbers.length} metrics`} aria-label="Filter metrics by a regular expression" value=${filter} onInput=${(event) => setFilter(event.currentTarget.value)} />${toggle("smooth")}${toggle("log")}${toggle("time")}</span>`;
  return html`<${Panel} title="Metrics" note=${filter ? "" : rest ? `${rest} more by the filter; drag across a chart to zoom, double-click to reset` : ""} side=${side}>
    ${groups.filter(([, keys]) => keys.length).map(([title, keys]) => html`<h3 key=${title}>${title}</h3>
      <div class="small-multiples" key=${`${title}-charts`}>${keys.slice(0, 40).map((key) => html`<${Small} key=${key} name=${key} xs=${xs} values=${steps.metrics[key]} options=${options} run=${run} steps=${steps} />`)}</div>`)}
    ${groups.every(([, keys]) => !keys.length) && html`<p class="empty">No metric matches.</p>`}
  <//>`;
}

function matching(filter) {
  try {
    const pattern = new RegExp(filter, "i");
    return (key) => pattern.test(key);
  } catch {
    return (key) => key.includes(filter);
  }
}

function varies(values) {
  return values.some((value) => value !== null && value !== 0);
}

function Small({ name, xs, values, options, run, steps }) {
  const series = useMemo(() => {
    const shown = options.log ? values.map((v) => (v > 0 ? v : null)) : values;
    const line = { label: name, values: shown, colour: "--c1", width: 1.5 };
    return options.smooth ? [{ ...line, colour: "--c1-faint", quiet: true, width: 1 }, { ...line, values: movingMean(shown, 9) }] : [line];
  }, [values, options.log, options.smooth]);
  const last = values.findLast((value) => value !== null);
  const format = /^mfu$|_share$/.test(name) ? pct : name.endsWith("_per_s") ? num : name.endsWith("_s") ? secs : num;
  const pick = (x) => go(href(run, "step", [options.time ? steps.step[xs.indexOf(x)] : x]));
  return html`<div class="small"><h3><span class="grow">${LABELS[name] ?? words(name)}</span><b>${format(last)}</b></h3>
    <${Chart} title=${LABELS[name] ?? words(name)} xs=${xs} series=${series} height=${110} log=${options.log} sync="steps" format=${format} axis=${options.time ? "time" : "step"} onPick=${pick} /></div>`;
}

const PARTS = [["collect_s", "collect", "--c1"], ["train_s", "train", "--c2"], ["publish_s", "publish weights", "--c3"]];

/** Collect, train and publish of each step as one bar. */
export function StepTime({ steps, run }) {
  const parts = PARTS.filter(([key]) => steps.metrics[key]).map(([key, label, colour]) => ({ label, colour, values: steps.metrics[key].map((v) => v ?? 0) }));
  const used = steps.step.map((_, i) => parts.reduce((sum, part) => sum + part.values[i], 0));
  const other = steps.metrics.step_s?.map((total, i) => Math.max(0, (total ?? 0) - used[i]));
  if (other?.some((v, i) => v > 0.02 * (used[i] || 1))) parts.push({ label: "other", colour: "--c6", values: other });
  if (!parts.length) return "";
  return html`<${Panel} title="Where a step's time goes"><${Stack} title="seconds per step" xs=${steps.step} parts=${parts} format=${secs} height=${84} link=${(step) => href(run, "step", [step])} /><//>`;
}
