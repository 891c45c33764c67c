// The histogram of waits for permits: columns, and the same in words.

import { h } from "./dom.js";
import { count, duration, percent, plural } from "./format.js";
import { empty, table } from "./parts.js";

export function histogram(waits) {
  const counts = waits?.counts ?? [];
  const bounds = waits?.bounds_ms ?? [];
  const total = counts.reduce((sum, n) => sum + n, 0);
  if (total === 0) return empty("No waits yet", "Each granted permit is counted here with its wait.");
  const bins = trimmed(counts, bounds);
  const most = Math.max(...bins.map((bin) => bin.count));
  const words = `${plural(total, "permit", "permits")} since the processes started: half within ${upTo(counts, bounds, 0.5)}, 95 % within ${upTo(counts, bounds, 0.95)}, 99 % within ${upTo(counts, bounds, 0.99)}.`;
  return [
    h("p", { class: "readout" }, words),
    h("div", { class: "histogram", role: "img", "aria-label": words, tabindex: "0" },
      bins.map((bin) => h("div", { key: bin.label, class: "column", title: `${bin.label}: ${count(bin.count)}` },
        h("span", { class: "column-count" }, bin.count > 0 ? share(bin.count / total) : ""),
        h("span", { class: "column-bar", style: { height: `${((bin.count / most) * 100).toFixed(1)}%` } }),
        h("span", { class: "column-label" }, bin.label)))),
    h("details", {}, h("summary", {}, "View as table"),
      table("Waits for a permit", [["Wait", ""], ["Permits", "num"], ["Share", "num"]],
        bins.map((bin) => ({ key: bin.label, cells: [bin.label, count(bin.count), share(bin.count / total)] })))),
  ];
}

const share = (part) => (part > 0 && part < 0.005 ? "< 1%" : percent(part));

/** Without the empty bins on both ends. */
function trimmed(counts, bounds) {
  const all = counts.map((n, at) => ({
    count: n,
    label: at < bounds.length ? `≤ ${duration(bounds[at])}` : `> ${duration(bounds.at(-1))}`,
  }));
  const first = Math.min(counts.findIndex((n) => n > 0), Math.max(0, counts.length - 4));
  const last = Math.max(counts.findLastIndex((n) => n > 0), first + 3);
  return all.slice(first, last + 1);
}

/** The upper bound of this share of all waits. */
function upTo(counts, bounds, wanted) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  let sum = 0;
  const at = counts.findIndex((n) => (sum += n) >= wanted * total);
  return at < bounds.length ? duration(bounds[at]) : `more than ${duration(bounds.at(-1))}`;
}
