// Text that agents wrote or read: matches of the newest turns first, further ones when asked for.
import { html, useEffect, useState } from "../vendor/preact-htm.module.js";
import { apiPath, get, isEmbedded } from "../api.js";
import { int, plural } from "../format.js";
import { rolloutHref, setQuery } from "../router.js";
import { Empty } from "../ui.js";
import { Line } from "../text.js";

export function SearchPage({ route }) {
  const asked = route.query.text ?? "";
  const [text, setText] = useState(asked);
  const found = useSearch(route.run, asked);
  const submit = (event) => {
    event.preventDefault();
    setQuery({ text });
  };
  return html`
    <div class="title"><h1>Search</h1><span class="sub">in what agents wrote and read, newest first</span></div>
    <form class="facet" role="search" onSubmit=${submit}>
      <input id="search" type="search" placeholder="text, as it was written" aria-label="Text to search for" value=${text} onInput=${(event) => setText(event.currentTarget.value)} /> <button>Search</button>
    </form>
    ${found.error && html`<div class="notice bad" role="alert"><${Line} text=${found.error} /></div>`}
    ${found.problem && html`<div class="notice warn"><${Line} text=${found.problem} /></div>`}
    <ul class="list">${found.matches.map((match) => html`<li><a class="rowlink" href=${rolloutHref(route.run, match.id, { turn: match.turn })}>
      <b class="go"><${Line} text=${match.id} /></b> <span class="dim small">turn ${match.turn}, ${match.where}</span>
      <span class="mono small full"><${Line} text=${match.before.slice(-80)} max=${80} /><mark><${Line} text=${match.match} /></mark><${Line} text=${match.after} max=${120} /></span></a></li>`)}</ul>
    ${asked && !found.busy && !found.matches.length && !found.problem && !found.error && html`<${Empty}>No match in the ${plural(found.searched, "turn")} searched.<//>`}
    <p class="note" aria-live="polite">${found.busy ? "Searching…" : asked ? `${plural(found.matches.length, "match", "matches")} in ${int(found.searched)} turns${found.next ? "" : ", all of the run"}` : ""}</p>
    ${found.next && !found.busy && html`<button onClick=${found.more}>Search older turns</button>`}`;
}

/** Parts of a search; each ends after a second of the server's time. */
function useSearch(run, text) {
  const none = { matches: /** @type {any[]} */ ([]), searched: 0, next: null, problem: "", error: "", busy: false };
  const [state, setState] = useState(none);
  const load = (old, signal) => {
    setState({ ...old, busy: true });
    get(apiPath([run, "search"], { text, before: old.next ?? "" }), signal).then(
      (part) => setState({ ...old, ...part, matches: [...old.matches, ...part.matches], searched: old.searched + part.searched, busy: false }),
      (error) => signal?.aborted || setState({ ...old, error: error.message, busy: false }),
    );
  };
  useEffect(() => {
    const abort = new AbortController();
    if (isEmbedded()) setState({ ...none, problem: "a report holds no search: open the run with insitu view" });
    else if (text) load(none, abort.signal);
    else setState(none);
    return () => abort.abort();
  }, [run, text]);
  return { ...state, more: () => load(state) };
}
