// What was judged and why: diff, verdict, attempts, log, files, raw rows.
import { html } from "../vendor/preact-htm.module.js";
import { apiPath, isEmbedded } from "../api.js";
import { int, num, pct, plural, secs, size, words } from "../format.js";
import { Badge, Empty, Facts, Panel, Table, useData, Waiting } from "../ui.js";
import { Block, Copy, Line } from "../text.js";
import { diffSummary, DiffView } from "../difftext.js";

const OUTCOMES = {
  resolved: "All required checks pass.", unresolved: "Required checks fail.", tampered: "The agent tampered with what judges it.",
  refused: "The change could not be judged.", test_timeout: "The tests ran out of time.", infra: "The grading itself failed.",
};
const TRUST = {
  strong: "strong: cases and expected results never enter the sandbox", standard: "standard: tests run in a clean sandbox, with controls that must fail",
  weak: "weak: the verdict is made inside the sandbox",
};

/** Why a rollout has less than full reward, in one line. */
export function whyWords(row, verdict) {
  if (row.error) return `${words(row.status)}: ${row.error}`;
  if (verdict?.reason) return verdict.reason;
  return row.status === "ok" ? OUTCOMES[row.outcome] ?? words(row.outcome || "no verdict") : words(row.status);
}

export function VerdictTab({ data }) {
  const { verdict, row } = data;
  const checks = verdict.evidence ?? [];
  return html`
    <${Panel} title=${OUTCOMES[verdict.outcome] ?? words(verdict.outcome)} side=${html`<${Badge} value=${verdict.outcome} />`}>
      ${verdict.reason && html`<${Block} text=${verdict.reason} label="reason" />`}
      <${Facts} items=${[
        ["Checks passed", verdict.total ? `${int(verdict.passed)} of ${int(verdict.total)} (${pct(verdict.passed / verdict.total)})` : "none ran"],
        verdict.fail_to_pass[1] > 0 && ["Must be fixed", `${int(verdict.fail_to_pass[0])} of ${int(verdict.fail_to_pass[1])}`],
        verdict.pass_to_pass[1] > 0 && ["Must keep passing", `${int(verdict.pass_to_pass[0])} of ${int(verdict.pass_to_pass[1])}`],
        ["Trust", TRUST[verdict.trust] ?? words(verdict.trust)], verdict.duration_s > 0 && ["Graded in", secs(verdict.duration_s)], ["Grader", html`<${Line} text=${verdict.grader} />`],
        verdict.image && ["Image", html`<span class="mono"><${Line} text=${verdict.image} /></span>`],
      ]} />
    <//>
    ${checks.length > 0 && html`<${Panel} title="Failing checks" note="for operators only: agents never see them">${checks.map((check) => html`<${Check} check=${check} />`)}<//>`}
    ${verdict.controls && html`<${Panel} title="Controls" note="checks that must fail or pass regardless of the change"><${Block} text=${verdict.controls} label="controls" /><//>`}
    ${verdict.dropped_paths.length > 0 && html`<${Panel} title="Changes that were not graded" note="protected paths"><ul class="list mono">${verdict.dropped_paths.map((path) => html`<li><${Line} text=${path} /></li>`)}</ul><//>`}
    ${Object.keys(data.components).length > 0 && html`<${Panel} title="Parts of the reward"><${Facts} items=${Object.entries(data.components).map(([key, value]) => [words(key), num(value)])} /><//>`}
    <${Panel} title="Hashes" note="what exactly was judged"><${Facts} items=${[["Task", html`<span class="mono"><${Line} text=${verdict.task_hash} /></span>`], ["Diff", html`<span class="mono"><${Line} text=${verdict.diff_hash || "no change"} /></span>`]]} />
      <p class="note">Judge again: <code>insitu grade</code> with this rollout.${row.reward !== verdict.reward ? ` The reward of the rollout is ${num(row.reward)}, the verdict's is ${num(verdict.reward)}.` : ""}</p><//>`;
}

function Check({ check }) {
  return html`<details class="check" open><summary><b><${Line} text=${check.name} /></b> <${Badge} value=${check.outcome} /></summary>
    ${[["expected", "expected"], ["got", "got"], ["tail", "end of the output"]].filter(([key]) => check[key]).map(([key, label]) => html`<span class="role">${label}</span><${Block} text=${String(check[key])} ansi lines=${12} label=${key} />`)}</details>`;
}

export function DiffTab({ route, id }) {
  const loaded = useData(apiPath([route.run, "diff"], { id }));
  if (!loaded.data) return html`<${Waiting} of=${loaded} />`;
  const { diff, files, deleted, dropped } = loaded.data;
  if (diff) return html`<div class="chips"><span>${diffSummary(diff)}</span><span class="grow"></span><${Copy} text=${diff} label="Copy as .patch" /></div><${DiffView} text=${diff} dropped=${dropped} />`;
  if (!files.length && !deleted.length) return html`<${Empty}>The agent changed nothing.<//>`;
  return html`<p class="note">The judged diff was not recorded: changed files are shown whole.</p>
    ${deleted.map((path) => html`<div class="notice"><span class="badge bad">deleted</span> <span class="mono"><${Line} text=${path} /></span></div>`)}
    ${files.map((file) => html`<details class="file" open><summary><span class="mono path"><${Line} text=${file.path} /></span>
        ${dropped.includes(file.path) && html`<span class="badge bad">dropped, not graded</span>`}${Boolean(file.executable) && html`<span class="badge">executable</span>`}
        <span class="grow"></span><span class="dim">${size(file.size)}</span></summary>
      <div class="inset">${file.text === null ? html`<${Empty}>A binary file.<//>` : html`<${Block} text=${file.text} lines=${80} label=${file.path} />${file.chars > file.text.length ? html`<p class="note">${int(file.text.length)} of ${int(file.chars)} characters are shown.</p>` : ""}`}
      ${!isEmbedded() && html`<a href=${`api/${apiPath([route.run, "download"], { id, file: file.path })}`} download>Download</a>`}</div></details>`)}`;
}

export function AttemptsTab({ data }) {
  const columns = [
    { key: "attempt", label: "Attempt", num: true }, { key: "status", label: "Status", cell: (row) => html`<${Badge} value=${row.status} />` },
    ...["queued_s", "engine_s", "agent_s", "grade_s", "total_s"].map((key) => ({ key, label: words(key), num: true, value: (row) => row.timings[key], cell: (row) => secs(row.timings[key]) })),
    { key: "captured", label: "Tokens", num: true, value: (row) => row.ledger.captured, cell: (row) => int(row.ledger.captured) },
    { key: "egress", label: "Network attempts", num: true }, { key: "error", label: "Error", cls: "wrap", cell: (row) => html`<${Line} text=${row.error || "–"} max=${400} />` },
  ];
  return html`<${Panel} title=${plural(data.attempts.length, "attempt")} note="an infrastructure failure starts another one"><${Table} label="attempts" columns=${columns} rows=${data.attempts} /><//>`;
}

export function LogTab({ route, id }) {
  const loaded = useData(apiPath([route.run, "log"], { id }));
  if (!loaded.data) return html`<${Waiting} of=${loaded} />`;
  const { text, chars } = loaded.data;
  if (text === null) return html`<${Empty}>No output of the agent was kept.<//>`;
  return html`<div class="chips"><span class="note">${plural(loaded.data.lines, "line")}, ${size(loaded.data.bytes)}${chars > text.length ? `; the first ${int(text.length)} characters are shown` : ""}</span><span class="grow"></span><${Copy} text=${text} /></div><${Block} text=${text} ansi lines=${400} label="log of the agent" />`;
}

export function ArtifactsTab({ route, id }) {
  const loaded = useData(apiPath([route.run, "artifacts"], { id }));
  if (!loaded.data) return html`<${Waiting} of=${loaded} />`;
  const columns = [
    { key: "path", label: "File", cls: "wrap", cell: (row) => isEmbedded() ? html`<span class="mono"><${Line} text=${row.path} /></span>` : html`<a class="mono" download href=${`api/${apiPath([route.run, "download"], { id, artifact: row.path })}`}><${Line} text=${row.path} /></a>` },
    { key: "size", label: "Size", num: true, cell: (row) => size(row.size) },
  ];
  return html`<${Panel} title="Files of the agent" note="downloads only: they are never shown here"><${Table} label="files" columns=${columns} rows=${loaded.data.artifacts} /><//>`;
}

export function RawTab({ route, id }) {
  const loaded = useData(apiPath([route.run, "raw"], { id }));
  if (!loaded.data) return html`<${Waiting} of=${loaded} />`;
  const text = JSON.stringify(loaded.data, null, 2);
  return html`<div class="chips"><span class="note">Stored rows without token arrays.</span><span class="grow"></span><${Copy} text=${text} label="Copy JSON" /></div><${Block} text=${text} lines=${300} label="stored rows" />`;
}
