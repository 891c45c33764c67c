// The bar that decides about many payments of a list, and the column that ticks them.

import { DECIDABLE, decisionsFor } from "../decisions.js";
import { h } from "../dom.js";
import { count, plural } from "../format.js";
import { button } from "../parts.js";
import { needs } from "../person.js";
import { askBatch } from "./batch_dialog.js";

/** The first column of the list. Only a payment that waits for a decision, or that can be cancelled, can be ticked. */
export function tickColumn(selection, jobs, context) {
  const open = jobs.filter(({ state }) => DECIDABLE.has(state));
  const tick = (job) => (event) => {
    selection.all = false;
    selection.toggle(open, job.id, event.shiftKey);
    context.redraw();
  };
  return {
    title: "Pick",
    cell: (job) => (DECIDABLE.has(job.state)
      ? h("input", { type: "checkbox", name: "pick", "aria-label": `Pick ${job.id}`, checked: selection.has(job.id), onclick: tick(job) })
      : null),
  };
}

/** `filter` holds the fields that have a value; `totals` say how many match it, null while that is unknown. */
export function batchBar({ selection, jobs, filter, totals, context }) {
  const open = jobs.filter(({ state }) => DECIDABLE.has(state));
  const states = selection.all ? statesOf(filter) : selection.states;
  if (open.length === 0 && selection.size === 0 && !selection.all) return null;
  const allHere = open.length > 0 && open.every(({ id }) => selection.has(id)) && !selection.all;
  const redrawn = (change) => () => {
    change();
    context.redraw();
  };
  const chosen = selection.all ? { filter } : { ids: selection.ids };
  const matching = totals?.currencies ? `${totals.at_least ? "at least " : ""}${count(totals.jobs)} that match` : "that match";
  return h("div", { class: "bulk", role: "group", "aria-label": "Several at once" },
    button(allHere ? "Pick none" : "Pick this page", redrawn(() => selection.set(open, !allHere))),
    button(selection.all ? "Not all" : `All ${matching}`, redrawn(() => (selection.all ? selection.clear() : (selection.all = true))), "", { "aria-pressed": String(selection.all) }),
    h("span", { class: "muted", role: "status" }, selection.all ? `All ${matching}` : `${plural(selection.size, "payment", "payments")} picked`),
    h("span", { class: "push" }),
    decisionsFor(states).map(([code, { label, danger }]) =>
      button(label, () => askBatch(code, chosen), danger ? "danger" : "", { key: code, ...needs("operator") })),
    h("a", { href: "#/batches" }, "Batches"));
}

/** The states that a filter allows. */
function statesOf({ state }) {
  return state ? new Set(state.split(",")) : DECIDABLE;
}
