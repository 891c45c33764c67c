// One provider on the overview: what it allows, what is used, what waits, and why it stands still if it does.

import { rateChart, rateWords } from "../chart.js";
import { h } from "../dom.js";
import { ago, count, duration, rate } from "../format.js";
import { chip, figure, figures, limitBar, providerHref } from "../parts.js";
import { laneState } from "../words.js";
import { pauseButton } from "./pause.js";

/** Bars on a card; the provider's page has them all. */
const BARS = 2;
const NEAR = 0.8;
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
      h("span", { class: "push" }),
      pauseButton(provider, context),
    ),
    cause(provider),
    h("div", { class: "limits" }, bars.map((limit) => h("div", { key: limit.name }, limitBar(limit)))),
    bars.length < limits.length ? h("p", { class: "more" }, h("a", { href: providerHref(name) }, `${limits.length - bars.length} more ${limits.length - bars.length === 1 ? "limit" : "limits"}`)) : null,
    h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", { class: "key" }, h("b", {}, rate(provider.rate_per_s)), " sent"), h("span", { class: "key limit-key" }, h("b", {}, rate(provider.limit_per_s)), " allowed")),
      h("div", { class: "canvas", role: "img", "aria-label": rateWords(points), mount: chart, data: points }),
    ),
    figures(...numbers(provider)),
  );
}

/** Why it is in its state, and until when. */
export function cause(provider) {
  const ends = provider.ends_in_ms;
  const words = provider.cause || "";
  if (!words && !ends) return null;
  return h("p", { class: "cause" }, words, ends ? `${words ? ", " : ""}for another ${duration(Math.ceil(ends / 1_000) * 1_000)}` : "");
}

export function numbers(provider) {
  const { name } = provider;
  const search = (state) => `#/jobs?state=${state}&provider=${encodeURIComponent(name)}`;
  const attention = (state) => `#/attention?state=${state}&provider=${encodeURIComponent(name)}`;
  const refused = provider.refused_by_provider ?? 0;
  return [
    figure("Waiting", count(provider.waiting), { href: search("waiting") }),
    figure("Oldest", ago(provider.oldest_waiting_at)),
    figure("Drained in", drained(provider)),
    figure("In flight", count(provider.in_flight)),
    figure("Review", count(provider.review), { alarm: provider.review > 0, href: attention("review") }),
    figure("Dead", count(provider.dead), { alarm: provider.dead > 0, href: attention("dead") }),
    figure("Refused by it", count(refused), { alarm: refused > 0 }),
    figure("Succeeded", count(provider.succeeded)),
  ];
}

export function drained(provider) {
  if (provider.waiting === 0) return "–";
  if (provider.drained_in_ms === null || provider.drained_in_ms === undefined) return provider.paused ? "not while paused" : "–";
  return duration(Math.max(1_000, provider.drained_in_ms));
}

/** The first ones, in their own order (by how full they are, they would jump about), and any other that is nearly full. */
function shown(limits) {
  // Those that charges meet before those of look-ups, and what only watches last.
  const place = ({ shadow, applies_to }) => (shadow ? 2 : applies_to === "lookup" ? 1 : 0);
  const enforced = [0, 1, 2].flatMap((at) => limits.filter((limit) => place(limit) === at));
  const counted = enforced.filter(({ used }) => used !== null && used !== undefined);
  const first = (counted.length > 0 ? counted : enforced).slice(0, BARS);
  const near = counted.slice(BARS).filter(({ used, free, shadow }) => !shadow && used >= NEAR * (used + (free ?? 0)));
  return [...first, ...near];
}
