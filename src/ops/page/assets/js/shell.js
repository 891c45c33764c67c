// The frame of every view: navigation, search, the count of payments that need a decision, and the connection state.

import { link } from "./api.js";
import { h, patch } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { incidents } from "./incidents.js";
import { inUtc, switchZone, zoneName } from "./instants.js";
import { personChip } from "./person.js";
import { cycle, theme } from "./theme.js";

const header = document.getElementById("header");
const banner = document.getElementById("banner");

const PLACES = [
  ["overview", "#/", "Overview"],
  ["jobs", "#/jobs", "Jobs"],
  ["attention", "#/attention", "Review", " and dead"],
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
    pulse(overview),
    personChip(),
    zoneButton(),
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

/** On a phone, the rest of a title is left out. */
function navLink([name, href, title, rest], place, waiting) {
  const badge = name === "attention" && waiting > 0;
  return h(
    "a",
    { href, "aria-current": name === place ? "page" : null },
    title,
    rest ? h("span", { class: "nav-rest" }, rest) : null,
    badge ? h("span", { class: "badge" }, count(waiting), h("span", { class: "unseen" }, " need a decision")) : null,
  );
}

/** Whether the figures are current and payments can be sent: the server, all backends and some worker respond. */
function pulse(overview) {
  const found = incidents(overview);
  const [words, tone] = link.problem !== null ? ["No response", "lost"] : found.length > 0 ? trouble(found, overview.outages ?? []) : link.lastAnswer ? ["Live", ""] : ["Loading", ""];
  return h("span", { class: `pulse ${tone}`.trim() }, h("span", { class: "dot", "aria-hidden": "true" }), words);
}

function trouble(found, outages) {
  const tone = found.some((incident) => incident.tone === "bad") ? "lost" : "partly";
  if (outages.length > 1) return [`${count(outages.length)} backends unavailable`, tone];
  if (found.length > 1) return [`${count(found.length)} incidents`, tone];
  return [found[0].short, tone];
}

function zoneButton() {
  const [zone, other] = [zoneName(), inUtc() ? "local time" : "UTC"];
  const local = inUtc() ? "UTC" : `local time, ${zone}`;
  return h("button", { type: "button", class: "quiet zone", onclick: switchZone, "aria-label": `Times: ${local}. Show ${other}.`, title: `Times: ${local}. Show ${other}.` }, zone);
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
