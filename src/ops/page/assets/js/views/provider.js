// The view of one provider: its limits, the accounts that wait, account rules, its rate and backlog over time, the waits for permits,
// and the last decisions.

import { get, path } from "../api.js";
import { finishLine } from "../cutoff.js";
import { h } from "../dom.js";
import { count, duration, rate, sentence } from "../format.js";
import { inZone, instant } from "../instants.js";
import { button, chip, empty, limitBar, loading, section, table, unasked } from "../parts.js";
import { needs } from "../person.js";
import { histogram } from "../histogram.js";
import { algorithm, decision, laneState, spelled } from "../words.js";
import { accountRules, loadRules } from "./account_rules.js";
import { cause, counted, decisions, depends, numbers, refused, whatCounts, zeros } from "./card.js";
import { changeLimit } from "./change_limit.js";
import { untilWords } from "./limit_until.js";
import { liftButton, pauseButton } from "./pause.js";
import { recorded } from "./recorded.js";
import { rowWords } from "./row.js";
import { fineLine } from "./sums.js";
import { throttling } from "./throttling.js";
import { waitingAccounts } from "./waiting_accounts.js";

export function provider(context, name) {
  const history = recorded(context, name);
  const observed = throttling(name);
  const state = { data: null, flows: {}, rules: {} };

  return {
    place: "overview",
    title: name,
    async load(signal) {
      state.data = await get(path("providers", name), signal);
      context.redraw();
      state.flows = await flows(signal);
      state.rules = await loadRules(name, signal);
      await observed.load(signal);
      await history.load(signal);
    },
    render() {
      const known = state.data?.overview ?? context.overview?.providers.find((p) => p.name === name);
      const crumb = h("nav", { "aria-label": "Where this is", class: "crumb" }, h("a", { href: "#/" }, "Overview"), " / ");
      if (!known) return [crumb, h("h1", { tabindex: "-1" }, name), loading(context)];
      return [crumb, head(known), cause(known), problems(known), observed.render(known, context), h("section", { class: "sums", "aria-label": "Figures" }, numbers(known), fineLine(zeros(known)), depends(known), finishLine(known), counted(context.overview)), limits(known), waitingAccounts(name, state.flows), accountRules(name, state.rules, context), history.render(known), detailSections(state.data)];
    },
  };

  /** Without them, the rest of the view is shown. */
  async function flows(signal) {
    try {
      return { lane: await get(path("providers", name, "flows"), signal) };
    } catch (error) {
      if (signal.aborted || error.status === 0) throw error;
      return { problem: error.message };
    }
  }

  function head(known) {
    return h("div", { class: "view-head" },
      h("h1", { tabindex: "-1" }, name),
      h("span", { "aria-live": "polite" }, chip(laneState(known.state))),
      decisions(known),
      refused(known),
      known.quota && known.quota !== name ? h("span", { class: "muted" }, `shares quota ${known.quota}`) : null,
      h("span", { class: "push" }),
      liftButton(known, context, ""),
      pauseButton(known, context, ""));
  }

  function limits(known) {
    const all = known.limits ?? [];
    return section("limits", "Limits", all.length === 0 ? h("p", {}, "The provider has no limit, so nothing is sent.") :
      h("ul", { class: "limit-list" }, all.map((limit) =>
        h("li", { key: limit.name },
          limitBar(limit, { unasked: unasked(known) }),
          h("p", { class: "limit-kind" },
            [scope(limit), algorithm(limit.algorithm), limit.shadow ? "shadow limit: counts, never delays" : "", limit.enabled === false ? "switched off" : ""].filter(Boolean).join(" · ")),
          button("Change", () => changeLimit(known, limit, context), "", { "aria-label": `Change limit ${limit.name}`, ...needs("admin") }),
          limit.until ? h("p", { class: "limit-until" }, sentence(untilWords(limit)), ".") : null))));
  }
}

const scope = (limit) => {
  const each = limit.scope === "provider" ? "all requests together" : `each ${limit.scope} separately`;
  return limit.applies_to && limit.applies_to !== "all" ? `${each}, ${limit.applies_to} only` : each;
};

function problems(known) {
  const all = known.problems ?? [];
  if (all.length === 0) return null;
  return h("div", { class: "notice warn", role: "alert" }, h("strong", {}, `Invalid configuration; ${whatCounts(known)}.`), h("ul", {}, all.map((words) => h("li", {}, words))));
}

function detailSections(all) {
  if (!all) return null;
  return [
    section("waits", "Waits for a permit",
      h("p", { class: "about" }, `Only the wait while the payment is active in a worker: at most max_wait_ms${all.row?.max_wait_ms ? ` (${duration(all.row.max_wait_ms)})` : ""}, or up to 90 s in a slow lane. Waits in the queue or in the ledger are not counted here. The payment's own page shows them.`),
      histogram(all.waits)),
    section("decisions", "Last decisions", (all.decisions ?? []).length === 0
      ? empty("No decisions yet", "Grants, refusals and pauses appear here with their reason.")
      : h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Last decisions, newest first" }, table("Last decisions, newest first", [["At", "nowrap"], ["Decision", "nowrap"], ["Reason", "wide"], ["Permits", "num"], ["Worker", "mono"]],
          all.decisions.map((d, at) => ({ key: `${d.at}-${d.worker}-${d.kind}-${all.decisions.length - at}`, cells: [instant(d.at), chip(decision(d.kind)), inZone(d.reason ?? ""), count(d.permits), d.worker ?? ""] }))))),
    section("changes", "Last changes of the configuration", (all.audit ?? []).length === 0
      ? empty("No change is recorded", "Each change of a limit appears here with its time and author.")
      : table("Last changes, newest first", [["At", "nowrap"], ["Who", ""], ["What", "wide"], ["Why", "wide"]],
          all.audit.map((a, at) => ({ key: `${a.at}-${all.audit.length - at}`, cells: [instant(a.at), a.who ?? "", what(a.what), a.because ?? ""] })))),
    all.row ? section("row", "Configuration", rowWords(all.row)) : null,
  ];
}

const what = (words) => (typeof words === "string" ? words : spelled(JSON.stringify(words)));
