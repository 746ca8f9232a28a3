// Keyboard shortcuts. A page registers its keys while it is shown; the newest registration wins.
import { useEffect } from "./vendor/preact-htm.module.js";

/** @typedef {Record<string, [string, (event: KeyboardEvent) => void]>} KeyMap key -> [meaning, action] */

/** @type {{keys: KeyMap}[]} */
const layers = [];
let prefix = "";

/** Register keys while the component is mounted. "g s" is g followed by s. @param {KeyMap} keys */
export function useKeys(keys) {
  useEffect(() => {
    const layer = { keys };
    layers.push(layer);
    return () => void layers.splice(layers.indexOf(layer), 1);
  });
}

/** The keys that work now, newest layer first, for the help dialog. */
export function activeKeys() {
  const found = new Map();
  for (const { keys } of [...layers].reverse()) {
    for (const [key, [meaning]] of Object.entries(keys)) if (!found.has(key)) found.set(key, meaning);
  }
  return [...found];
}

function typing(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

/** @param {KeyboardEvent} event */
function handle(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target instanceof HTMLElement && typing(event.target)) return event.target.blur();
  if (typing(event.target) || document.querySelector("dialog[open]")) return undefined;
  // Enter and Space belong to the control that has the focus.
  if (/^(Enter| )$/.test(event.key) && event.target instanceof Element && event.target.closest("a,button,summary")) return undefined;
  const name = prefix ? `${prefix} ${event.key}` : event.key;
  prefix = "";
  for (const { keys } of [...layers].reverse()) {
    if (keys[name]) {
      event.preventDefault();
      return keys[name][1](event);
    }
  }
  if (event.key === "g") prefix = "g";
  return undefined;
}

/** Focus the link of the next row (or the one before) of lists and tables; Enter opens it. @param {1|-1} by */
export function focusRow(by) {
  const rows = [...document.querySelectorAll("main tbody tr, main .bar-row, main .rowlink")];
  const links = rows.map((row) => /** @type {HTMLElement|null} */ (row.matches("a") ? row : row.querySelector("a"))).filter((link) => link !== null);
  const at = links.findIndex((link) => link === document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at + (at < 0 ? 1 : by)))]?.focus();
}

/** Arrow keys between the links of a picture: along a row, and to the nearest link of the next row. @param {KeyboardEvent} event */
export function moveAmong(event, rows) {
  const link = event.target instanceof Element ? event.target.closest("a") : null;
  const row = link?.closest(rows);
  if (!link || !row) return;
  const across = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const down = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  let next = null;
  if (across) {
    const links = [...row.querySelectorAll("a")];
    next = links[links.indexOf(link) + across];
  } else if (down) {
    let other = down > 0 ? row.nextElementSibling : row.previousElementSibling;
    while (other && !(other.matches(rows) && other.querySelector("a"))) other = down > 0 ? other.nextElementSibling : other.previousElementSibling;
    const middle = (element) => (element.getBoundingClientRect().left + element.getBoundingClientRect().right) / 2;
    const from = middle(link);
    next = other && [...other.querySelectorAll("a")].reduce((best, one) => (Math.abs(middle(one) - from) < Math.abs(middle(best) - from) ? one : best));
  } else return;
  event.preventDefault();
  event.stopPropagation();
  /** @type {HTMLElement|null|undefined} */ (next)?.focus();
}

addEventListener("keydown", handle);
