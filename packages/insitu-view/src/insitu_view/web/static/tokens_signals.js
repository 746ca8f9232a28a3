// What the colours of tokens mean: each signal sorts tokens into at most nine buckets.
import { num, pct } from "./format.js";

/**
 * `kind` sorts a token into one of the buckets, -1 = none. `flag`: n and N go to it.
 * @typedef {{label: string, tone: string, flag?: boolean}} Bucket
 * @typedef {{id: string, key: string, label: string, needs: string, buckets: Bucket[], kind: (page: any, i: number, context: any) => number}} Signal
 */

const FATES = { trained: "p3", context: "", demonstrated: "p2", "trained in another row": "q1" };
const CLIPPED = 1;
const BOUNDED = 2;
const MISMATCHED = 4;
const bucket = (label, tone, flag = false) => ({ label, tone, flag });

/** Ranges of a number: `edges` between the buckets. */
function ranges(column, buckets, edges, of = (x) => x) {
  const kind = (page, i) => {
    const value = of(page.columns[column][i]);
    if (Number.isNaN(value)) return -1;
    let n = 0;
    while (n < edges.length && value >= edges[n]) n++;
    return n;
  };
  return { needs: column, buckets, kind };
}

/** The ratio of trainer to sampler, and why its gradient is not the plain one. */
function clippedKind({ columns }, i) {
  const [gap, flags] = [columns.gap[i], columns.flags[i]];
  if (Number.isNaN(gap)) return -1;
  if (flags & MISMATCHED) return 0;
  if (flags & CLIPPED) return 1;
  if (flags & BOUNDED) return 2;
  return gap < Math.log(0.9) ? 3 : gap > Math.log(1.1) ? 5 : 4;
}

function ageKind({ columns }, i, { trainer }) {
  const age = columns.version[i] < 0 ? -1 : trainer - columns.version[i];
  return age < 2 ? age : age < 4 ? 2 : 3;
}

/** The signals of a page: the fates depend on its reasons. @returns {Signal[]} */
export function signalsOf(reasons) {
  // Pages list the reasons in the order of their own tokens.
  const places = new WeakMap();
  const placesOf = (page) => places.get(page) ?? places.set(page, page.header.reasons.map((name) => reasons.indexOf(name))).get(page);
  return [
    {
      id: "fate", key: "1", label: "Trained or why not", needs: "reason",
      buckets: reasons.map((name, n) => bucket(name, name in FATES ? FATES[name] : `n${(n % 3) + 1}`, n > 0)),
      kind: (page, i) => placesOf(page)[page.columns.reason[i]] ?? -1,
    },
    {
      id: "advantage", key: "2", label: "Advantage", needs: "mask",
      buckets: [bucket("pushed down (advantage < 0)", "n3", true), bucket("no credit (advantage 0)", "q1"), bucket("pushed up (advantage > 0)", "p3", true)],
      kind: ({ columns }, i, { advantage }) => (columns.mask[i] && advantage !== null ? Math.sign(advantage) + 1 : -1),
    },
    {
      id: "logprob", key: "3", label: "Log-probability",
      ...ranges("logprob", [bucket("p < 1 %", "n3", true), bucket("1 – 10 %", "n2"), bucket("10 – 50 %", "n1"), bucket("50 – 90 %", "q1"), bucket("≥ 90 %", "p1")], [0.01, 0.1, 0.5, 0.9].map(Math.log)),
    },
    {
      id: "gap", key: "4", label: "Gap trainer − sampler",
      ...ranges("gap", [bucket("|gap| < 1e-5", "p1"), bucket("1e-5 – 1e-3", "q1"), bucket("1e-3 – 0.1", "n2", true), bucket("≥ 0.1", "n3", true)], [1e-5, 1e-3, 0.1], Math.abs),
    },
    {
      id: "clipped", key: "5", label: "Ratio and clipped", needs: "flags",
      buckets: [
        bucket("excluded: trainer and sampler disagree", "n3", true), bucket("clipped by the loss", "n2", true), bucket("bounded by a correction", "n1", true),
        bucket("ratio < 0.9", "q2"), bucket("ratio 0.9 – 1.1", "p1"), bucket("ratio > 1.1", "p3"),
      ],
      kind: clippedKind,
    },
    {
      id: "entropy", key: "6", label: "Entropy",
      ...ranges("entropy", [bucket("< 0.1 nats", "p1"), bucket("0.1 – 0.5", "q1"), bucket("0.5 – 1", "n1"), bucket("1 – 2", "n2"), bucket("≥ 2 nats", "n3", true)], [0.1, 0.5, 1, 2]),
    },
    {
      id: "age", key: "7", label: "Version age", needs: "version",
      buckets: [bucket("same version as the trainer", "p1"), bucket("1 version old", "q1"), bucket("2 or 3 old", "n1"), bucket("older", "n3", true)],
      kind: ageKind,
    },
  ];
}

/** The bucket of every token of a page; kept until the signal or its context changes. @returns {Int8Array} */
export function kindsOf(signal, page, context) {
  if (page.kinds?.signal !== signal || page.kinds.context !== context) {
    const found = new Int8Array(page.count).fill(-1);
    if (page.columns[signal.needs]?.length) for (let i = 0; i < page.count; i++) found[i] = signal.kind(page, i, context);
    page.kinds = { signal, context, found };
  }
  return page.kinds.found;
}

export function reasonOf(page, i) {
  return page.header.reasons[page.columns.reason[i]];
}

/** The tones of the highlights, in their order: p = blue, n = orange, q = grey. */
export const TONES_OF_TOKENS = ["p1", "p2", "p3", "n1", "n2", "n3", "q1", "q2", "here"];

/** One token in words. */
export function tokenWords(page, i, { advantage, weight, trainer }) {
  const { columns, header } = page;
  const at = header.start + i;
  const logprob = columns.logprob[i];
  const shown = [["token", num(at)], ["id", String(columns.id[i])], ["text", pieceText(page, i)]];
  if (!Number.isNaN(logprob)) shown.push(["log-probability", `${num(logprob)} (${pct(Math.exp(logprob))})`]);
  if (columns.gap && !Number.isNaN(columns.gap[i])) shown.push(["trainer", num(logprob + columns.gap[i])], ["gap", num(columns.gap[i])], ["ratio", num(Math.exp(columns.gap[i]))]);
  if (columns.entropy && !Number.isNaN(columns.entropy[i])) shown.push(["entropy", num(columns.entropy[i])]);
  if (columns.mask[i] && advantage !== null) shown.push(["advantage × weight", `${num(advantage)} × ${num(weight)}`]);
  if (columns.version[i] >= 0) shown.push(["version", String(columns.version[i]) + (trainer > columns.version[i] ? ` (${trainer - columns.version[i]} old)` : "")]);
  if (columns.turn[i] >= 0) shown.push(["turn", String(columns.turn[i])]);
  shown.push(["fate", String(reasonOf(page, i)).replaceAll("_", " ")]);
  if (columns.flags?.[i]) shown.push(["gradient", columns.flags[i] & MISMATCHED ? "excluded: trainer and sampler disagree" : columns.flags[i] & CLIPPED ? "clipped by the loss" : "bounded by a correction"]);
  return shown;
}

/** The text of a token with escapes, so that each character can be seen. */
export function pieceText(page, i) {
  const text = page.text.slice(i ? page.columns.end[i - 1] : 0, page.columns.end[i] ?? 0);
  return text === "" ? "(part of a character)" : JSON.stringify(text).replace(/[^\x20-\x7e]/g, (c) => (/[\p{L}\p{N}\p{P}\p{S}]/u.test(c) ? c : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`));
}
