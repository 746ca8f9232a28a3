// Every token of a segment with its fate: strip, minimap, signals, legend as filter, readout in words.
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.module.js";
import { apiPath } from "../api.js";
import { compact, int, plural, words } from "../format.js";
import { useKeys } from "../keys.js";
import { setQuery } from "../router.js";
import { useData } from "../ui.js";
import { Line } from "../text.js";
import { PAGE_TOKENS } from "../tokens_page.js";
import { TokenStrip } from "../tokens_strip.js";
import { kindsOf, signalsOf, tokenWords } from "../tokens_signals.js";
import { Minimap } from "./minimap.js";

export function TokensTab({ data, route, id }) {
  const { segments, turns } = data;
  const ofTurn = route.query.turn !== undefined && route.query.turn !== "" ? Number(route.query.turn) : -1;
  const segment = segments.find((s) => s.segment === Number(route.query.seg ?? -1)) ?? segments.find((s) => s.label === "final") ?? segments[0];
  const turn = turns.find((t) => t.turn === ofTurn) ?? (segment ? null : turns[0]);
  const source = turn ? { turn: turn.turn } : { segment: segment?.segment };
  const total = turn ? turn.fresh + turn.sampled : segment.tokens;
  const first = Math.min(total - 1, turn ? turn.fresh : segment.sampled);
  const choose = (event) => {
    const [kind, number] = event.currentTarget.value.split(" ");
    setQuery({ seg: kind === "seg" ? number : "", turn: kind === "turn" ? number : "", at: "" });
  };
  const picker = html`<label class="facet"><span class="label">Show</span><select onChange=${choose} value=${turn ? `turn ${turn.turn}` : `seg ${segment.segment}`}>
      ${segments.length > 0 && html`<optgroup label="Segments (training rows)">${segments.map((s) => html`<option value=${`seg ${s.segment}`}>Segment ${s.segment}: ${words(s.label)}, ${plural(s.tokens, "token")}, ${int(s.masked)} ${s.kind}</option>`)}</optgroup>`}
      <optgroup label="Turns (new prompt and reply)">${turns.map((t) => html`<option value=${`turn ${t.turn}`}>Turn ${t.turn}: ${plural(t.fresh + t.sampled, "token")}${t.excluded ? `, ${words(t.excluded)}` : ""}</option>`)}</optgroup>
    </select></label>`;
  return html`<${Strip} key=${JSON.stringify(source)} data=${data} route=${route} id=${id} source=${source} total=${total} first=${first} picker=${picker} />`;
}

/** What the signals need beside the page: credit of the rollout and the trainer's version. */
function contextOf(data, source) {
  const row = data.credit?.rows?.find((r) => r.segment === source.segment) ?? data.credit?.rows?.[0];
  return { advantage: row?.advantage ?? null, weight: row?.weight ?? null, trainer: data.row?.account ? data.row.account - 1 : data.row?.version ?? 0 };
}

/** `first`: the first sampled token. */
function Strip({ data, route, id, source, total, first, picker }) {
  const box = useRef(/** @type {HTMLElement|null} */ (null));
  const strip = useRef(/** @type {TokenStrip|null} */ (null));
  const pages = useRef(new Map());
  const [loaded, setLoaded] = useState({ n: 0, reasons: [], has: /** @type {string[]} */ ([]), text: true, unscored: "" });
  const [view, setView] = useState([0, 0]);
  const [error, setError] = useState("");
  const [at, setAt] = useState(route.query.at === undefined || route.query.at === "" ? -1 : Number(route.query.at));
  const [readout, setReadout] = useState(/** @type {string[][]} */ ([]));
  const [spaces, setSpaces] = useState(false);
  const signalId = route.query.signal ?? "fate";
  const only = route.query.only === undefined || route.query.only === "" ? null : Number(route.query.only);
  const context = useMemo(() => contextOf(data, source), [data, source]);
  const signals = useMemo(() => signalsOf(loaded.reasons), [loaded.reasons.join()]);
  const signal = signals.find((s) => s.id === signalId) ?? signals[0];
  const missing = (s) => (s.id === "advantage" ? context.advantage === null : loaded.n > 0 && !loaded.has.includes(s.needs));

  useEffect(() => {
    if (!box.current) return undefined;
    const pathOf = (start, count) => apiPath([route.run, "tokens"], { id, ...source, start, count });
    const onPage = (page) => {
      pages.current.set(page.header.start, page);
      setLoaded((old) => ({ n: old.n + 1, reasons: [...new Set([...old.reasons, ...page.header.reasons])], has: Object.keys(page.columns).filter((key) => page.columns[key].length), text: page.text !== "", unscored: page.header.unscored }));
    };
    const onView = (first, last) => setView((old) => (old[0] === first && old[1] === last ? old : [first, last]));
    const made = new TokenStrip(box.current, { total, pathOf, onView, onPage, onError: setError });
    strip.current = made;
    made.update();
    if (at >= 0) void show(at);
    else made.goTo(first, true, false).catch(() => {}); // onError shows it
    return () => made.destroy();
  }, []);
  useEffect(() => strip.current?.setPaint({ signal, only, context }), [signal, only, context]);
  useEffect(() => strip.current?.setSpaces(spaces), [spaces]);

  const describe = (page, token) => setReadout(tokenWords(page, token - page.header.start, context));
  const show = useCallback(async (token, scroll = true) => {
    const bounded = Math.max(0, Math.min(total - 1, token));
    setAt(bounded);
    setQuery({ at: bounded });
    const page = await strip.current?.goTo(bounded, scroll);
    if (page) describe(page, bounded);
  }, [total, context]);
  const hover = async (event) => {
    const token = strip.current?.tokenAt(event.clientX, event.clientY);
    if (token === null || token === undefined) return;
    const page = pages.current.get(Math.floor(token / PAGE_TOKENS) * PAGE_TOKENS);
    if (page) describe(page, token);
  };
  const pick = (event) => {
    const token = strip.current?.tokenAt(event.clientX, event.clientY);
    if (token !== null && token !== undefined) void show(token, false);
  };
  const kindOf = async (token) => {
    const page = await strip.current?.load(Math.floor(token / PAGE_TOKENS));
    return page ? kindsOf(signal, page, context)[token - page.header.start] : -1;
  };
  const jump = async (direction) => {
    // A million tokens are 245 pages; 40 of them are looked through at a time.
    // From stretch to stretch: tokens in a row of the same kind are one.
    let last = at < 0 ? -1 : await kindOf(at);
    for (let token = at + direction, looked = 0; token >= 0 && token < total && looked < 40 * PAGE_TOKENS; token += direction, looked++) {
      const page = pages.current.get(token - (token % PAGE_TOKENS));
      const kind = page ? kindsOf(signal, page, context)[token - page.header.start] : await kindOf(token);
      if (kind !== last && kind >= 0 && (only === null ? signal.buckets[kind].flag : only === kind)) return show(token);
      last = kind;
    }
    return setReadout([["next", "no further flagged token"]]);
  };
  useKeys({
    n: ["next flagged token", () => void jump(1)],
    N: ["previous flagged token", () => void jump(-1)],
    ArrowRight: ["next token", () => void show(at < 0 ? first : at + 1)],
    ArrowLeft: ["previous token", () => void show(at < 0 ? first : at - 1)],
    w: ["show spaces and line ends", () => setSpaces(!spaces)],
    ...Object.fromEntries(signals.map((s) => [s.key, [`colour by ${s.label}`, () => !missing(s) && setQuery({ signal: s.id, only: "" })]])),
  });
  return html`
    <div class="facet" role="group" aria-label="Colour by">${picker}<span class="label">Colour by</span>
      ${signals.map((s) => html`<button class="chip" key=${s.id} aria-pressed=${s === signal} disabled=${missing(s)} title=${missing(s) ? (s.id === "advantage" ? "this rollout has no proven advantage" : loaded.unscored) : `key ${s.key}`} onClick=${() => setQuery({ signal: s.id, only: "" })}>${s.label}</button>`)}</div>
    <${LegendFilter} signal=${signal} only=${only} pages=${pages.current} loaded=${loaded.n} total=${total} context=${context} />
    ${source.segment !== undefined && html`<${Minimap} run=${route.run} id=${id} segment=${source.segment} view=${view} at=${at} onGo=${(token) => void show(token)} />`}
    ${loaded.unscored && html`<p class="note">Gap, ratio and entropy: <${Line} text=${loaded.unscored} />.</p>`}
    ${error && html`<div class="notice bad"><${Line} text=${error} /></div>`}
    ${loaded.n > 0 && !loaded.text && html`<div class="notice warn">The tokenizer of this run is not here: ids are shown.</div>`}
    <dl class="tokens-readout" aria-live="polite" aria-label="token under the pointer">${readout.length ? readout.map(([label, value]) => html`<div><dt>${label}</dt><dd class=${label === "text" ? "mono" : ""}><${Line} text=${value} max=${80} /></dd></div>`) : html`<div><dd class="dim">Point at a token, or press n for the next flagged one.</dd></div>`}</dl>
    <div ref=${box} class="tokens" tabindex="0" role="region" aria-label=${`${plural(total, "token")}`} onMouseMove=${hover} onClick=${pick}></div>
    <div class="chips"><span class="note">${total > PAGE_TOKENS ? `tokens ${int(view[0])} to ${int(view[1])} of ${int(total)}` : plural(total, "token")}</span><span class="grow"></span>
      <button class="chip" onClick=${() => void jump(-1)}>previous flagged</button><button class="chip" onClick=${() => void jump(1)}>next flagged</button>
      <button class="chip" aria-pressed=${spaces} onClick=${() => setSpaces(!spaces)}>spaces and line ends</button></div>`;
}

function LegendFilter({ signal, only, pages, loaded, total, context }) {
  const counts = useMemo(() => {
    const found = signal.buckets.map(() => 0);
    let seen = 0;
    for (const page of pages.values()) {
      for (const n of kindsOf(signal, page, context)) if (n >= 0) found[n]++;
      seen += page.count;
    }
    return { found, seen };
  }, [signal, loaded, context]);
  return html`<div class="facet" role="group" aria-label="Legend: show only">
    ${signal.buckets.map((bucket, n) => counts.found[n] > 0 || only === n ? html`<button class="chip" key=${bucket.label} aria-pressed=${only === n} title="show only these" onClick=${() => setQuery({ only: only === n ? "" : n })}><span class=${`tone tone-${bucket.tone || "none"}`} aria-hidden="true"></span>${words(bucket.label)}<span class="n">${int(counts.found[n])}</span></button>` : "")}
    ${counts.seen < total && html`<span class="note">counts of the ${compact(counts.seen)} tokens loaded so far</span>`}</div>`;
}
