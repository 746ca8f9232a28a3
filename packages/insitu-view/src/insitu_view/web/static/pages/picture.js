// One rollout in one picture: a lane per segment, by tokens or by time; a click opens the turn.
import { html, useMemo, useState } from "../vendor/preact-htm.module.js";
import { compact, int, plural, secs, words } from "../format.js";
import { rolloutHref } from "../router.js";
import { Panel, useStored } from "../ui.js";
import { AsTable, Bars } from "../chart.js";

/** Labels of segments: colour, and name of the lane. */
export const LABELS = { final: ["--c1", "main line"], subagent: ["--c3", "sub-agent"], auxiliary: ["--c5", "side call"], wipe: ["--c4", "wiped later"], append: ["--c2", "earlier branch"] };
const LOOSE = ["--c6", "in no segment"];
const SHOWN = 16;

export function Picture({ data, run, id }) {
  const [options, setOptions] = useStored("picture", { time: false });
  const [all, setAll] = useState(false);
  const lanes = useMemo(() => lanesOf(data), [data]);
  if (!lanes.length) return "";
  const spans = lanes.flatMap((lane) => lane.spans);
  const time = options.time && data.has.times;
  const link = (turn) => rolloutHref(run, id, { turn });
  const { rows, to } = time ? byTime(lanes, link) : byTokens(lanes, link);
  const chip = (label, value) => html`<button class="chip" aria-pressed=${time === value} disabled=${value && !data.has.times} onClick=${() => setOptions({ time: value })}>${label}</button>`;
  const attempt = data.row.attempt > 1 ? html` · <a href=${rolloutHref(run, id, { tab: "attempts" })}>↻ attempt ${int(data.row.attempt)}</a>` : "";
  const unknown = data.has.times ? "" : ", no times recorded";
  return html`<${Panel} title="Lanes" note=${html`a segment each${unknown}; click to open a turn${attempt}`} side=${html`<span class="chips">${chip("by tokens", false)}${chip("by time", true)}</span>`} cls="picture">
    <figure class="chart"><ul class="legend">
        ${[...new Map(lanes.map((lane) => [lane.name, lane.colour]))].map(([name, colour]) => html`<li><span class="swatch box" style=${{ background: `var(${colour})` }}></span>${name}</li>`)}
        <li><span class="swatch box context"></span>${time ? "before the first token" : "prompt and tool output"}</li>
        ${spans.some((span) => !span.trained && (span.here || !time)) && html`<li><span class="swatch box masked hatched"></span>sampled, not trained</li>`}
        ${spans.some((span) => span.again) && html`<li>↻N: tried again N times</li>`}</ul>
      <${Bars} title=${`lanes of the rollout by ${time ? "time" : "tokens"}`} rows=${all ? rows : rows.slice(0, SHOWN)} to=${to} ends=${["0", time ? secs(to) : plural(to, "token")]} />
      ${rows.length > SHOWN && !all && html`<button class="more" onClick=${() => setAll(true)}>Show ${plural(rows.length - SHOWN, "more lane")}</button>`}
      <${AsTable} title="lanes" columns=${columnsOf(lanes, link)} />
    </figure><//>`;
}

/** The segments of a rollout, the main line first, and a lane for turns that are in none. */
function lanesOf(data) {
  const heads = new Map((data.turns ?? []).map((head) => [head.turn, head]));
  const tries = new Map();
  for (const head of heads.values()) if (head.excluded === "retry_sibling") tries.set(head.parent, (tries.get(head.parent) ?? 0) + 1);
  const segments = data.segments ?? [];
  const owner = new Map();
  for (const segment of segments) for (const [turn, , , , n] of segment.spans) if (n || !owner.has(turn)) owner.set(turn, segment.segment);
  const planned = data.credit && data.credit.proof !== "unknown" ? new Set(data.credit.rows.map((row) => row.segment)) : null;
  const lost = data.credit?.reason || data.row?.fate || "";
  const span = (segment, [turn, start, sampled, stop, n]) => {
    const head = heads.get(turn);
    const kept = n > 0 && (planned ? planned.has(segment) : !lost);
    const here = owner.get(turn) === segment;
    const fate = kept ? `${n < stop - sampled ? `${int(n)} of them ` : ""}${planned ? "trained" : "may be trained"}` : head.excluded ? `not trained: ${words(head.excluded)}` : here ? `not trained: ${words(lost || "in no row of the plan")}` : "trained in another lane";
    return { turn, start, sampled, stop, trained: kept, here, fate, head, again: head.excluded ? 0 : tries.get(head.parent) ?? 0 };
  };
  const lane = (segment, [colour, name], found) => ({ segment, colour, name, spans: found.map((one) => span(segment, one)) });
  const lanes = [...segments].sort((a, b) => Number(b.label === "final") - Number(a.label === "final"))
    .map((segment) => lane(segment.segment, LABELS[segment.label] ?? ["--c6", segment.kind], segment.spans));
  // A task of several steps has a main line for each.
  if (segments.filter((segment) => segment.label === "final").length > 1) for (const [at, one] of lanes.entries()) if (one.name === LABELS.final[1]) one.name = `step ${at + 1}`;
  const loose = [...heads.values()].filter((head) => !owner.has(head.turn));
  let at = 0;
  const laid = loose.map((head) => [head.turn, at, at + head.fresh, (at += head.fresh + head.sampled), 0]);
  for (const head of loose) owner.set(head.turn, -1);
  if (laid.length) lanes.push(lane(-1, LOOSE, laid));
  return lanes.filter(({ spans }) => spans.length);
}

const naming = (lane, note) => html`${lane.name} <span class="dim">· ${note}</span>`;
const again = (span) => (span.again ? `↻${span.again}` : undefined);
const told = (span) => `turn ${span.turn}: ${plural(span.stop - span.sampled, "token")}, ${span.again ? `tried again ${plural(span.again, "time")}, ` : ""}${span.fate}`;
const looks = (span) => (span.trained ? "sampled" : "sampled hatched");

function byTokens(lanes, link) {
  const rows = lanes.map((lane) => ({
    key: lane.segment, name: naming(lane, compact(lane.spans.at(-1).stop)),
    parts: lane.spans.flatMap((span) => [
      { from: span.start, to: span.sampled, colour: "--line-strong", kind: "context", title: `turn ${span.turn}: ${plural(span.sampled - span.start, "prompt token")}`, link: link(span.turn) },
      { from: span.sampled, to: span.stop, colour: lane.colour, kind: looks(span), title: told(span), mark: again(span), link: link(span.turn) },
    ]),
  }));
  return { rows, to: Math.max(...lanes.map((lane) => lane.spans.at(-1).stop)) };
}

/** Each turn once, in the lane that trains it. */
function byTime(lanes, link) {
  const timed = lanes.flatMap((lane) => lane.spans.filter((span) => span.here && span.head.began_s && span.head.ended_s));
  const from = Math.min(...timed.map((span) => span.head.began_s));
  const rows = lanes.map((lane) => {
    const own = lane.spans.filter((span) => timed.includes(span));
    const parts = own.flatMap((span) => {
      const { began_s: began, first_s: first, ended_s: ended } = span.head;
      const begins = first ?? began;
      return [
        { from: began - from, to: begins - from, colour: "--line-strong", kind: "context", title: `turn ${span.turn}: ${secs(begins - began)} before the first token`, link: link(span.turn) },
        { from: begins - from, to: ended - from, colour: lane.colour, kind: looks(span), title: `${told(span)}, ${secs(ended - began)}`, mark: again(span), link: link(span.turn) },
      ];
    });
    return { key: lane.segment, name: naming(lane, secs(own.reduce((sum, { head }) => sum + head.ended_s - head.began_s, 0))), parts };
  });
  return { rows, to: Math.max(...timed.map((span) => span.head.ended_s)) - from };
}

function columnsOf(lanes, link) {
  const rows = lanes.flatMap((lane) => lane.spans.map((span) => ({ lane, span, times: span.head })));
  const column = (label, text) => ({ label, texts: rows.map(text) });
  return [
    column("lane", ({ lane }) => lane.name), column("turn", ({ span }) => html`<a href=${link(span.turn)}>turn ${span.turn}</a>`),
    column("prompt", ({ span }) => int(span.sampled - span.start)), column("sampled", ({ span }) => int(span.stop - span.sampled)),
    column("tried again", ({ span }) => int(span.again)), column("fate", ({ span }) => span.fate),
    column("model", ({ times }) => secs(times.began_s && times.ended_s ? times.ended_s - times.began_s : null)),
  ];
}
