// The forest of a rollout: one node per turn, sized by its tokens; a click opens the turn.
import { html } from "../vendor/preact-htm.module.js";
import { int, plural, words } from "../format.js";
import { rolloutHref } from "../router.js";
import { Panel, Table } from "../ui.js";
import { Line } from "../text.js";
import { LABELS } from "./picture.js";
import { driftWords } from "./transcript.js";

const GAP_X = 88;
const GAP_Y = 56;

export function TreeTab({ data, route, id }) {
  const turns = data.turns;
  const places = layout(turns);
  const most = Math.max(...turns.map((turn) => turn.sampled), 1);
  const radius = (turn) => 6 + 9 * Math.sqrt(turn.sampled / most);
  const width = 40 + GAP_X * (1 + Math.max(...[...places.values()].map((place) => place.x)));
  const height = 24 + GAP_Y * (1 + Math.max(...[...places.values()].map((place) => place.y)));
  const at = (turn) => ({ x: 34 + GAP_X * places.get(turn).x, y: 38 + GAP_Y * places.get(turn).y });
  const labels = [...new Set(turns.map((turn) => turn.label || "none"))];
  return html`<${Panel} title="Forest" note=${`${plural(turns.length, "turn")}, ${plural(data.segments.length, "segment")}; a node's size is its sampled tokens`}>
      <ul class="legend">${labels.map((label) => html`<li><span class="swatch box" style=${{ background: `var(${LABELS[label]?.[0] ?? "--c6"})` }}></span>${label === "none" ? "in no segment" : words(label)}</li>`)}</ul>
      <div class="scroll" tabindex="0" role="region" aria-label="forest of turns"><svg class="tree" width=${width} height=${height} role="group" aria-label=${`${turns.length} turns`}>
        ${turns.filter((turn) => places.has(turn.parent)).map((turn) => {
          const [from, to] = [at(turn.parent), at(turn.turn)];
          return html`<path d=${`M${from.x} ${from.y}C${from.x + GAP_X / 2} ${from.y} ${to.x - GAP_X / 2} ${to.y} ${to.x} ${to.y}`} />`;
        })}
        ${turns.map((turn) => html`<a href=${rolloutHref(route.run, id, { turn: turn.turn })} aria-label=${`turn ${turn.turn}, ${plural(turn.sampled, "token")}, ${words(turn.label || "in no segment")}`}>
          <circle cx=${at(turn.turn).x} cy=${at(turn.turn).y} r=${radius(turn)} fill=${`var(${LABELS[turn.label]?.[0] ?? "--c6"})`} class=${turn.excluded ? "faded" : ""}><title>${`turn ${turn.turn}: ${int(turn.sampled)} tokens${turn.excluded ? `, ${words(turn.excluded)}` : ""}`}</title></circle>
          <text x=${at(turn.turn).x} y=${at(turn.turn).y - radius(turn) - 4}>turn ${turn.turn}</text></a>`)}
      </svg></div><//>
    ${data.drifts.length > 0 && html`<${Panel} title="Why it branched"><${Table} label="drifts" rows=${data.drifts} columns=${[
      { key: "request", label: "At turn", num: true }, { key: "kind", label: "Kind" }, { key: "cause", label: "Cause", cell: driftWords },
      { key: "tokens", label: "Tokens affected", num: true }, { key: "detail", label: "Detail", cls: "wrap", cell: (row) => html`<${Line} text=${row.detail || "–"} />` },
    ]} /><//>`}`;
}

/** Depth to the right; a branch that is not the first child gets a row of its own. */
function layout(turns) {
  const places = new Map();
  const used = new Set();
  let rows = 0;
  for (const turn of turns) {
    const parent = places.get(turn.parent);
    const x = parent ? parent.x + 1 : 0;
    let y = parent && !used.has(turn.parent) ? parent.y : rows;
    if (!parent) y = rows;
    used.add(turn.parent);
    rows = Math.max(rows, y + 1);
    places.set(turn.turn, { x, y });
  }
  return places;
}
