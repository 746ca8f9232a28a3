// One rollout: the head stays on every tab; the tab, the turn and the token are in the address.
import { html, useEffect, useState } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, isNumber, NONE, num, pct, plural, secs, signed, when, words } from "../format.js";
import { useKeys } from "../keys.js";
import { useRun, useRunVersion } from "../live.js";
import { go, href, rolloutHref, setQuery } from "../router.js";
import { Badge, Reward, Tabs, useData, Waiting } from "../ui.js";
import { Line } from "../text.js";
import { Picture } from "./picture.js";
import { listed } from "./rollouts.js";
import { Transcript } from "./transcript.js";
import { TokensTab } from "./tokens.js";
import { ArtifactsTab, AttemptsTab, DiffTab, LogTab, RawTab, VerdictTab, whyWords } from "./evidence.js";
import { TreeTab } from "./tree.js";

export function RolloutPage({ route }) {
  const id = route.parts.join("/");
  const version = useRunVersion(5);
  // A decided rollout does not change: only one under way is fetched again.
  const [decided, setDecided] = useState("");
  const loaded = useData(apiPath([route.run, "rollout"], { id }), decided === id ? 0 : version);
  useEffect(() => {
    if (loaded.data?.row) setDecided(id);
  }, [loaded.data, id]);
  if (!loaded.data) return html`<h1 class="mono"><${Line} text=${id} /></h1><${Waiting} of=${loaded} />`;
  return html`<${Loaded} key=${id} data=${loaded.data} route=${route} id=${id} />`;
}

const TABS = [["transcript", "Transcript", "t"], ["tokens", "Tokens", "i"], ["diff", "Diff", "d"], ["verdict", "Verdict", "v"], ["tree", "Tree", ""], ["attempts", "Attempts", ""], ["log", "Log", ""], ["files", "Files", ""], ["raw", "Raw", ""]];

function Loaded({ data, route, id }) {
  const { run } = useRun();
  const available = TABS.filter(([tab]) => shows(tab, data, run));
  const tab = available.some(([name]) => name === route.query.tab) ? route.query.tab : "transcript";
  const link = (name) => rolloutHref(route.run, id, { tab: name === "transcript" ? "" : name });
  const near = data.neighbours ?? { group: [] };
  const at = listed.ids.indexOf(id);
  const previous = at > 0 ? listed.ids[at - 1] : at === -1 ? near.next : null;
  const next = at >= 0 ? listed.ids[at + 1] ?? null : near.previous;
  const member = near.group.indexOf(id);
  const open = (other) => other && go(rolloutHref(route.run, other, { tab: tab === "transcript" ? "" : tab }));
  useKeys({
    h: ["previous rollout in the list", () => open(previous)],
    l: ["next rollout in the list", () => open(next)],
    "[": ["previous in the group", () => open(near.group[member - 1])],
    "]": ["next in the group", () => open(near.group[member + 1])],
    "{": ["same task, earlier step", () => open(near.earlier)],
    "}": ["same task, later step", () => open(near.later)],
    ...Object.fromEntries(available.filter(([, , key]) => key).map(([name, label, key]) => [key, [`tab ${label}`, () => setQuery({ tab: name === "transcript" ? "" : name }, false)]])),
  });
  return html`
    <${Head} data=${data} route=${route} id=${id} moves=${{ previous, next, near, member, open: (other) => rolloutHref(route.run, other, { tab: tab === "transcript" ? "" : tab }) }} />
    ${data.row && html`<${Picture} data=${data} run=${route.run} id=${id} />`}
    <${Tabs} label="Parts of the rollout" current=${tab} tabs=${available.map(([name, label]) => [name, tabLabel(name, label, data), link(name)])} />
    <${Tab} tab=${tab} data=${data} route=${route} id=${id} />`;
}

function shows(tab, data, run) {
  if (tab === "tokens") return run?.has_tokens !== false && Boolean(data.turns?.length);
  if (tab === "verdict") return Boolean(data.verdict);
  if (tab === "log") return data.has.log;
  if (tab === "files") return data.has.artifacts;
  if (tab === "diff") return Boolean(data.row);
  return tab !== "tree" || Boolean(data.turns?.length);
}

function tabLabel(name, label, data) {
  const count = { transcript: data.turns?.length, diff: data.files ? data.files.length + data.deleted.length : undefined, attempts: data.attempts.length > 1 ? data.attempts.length : undefined }[name];
  return count === undefined ? label : html`${label} <span class="dim">${count}</span>`;
}

function Tab({ tab, data, route, id }) {
  const page = { transcript: Transcript, tokens: TokensTab, diff: DiffTab, verdict: VerdictTab, tree: TreeTab, attempts: AttemptsTab, log: LogTab, files: ArtifactsTab, raw: RawTab }[tab];
  return html`<${page} key=${tab} data=${data} route=${route} id=${id} />`;
}

function Head({ data, route, id, moves }) {
  const { row, credit, state } = data;
  const place = row ?? { phase: state.phase, step: state.step, group: state.group_no, task: state.task_id };
  return html`<div class="title">
      <h1 class="mono"><${Line} text=${id} /></h1>${row ? html`<${Badge} value=${row.outcome || row.status} />` : html`<${Badge} value=${state.state} />`}
      <span class="grow"></span><${Moves} moves=${moves} />
      <span class="sub">Task <a href=${href(route.run, "task", [place.task])}><${Line} text=${place.task} /></a>${row?.category ? html` (<${Line} text=${row.category} />)` : ""}${row?.task_set ? html`, task set <${Line} text=${row.task_set} />` : ""}${data.agent ? html`, agent <${Line} text=${data.agent} />` : ""} · <a href=${href(route.run, "group", [place.phase, place.step, place.group])}>group ${place.group}</a> of ${place.phase === "train" ? html`<a href=${href(route.run, "step", [row?.account ?? place.step])}>step ${row?.account ?? place.step}</a>` : words(place.phase)}${row ? html` · ended ${when(row.ended_s)}` : ""}</span></div>
    ${row ? html`<${Figures} row=${row} credit=${credit} waits=${data.waits} run=${route.run} />${!(row.reward >= 1) && html`<${WhyNot} row=${row} verdict=${data.verdict} link=${rolloutHref(route.run, id, { tab: "verdict" })} />`}` : html`<div class="notice info">This rollout is ${words(state.state)}${state.reason ? ` (${words(state.reason)})` : ""}. The page updates by itself.</div>`}`;
}

function Moves({ moves }) {
  const { previous, next, near, member, open } = moves;
  const link = (id, text, title) => (id ? html`<a class="button" href=${open(id)} title=${title}>${text}</a>` : html`<span class="button off" aria-hidden="true">${text}</span>`);
  return html`<span class="moves small"><span class="dim">list</span>${link(previous, "←", "previous in the list (h)")}${link(next, "→", "next in the list (l)")}
    ${near.group.length > 1 && html`<span class="dim">group</span>${link(near.group[member - 1], "←", "previous in the group ([)")}${link(near.group[member + 1], "→", "next in the group (])")}`}
    ${(near.earlier || near.later) && html`<span class="dim">task</span>${link(near.earlier, "←", "same task, earlier step ({)")}${link(near.later, "→", "same task, later step (})")}`}</span>`;
}

function Figures({ row, credit, waits, run }) {
  const trained = credit?.proof === "identical";
  const planned = credit && credit.proof !== "unknown";
  return html`<section class="panel strip" aria-label="figures"><div class="figures">
    <dl class="stats">
      ${figure("Reward", html`<${Reward} value=${row.reward} />`, row.total ? `${int(row.passed)} of ${int(row.total)} checks` : "")}
      ${figure("Status", words(row.status), row.attempt > 1 ? `attempt ${row.attempt}` : "")}
      ${figure("Advantage × weight", isNumber(credit?.advantage) ? html`${signed(credit.advantage)} <span class="dim">× ${num(credit.weight)}</span>` : NONE, credit ? (trained && isNumber(credit.advantage) ? html`<span class="good-text" title="the recomputed plan has the digest of the trained one">✓ proven</span>` : words(credit.reason || credit.problem)) : row.fate ? words(row.fate) : "")}
      ${figure(planned ? "Tokens trained" : "Tokens to train", html`${int(planned ? credit.trained : row.trained)} <span class="dim">of ${int(row.sampled)}</span>`, Object.entries(row.excluded ?? {}).map(([reason, n]) => `${int(n)} ${words(reason)}`).join(", "))}
      ${figure("Calls", int(row.calls), "")}
      ${figure("Weights", isNumber(row.oldest) ? `version ${row.oldest === row.version ? row.version : `${row.oldest}–${row.version}`}` : NONE, "")}
    </dl>
    <${Times} row=${row} waits=${waits} />
    ${waits?.longest.length > 0 && html`<p class="note">Longest waits: ${waits.longest.slice(0, 3).map((wait, i) => html`${i ? ", " : ""}<a href=${href(run, "rollout", row.id.split("/"), { turn: wait.turn })}>turn ${wait.turn}</a> ${wait.kind === "tools" ? "agent and tools" : "model"} ${secs(wait.s)}`)}</p>`}
  </div></section>`;
}

function figure(label, value, note) {
  return html`<div class="stat"><dt class="label">${label}</dt><dd class="value">${value}</dd>${note ? html`<dd class="note">${note}</dd>` : ""}</div>`;
}

/** Queue, engine, tools and grading as one bar. */
export function Times({ row, waits = null }) {
  const model = waits ? waits.sampling_s : row.engine_s;
  const tools = waits ? waits.tools_s : Math.max(0, row.agent_s - row.engine_s);
  const parts = [["queued", row.queued_s, "--c6"], ["model", model, "--c1"], ["agent and tools", tools, "--c3"], ["grading", row.grade_s, "--c2"]];
  const rest = row.total_s - parts.reduce((sum, part) => sum + part[1], 0);
  if (rest > 0.02 * row.total_s) parts.push(["other waits", rest, "--c5"]);
  const total = parts.reduce((sum, part) => sum + part[1], 0) || 1;
  return html`<div class="times"><div class="timebar" role="img" aria-label=${`time ${secs(row.total_s)}: ${parts.map(([name, s]) => `${name} ${secs(s)}`).join(", ")}`}>${parts.map(([name, s, colour]) => html`<span style=${{ width: `${(100 * s) / total}%`, background: `var(${colour})` }} title=${`${name} ${secs(s)}`}></span>`)}</div>
    <ul class="legend"><li><b class="num">${secs(row.total_s)}</b></li>${parts.filter(([, s]) => s > 0).map(([name, s, colour]) => html`<li><span class="swatch box" style=${{ background: `var(${colour})` }}></span>${name} ${secs(s)} <span>${pct(s / total)}</span></li>`)}</ul></div>`;
}

function WhyNot({ row, verdict, link }) {
  const check = verdict?.evidence?.[0];
  return html`<div class="notice ${row.outcome === "tampered" ? "bad" : "warn"}"><b>Why not solved:</b> <${Line} text=${whyWords(row, verdict)} max=${400} />${check && html`. First failing check: <b><${Line} text=${check.name} max=${80} /></b>${check.expected || check.got ? html`, expected <span class="mono"><${Line} text=${check.expected || "–"} max=${80} /></span>, ${check.got ? html`got <span class="mono"><${Line} text=${check.got} max=${80} /></span>` : html`<${Line} text=${check.outcome} max=${80} />`}` : ""}`}${verdict ? html` <a href=${link}>Verdict</a>` : ""}</div>`;
}
