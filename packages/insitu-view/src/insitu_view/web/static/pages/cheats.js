// Evidence of cheating, ranked; none of it is a verdict on its own.
import { html } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int, plural, words } from "../format.js";
import { useRunVersion } from "../live.js";
import { href, rolloutHref } from "../router.js";
import { Badge, Panel, Reward, Table, useData, Waiting } from "../ui.js";
import { Line } from "../text.js";

const MEANING = {
  "tampered": "the agent changed what judges it, and the verdict says so",
  "protected paths changed": "changes to protected files, which were not judged",
  "network attempts": "connections that the sandbox refused",
  "rewarded by a weak verdict": "the verdict was made inside the sandbox, where the agent's code runs",
  "solved without a change": "the checks pass and no file differs",
  "solved, test files changed": "the checks pass and files with “test” in their path differ",
  "solved in one call": "may be an easy task, or a known answer",
};
/** What alone is a reason to look; the others are often harmless. */
const STRONG = new Set(["tampered", "protected paths changed", "network attempts", "solved without a change"]);

export function strongOf(kinds) {
  return kinds.filter((kind) => kind.n > 0 && STRONG.has(kind.evidence));
}

export function CheatsPage({ route }) {
  const loaded = useData(apiPath([route.run, "cheats"]), useRunVersion(15));
  if (!loaded.data) return html`<h1>Cheats</h1><${Waiting} of=${loaded} />`;
  const { kinds, shared_diffs: shared, alarms } = loaded.data;
  const found = kinds.filter((kind) => kind.n > 0).sort((a, b) => Number(STRONG.has(b.evidence)) - Number(STRONG.has(a.evidence)) || a.n - b.n);
  const nothing = kinds.filter((kind) => !kind.n);
  const strong = strongOf(found);
  return html`<div class="title"><h1>Cheats</h1><span class="sub">Evidence to look at, strongest first. None of it is a verdict on its own.</span></div>
    ${strong.length ? html`<div class="notice bad"><b>Look at:</b> ${strong.map((kind, i) => html`${i ? ", " : ""}${kind.evidence} (${int(kind.n)})`)}</div>` : html`<div class="notice good"><b>✓ No strong evidence:</b> no tampering, no protected file changed, no network attempt, nothing solved without a change.</div>`}
    ${Object.entries(alarms).filter(([, steps]) => steps.length).map(([name, steps]) => html`<div class="notice warn"><b>${words(name.replace(/_alarm$/, ""))} alarm</b> in ${steps.slice(-12).map((step, i) => html`${i ? ", " : ""}<a href=${href(route.run, "step", [step])}>step ${step}</a>`)}</div>`)}
    ${found.map((kind) => html`<${Panel} key=${kind.evidence} title=${kind.evidence[0].toUpperCase() + kind.evidence.slice(1)} note=${MEANING[kind.evidence] ?? ""} side=${html`<b class="num">${plural(kind.n, "rollout")}</b>`}><${Suspects} kind=${kind} run=${route.run} /><//>`)}
    ${shared.length > 0 && html`<${Panel} title="One change that solves several tasks" note="the same diff was judged as solving different tasks"><${Table} label="shared diffs" rows=${shared} columns=${[
      { key: "diff_hash", label: "Diff", cls: "id", cell: (row) => html`<${Line} text=${row.diff_hash} max=${16} />` }, { key: "tasks", label: "Tasks", num: true }, { key: "n", label: "Rollouts", num: true },
      { key: "example", label: "Example", cls: "id", cell: (row) => html`<a href=${rolloutHref(route.run, row.example, { tab: "diff" })}><${Line} text=${row.example} /></a>` }]} /><//>`}
    ${nothing.length > 0 && html`<p class="note">Looked for and not found: ${nothing.map((kind) => kind.evidence).join("; ")}.</p>`}`;
}

function Suspects({ kind, run }) {
  return html`<${Table} label=${kind.evidence} rows=${kind.rollouts} first=${5} columns=${[
    { key: "id", label: "Rollout", cls: "id", cell: (row) => html`<a href=${rolloutHref(run, row.id, { tab: kind.evidence.includes("paths") || kind.evidence.includes("files") ? "diff" : "" })}><${Line} text=${row.id} /></a>` },
    { key: "task", label: "Task", cell: (row) => html`<${Line} text=${row.task} max=${50} />` }, { key: "outcome", label: "Outcome", cell: (row) => html`<${Badge} value=${row.outcome || row.status} />` },
    { key: "reward", label: "Reward", num: true, cell: (row) => html`<${Reward} value=${row.reward} />` }, { key: "calls", label: "Calls", num: true },
    { key: "what", label: "Evidence", cls: "wrap", sort: false, cell: (row) => html`<${Line} text=${[...(row.dropped ?? []), row.egress > 0 ? plural(row.egress, "network attempt") : "", row.reason].filter(Boolean).join("; ")} max=${160} />` },
  ]} />`;
}
