// The overview: sums over all providers, warnings, and one card per provider.

import { h } from "../dom.js";
import { ago, count, rate } from "../format.js";
import { Histories } from "../history.js";
import { empty, figure, figures, loading, total, waitingLacks, waitingWords } from "../parts.js";
import { laneState } from "../words.js";
import { card, counted, whatCounts } from "./card.js";
import { rejectedLine } from "./rejected.js";

const TROUBLE = ["breaker_open", "misconfigured", "backend_unavailable", "no_worker", "draining", "paused_by_provider"];

export function overview(context) {
  const histories = new Histories();
  const state = { filter: "all", lanes: new Map(), changed: "" };

  return {
    place: "overview",
    title: "Overview",
    async load(signal) {
      if (context.overview === null) return;
      notice(context.overview.providers);
      // The figures first; the charts follow.
      context.redraw();
      const names = context.overview.providers.map(({ name }) => name);
      await histories.follow(context.overview, names, signal);
    },
    render() {
      const known = context.overview;
      if (!known) return [heading(), loading(context)];
      const { providers } = known;
      const chosen = state.filter === "all" ? providers : providers.filter(needsAttention);
      return [
        heading(),
        h("p", { class: "unseen", "aria-live": "polite" }, state.changed),
        sums(known),
        warnings(known),
        rejectedLine(known),
        providers.length === 0
          ? empty(
              "No provider yet",
              "Limits are in the database. Write a provider file and apply it; its card appears here within 2 s.",
              h("pre", {}, h("code", {}, "sluicegate provider apply providers.toml")),
            )
          : [
              filter(providers),
              h("div", { class: "cards" }, chosen.map((provider) => card(provider, histories.of(provider.name), context))),
              chosen.length === 0 ? empty("Nothing needs attention", "No provider has an unexpected problem, and no payment waits for a decision. Providers that an operator stopped are not listed here.") : null,
            ],
      ];
    },
  };

  /** What a screen reader announces: a provider's new state, not the figures. */
  function notice(providers) {
    const turned = providers.filter((p) => (state.lanes.get(p.name) ?? p.state) !== p.state);
    for (const { name, state: lane } of providers) state.lanes.set(name, lane);
    if (turned.length > 0) state.changed = turned.map((p) => `${p.name}: ${laneState(p.state)[0]}`).join(", ");
  }

  function heading() {
    return h("h1", { tabindex: "-1", class: "unseen" }, "Overview");
  }

  function filter(providers) {
    if (providers.length < 4) return null;
    const choice = (name, words) =>
      h("button", { type: "button", "aria-pressed": String(state.filter === name), onclick: () => { state.filter = name; context.redraw(); } }, words);
    return h("div", { class: "choices", role: "group", "aria-label": "Which providers" },
      choice("all", `All ${count(providers.length)}`),
      choice("trouble", `Needs attention ${count(providers.filter(needsAttention).length)}`));
  }
}

const needsAttention = (p) =>
  TROUBLE.includes(p.state) || p.review > 0 || p.dead > 0 || p.refused_by_provider > 0 || (p.problems ?? []).length > 0;

function sums(known) {
  const sum = (field) => total(known.providers, field);
  const lacking = known.providers.find((provider) => provider.waiting_is_at_least);
  const waiting = waitingWords({ waiting: sum("waiting"), waiting_is_at_least: lacking !== undefined });
  const oldest = known.providers.map((p) => p.oldest_waiting_at).filter(Boolean).sort()[0];
  const refused = sum("refused_by_provider");
  return h(
    "section",
    { class: "sums", "aria-label": "All providers together" },
    figures(
      figure("Waiting", waiting, { note: lacking ? waitingLacks(lacking) : oldest ? `oldest ${ago(oldest)}` : null, href: "#/jobs?state=waiting" }),
      figure("Sent", rate(sum("rate_per_s")), { note: "over the last 10 s" }),
      figure("In flight", count(sum("in_flight")), { note: `${count(sum("active"))} active` }),
      figure("Review", count(sum("review")), { alarm: sum("review") > 0, href: "#/attention?state=review" }),
      figure("Dead", count(sum("dead")), { alarm: sum("dead") > 0, href: "#/attention?state=dead" }),
      figure("429s", count(refused), { alarm: refused > 0, note: refused === null ? null : "expected: 0" }),
    ),
    reconciliation(known),
    counted(known),
  );
}

function reconciliation(known) {
  const accounts = known.reconciliation ?? [];
  if (accounts.length === 0) return null;
  const recorded = accounts.reduce((sum, account) => sum + (account.recorded ?? 0), 0);
  const faults = accounts.flatMap((account) => (account.faults ?? []).map((fault) => `${account.provider}: ${fault}`));
  return faults.length === 0
    ? h("p", { class: "accounted" }, h("span", { class: "tick", "aria-hidden": "true" }, "✓"), recorded === 1 ? " The one recorded payment is accounted for." : ` All ${count(recorded)} recorded payments are accounted for.`)
    : h("div", { class: "notice bad", role: "alert" }, h("strong", {}, "Not all payments are accounted for."), h("ul", {}, faults.map((fault) => h("li", {}, fault))));
}

function warnings(known) {
  const shown = known.warnings ?? [];
  const notShown = (problem) => !shown.some((words) => words.includes(problem));
  const rows = known.providers.flatMap((p) => (p.problems ?? []).filter(notShown).map((problem) => `${p.name}: ${problem}; ${whatCounts(p)}`));
  const all = [...shown, ...rows];
  if (all.length === 0) return null;
  return h("section", { class: "notice warn", "aria-label": "Warnings" }, h("ul", {}, all.map((words) => h("li", { key: words }, words))));
}
