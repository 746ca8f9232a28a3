// A unified diff as a table per file: line numbers, sign, text nodes.
import { html } from "./vendor/preact-htm.module.js";
import { Clean, Line } from "./text.js";
import { plural } from "./format.js";
import { More } from "./ui.js";

/** @typedef {{kind: string, text: string, a: number|null, b: number|null}} DiffLine */
/** @typedef {{path: string, note: string, added: number, removed: number, lines: DiffLine[]}} DiffFile */

const HUNK = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@/;

/** @param {string} text @returns {DiffFile[]} */
export function parseDiff(text) {
  /** @type {DiffFile[]} */
  const files = [];
  /** @type {DiffFile|null} */
  let file = null;
  let [a, b, restA, restB] = [0, 0, 0, 0];
  const start = (path) => {
    file = { path, note: "", added: 0, removed: 0, lines: [] };
    files.push(file);
  };
  const lines = text.split("\n");
  if (lines.at(-1) === "") lines.pop();
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    // Inside a hunk a line that begins with "--- " is a removed line: only the counts of the hunk say where it ends.
    if (file && (restA > 0 || restB > 0)) {
      const sign = line[0];
      if (sign === "+") (restB--, file.added++, file.lines.push({ kind: "add", text: line.slice(1), a: null, b: b++ }));
      else if (sign === "-") (restA--, file.removed++, file.lines.push({ kind: "del", text: line.slice(1), a: a++, b: null }));
      else if (sign === "\\") file.lines.push({ kind: "note", text: line.slice(2), a: null, b: null });
      else (restA--, restB--, file.lines.push({ kind: "same", text: line.slice(1), a: a++, b: b++ }));
      continue;
    }
    const hunk = HUNK.exec(line);
    if (hunk) {
      if (!file) start("");
      [a, b, restA, restB] = [Number(hunk[1]), Number(hunk[3]), Number(hunk[2] ?? 1), Number(hunk[4] ?? 1)];
      file?.lines.push({ kind: "hunk", text: line, a: null, b: null });
    } else if (line.startsWith("diff --git ")) start(line.replace(/^diff --git a\/(.*) b\/.*$/, "$1"));
    else if (line.startsWith("--- ") && lines[i + 1]?.startsWith("+++ ")) {
      const before = pathOf(line.slice(4));
      const after = pathOf(lines[++i].slice(4));
      if (!file || file.lines.length) start(after === "/dev/null" ? before : after);
      else if (after !== "/dev/null") file.path = after;
      if (file) file.note = before === "/dev/null" ? "new file" : after === "/dev/null" ? "deleted" : file.note;
    } else if (file && /^(new|deleted|old) (file )?mode|^(similarity|rename|copy|Binary)/.test(line)) file.note ||= line;
    else if (line.startsWith("\\") && file) file.lines.push({ kind: "note", text: line.slice(2), a: null, b: null });
    else if (line.trim() && !line.startsWith("index ")) {
      if (!file) start("");
      file?.lines.push({ kind: "note", text: line, a: null, b: null });
    }
  }
  return files;
}

function pathOf(text) {
  return text.split("\t")[0].replace(/^[ab]\//, "");
}

export function DiffView({ text, dropped = [] }) {
  const files = parseDiff(text);
  return files.map((file) => html`<${FileDiff} key=${file.path} file=${file} dropped=${dropped.includes(file.path)} />`);
}

function FileDiff({ file, dropped }) {
  return html`<details class="file" open>
    <summary>
      <span class="mono path"><${Line} text=${file.path || "(no name)"} /></span>
      ${file.note && html`<span class="badge">${file.note}</span>`}
      ${dropped && html`<span class="badge bad" title="A protected path: this change was not graded">dropped</span>`}
      <span class="grow"></span>
      <span class="good-text">+${file.added}</span> <span class="bad-text">−${file.removed}</span>
    </summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${`changes of ${file.path}`}>
      <table class="diff"><tbody>
        <${More} items=${file.lines} first=${400} step=${2000} columns=${4} noun="line">${(line) => html`<${DiffRow} line=${line} />`}<//>
      </tbody></table>
    </div>
  </details>`;
}

const SIGNS = { add: "+", del: "−" };

function DiffRow({ line }) {
  if (line.kind === "hunk" || line.kind === "note") return html`<tr class=${line.kind}><td colspan="4"><${Line} text=${line.text} /></td></tr>`;
  return html`<tr class=${line.kind}>
    <td class="ln">${line.a ?? ""}</td><td class="ln">${line.b ?? ""}</td>
    <td class="sign">${SIGNS[line.kind] ?? ""}</td><td class="code"><${Clean} text=${line.text} /></td>
  </tr>`;
}

/** "2 files, +10 −3". */
export function diffSummary(text) {
  const files = parseDiff(text);
  const sum = (key) => files.reduce((total, file) => total + file[key], 0);
  return `${plural(files.length, "file")}, +${sum("added")} −${sum("removed")}`;
}
