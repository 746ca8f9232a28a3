// What changes while a run is under way: one event stream per visible tab.
import { createContext, useContext, useEffect, useRef, useState } from "./vendor/preact-htm.module.js";
import { apiPath, isEmbedded } from "./api.js";
import { plural } from "./format.js";

/** @typedef {{version: number, message: string, rollouts: number|null, running: number|null, state?: string}} Live */

/** The run that the page shows: {run: its info, live, name}. */
export const RunContext = createContext({ run: /** @type {any} */ (null), live: { version: 0, message: "", rollouts: null, running: null }, name: "" });

export function useRun() {
  return useContext(RunContext);
}

/** A number that rises when the run has new data, at most once in `seconds`. */
export function useRunVersion(seconds = 2) {
  const { live } = useRun();
  const [shown, setShown] = useState(live.version);
  const last = useRef(0);
  useEffect(() => {
    if (live.version === shown) return undefined;
    const wait = Math.max(0, last.current + seconds * 1000 - Date.now());
    const timer = setTimeout(() => {
      last.current = Date.now();
      setShown(live.version);
    }, wait);
    return () => clearTimeout(timer);
  }, [live.version, shown]);
  return shown;
}

/** Subscribe to the events of a run while the tab is visible. @returns {Live} */
export function useEvents(run) {
  const [live, setLive] = useState({ version: 0, message: "", rollouts: null, running: null });
  useEffect(() => {
    if (!run || isEmbedded()) return undefined;
    /** @type {EventSource|null} */
    let source = null;
    let spoken = 0;
    let first = true;
    setLive({ version: 0, message: "", rollouts: null, running: null });
    const onChange = (event) => {
      const now = JSON.parse(event.data);
      setLive((old) => {
        const grown = old.rollouts !== null && now.rollouts > old.rollouts;
        const speak = grown && Date.now() - spoken > 10_000;
        if (speak) spoken = Date.now();
        const ended = old.state === "running" && now.state !== "running";
        const message = ended ? `the run ${now.state}` : speak ? `${plural(now.rollouts - (old.rollouts ?? 0), "new rollout")}` : old.message;
        // The first event says where the run is; the page has just been loaded.
        const version = first ? old.version : old.version + 1;
        first = false;
        return { ...now, version, message };
      });
    };
    const open = () => {
      if (source || document.hidden) return;
      source = new EventSource(`api/${apiPath([run, "events"])}`);
      source.onmessage = onChange;
    };
    const close = () => {
      source?.close();
      source = null;
    };
    const toggle = () => (document.hidden ? close() : open());
    open();
    document.addEventListener("visibilitychange", toggle);
    return () => {
      document.removeEventListener("visibilitychange", toggle);
      close();
    };
  }, [run]);
  return live;
}
