// Two rollouts side by side, tied by turn: equal turns are marked up to the first difference.
import { html } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, plural, secs, words } from "../format.js";
import { rolloutHref } from "../router.js";
import { Badge, Reward, useData, Waiting } from "../ui.js";
import { Block, Line } from "../text.js";
import { Call } from "./call.js";

export function Pair({ names, query }) {
  const [a, b] = [names[0], names.at(-1)];
  const { id_a: idA, id_b: idB } = query;
  const match = useData(apiPath(["compare"], { runs: [...new Set(names)].join(","), id_a: idA, id_b: idB }));
  const left = { page: useData(apiPath([a, "rollout"], { id: idA })), text: useData(apiPath([a, "transcript"], { id: idA })), run: a, id: idA };
  const right = { page: useData(apiPath([b, "rollout"], { id: idB })), text: useData(apiPath([b, "transcript"], { id: idB })), run: b, id: idB };
  const title = html`<div class="title"><h1>Two rollouts</h1>${match.data && html`<span class="dim">${match.data.shared_turns ? `the first ${plural(match.data.shared_turns, "reply is", "replies are")} equal, token by token` : "they differ from the first reply on"}</span>`}</div>`;
  const failed = [match, left.page, left.text, right.page, right.text].find((part) => !part.data);
  if (failed) return html`${title}<${Waiting} of=${failed} />`;
  const count = Math.max(match.data.a.length, match.data.b.length);
  const turnOf = (side, line, i) => side.text.data.turns.find((turn) => turn.turn === line[i]);
  return html`${title}
    <div class="pair heads"><${Head} side=${left} /><${Head} side=${right} /></div>
    ${Array.from({ length: count }, (_, i) => html`<section class="pair" key=${i} aria-label=${`turn ${i}`}>
      <h2 class="pair-title">Turn ${i}${i < match.data.shared_turns ? html` <span class="badge good">equal</span>` : i === match.data.shared_turns ? html` <span class="badge warn">first difference</span>` : ""}</h2>
      <${Side} turn=${turnOf(left, match.data.a, i)} /><${Side} turn=${turnOf(right, match.data.b, i)} /></section>`)}
    <div class="pair"><${End} side=${left} /><${End} side=${right} /></div>`;
}

function Head({ side }) {
  const { row } = side.page.data;
  return html`<div class="panel"><h2 class="mono"><a href=${rolloutHref(side.run, side.id)}><${Line} text=${side.id} /></a></h2>
    ${row ? html`<p><${Badge} value=${row.outcome || row.status} /> reward <${Reward} value=${row.reward} /> <span class="dim">· ${plural(row.calls, "call")}, ${int(row.sampled)} tokens, ${secs(row.total_s)}</span></p><p class="small dim"><${Line} text=${row.task} max=${80} />, ${row.phase === "train" ? `step ${row.step}` : words(row.phase)}</p>` : html`<p>${words(side.page.data.state.state)}</p>`}</div>`;
}

function Side({ turn }) {
  if (!turn) return html`<div class="reply gone"><span class="dim">no such turn</span></div>`;
  const { reply } = turn;
  return html`<div class="side">
    ${turn.messages.filter((message) => message.role === "tool").map((message) => html`<${Block} text=${message.text} ansi lines=${12} label="result" />`)}
    <div class="reply">${reply ? html`
      ${reply.reasoning && html`<div class="reasoning"><${Block} text=${reply.reasoning.text} lines=${8} label="reasoning" /></div>`}
      ${reply.text.text.trim() && html`<${Block} text=${reply.text.text} kind="plain" lines=${16} label="reply" />`}
      ${reply.calls.map((call) => html`<${Call} call=${call} />`)}
      ${!reply.calls.length && !reply.text.text.trim() && html`<span class="dim">no text, no call</span>`}` : html`<span class="dim">no text here</span>`}</div></div>`;
}

function End({ side }) {
  const { verdict, row } = side.page.data;
  return html`<div class="notice"><b>${words(row?.outcome || row?.status || "")}</b> <${Line} text=${verdict?.reason || row?.error || ""} max=${300} /></div>`;
}
