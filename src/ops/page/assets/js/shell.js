// The frame of every view: navigation, search, the count of payments that need a decision, and the connection state.

import { link } from "./api.js";
import { h, patch } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { cycle, theme } from "./theme.js";

const header = document.getElementById("header");
const banner = document.getElementById("banner");

const PLACES = [
  ["overview", "#/", "Overview"],
  ["jobs", "#/jobs", "Jobs"],
  ["attention", "#/attention", "Review and dead"],
  ["rejected", "#/rejected", "Rejected"],
  ["workers", "#/workers", "Workers"],
];

/** Draws the header; `place` is the view's entry, `overview` the last one loaded. */
export function drawShell(place, overview) {
  const waiting = (overview?.providers ?? []).reduce((sum, p) => sum + (p.review ?? 0) + (p.dead ?? 0), 0);
  patch(
    header,
    h("a", { class: "brand", href: "#/", "aria-label": "Sluicegate, overview" }, logo(), h("span", {}, "Sluicegate")),
    h("nav", { "aria-label": "Main" }, PLACES.map((entry) => navLink(entry, place, waiting))),
    h("form", { class: "search", role: "search", onsubmit: search },
      h("input", {
        id: "search",
        type: "search",
        name: "search",
        placeholder: "Payment id or provider",
        "aria-label": "Find a payment by id, or a provider",
        "aria-keyshortcuts": "/",
        autocomplete: "off",
        spellcheck: "false",
      }),
      h("kbd", { "aria-hidden": "true" }, "/")),
    pulse(overview?.missing ?? []),
    h("button", { type: "button", class: "quiet theme", onclick: cycle, "aria-label": `Theme: ${theme()}. Change it.`, title: `Theme: ${theme()}` },
      h("span", { class: `theme-mark ${theme()}`, "aria-hidden": "true" }), h("span", { class: "theme-word" }, theme())),
  );
  drawBanner();

  function search(event) {
    event.preventDefault();
    const field = event.target.elements.search;
    const words = field.value.trim();
    if (words === "") return;
    const provider = (overview?.providers ?? []).some(({ name }) => name === words);
    location.hash = provider ? `#/providers/${encodeURIComponent(words)}` : `#/jobs/${encodeURIComponent(words)}`;
    field.value = "";
  }
}

function navLink([name, href, title], place, waiting) {
  const badge = name === "attention" && waiting > 0;
  return h(
    "a",
    { href, "aria-current": name === place ? "page" : null },
    title,
    badge ? h("span", { class: "badge" }, count(waiting), h("span", { class: "unseen" }, " need a decision")) : null,
  );
}

/** Whether the figures are current: the server and all backends respond. */
function pulse(missing) {
  const lost = link.problem !== null;
  const away = missing.length === 1 ? `No ${missing[0]}` : `${count(missing.length)} backends unavailable`;
  const words = lost ? "No response" : missing.length > 0 ? away : link.lastAnswer ? "Live" : "Loading";
  return h("span", { class: lost || missing.length > 0 ? "pulse lost" : "pulse" }, h("span", { class: "dot", "aria-hidden": "true" }), words);
}

function drawBanner() {
  if (link.problem === null) return patch(banner);
  const at = new Date(link.since).toISOString();
  patch(
    banner,
    h("p", {}, `${link.problem} since ${clock(at)}. The page shows the state of that time, and retries every 2 s.`),
    // The growing number is hidden from screen readers: they would read it every second.
    h("span", { "aria-hidden": "true", class: "since" }, duration(Math.floor((Date.now() - link.since) / 1_000) * 1_000)),
  );
}

function logo() {
  return h(
    "svg",
    { viewBox: "0 0 24 24", class: "logo", "aria-hidden": "true" },
    h("path", { d: "M4 3v18M20 3v18M4 4h16", class: "frame" }),
    h("rect", { x: 7, y: 6.5, width: 10, height: 6, rx: 1, class: "gate" }),
    h("path", { d: "M6.5 16.5c1.4-1.2 2.6-1.2 4 0s2.600 1.200 4 0 2.100-1.100 3-.8M6.500 20c1.400-1.200 2.600-1.200 4 0s2.600 1.200 4 0 2.100-1.100 3-.8", class: "water" }),
  );
}
