// The table of payments, a page at a time.

import { h } from "../dom.js";
import { agoWords, count, money } from "../format.js";
import { chip, jobHref, providerHref, table } from "../parts.js";
import { jobState } from "../words.js";

const COLUMNS = [
  ["Payment", "mono"],
  ["State", "nowrap"],
  ["Amount", "num nowrap"],
  ["Provider", ""],
  ["Account", "mono"],
  ["Attempts", "num"],
  ["Changed", "nowrap"],
  ["Reason", "wide"],
];

/** `lead` adds a first column: {title, cell(job)}; `tail` a last one. `created` shows when, instead of the last change. */
export function jobTable(caption, jobs, { lead, tail, created } = {}) {
  // Waiting payments have no attempt.
  const tried = jobs.some(({ attempts }) => attempts > 0);
  const own = COLUMNS.filter(([title]) => tried || title !== "Attempts").map(([title, kind]) => [created && title === "Changed" ? "Created" : title, kind]);
  const columns = [...(lead ? [[lead.title, "tight"]] : []), ...own, ...(tail ? [[tail.title, "actions"]] : [])];
  return table(caption, columns, jobs.map((job) => ({
    key: job.id,
    cells: [
      ...(lead ? [lead.cell(job)] : []),
      h("a", { href: jobHref(job.id) }, job.id),
      chip(jobState(job.state)),
      job.charged_amount ? `${money(job.amount, job.currency)}, charged ${money(job.charged_amount, job.currency)}` : money(job.amount, job.currency),
      h("a", { href: providerHref(job.provider) }, job.provider),
      job.account ?? "",
      ...(tried ? [job.attempts > 0 ? count(job.attempts) : ""] : []),
      agoWords(created ? job.created_at : job.updated_at),
      job.reason ?? "",
      ...(tail ? [tail.cell(job)] : []),
    ],
  })));
}

/** Payments of a page of the API that no table can show: their rows cannot be read. */
export const unreadableRows = (rows) =>
  (rows ?? []).map(({ id, problem }) =>
    h("p", { key: `unreadable ${id}`, class: "notice unreadable" }, "The row of payment ", h("span", { class: "mono" }, id), ` cannot be read: ${problem}. Repair it by SQL.`));

/** Whether this page shows nothing, and no page follows it. */
export const isEmpty = ({ jobs, unreadable, next }) => jobs.length === 0 && (unreadable ?? []).length === 0 && !next;

/** The position in the list: the pages seen so far, each by the id after which it begins. */
export class Pages {
  seen = [null];

  get after() {
    return this.seen.at(-1);
  }

  bar(next, go) {
    const first = this.seen.length === 1;
    if (first && !next) return null;
    const move = (change) => () => {
      change();
      go();
    };
    return h("div", { class: "pages", role: "group", "aria-label": "Pages" },
      h("button", { type: "button", disabled: first, onclick: move(() => this.seen.pop()) }, "Previous"),
      h("span", {}, `Page ${count(this.seen.length)}`),
      h("button", { type: "button", disabled: !next, onclick: move(() => this.seen.push(next)) }, "Next"));
  }
}
