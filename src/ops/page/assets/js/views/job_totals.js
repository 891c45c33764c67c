// The line above a list of payments: how many match, their sums, and the links that export them.

import { query } from "../api.js";
import { h } from "../dom.js";
import { money, plural } from "../format.js";

const FORMATS = [["csv", "CSV"], ["jsonl", "JSON lines"]];

/** `totals` is null until they are known; `problem` says why they are not. */
export function totalsLine(filter, totals, problem) {
  return h("div", { class: "totals" },
    h("p", { role: "status" }, words(totals, problem)),
    h("p", {}, "Export: ", FORMATS.map(([format, name], at) => [
      at > 0 ? " · " : null,
      h("a", { key: format, href: `/api/v1/job-export${query({ format, ...filter })}`, download: `payments.${format}` }, name),
    ])));
}

function words(totals, problem) {
  if (problem) return `The sums are unknown: ${problem}`;
  if (!totals?.currencies) return "Counting…";
  const least = totals.at_least ? "At least " : "";
  const sums = totals.currencies.map(({ currency, amount }) => money(amount, currency));
  return `${least}${plural(totals.jobs, "payment", "payments")}${sums.length > 0 ? `: ${sums.join(", ")}` : ""}`;
}
