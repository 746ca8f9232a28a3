// A tool call as what it does: a command as a terminal line, an edit as a diff, anything else as its arguments.
import { html } from "../vendor/preact-htm.module.js";
import { Block, Line } from "../text.js";

export function Call({ call, raw, open }) {
  const given = raw ? null : parsed(call.text);
  return html`<div class="call">
    <div class="call-name"><span class="mono"><${Line} text=${call.name} max=${80} /></span>${given ? html`<span class="mono dim"><${Line} text=${target(given)} max=${120} /></span>` : ""}</div>
    ${given ? html`<${Arguments} given=${given} open=${open} />` : html`<${Block} text=${call.text} open=${open} label="arguments" />`}
  </div>`;
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

const PATHS = ["path", "file_path", "filePath", "filename", "file"];
const COMMANDS = ["command", "cmd", "script"];
const BEFORE = ["oldText", "old_string", "oldString", "old_str", "search"];
const AFTER = ["newText", "new_string", "newString", "new_str", "replace"];

function first(given, keys) {
  const key = keys.find((name) => typeof given[name] === "string" || Array.isArray(given[name]));
  return key === undefined ? undefined : given[key];
}

function target(given) {
  const path = first(given, PATHS);
  return typeof path === "string" ? path : "";
}

function editsOf(given) {
  const found = (Array.isArray(given.edits) ? given.edits : [given]).filter((edit) => edit && typeof first(edit, BEFORE) === "string" && typeof first(edit, AFTER) === "string");
  return found.map((edit) => [String(first(edit, BEFORE)), String(first(edit, AFTER))]);
}

function Arguments({ given, open }) {
  const command = first(given, COMMANDS);
  const edits = editsOf(given);
  const used = new Set([...PATHS, ...(command !== undefined ? COMMANDS : []), ...(edits.length ? [...BEFORE, ...AFTER, "edits"] : [])]);
  const rest = Object.entries(given).filter(([key]) => !used.has(key));
  return html`
    ${command !== undefined && html`<${Block} text=${`$ ${Array.isArray(command) ? command.join(" ") : command}`} kind="terminal" open=${open} label="command" />`}
    ${edits.map(([before, after]) => html`<${Edit} before=${before} after=${after} open=${open} />`)}
    ${rest.map(([key, value]) => {
      const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
      return text.includes("\n") || text.length > 80 ? html`<span class="role"><${Line} text=${key} max=${60} /></span><${Block} text=${text} open=${open} label=${key} />`
        : html`<p class="mono small"><span class="dim"><${Line} text=${key} max=${60} />:</span> <${Line} text=${text} /></p>`;
    })}`;
}

/** Lines that both sides begin and end with are context. */
function Edit({ before, after, open }) {
  const [a, b] = [before.split("\n"), after.split("\n")];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a.at(-1 - tail) === b.at(-1 - tail)) tail++;
  const part = (lines, kind) => (lines.length ? html`<div class=${kind}><${Block} text=${lines.join("\n")} lines=${20} open=${open} label=${kind === "old" ? "removed" : "added"} /></div>` : "");
  return html`<div class="edit">${part(a.slice(0, head), "same")}${part(a.slice(head, a.length - tail), "old")}${part(b.slice(head, b.length - tail), "new")}${part(a.slice(a.length - tail), "same")}</div>`;
}
