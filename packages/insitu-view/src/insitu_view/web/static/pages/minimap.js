// The whole row on one canvas: share trained, lowest log-probability, turn borders; click or drag moves.
import { html, useEffect, useRef } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { int } from "../format.js";
import { useData } from "../ui.js";
import { cssColour, onScheme } from "../chart.js";

const HEIGHT = 44;
const LOWEST = -8;

export function Minimap({ run, id, segment, view, at, onGo }) {
  const { data } = useData(apiPath([run, "minimap"], { id, segment }));
  const canvas = useRef(/** @type {HTMLCanvasElement|null} */ (null));
  useEffect(() => {
    const element = canvas.current;
    if (!element || !data) return undefined;
    const draw = () => drawMinimap(element, data);
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(element);
    const stop = onScheme(draw);
    return () => {
      watch.disconnect();
      stop();
    };
  }, [data]);
  if (!data?.tokens) return html`<div class="minimap-space"></div>`;
  const tokenAt = (event) => {
    const place = event.currentTarget.getBoundingClientRect();
    return Math.floor(((event.clientX - place.left) / place.width) * data.tokens);
  };
  const keys = (event) => {
    const by = { PageDown: 4096, PageUp: -4096, Home: -data.tokens, End: data.tokens }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    onGo(Math.max(0, Math.min(data.tokens - 1, Math.max(0, at) + by)));
  };
  const percent = (token) => `${(100 * token) / data.tokens}%`;
  return html`<figure class="minimap"><div class="minimap-track">
    <canvas ref=${canvas} height=${HEIGHT} tabindex="0" role="slider" aria-label="position in the row" aria-valuemin="0" aria-valuemax=${data.tokens} aria-valuenow=${Math.max(0, at)} aria-valuetext=${`token ${int(Math.max(0, at))} of ${int(data.tokens)}`}
      onPointerDown=${(event) => (event.currentTarget.setPointerCapture(event.pointerId), onGo(tokenAt(event)))} onPointerMove=${(event) => event.buttons && onGo(tokenAt(event))} onKeyDown=${keys}></canvas>
    <div class="minimap-view" style=${{ left: percent(view[0]), width: percent(view[1] - view[0]) }}></div>
    ${at >= 0 && html`<div class="minimap-at" style=${{ left: percent(at) }}></div>`}</div>
    <figcaption><ul class="legend"><li><span class="swatch box swatch-1"></span>sampled</li><li><span class="swatch swatch-2"></span>lowest log-probability</li>${data.max_gap && html`<li><span class="swatch swatch-3"></span>largest gap (1e-6 – 1)</li>`}<li><span class="swatch box swatch-turn"></span>turn begins</li></ul></figcaption>
  </figure>`;
}

/** Drawn once per row: what moves while one scrolls stands above the canvas. */
function drawMinimap(element, data) {
  const ratio = devicePixelRatio || 1;
  const width = element.clientWidth;
  element.width = Math.round(width * ratio);
  element.height = HEIGHT * ratio;
  const draw = element.getContext("2d");
  if (!draw) return;
  draw.scale(ratio, ratio);
  const [trained, line, gaps, dim, back] = ["--c1", "--c2", "--c3", "--line-strong", "--sunk"].map(cssColour);
  draw.fillStyle = back;
  draw.fillRect(0, 0, width, HEIGHT);
  const x = (token) => (token / data.tokens) * width;
  draw.fillStyle = trained;
  data.edges.forEach((edge, i) => {
    const end = data.edges[i + 1] ?? data.tokens;
    draw.globalAlpha = 0.15 + 0.6 * data.masked[i];
    if (data.masked[i] > 0) draw.fillRect(x(edge), HEIGHT - 12, Math.max(0.6, x(end) - x(edge)), 12);
  });
  draw.globalAlpha = 1;
  draw.strokeStyle = dim;
  draw.beginPath();
  for (const turn of data.turns) {
    draw.moveTo(x(turn.sampled), 0);
    draw.lineTo(x(turn.sampled), 5);
  }
  draw.stroke();
  const curve = (colour, values, shareOf) => {
    draw.strokeStyle = colour;
    draw.beginPath();
    let open = false;
    data.edges.forEach((edge, i) => {
      const y = values[i] === null ? null : 4 + shareOf(values[i]) * (HEIGHT - 20);
      if (y !== null) open ? draw.lineTo(x(edge), y) : draw.moveTo(x(edge), y);
      open = y !== null;
    });
    draw.stroke();
  };
  draw.lineWidth = 1;
  curve(line, data.min_logprob, (value) => Math.max(LOWEST, value) / LOWEST);
  // From 1e-6 at the bottom to 1 at the top.
  if (data.max_gap) curve(gaps, data.max_gap, (value) => Math.min(1, Math.max(0, -Math.log10(value || 1e-9) / 6)));
}
