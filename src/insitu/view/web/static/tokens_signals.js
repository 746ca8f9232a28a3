// What the colours of tokens mean: each signal sorts tokens into at most nine buckets.
import { num, pct } from "./format.js";

/** @typedef {{id: string, key: string, label: string, needs: string, buckets: {label: string, tone: string, test: (page: any, i: number, context: any) => boolean, flag?: boolean}[]}} Signal */

const FATES = { trained: "p3", context: "", demonstrated: "p2", "trained in another row": "q1" };

/** Ranges of a number as buckets: `edges` between them, first match wins. */
function ranges(column, labels, tones, edges, flags = [], of = (x) => x) {
  return labels.map((label, n) => ({
    label,
    tone: tones[n],
    flag: flags.includes(n),
    test: (page, i) => {
      const value = of(page.columns[column]?.[i]);
      return value >= (n === 0 ? -Infinity : edges[n - 1]) && value < (edges[n] ?? Infinity);
    },
  }));
}

/** The signals of a page: the fates depend on its reasons. @returns {Signal[]} */
export function signalsOf(reasons) {
  const age = (page, i, { trainer }) => (page.columns.version[i] < 0 ? -1 : trainer - page.columns.version[i]);
  return [
    {
      id: "fate", key: "1", label: "Trained or why not", needs: "reason",
      buckets: reasons.map((name, n) => ({ label: name, tone: name in FATES ? FATES[name] : `n${(n % 3) + 1}`, flag: n > 0, test: (page, i) => reasonOf(page, i) === name })),
    },
    {
      id: "advantage", key: "2", label: "Advantage", needs: "mask",
      buckets: [
        { label: "pushed down (advantage < 0)", tone: "n3", flag: true, test: (page, i, { advantage }) => Boolean(page.columns.mask[i]) && advantage < 0 },
        { label: "no credit (advantage 0)", tone: "q1", test: (page, i, { advantage }) => Boolean(page.columns.mask[i]) && advantage === 0 },
        { label: "pushed up (advantage > 0)", tone: "p3", flag: true, test: (page, i, { advantage }) => Boolean(page.columns.mask[i]) && advantage > 0 },
      ],
    },
    {
      id: "logprob", key: "3", label: "Log-probability", needs: "logprob",
      buckets: ranges("logprob", ["p < 1 %", "1 – 10 %", "10 – 50 %", "50 – 90 %", "≥ 90 %"], ["n3", "n2", "n1", "q1", "p1"], [Math.log(0.01), Math.log(0.1), Math.log(0.5), Math.log(0.9)], [0]),
    },
    {
      id: "gap", key: "4", label: "Gap trainer − sampler", needs: "gap",
      buckets: ranges("gap", ["|gap| < 1e-5", "< 1e-3", "< 0.1", "≥ 0.1"], ["p1", "q1", "n2", "n3"], [1e-5, 1e-3, 0.1], [2, 3], Math.abs),
    },
    {
      id: "clipped", key: "5", label: "Ratio and clipped", needs: "flags",
      buckets: [
        { label: "gradient masked (clipped)", tone: "n3", flag: true, test: (page, i) => page.columns.flags?.[i] > 0 },
        { label: "gradient used", tone: "p1", test: (page, i) => Boolean(page.columns.mask[i]) && !(page.columns.flags?.[i] > 0) },
      ],
    },
    {
      id: "entropy", key: "6", label: "Entropy", needs: "entropy",
      buckets: ranges("entropy", ["< 0.1", "0.1 – 0.5", "0.5 – 1", "1 – 2", "≥ 2 nats"], ["p1", "q1", "n1", "n2", "n3"], [0.1, 0.5, 1, 2], [4]),
    },
    {
      id: "age", key: "7", label: "Version age", needs: "version",
      buckets: [
        { label: "same version as the trainer", tone: "p1", test: (page, i, context) => age(page, i, context) === 0 },
        { label: "1 version old", tone: "q1", test: (page, i, context) => age(page, i, context) === 1 },
        { label: "2 or 3 old", tone: "n1", test: (page, i, context) => [2, 3].includes(age(page, i, context)) },
        { label: "older", tone: "n3", flag: true, test: (page, i, context) => age(page, i, context) > 3 },
      ],
    },
  ];
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
  if (columns.gap && !Number.isNaN(columns.gap[i])) shown.push(["trainer", num(logprob + columns.gap[i])], ["gap", num(columns.gap[i])]);
  if (columns.entropy && !Number.isNaN(columns.entropy[i])) shown.push(["entropy", num(columns.entropy[i])]);
  if (columns.mask[i] && advantage !== null) shown.push(["advantage × weight", `${num(advantage)} × ${num(weight)}`]);
  if (columns.version[i] >= 0) shown.push(["version", String(columns.version[i]) + (trainer > columns.version[i] ? ` (${trainer - columns.version[i]} old)` : "")]);
  if (columns.turn[i] >= 0) shown.push(["turn", String(columns.turn[i])]);
  shown.push(["fate", String(reasonOf(page, i)).replaceAll("_", " ")]);
  if (columns.flags?.[i] > 0) shown.push(["gradient", "masked"]);
  return shown;
}

/** The text of a token with escapes, so that each character can be seen. */
export function pieceText(page, i) {
  const text = page.text.slice(i ? page.columns.end[i - 1] : 0, page.columns.end[i] ?? 0);
  return text === "" ? "(part of a character)" : JSON.stringify(text).replace(/[^\x20-\x7e]/g, (c) => (/[\p{L}\p{N}\p{P}\p{S}]/u.test(c) ? c : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`));
}
