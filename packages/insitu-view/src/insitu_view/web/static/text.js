// Hostile text as visible text: ANSI colours become classes, every other control or invisible character a box.
import { html, useState } from "./vendor/preact-htm.module.js";
import { int } from "./format.js";

// eslint-disable-next-line no-control-regex
const ESCAPE = /\x1b\[([0-9;:]*)m|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?/g;
/** Controls except tab and line feed, soft hyphen, zero-width, bidi, line separators, tags, variation selectors. */
const HIDDEN =
  /[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\uddef]/g;
const NAMES = { "\0": "NUL", "\r": "CR", "\x1b": "ESC", "\x07": "BEL", "\b": "BS", "\x7f": "DEL", "\u202e": "U+202E", "\ufeff": "BOM" };
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

/** @typedef {{text: string, style: string, box: boolean}} Run */

/** The visible name of a control or invisible character. */
export function controlName(char) {
  return NAMES[char] ?? `U+${(char.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Split text into plain runs, coloured runs and boxes. @param {string} text @param {boolean} ansi @returns {Run[]} */
export function cleanRuns(text, ansi = false) {
  /** @type {Run[]} */
  const runs = [];
  if (!ansi) {
    addPlain(runs, text, "");
    return runs;
  }
  const state = { colour: "", bold: false, dim: false };
  let end = 0;
  for (const match of text.matchAll(ESCAPE)) {
    addPlain(runs, text.slice(end, match.index), styleOf(state));
    end = match.index + match[0].length;
    if (match[1] !== undefined) applySgr(state, match[1]);
  }
  addPlain(runs, text.slice(end), styleOf(state));
  return runs;
}

function addPlain(runs, text, style) {
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const crlf = match[0] === "\r" && text[match.index + 1] === "\n";
    if (match.index > end) runs.push({ text: text.slice(end, match.index), style, box: false });
    if (!crlf) runs.push({ text: controlName(match[0]), style: "ctl", box: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) runs.push({ text: text.slice(end), style, box: false });
}

function styleOf({ colour, bold, dim }) {
  return [colour && `ansi-${colour}`, bold && "ansi-bold", dim && "ansi-dim"].filter(Boolean).join(" ");
}

function applySgr(state, codes) {
  const numbers = codes.split(/[;:]/).map(Number);
  for (let i = 0; i < numbers.length; i++) {
    const code = numbers[i];
    if (code === 0) Object.assign(state, { colour: "", bold: false, dim: false });
    else if (code === 1) state.bold = true;
    else if (code === 2) state.dim = true;
    else if (code === 22) state.bold = state.dim = false;
    else if (code === 39) state.colour = "";
    else if (code >= 30 && code <= 37) state.colour = COLOURS[code - 30];
    else if (code >= 90 && code <= 97) state.colour = COLOURS[code - 90];
    else if (code === 38 || code === 48) i += numbers[i + 1] === 2 ? 4 : 2; // 256 and true colours are not shown.
  }
}

/** Text of the run as nodes: strings and spans, never markup. */
export function Clean({ text, ansi = false }) {
  return cleanRuns(String(text ?? ""), ansi).map(({ text: piece, style, box }) =>
    box ? html`<span class="ctl" title="invisible character">${piece}</span>` : style ? html`<span class=${style}>${piece}</span>` : piece,
  );
}

/** One line of hostile text: line feeds and tabs are boxes too. */
export function Line({ text, max = 300 }) {
  const value = String(text ?? "");
  const shown = value.length > max ? value.slice(0, max) : value;
  return html`<${Clean} text=${shown.replaceAll("\n", " ⏎ ").replaceAll("\t", " ")} />${
    value.length > max ? html`<span class="dim"> … ${int(value.length - max)} more characters</span>` : ""
  }`;
}

/** Preformatted text, clamped at `lines` lines with the true count and a button for all. */
export function Block({ text, lines = 30, ansi = false, label = "text", kind = "", open = false }) {
  const [all, setAll] = useState(false);
  const value = String(text ?? "");
  const { cut, total } = clampLines(value, lines);
  const whole = all || open || cut === value.length;
  return html`<div class="block">
    <pre class=${`text ${kind}`} tabindex=${value.length > 2000 ? 0 : undefined} aria-label=${value.length > 2000 ? label : undefined} role=${value.length > 2000 ? "region" : undefined}><${Clean} text=${whole ? value : value.slice(0, cut)} ansi=${ansi} /></pre>
    ${cut < value.length && !open
      ? html`<button class="more" aria-expanded=${all} onClick=${() => setAll(!all)}>
          ${all ? "Show less" : `Show all ${int(total)} lines (${int(value.length)} characters)`}
        </button>`
      : ""}
  </div>`;
}

/** Where the first `lines` lines end (or 8,000 characters), and how many lines there are. */
export function clampLines(text, lines) {
  let total = 1;
  let cut = -1;
  for (let at = text.indexOf("\n"); at !== -1; at = text.indexOf("\n", at + 1)) {
    if (total === lines) cut = at;
    total++;
  }
  if (cut === -1 || text.length - cut < 200) cut = text.length;
  return { cut: cut > 8000 && text.length > 9000 ? 8000 : cut, total };
}

/** A button that copies raw text. */
export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="quiet" onClick=${copy} title="The raw text is copied, with its invisible characters">${done ? "Copied" : label}</button>`;
}

const HIDDEN_ONE = new RegExp(HIDDEN.source);

/** Whether the character at `at` is one that must be shown as a box. */
export function isHidden(text, at) {
  const code = text.charCodeAt(at);
  if ((code >= 0x20 && code < 0x7f) || code === 10 || code === 9) return false;
  if (code >= 0xd800 && code < 0xdc00) {
    const pair = text.slice(at, at + 2);
    return HIDDEN_ONE.test(pair);
  }
  if (code >= 0xdc00 && code < 0xe000) return !(text.charCodeAt(at - 1) >= 0xd800 && text.charCodeAt(at - 1) < 0xdc00);
  return HIDDEN_ONE.test(text[at]);
}
