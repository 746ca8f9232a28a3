// Columns of the list of rollouts. `sortable` ones are sorted by the server.
import { html } from "../vendor/preact-htm.module.js";
import { ago, int, NONE, num, secs, signed, words } from "../format.js";
import { href } from "../router.js";
import { Badge, Reward } from "../ui.js";
import { Line } from "../text.js";

const dim = (text) => html`<span class="dim">${text}</span>`;
const seconds = (key, label, title) => ({ key, label, title, num: true, sortable: true, cell: (row) => secs(row[key]) });

/** `mix`: only shown of a run with several task sets. */
export const COLUMNS = [
  { key: "id", label: "Rollout", sortable: true, cls: "id", cell: () => "" },
  { key: "phase", label: "Phase", cell: (row) => words(row.phase) },
  { key: "step", label: "Step", num: true, sortable: true, cell: (row, run) => (row.account === null ? int(row.step) : html`<a href=${href(run, "step", [row.account])}>${int(row.account)}</a>`) },
  { key: "task_set", label: "Task set", sortable: true, mix: true, cell: (row) => html`<${Line} text=${row.task_set} max=${32} />` },
  { key: "task", label: "Task", sortable: true, cell: (row, run) => html`<a class="plainlink" href=${href(run, "task", [row.task])}><${Line} text=${row.task} max=${48} /></a>` },
  { key: "category", label: "Category", cell: (row) => (row.category ? html`<${Line} text=${row.category} max=${32} />` : dim(NONE)) },
  { key: "status", label: "Status", sortable: true, cell: (row) => html`<${Badge} value=${row.status} />` },
  { key: "outcome", label: "Outcome", sortable: true, cell: (row) => html`<${Badge} value=${row.outcome} />` },
  { key: "reward", label: "Reward", num: true, sortable: true, cell: (row) => html`<${Reward} value=${row.reward} />` },
  { key: "advantage", label: "Advantage", num: true, title: "known once the step's page was opened", cell: (row) => (row.advantage === null ? dim(NONE) : signed(row.advantage)) },
  { key: "reason", label: "Why", cell: (row) => (row.reason || row.error ? html`<${Line} text=${row.reason || row.error} max=${64} />` : dim(NONE)) },
  { key: "calls", label: "Calls", num: true, sortable: true, cell: (row) => int(row.calls) },
  { key: "sampled", label: "Tokens", title: "sampled tokens", num: true, sortable: true, cell: (row) => int(row.sampled) },
  { key: "trained", label: "To train", title: "tokens that may be trained: a plan can still exclude them", num: true, sortable: true, cell: (row) => int(row.trained) },
  { key: "excluded", label: "Excluded by", cell: (row) => Object.keys(row.excluded ?? {}).map(words).join(", ") || dim(NONE) },
  { key: "state", label: "State", cell: (row) => html`${words(row.state ?? "")} ${row.fate ? dim(words(row.fate)) : ""}` },
  seconds("total_s", "Time", "from dispatch to verdict"),
  seconds("agent_s", "Agent", "time of the agent"),
  seconds("engine_s", "Engine", "time in the engine"),
  seconds("queued_s", "Queued", "time in the queue"),
  seconds("grade_s", "Grading", "time of grading"),
  { key: "attempt", label: "Attempt", num: true, sortable: true, cell: (row) => int(row.attempt) },
  { key: "version", label: "Versions", num: true, sortable: true, cell: (row) => (row.oldest === null || row.oldest === undefined ? dim(NONE) : row.oldest === row.version ? num(row.version) : `${row.oldest}–${row.version}`) },
  { key: "dropped", label: "Dropped paths", num: true, cell: (row) => (row.dropped?.length ? html`<span class="bad-text">${row.dropped.length}</span>` : dim("0")) },
  { key: "egress", label: "Network attempts", num: true, sortable: true, cell: (row) => (row.egress > 0 ? html`<span class="bad-text">${int(row.egress)}</span>` : dim(row.egress === 0 ? "0" : NONE)) },
  { key: "ended_s", label: "Ended", num: true, cell: (row) => ago(row.ended_s) },
];

export const DEFAULT_COLUMNS = ["id", "task_set", "task", "outcome", "reward", "status", "reason", "calls", "sampled", "trained", "total_s", "ended_s"];
