// The small chart of a card: the rate of the last minutes against what the limits allow. It fills the height that its
// card has left, so that cards of one row end together.

import { rateWords } from "./chart.js";
import { h } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 60;
const drawn = new WeakMap();

/** `limit`: the tightest limit in words; `refused`: the 429s of the last hour. */
export function spark(points, limit, refused) {
  const lines = drawn.get(points) ?? shapes(points);
  drawn.set(points, lines);
  const empty = lines === null;
  return h("div", { class: empty ? "canvas spark no-data" : "canvas spark", role: "img", "aria-label": rateWords(points, limit, refused) },
    empty ? null : h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      h("path", { class: "spark-fill", d: lines.fill }),
      h("path", { class: "spark-rate", d: lines.rate }),
      h("path", { class: "spark-limit", d: lines.limit }),
      h("path", { class: "spark-bad", d: lines.refused })));
}

/** Paths; null without a figure. A gap in the figures is a gap in the line. */
function shapes(points) {
  const known = points.filter(({ rate_per_s }) => Number.isFinite(rate_per_s));
  if (known.length === 0) return null;
  const [first, last] = [points[0], points.at(-1)].map(({ at }) => Date.parse(at));
  const most = Math.max(0.01, ...points.map(({ rate_per_s, limit_per_s }) => Math.max(rate_per_s ?? 0, limit_per_s ?? 0)));
  const x = (at) => (last === first ? WIDTH : ((Date.parse(at) - first) / (last - first)) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 1 - (value / most) * (HEIGHT - 4)).toFixed(1);
  const line = (field) => {
    let pen = "M";
    return points.map((point) => {
      const value = point[field];
      if (!Number.isFinite(value)) {
        pen = "M";
        return "";
      }
      const step = `${pen}${x(point.at)} ${y(value)}`;
      pen = "L";
      return step;
    }).join("");
  };
  return {
    rate: line("rate_per_s"),
    fill: `M${x(known[0].at)} ${HEIGHT}${known.map((point) => `L${x(point.at)} ${y(point.rate_per_s)}`).join("")}L${x(known.at(-1).at)} ${HEIGHT}Z`,
    limit: line("limit_per_s"),
    refused: points.filter(({ throttled }) => throttled).map(({ at }) => `M${x(at)} 0V6`).join(""),
  };
}
