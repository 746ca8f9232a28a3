// The shell: header, pages, keys, live events.
import { h, html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/preact-htm.module.js";
import { get, isEmbedded } from "./api.js";
import { RunContext, useEvents } from "./live.js";
import { activeKeys, focusRow, useKeys } from "./keys.js";
import { go, href, rolloutHref, useRoute } from "./router.js";
import { Badge, useData, Waiting } from "./ui.js";
import { Line } from "./text.js";
import { RunsPage } from "./pages/runs.js";
import { OverviewPage } from "./pages/overview.js";
import { StepPage } from "./pages/step.js";
import { GroupPage } from "./pages/group.js";
import { RolloutsPage } from "./pages/rollouts.js";
import { RolloutPage } from "./pages/rollout.js";
import { TasksPage, TaskPage } from "./pages/tasks.js";
import { HealthPage } from "./pages/health.js";
import { CheatsPage } from "./pages/cheats.js";
import { ComparePage } from "./pages/compare.js";
import { SearchPage } from "./pages/search.js";
import { ConfigPage } from "./pages/config.js";

const PAGES = {
  runs: RunsPage, overview: OverviewPage, step: StepPage, group: GroupPage, rollouts: RolloutsPage, rollout: RolloutPage,
  tasks: TasksPage, task: TaskPage, health: HealthPage, cheats: CheatsPage, compare: ComparePage, config: ConfigPage, search: SearchPage,
};
const MENU = [["overview", "Overview"], ["rollouts", "Rollouts"], ["search", "Search"], ["tasks", "Tasks"], ["health", "Health"], ["cheats", "Cheats"], ["config", "Config"]];
const PARENT = { step: "overview", group: "rollouts", rollout: "rollouts", task: "tasks" };

function App() {
  const route = useRoute();
  const [help, setHelp] = useState(false);
  const live = useEvents(route.run);
  const { data, error } = useData(route.run || route.page === "compare" ? "runs" : "", live.running === null ? 0 : Number(live.running > 0));
  const run = data?.runs.find((info) => info.name === route.run);
  const [said, setSaid] = useState("");
  const copy = () => void copyPlace(route).then((text) => (setSaid(text), setTimeout(() => setSaid(""), 3000)));
  useKeys(globalKeys(route, () => setHelp(true), copy));
  useEffect(() => {
    document.title = [pageTitle(route), route.run, "insitu"].filter(Boolean).join(" · ");
  }, [route]);
  const name = Object.hasOwn(PAGES, route.page) ? route.page : "";
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.querySelector("main")?.focus())}>Skip to the page</a>
    <header class="top">
      <div class="bar">
        <a class="brand" href="#/" aria-label="insitu: all runs"><img src="icon.svg" alt="" /><span>insitu</span></a>
        ${route.run && html`<span class="crumb"><span class="up"><a href="#/">runs</a><span class="sep" aria-hidden="true">/</span></span><a href=${href(route.run)}><${Line} text=${route.run} /></a></span>`}
        ${route.page === "compare" && html`<span class="crumb"><a href="#/">runs</a><span class="sep" aria-hidden="true">/</span>compare</span>`}
        ${run && html`<${Badge} value=${live.state ?? run.state} />`}
        <span class="grow"></span>
        <span class="note" role="status">${said}</span>
        <span class="icons">
          <button onClick=${switchTheme} title="Switch between dark and light" aria-label="Switch between dark and light">◐</button>
          <button onClick=${() => setHelp(true)} title="Keys (?)" aria-label="Keys">?</button>
        </span>
      </div>
      ${route.run && html`<${Menu} route=${route} />`}
    </header>
    <main id="main" tabindex="-1">
      ${route.run && data && !run ? html`<div class="notice warn">No run is called <b><${Line} text=${route.run} /></b>. <a href="#/">All runs</a></div>` : error && !run ? html`<${Waiting} of=${{ error }} />`
        : h(RunContext.Provider, { value: { run, live, name: route.run } },
            name ? html`<${Guarded} key=${`${name}/${route.run}`} page=${name} route=${route} />` : html`<div class="notice warn">There is no page at this address. <a href="#/">All runs</a></div>`)}
    </main>
    <div class="visually-hidden" aria-live="polite">${live.message}</div>
    ${help && html`<${Keys} onClose=${() => setHelp(false)} />`}`;
}

/** A page whose failure is shown instead of a blank screen. */
function Guarded({ page, route }) {
  const [error] = useErrorBoundary((problem) => console.error(problem));
  const box = useRef(null);
  useEffect(() => document.documentElement.setAttribute("data-ready", page), [page]);
  if (error) return html`<div class="notice bad" role="alert"><b>This page failed.</b> <${Line} text=${error.message} /></div>`;
  return html`<${PAGES[page]} ref=${box} route=${route} />`;
}

function Menu({ route }) {
  const current = PARENT[route.page] ?? route.page;
  return html`<nav class="pages" aria-label="Pages of this run">
    ${MENU.map(([page, label]) => html`<a key=${page} href=${href(route.run, page === "overview" ? "" : page)} aria-current=${page === current ? "page" : undefined}>${label}</a>`)}
  </nav>`;
}

function pageTitle({ page, parts }) {
  if (page === "overview") return "";
  return [page, ...parts].join(" ");
}

function globalKeys(route, help, copy) {
  const to = (page) => [`go to ${page || "overview"}`, () => route.run && go(href(route.run, page))];
  return {
    "?": ["show the keys", help],
    "j": ["next row, Enter opens it", () => focusRow(1)],
    "k": ["previous row", () => focusRow(-1)],
    "u": ["up one level", () => go(parentOf(route))],
    "g o": to(""), "g s": to("rollouts"), "g f": to("search"), "g t": to("tasks"), "g h": to("health"), "g e": to("cheats"), "g k": to("config"),
    "g r": ["go to all runs", () => go("#/")],
    "y": ["copy the command that opens this view", copy],
  };
}

/** Copy `insitu view … --at …`, or the address of an exported file; return what was done. */
async function copyPlace(route) {
  const { runs } = isEmbedded() ? { runs: [] } : await get("runs");
  const names = route.page === "compare" ? (route.parts[0] ?? "").split(",") : [route.run];
  const paths = runs.filter((run) => names.includes(run.name)).map((run) => run.path);
  const command = ["insitu view", ...paths.map(shellWord), "--at", shellWord(location.hash.replace(/^#\/?/, ""))].join(" ");
  const text = isEmbedded() || !paths.length ? location.href : command;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    return "the browser does not allow copying";
  }
  return `copied: ${text === command ? "the command that opens this view" : "the address"}`;
}

/** One word of a POSIX shell. */
function shellWord(text) {
  return /^[\w./:=,@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function parentOf({ run, page, parts, query }) {
  if (page === "compare") return query.id_a && parts[0] ? rolloutHref(parts[0].split(",")[0], query.id_a) : "#/";
  if (page === "rollout") return href(run, "rollouts");
  if (page === "group") return parts[0] === "train" ? href(run, "step", [Number(parts[1])]) : href(run, "rollouts");
  if (page === "task") return href(run, "tasks");
  return page === "overview" ? "#/" : href(run);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("insitu.theme", root.dataset.theme);
  } catch {
    // Storage is off: the choice lasts as long as the page.
  }
}

function Keys({ onClose }) {
  const dialog = useRef(/** @type {HTMLDialogElement|null} */ (null));
  const [keys] = useState(activeKeys);
  useEffect(() => dialog.current?.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="keys-title">
    <h2 id="keys-title">Keys on this page</h2>
    <dl class="keys">${keys.map(([key, meaning]) => html`<dt>${key.split(" ").map((part) => html`<kbd>${part}</kbd> `)}</dt><dd>${meaning}</dd>`)}</dl>
    <form method="dialog"><button autofocus>Close</button></form>
  </dialog>`;
}

const app = document.getElementById("app");
if (app) {
  app.replaceChildren();
  render(html`<${App} />`, app);
}
