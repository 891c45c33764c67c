// The view of payments that need an operator: those in manual review, and dead ones (retries exhausted).

import { get, path, query } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { button, empty, loading } from "../parts.js";
import { needs } from "../person.js";
import { Selection } from "../selection.js";
import { batchBar, tickColumn } from "./batch_bar.js";
import { discard, replay, resolve } from "./decide.js";
import { Pages, isEmpty, jobTable, unreadableRows } from "./job_table.js";

const PAGE = 50;
const KINDS = {
  review: ["Review", "An operator decides about these. The reason says whether the provider rejected the payment, or whether its outcome is unknown. Look each one up at its provider, then resolve it.", "Nothing to review", "No payment waits for a decision."],
  dead: ["Dead", "Retries exhausted, confirmed not charged. Fix the cause, then replay or discard them.", "Nothing is dead", "No payment has exhausted its retries."],
};

export function attention(context, fields) {
  const state = fields.get("state") === "dead" ? "dead" : "review";
  const provider = fields.get("provider") ?? "";
  const [, about, nothing, calm] = KINDS[state];
  const pages = new Pages();
  const selection = new Selection();
  let data = null;

  return {
    place: "attention",
    title: "Review and dead",
    async load(signal) {
      data = await get(path("jobs") + query({ state, provider, after: pages.after, limit: PAGE }), signal);
      selection.follow(data.jobs, (now) => now === state);
    },
    render() {
      return [h("h1", { tabindex: "-1" }, "Review and dead"), tabs(), h("p", { class: "about" }, about), list()];
    },
  };

  function total(of) {
    const all = context.overview?.providers ?? [];
    return all.filter(({ name }) => provider === "" || name === provider).reduce((sum, p) => sum + (p[of] ?? 0), 0);
  }

  function tabs() {
    const link = (name) => h("a", { key: name, href: `#/attention${query({ state: name, provider })}`, "aria-current": name === state ? "true" : null }, KINDS[name][0], " ", h("span", { class: "badge" }, count(total(name))));
    const names = (context.overview?.providers ?? []).map(({ name }) => name);
    const known = [...new Set([...names, ...(provider ? [provider] : [])])];
    const go = (event) => (location.hash = `#/attention${query({ state, provider: event.target.value })}`);
    return h("div", { class: "tools" },
      h("nav", { class: "choices", "aria-label": "Which payments" }, link("review"), link("dead")),
      h("label", { class: "field inline" }, h("span", {}, "Provider"),
        h("select", { name: "provider", value: provider, onchange: go },
          h("option", { value: "" }, "all"), known.map((name) => h("option", { key: name, value: name }, name)))));
  }

  function list() {
    if (data === null) return loading(context);
    if (isEmpty(data) && pages.seen.length === 1) return empty(nothing, calm);
    const single = state === "review"
      ? { title: "Decide", cell: (job) => button("Resolve", () => resolve(job, context), "", { "aria-label": `Resolve ${job.id}`, ...needs("operator") }) }
      : { title: "Decide", cell: (job) => [button("Replay", () => replay(job, context), "", { "aria-label": `Replay ${job.id}`, ...needs("operator") }), " ", button("Discard", () => discard(job, context), "", { "aria-label": `Discard ${job.id}`, ...needs("operator") })] };
    const known = context.overview ? { currencies: [], jobs: total(state), at_least: false } : null;
    const filter = { state, ...(provider ? { provider } : {}) };
    return [
      batchBar({ selection, jobs: data.jobs, filter, totals: known, context }),
      unreadableRows(data.unreadable),
      jobTable(state === "dead" ? "Payments with exhausted retries" : "Payments to review", data.jobs, { lead: tickColumn(selection, data.jobs, context), tail: single }),
      pages.bar(data.next, context.refresh),
    ];
  }
}
