// The rollouts of a step as bars: what became of the tokens of each.
import { html, useMemo } from "../vendor/preact-htm.module.js";
import { compact, int, isNumber, plural, words } from "../format.js";
import { rolloutHref, setQuery } from "../router.js";
import { Empty, More, Panel, Reward } from "../ui.js";
import { AsTable, Bars, FATES } from "../chart.js";

const ORDERS = [["", "by group"], ["tokens", "longest first"]];
const SHOWN = 64;

export function Batch({ groups, run, order }) {
  const { bars, kinds } = useMemo(() => barsOf(groups, order), [groups, order]);
  const to = Math.max(...bars.map((bar) => bar.whole));
  const side = html`<span class="chips">${ORDERS.map(([id, label]) => html`<button class="chip" aria-pressed=${order === id} onClick=${() => setQuery({ bars: id })}>${label}</button>`)}</span>`;
  if (!bars.length) return html`<${Panel} title="Tokens of each rollout"><${Empty}>No rollout belongs to this step.<//><//>`;
  const rowOf = (bar) => ({ key: bar.row.id, name: html`<span class="mono">${bar.name}</span>`, note: html`<${Reward} value=${bar.row.reward} /> <span class="dim">· ${compact(bar.whole)}</span>`, link: rolloutHref(run, bar.row.id), title: saying(bar), parts: partsOf(bar, kinds), first: bar.first && !order });
  const column = (label, text) => ({ label, texts: bars.map(text) });
  return html`<${Panel} title="Tokens of each rollout" note="step/group/slot, reward · tokens; click to open" side=${side} cls="batch"><figure class="chart">
    <ul class="legend">${[...kinds].map(([label, { colour, kind }]) => html`<li><span class=${`swatch box ${kind}`} style=${{ "--part": `var(${colour})` }}></span>${label}</li>`)}</ul>
    <${More} items=${pages(bars)} first=${1} step=${1} noun=${`page of ${SHOWN} rollouts`} key=${order}>${(page, i) => html`<${Bars} key=${i} title=${`tokens of ${plural(page.length, "rollout")}`} rows=${page.map(rowOf)} to=${to} ends=${["0", plural(to, "token")]} />`}<//>
    <${AsTable} title="tokens of each rollout" columns=${[column("rollout", ({ row }) => html`<a href=${rolloutHref(run, row.id)}>${row.id}</a>`), column("reward", ({ row }) => html`<${Reward} value=${row.reward} />`), ...[...kinds.keys()].map((kind) => column(kind, ({ tokens }) => int(tokens[kind] ?? 0)))]} />
  </figure><//>`;
}

function pages(bars) {
  const found = [];
  for (let at = 0; at < bars.length; at += SHOWN) found.push(bars.slice(at, at + SHOWN));
  return found;
}

/** Each rollout with its tokens by kind, and the kinds with their looks: context, trained, and each reason of the rest. */
function barsOf(groups, order) {
  const bars = groups.flatMap((group) => group.rollouts.map((row, i) => {
    const kept = isNumber(row.planned) ? row.planned : row.trained;
    const tokens = { context: row.context, [isNumber(row.planned) ? "trained" : "may be trained"]: kept };
    const lost = { ...row.excluded };
    if (row.trained > kept) lost[row.untrained || "not in the plan"] = (lost[row.untrained || "not in the plan"] ?? 0) + row.trained - kept;
    for (const [reason, n] of Object.entries(lost)) tokens[words(reason)] = n;
    return { row, first: i === 0, name: `${group.step}/${group.group}/${row.slot}`, tokens, whole: Object.values(tokens).reduce((sum, n) => sum + n, 0) };
  }));
  const sums = new Map();
  for (const { tokens } of bars) for (const [kind, n] of Object.entries(tokens)) if (n > 0) sums.set(kind, (sums.get(kind) ?? 0) + n);
  const fixed = { context: { colour: "--line-strong", kind: "context" }, trained: { colour: "--c1", kind: "sampled" }, "may be trained": { colour: "--c1", kind: "sampled" } };
  const reasons = [...sums.keys()].filter((kind) => !fixed[kind]).sort((a, b) => sums.get(b) - sums.get(a));
  const kinds = new Map([...Object.keys(fixed).filter((kind) => sums.has(kind)), ...reasons].map((kind) => [kind, fixed[kind] ?? { colour: FATES[reasons.indexOf(kind) % FATES.length], kind: "hatched" }]));
  if (order === "tokens") bars.sort((a, b) => b.whole - a.whole);
  return { bars, kinds };
}

function partsOf({ tokens }, kinds) {
  let at = 0;
  return [...kinds].map(([label, look]) => ({ ...look, from: at, to: (at += tokens[label] ?? 0) }));
}

function saying({ row, tokens }) {
  return `${row.id}: ${Object.entries(tokens).filter(([, n]) => n > 0).map(([kind, n]) => `${int(n)} ${kind}`).join(", ")}`;
}
