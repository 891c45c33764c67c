// A provider's card on the overview: limits, usage, backlog, and the cause if nothing is sent.

import { rateChart, rateWords } from "../chart.js";
import { clearsAbout, clearsDependsOn, clearsWords } from "../clears.js";
import { finishLine } from "../cutoff.js";
import { h } from "../dom.js";
import { ago, count, duration, rate, since } from "../format.js";
import { chip, figure, figures, limitBar, providerHref, unasked, waitingLacks, waitingWords } from "../parts.js";
import { laneState } from "../words.js";
import { liftButton, pauseButton } from "./pause.js";

/** Bars on a card; the provider's page has them all. */
const BARS = 2;
const NEAR = 0.8;
/** Counts younger than this are shown without their age. */
const COUNTED_OLD_MS = 5_000;
const chart = rateChart({ height: 104, compact: true });

export function card(provider, points, context) {
  const { name } = provider;
  const [, tone] = laneState(provider.state);
  const limits = (provider.limits ?? []).filter((limit) => limit.enabled !== false);
  const bars = shown(limits);
  return h(
    "article",
    { key: name, class: `card ${tone}`, "aria-labelledby": `card-${name}` },
    h(
      "header",
      {},
      h("h2", { id: `card-${name}` }, h("a", { href: providerHref(name) }, name)),
      chip(laneState(provider.state)),
      h("span", { class: "actions" }, liftButton(provider, context), pauseButton(provider, context)),
    ),
    cause(provider),
    badRow(provider),
    h("div", { class: "limits" }, bars.map((limit) => h("div", { key: limit.name }, limitBar(limit, { unasked: unasked(provider) })))),
    bars.length < limits.length ? h("p", { class: "more" }, h("a", { href: providerHref(name) }, `${limits.length - bars.length} more ${limits.length - bars.length === 1 ? "limit" : "limits"}`)) : null,
    h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", { class: "key" }, h("b", {}, rate(provider.rate_per_s)), " sent"), h("span", { class: "key limit-key" }, h("b", {}, rate(provider.limit_per_s)), " allowed on average")),
      h("div", { class: "canvas", role: "img", "aria-label": rateWords(points), mount: chart, data: points }),
    ),
    figures(...numbers(provider)),
    depends(provider),
    finishLine(provider),
  );
}

/** The first problem of an invalid row. The provider's page shows all of them. */
function badRow(provider) {
  const [first, ...more] = provider.problems ?? [];
  if (!first || provider.cause?.includes(first)) return null;
  const others = more.length > 0 ? ` (and ${count(more.length)} more)` : "";
  return h("p", { class: "cause bad-row" }, `Invalid configuration, ${whatCounts(provider)}: ${first}${others}`);
}

/** What applies while a row is invalid: the last valid one, if any worker has loaded one. */
export const whatCounts = (provider) =>
  provider.has_valid_row ? "the last valid one applies" : "nothing is sent";

/** The limits that count per account or reference. The clear time depends on them, and the queue hides accounts. */
export function depends(provider) {
  const on = clearsDependsOn(provider.clears);
  if (on.length === 0 || !(provider.waiting > 0)) return null;
  const [limit, counts] = on.length === 1 ? ["limit", "counts"] : ["limits", "count"];
  const guess = known(provider.clears.about_ms) ? `about ${duration(provider.clears.about_ms)} at the rate of the last minutes` : "the total time is unknown";
  return h("p", { class: "depends" }, `Clears in ${clearsWords(provider.clears)}; ${guess}: ${limit} ${on.join(", ")} ${counts} each account or reference separately.`);
}

const known = (value) => value !== null && value !== undefined;

/** The age of the ledger's counts, once they are old. */
export function counted(overview) {
  const age = since(overview?.counted_at);
  return age > COUNTED_OLD_MS ? h("p", { class: "counted", "aria-live": "off" }, `Payments in the ledger were counted ${ago(overview.counted_at)} ago: counting takes long here, so it is done less often.`) : null;
}

/** States whose pause ends with another try, which may fail again. */
const RETRIED = new Set(["breaker_open", "misconfigured"]);

/** The cause of the provider's state, and how long it lasts. */
export function cause(provider) {
  const ends = provider.ends_in_ms;
  const words = provider.cause || "";
  if (!words && !ends) return null;
  const when = RETRIED.has(provider.state) ? "next try in" : "for another";
  return h("p", { class: "cause" }, words, ends ? `${words ? ", " : ""}${when} ${duration(Math.ceil(ends / 1_000) * 1_000)}` : "");
}

export function numbers(provider) {
  const { name } = provider;
  const search = (state) => `#/jobs?state=${state}&provider=${encodeURIComponent(name)}`;
  const attention = (state) => `#/attention?state=${state}&provider=${encodeURIComponent(name)}`;
  const refused = provider.refused_by_provider;
  return [
    figure("Waiting", waitingWords(provider), { note: waitingLacks(provider), href: search("waiting") }),
    figure("Oldest", oldest(provider)),
    figure("Clears in", clearsAbout(provider.clears)),
    figure("In flight", count(provider.in_flight)),
    figure("Review", count(provider.review), { alarm: provider.review > 0, href: attention("review") }),
    figure("Dead", count(provider.dead), { alarm: provider.dead > 0, href: attention("dead") }),
    figure("429s", count(refused), { alarm: refused > 0 }),
    figure("Succeeded", count(provider.succeeded)),
  ];
}

function oldest(provider) {
  const age = ago(provider.oldest_waiting_at);
  return provider.oldest_is_at_least && provider.oldest_waiting_at ? `at least ${age}` : age;
}

/** The tightest limits, and any other that is nearly full. An order by usage would move the bars all the time. */
function shown(limits) {
  // Requests in flight say no rate: behind those that do.
  const perMs = ({ max_requests, window_ms }) => (window_ms ? max_requests / window_ms : Number.MAX_VALUE);
  // Limits on charges first, then limits on look-ups only, shadow limits last.
  const place = ({ shadow, applies_to }) => (shadow ? 2 : applies_to === "lookup" ? 1 : 0);
  const enforced = [...limits].sort((a, b) => place(a) - place(b) || perMs(a) - perMs(b));
  const counted = enforced.filter(({ used }) => used !== null && used !== undefined);
  const first = (counted.length > 0 ? counted : enforced).slice(0, BARS);
  const near = counted.slice(BARS).filter(({ used, remaining, shadow }) => !shadow && used >= NEAR * (used + (remaining ?? 0)));
  return [...first, ...near];
}
