// The entry point: it routes by the URL's hash, loads the view's data, and draws.

import { get, link, path } from "./api.js";
import { announce } from "./announce.js";
import { heard } from "./clock.js";
import { h, patch } from "./dom.js";
import { askPerson } from "./person.js";
import { Poll } from "./poll.js";
import { printable } from "./printable.js";
import { drawShell } from "./shell.js";
import { attention } from "./views/attention.js";
import { batch } from "./views/batch.js";
import { batches } from "./views/batches.js";
import { job } from "./views/job.js";
import { jobs } from "./views/jobs.js";
import { overview } from "./views/overview.js";
import { provider } from "./views/provider.js";
import { rejected } from "./views/rejected.js";
import { workers } from "./views/workers.js";

const ROUTES = [
  [/^\/$/, overview],
  [/^\/providers\/([^/]+)$/, provider],
  [/^\/jobs$/, jobs],
  [/^\/jobs\/([^/]+)$/, job],
  [/^\/batches$/, batches],
  [/^\/batches\/([^/]+)$/, batch],
  [/^\/attention$/, attention],
  [/^\/rejected$/, rejected],
  [/^\/workers$/, workers],
];
/** Views that only need the overview's sums load it once in so many polls. */
const SELDOM = 3;

const main = document.getElementById("main");
// The document has a first content of its own, which is painted before the scripts are loaded.
for (const place of [main, document.getElementById("header")]) place.replaceChildren();
let shown;

/** What a view gets. */
function context(view) {
  return {
    overview: null,
    problem: null,
    redraw: () => shown === view && draw(),
    refresh: () => view.poll.now(),
    aborted: new AbortController(),
  };
}

function route() {
  const [where, query = ""] = (location.hash.replace(/^#/, "") || "/").split("?");
  const fields = new URLSearchParams(query);
  for (const [pattern, make] of ROUTES) {
    const found = pattern.exec(where);
    if (found) return { make, args: found.slice(1).map(unquoted), fields };
  }
  return { make: nowhere, args: [], fields };
}

function unquoted(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const nowhere = () => ({
  place: "",
  title: "No such page",
  load: async () => {},
  render: () => [
    h("h1", { tabindex: "-1" }, "No such page"),
    h("p", { class: "empty" }, "There is no such page. ", h("a", { href: "#/" }, "Go to the overview"), "."),
  ],
});

function open() {
  const { make, args, fields } = route();
  const known = shown?.context.overview ?? null;
  shown?.poll.stop();
  shown?.context.aborted.abort();
  shown?.page.destroy?.();
  // Another query of the same view keeps the scroll position and the focus.
  const same = shown !== undefined && shown.make === make && String(shown.args) === String(args);
  const first = shown === undefined;
  if (!same) patch(main);
  const view = { ticks: 0, make, args };
  view.context = context(view);
  view.context.overview = known;
  view.page = make(view.context, ...args, fields);
  view.poll = new Poll(() => tick(view));
  shown = view;
  draw();
  void view.poll.now();
  if (!first && !same) {
    scrollTo(0, 0);
    main.querySelector("h1")?.focus({ preventScroll: true });
  }
}

async function tick(view) {
  const { context, page } = view;
  const { signal } = context.aborted;
  const overviewIsDue = page.place === "overview" || view.ticks++ % SELDOM === 0 || context.overview === null;
  const failures = [];
  try {
    // A failed call does not stop the other.
    for (const ask of [overviewIsDue ? () => askOverview(context, signal) : null, () => page.load(signal), () => askPerson(signal)]) {
      try {
        await ask?.();
      } catch (error) {
        if (signal.aborted) return;
        failures.push(error);
      }
    }
    // An error response belongs to the view. No response concerns the whole page, and the banner shows it.
    const refused = failures.find((error) => error.status !== 0) ?? (context.overview ? undefined : failures[0]);
    context.problem = refused ? (refused.message ?? String(refused)) : null;
    const broken = failures.find((error) => error.status === undefined);
    if (broken) throw broken;
  } finally {
    if (shown === view) draw();
  }
}

async function askOverview(context, signal) {
  const answer = await get(path("overview"), signal);
  heard(answer.at);
  context.overview = answer;
}

function draw() {
  const { page, context } = shown;
  document.title = `${printable(page.title)} · Sluicegate`;
  document.documentElement.classList.toggle("stale", link.problem !== null);
  drawShell(page.place, context.overview);
  const headed = document.activeElement?.matches("main h1");
  patch(
    main,
    context.problem ? h("p", { key: "problem", class: "notice bad", role: "alert" }, context.problem) : null,
    page.render(),
  );
  // A loaded view may have another heading element; the focus moves along.
  if (headed && document.activeElement === document.body) main.querySelector("h1")?.focus({ preventScroll: true });
}

function keys(event) {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
}

// The link's own hash would be a route here; it works as written only without scripts.
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", open);
addEventListener("keydown", keys);
document.addEventListener("themechange", () => draw());
document.addEventListener("zonechange", () => draw());
// Ages and countdowns change between two responses.
setInterval(() => document.hidden || draw(), 1_000);
addEventListener("unhandledrejection", (event) => announce(`This page failed: ${event.reason?.message}`, "bad"));
open();
