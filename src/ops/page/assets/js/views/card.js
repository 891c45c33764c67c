// A provider's card on the overview: its state, what waits and until when, limits, and the rate of the last minutes.

import { clearsAbout, clearsDependsOn, clearsWords } from "../clears.js";
import { finishLine } from "../cutoff.js";
import { h } from "../dom.js";
import { ago, count, duration, plural, rate, since } from "../format.js";
import { inZone, instant } from "../instants.js";
import { tightestWords } from "../limits.js";
import { chip, figure, figures, limitBar, providerHref, unasked, waitingLacks, waitingWords } from "../parts.js";
import { spark } from "../spark.js";
import { laneState } from "../words.js";
import { liftButton, pauseButton } from "./pause.js";

/** Bars on a card; the provider's page has them all. */
const BARS = 2;
const NEAR = 0.8;
/** Counts younger than this are shown without their age. */
const COUNTED_OLD_MS = 5_000;

/** `explained`: an incident above the cards has the cause, and the usage of limits is unknown. */
export function card(provider, points, context, explained) {
  const { name } = provider;
  const [, tone] = laneState(provider.state);
  return h(
    "article",
    { key: name, class: `card ${tone}`, "aria-labelledby": `card-${name}` },
    h(
      "header",
      {},
      h("h3", { id: `card-${name}` }, h("a", { href: providerHref(name) }, name)),
      h("span", { class: "actions" }, liftButton(provider, context), pauseButton(provider, context)),
    ),
    h("div", { class: "state" }, chip(laneState(provider.state)), decisions(provider)),
    explained ? null : cause(provider),
    badRow(provider),
    backlog(provider),
    finishLine(provider),
    explained ? null : bars(provider),
    h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", { class: "key" }, h("b", {}, rate(provider.rate_per_s)), " sent"), h("span", { class: "key limit-key" }, "limit ", h("b", {}, tightestWords(provider))), points.some(({ throttled }) => throttled) ? h("span", { class: "key bad-key" }, "429") : null),
      spark(points, tightestWords(provider), provider.refused_by_provider),
    ),
    rest(provider),
  );
}

function bars(provider) {
  const limits = (provider.limits ?? []).filter((limit) => limit.enabled !== false);
  const shown = tightest(limits);
  const more = limits.length - shown.length;
  return h("div", { class: "limits" },
    shown.map((limit) => h("div", { key: limit.name }, limitBar(limit, { unasked: unasked(provider) }))),
    more > 0 ? h("p", { key: "more", class: "more" }, h("a", { href: providerHref(provider.name) }, plural(more, "more limit", "more limits"))) : null);
}

/** What waits, and until when. */
function backlog(provider) {
  const { name, waiting, clears, oldest_waiting_at: at } = provider;
  if (waiting === 0 && !provider.waiting_is_at_least) return h("p", { class: "calm" }, "Nothing waits.");
  const estimated = clearsDependsOn(clears).length > 0 ? "depends on the accounts" : null;
  return figures(
    figure("Waiting", waitingWords(provider), { note: waitingLacks(provider) ?? (at ? ["oldest ", instant(at, oldest(provider))] : null), href: waitingHref(name) }),
    figure("Clears in", clearsAbout(clears), { note: estimated }),
  );
}

/** Links to the payments that need a decision. */
export function decisions({ name, review, dead }) {
  const link = (state, words) => h("a", { key: state, class: "decide", href: attentionHref(name, state) }, words);
  return [review > 0 ? link("review", `${count(review)} to review`) : null, dead > 0 ? link("dead", `${count(dead)} dead`) : null];
}

/** The 429s of the last hour; null without any. */
export const refused = ({ refused_by_provider: all }) =>
  (all > 0 ? h("strong", { class: "refused", title: "In the last hour" }, `${count(all)} × 429`) : null);

/** What is zero and should be, in words. */
export const zeros = ({ review, dead, refused_by_provider: refused }) =>
  [review === 0 ? "nothing to review" : "", dead === 0 ? "none dead" : "", refused === 0 ? "no 429s" : ""].filter(Boolean).join(", ");

/** The last line: what should be zero, and what is under way. */
function rest(provider) {
  const zero = zeros(provider);
  return h("p", { class: "rest" },
    refused(provider),
    zero === "" ? null : h("span", {}, h("span", { class: "tick", "aria-hidden": "true" }, "✓ "), zero),
    h("span", {}, `${count(provider.in_flight)} in flight`));
}

const waitingHref = (name) => `#/jobs?state=waiting&provider=${encodeURIComponent(name)}`;
const attentionHref = (name, state) => `#/attention?state=${state}&provider=${encodeURIComponent(name)}`;

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
  return h("p", { class: "cause" }, inZone(words), ends ? `${words ? ", " : ""}${when} ${duration(Math.ceil(ends / 1_000) * 1_000)}` : "");
}

/** The ten figures of a provider's view: always as many, so that their rows are full. */
export function numbers(provider) {
  return h("dl", { class: "figures ten" },
    figure("Waiting", waitingWords(provider), { note: waitingLacks(provider), href: waitingHref(provider.name) }),
    figure("Oldest", oldest(provider)),
    figure("Clears in", clearsAbout(provider.clears)),
    figure("In flight", count(provider.in_flight)),
    figure("Active", count(provider.active)),
    figure("In the queue", count(provider.queued)),
    figure("In the backlog", count(provider.backlog)),
    figure("Delayed", count(provider.delayed)),
    figure("Succeeded", count(provider.succeeded)),
    figure("Declined", count(provider.declined)));
}

export function oldest(provider) {
  const age = ago(provider.oldest_waiting_at);
  return provider.oldest_is_at_least && provider.oldest_waiting_at ? `at least ${age}` : age;
}

/** The tightest limits, and any other that is nearly full. An order by usage would move the bars all the time. */
export function tightest(limits) {
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
