// The view of payments that need an operator: those in manual review, and dead ones (retries exhausted).

import { get, path, query } from "../api.js";
import { h } from "../dom.js";
import { count, plural } from "../format.js";
import { button, empty, loading } from "../parts.js";
import { needs } from "../person.js";
import { Selection } from "../selection.js";
import { batchBar, tickColumn } from "./batch_bar.js";
import { askBulk } from "./bulk.js";
import { discard, replay, resolve } from "./decide.js";
import { Pages, isEmpty, jobTable, unreadableRows } from "./job_table.js";

const PAGE = 50;
const KINDS = {
  review: ["Review", "It is unknown whether these were charged. Look each one up at its provider, then resolve it.", "Nothing to review", "Every payment's outcome is known."],
  dead: ["Dead", "Retries exhausted, confirmed not charged. Fix the cause, then replay or discard them.", "Nothing is dead", "No payment has exhausted its retries."],
};

export function attention(context, fields) {
  const state = fields.get("state") === "dead" ? "dead" : "review";
  const provider = fields.get("provider") ?? "";
  const [, about, nothing, calm] = KINDS[state];
  const pages = new Pages();
  const chosen = new Set();
  const selection = new Selection();
  let data = null;

  return {
    place: "attention",
    title: "Review and dead",
    async load(signal) {
      data = await get(path("jobs") + query({ state, provider, after: pages.after, limit: PAGE }), signal);
      const here = new Set(data.jobs.map(({ id }) => id));
      selection.follow(data.jobs, (now) => now === state);
      // A payment that left this page has changed its state.
      if (pages.seen.length === 1 && !data.next) for (const id of chosen) if (!here.has(id)) chosen.delete(id);
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
    return h("div", { class: "tools" },
      h("nav", { class: "choices", "aria-label": "Which payments" }, link("review"), link("dead")),
      h("label", { class: "field inline" }, h("span", {}, "Provider"),
        h("select", { name: "provider", value: provider, onchange: (event) => (location.hash = `#/attention${query({ state, provider: event.target.value })}`) },
          h("option", { value: "" }, "all"), [...new Set([...names, ...(provider ? [provider] : [])])].map((name) => h("option", { key: name, value: name }, name)))));
  }

  function list() {
    if (data === null) return loading(context);
    if (isEmpty(data) && pages.seen.length === 1) return empty(nothing, calm);
    const single = state === "review"
      ? { title: "Decide", cell: (job) => button("Resolve", () => resolve(job, context), "", { "aria-label": `Resolve ${job.id}`, ...needs("operator") }) }
      : { title: "Decide", cell: (job) => [button("Replay", () => replay(job, context), "", { "aria-label": `Replay ${job.id}`, ...needs("operator") }), " ", button("Discard", () => discard(job, context), "", { "aria-label": `Discard ${job.id}`, ...needs("operator") })] };
    const dead = state === "dead";
    return [
      dead ? bulkBar() : reviewBar(),
      unreadableRows(data.unreadable),
      jobTable(dead ? "Payments with exhausted retries" : "Payments to review", data.jobs, { lead: dead ? picker() : tickColumn(selection, data.jobs, context), tail: single }),
      pages.bar(data.next, context.refresh),
    ];
  }

  function reviewBar() {
    const known = context.overview ? { currencies: [], jobs: total(state), at_least: false } : null;
    const filter = provider ? { state, provider } : { state };
    return batchBar({ selection, jobs: data.jobs, filter, totals: known, context });
  }

  function picker() {
    return {
      title: "Pick",
      cell: (job) => h("input", { type: "checkbox", name: "pick", "aria-label": `Pick ${job.id}`, checked: chosen.has(job.id), onchange: (event) => { event.target.checked ? chosen.add(job.id) : chosen.delete(job.id); context.redraw(); } }),
    };
  }

  function allDead(dead) {
    return dead === 1 ? "the one dead payment" : `all ${count(dead)} dead payments`;
  }

  function bulkBar() {
    const here = data.jobs.map(({ id }) => id);
    const allHere = here.length > 0 && here.every((id) => chosen.has(id));
    const some = () => ({ ids: [...chosen], total: chosen.size, words: plural(chosen.size, "picked payment", "picked payments") });
    const all = () => ({ provider, total: total("dead"), words: `${allDead(total("dead"))}${provider ? ` of ${provider}` : ""}` });
    const pick = () => {
      for (const id of here) allHere ? chosen.delete(id) : chosen.add(id);
      context.redraw();
    };
    const finished = () => {
      chosen.clear();
      context.refresh();
    };
    return h("div", { class: "bulk", role: "group", "aria-label": "Several at once" },
      button(allHere ? "Pick none" : "Pick this page", pick),
      h("span", { class: "muted", "aria-live": "polite" }, `${count(chosen.size)} picked`),
      h("span", { class: "push" }),
      button("Replay picked", () => askBulk("replay", some(), finished), "", { disabled: chosen.size === 0, ...needs("operator") }),
      button("Discard picked", () => askBulk("discard", some(), finished), "", { disabled: chosen.size === 0, ...needs("operator") }),
      button("Replay all", () => askBulk("replay", all(), finished), "primary", { disabled: total("dead") === 0 && here.length === 0, ...needs("operator") }));
  }
}
