// What the agent did, turn by turn: the main line, with other branches folded where they left it.
import { html, useEffect, useMemo, useState } from "../vendor/preact-htm.module.js";
import { apiPath, get } from "../api.js";
import { int, plural, secs, words } from "../format.js";
import { useKeys } from "../keys.js";
import { rolloutHref, setQuery } from "../router.js";
import { Empty, useStored } from "../ui.js";
import { Block, Line } from "../text.js";
import { Call } from "./call.js";

const DEFAULT = { reasoning: true, results: true, system: false, raw: false };

export function Transcript({ data, route, id }) {
  const text = useTranscript(route.run, id, data.turns?.length ?? 0);
  const [show, setShow] = useStored("transcript", DEFAULT);
  const [open, setOpen] = useState(false);
  const [at, setAt] = useState(Number(route.query.turn ?? -1));
  const lanes = useMemo(() => lanesOf(data), [data]);
  const order = lanes.flatMap((lane) => (lane.main ? lane.turns : []));
  const toggle = (key) => setShow({ ...show, [key]: !show[key] });
  const select = (turn, scroll = true) => {
    setAt(turn);
    setQuery({ turn });
    if (scroll) requestAnimationFrame(() => document.getElementById(`turn-${turn}`)?.scrollIntoView({ block: "start" }));
  };
  const move = (by) => {
    const place = order.indexOf(at);
    select(order[Math.max(0, Math.min(order.length - 1, place === -1 ? 0 : place + by))]);
  };
  useKeys({
    j: ["next turn", () => move(1)],
    k: ["previous turn", () => move(-1)],
    r: ["show or hide reasoning", () => toggle("reasoning")],
    o: ["show or hide tool output", () => toggle("results")],
    e: ["expand or collapse all", () => setOpen(!open)],
  });
  useEffect(() => {
    if (route.query.turn !== undefined) setAt(Number(route.query.turn));
    if (text.turns.size && route.query.turn) document.getElementById(`turn-${route.query.turn}`)?.scrollIntoView({ block: "start" });
  }, [text.turns.size > 0, route.query.turn]);
  if (!data.turns?.length) return html`<${Empty}>This rollout has no model call${data.row?.error ? html`: <${Line} text=${data.row.error} />` : "."}<//>`;
  const chip = (key, label) => html`<button class="chip" aria-pressed=${show[key]} onClick=${() => toggle(key)}>${label}</button>`;
  return html`
    <div class="chips sticky-tools" role="group" aria-label="What is shown">
      ${chip("reasoning", "reasoning")}${chip("results", "tool output")}${chip("system", "system prompt")}${chip("raw", "raw calls")}
      <button class="chip" aria-pressed=${open} onClick=${() => setOpen(!open)}>expand all</button></div>
    ${text.problem && html`<div class="notice warn"><${Line} text=${text.problem} /> Turns are shown without their text.</div>`}
    <div class="transcript">${lanes.map((lane) => lane.main ? html`${lane.step && html`<h3>Step ${lane.step}</h3>`}${lane.turns.map((turn) => html`<${Turn} key=${turn} turn=${turn} head=${data.turns.find((t) => t.turn === turn)} text=${text.turns.get(turn)} show=${show} open=${open} here=${turn === at} data=${data} route=${route} id=${id} onPick=${() => select(turn, false)} />`)}`
      : html`<${Lane} key=${`lane-${lane.turns[0]}`} lane=${lane} data=${data} text=${text} show=${show} open=${open} at=${at} route=${route} id=${id} select=${select} />`)}</div>
    ${text.loading ? html`<p class="empty" role="status">Loading turns…</p>` : text.error ? html`<div class="notice bad"><${Line} text=${text.error} /></div>` : html`<${End} data=${data} />`}`;
}

/** All turns as text, page by page. */
function useTranscript(run, id, count) {
  const [state, setState] = useState({ turns: new Map(), problem: "", loading: true, error: "" });
  useEffect(() => {
    const abort = new AbortController();
    const load = async () => {
      const turns = new Map();
      let start = 0;
      while (start !== null) {
        const page = await get(apiPath([run, "transcript"], { id, start }), abort.signal);
        for (const turn of page.turns) turns.set(turn.turn, turn);
        setState({ turns: new Map(turns), problem: page.problem, loading: page.next !== null, error: "" });
        start = page.next;
      }
    };
    load().catch((error) => abort.signal.aborted || setState((old) => ({ ...old, loading: false, error: error.message })));
    return () => abort.abort();
  }, [run, id, count]);
  return state;
}

/** The main line cut where other branches left it; a task of several steps has one for each, numbered from 1. */
export function lanesOf(data) {
  const segments = data.segments ?? [];
  const turns = (data.turns ?? []).map((turn) => turn.turn);
  const finals = segments.filter((segment) => segment.label === "final");
  const main = finals.length ? finals : segments.slice(-1);
  const lanes = [];
  let step = 0;
  for (const turn of turns) {
    const at = main.findIndex((segment) => segment.turns.includes(turn));
    if (finals.length > 1 && at + 1 > step) lanes.push({ main: true, step: (step = at + 1), owner: null, label: "", turns: [] });
    const owner = at >= 0 || !main.length ? null : segments.find((segment) => segment.turns.includes(turn)) ?? { segment: -1, label: data.turns.find((t) => t.turn === turn)?.excluded || "in no segment" };
    const last = lanes.at(-1);
    if (last && last.owner === (owner ? owner.segment : null)) last.turns.push(turn);
    else lanes.push({ main: !owner, owner: owner ? owner.segment : null, label: owner?.label ?? "", turns: [turn] });
  }
  return lanes;
}

const LANES = { subagent: "Sub-agent", auxiliary: "Side call", wipe: "Context that was wiped later", append: "Earlier branch" };
const CAUSES = {
  rewind: "the agent went back to an earlier point", context: "the context before it changed", new_root: "a new conversation began", retention: "the agent dropped part of what it had kept",
  missing: "a turn is missing in the agent's history", foreign: "the agent sent a reply that was not sampled here", arguments: "the agent changed arguments of a call",
};

const LABELS = { malformed: "malformed call", unknown_tool: "tool was not offered", parts_left_out: "an image or file was left out", insitu_blocked: "a hook blocked a call" };
const labelled = (label) => LABELS[label] ?? (label.startsWith("hook: ") ? label : "");

export function driftWords(drift) {
  return CAUSES[drift.cause] ?? words(drift.cause);
}

function Lane({ lane, data, text, show, open, at, route, id, select }) {
  const heads = lane.turns.map((turn) => data.turns.find((t) => t.turn === turn));
  const tokens = heads.reduce((sum, head) => sum + head.sampled, 0);
  const drift = data.drifts.find((d) => lane.turns.includes(d.turn) || lane.turns.includes(d.request));
  return html`<details class="lane" open=${open || lane.turns.includes(at)}>
    <summary><b>${LANES[lane.label] ?? words(lane.label)}</b> <span class="dim">${plural(lane.turns.length, "turn")}, ${plural(tokens, "token")}${drift ? html` · ${driftWords(drift)}${drift.detail ? html` (<${Line} text=${drift.detail} max=${80} />)` : ""}` : ""}</span></summary>
    ${lane.turns.map((turn) => html`<${Turn} key=${turn} turn=${turn} head=${data.turns.find((t) => t.turn === turn)} text=${text.turns.get(turn)} show=${show} open=${open} here=${turn === at} data=${data} route=${route} id=${id} onPick=${() => select(turn, false)} />`)}
  </details>`;
}

function Turn({ turn, head, text, show, open, here, data, route, id, onPick }) {
  const drift = data.drifts.find((d) => d.request === turn);
  const trained = !head.excluded && data.row?.state === "trained" && head.segments.length > 0;
  const fate = head.excluded ? words(head.excluded) : data.row?.state === "trained" ? (head.segments.length ? "trained" : "in no segment") : words(data.row?.fate || data.row?.state || "");
  const time = [head.began_s && head.ended_s && `model ${secs(head.ended_s - head.began_s)}`, head.waited_s !== null && head.waited_s !== undefined && `after ${secs(head.waited_s)} of agent and tools`, head.cached && `${int(head.cached)} prompt tokens cached`].filter(Boolean).join(" · ");
  const messages = (text?.messages ?? []).filter((message) => (message.role === "system" ? show.system : message.role === "tool" ? show.results : true));
  const versions = [...new Set(head.version_runs.map((run) => run[1]))].join(", ");
  return html`<article class=${`turn ${here ? "here" : ""} ${trained ? "trained" : head.excluded ? "excluded" : ""}`} id=${`turn-${turn}`} aria-label=${`turn ${turn}`} onClick=${onPick}>
    ${messages.map((message) => html`<${Message} message=${message} open=${open} />`)}
    <div class="reply">
      <header><b>Turn ${turn}</b> <a href=${rolloutHref(route.run, id, { tab: "tokens", turn })} title="the tokens of this turn">${plural(head.sampled, "token")}</a>
        <span class="dim">${[words(head.finish), versions && `version ${versions}`, time].filter(Boolean).join(" · ")}</span>
        ${head.labels.filter(labelled).map((label) => html`<span class="badge warn">${labelled(label)}</span>`)}
        ${fate && html`<span class=${`badge ${trained ? "info" : head.excluded ? "warn" : ""}`}>${fate}</span>`}
        ${drift && html`<span class="badge warn" title=${drift.kind}>${driftWords(drift)}</span>`}</header>
      ${text?.reply ? html`<${Reply} reply=${text.reply} show=${show} open=${open} />` : text ? html`<p class="dim">${plural(head.fresh, "prompt token")}, ${plural(head.sampled, "sampled token")}</p>` : html`<p class="dim">…</p>`}
    </div>
  </article>`;
}

function Message({ message, open }) {
  const role = message.role === "tool" ? `Result${message.name ? ` of ${message.name}` : ""}` : message.role[0].toUpperCase() + message.role.slice(1);
  return html`<div class=${`message ${message.role === "tool" ? "result" : ""}`}><span class="role"><${Line} text=${role} max=${80} /></span><${Block} text=${message.text} ansi=${message.role === "tool"} open=${open} lines=${message.role === "system" ? 12 : 30} label=${`${role} text`} /><${Cut} text=${message} /></div>`;
}

/** Says how much of a text the server kept back. */
function Cut({ text }) {
  return text.chars > text.text.length ? html`<p class="note">${int(text.chars - text.text.length)} of ${int(text.chars)} characters are not shown; the Raw tab and the files have them.</p>` : "";
}

function Reply({ reply, show, open }) {
  const silent = !reply.text.text.trim() && !reply.calls.length;
  return html`
    ${reply.reasoning && (show.reasoning ? html`<div class="reasoning"><span class="role">Reasoning</span><${Block} text=${reply.reasoning.text} open=${open} lines=${16} label="reasoning" /><${Cut} text=${reply.reasoning} /></div>` : html`<p class="dim small">Reasoning of ${plural(reply.reasoning.lines, "line")} is hidden (r).</p>`)}
    ${reply.text.text.trim() && html`<${Block} text=${reply.text.text} kind="plain" open=${open} label="reply" /><${Cut} text=${reply.text} />`}
    ${reply.calls.map((call) => html`<${Call} call=${call} raw=${show.raw} open=${open} />`)}
    ${silent && html`<p class="dim">${reply.reasoning ? "No text and no call." : "Empty reply."}</p>`}
    ${reply.malformed && html`<p class="warn-text small">The reply could not be parsed completely.</p>`}`;
}

function End({ data }) {
  if (!data.row) return "";
  const parts = [data.verdict?.reason && html`<b>Verdict:</b> <${Line} text=${data.verdict.reason} />`, data.row.error && html`<b>Error:</b> <${Line} text=${data.row.error} />`].filter(Boolean);
  return parts.length ? html`<p class="end">${parts.map((part, i) => html`${i ? " · " : ""}${part}`)}</p>` : "";
}
