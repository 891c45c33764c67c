// What charts over time have in common. A screen reader cannot read a canvas, so each chart has a text beside it.

import { plural, rate } from "./format.js";
import { hourMinute } from "./instants.js";
import { colour } from "./theme.js";

const FONT = "11px system-ui, sans-serif";

/** What the charts of a view have in common. `words` gives the text of a value. */
export function frame(onpoint, points, words) {
  const stroke = colour("--muted");
  const grid = { stroke: colour("--grid"), width: 1 };
  const x = {
    stroke,
    grid: { show: false },
    ticks: { show: false },
    font: FONT,
    size: 22,
    space: 90,
    values: (_, all) => all.map((at) => hourMinute(at * 1_000)),
  };
  const y = {
    stroke,
    grid,
    ticks: { show: false },
    font: FONT,
    space: 40,
    // The same size for charts above each other, so that their times line up.
    size: 64,
    // Without any count there is no scale.
    values: (plot, all) => {
      const counted = plot.data.slice(1).some((line) => line.some((value) => value > 0));
      return all.map((value) => (counted || (value === 0 && plot.data[0].length > 0) ? words(value) : ""));
    },
  };
  return {
    legend: { show: false },
    cursor: { y: false, drag: { setScale: false, x: false, y: false }, points: { size: 7 }, sync: { key: "times" } },
    padding: [8, 18, 0, 0],
    axes: [x, y],
    hooks: onpoint ? { setCursor: [({ cursor }) => onpoint(points()[cursor.idx] ?? null)] } : {},
  };
}

/** The rate chart in a sentence; `limit`: the tightest limit in words; `refused`: the 429s of the last hour. */
export function rateWords(points, limit, refused) {
  const rates = points.map((point) => point.rate_per_s).filter((value) => Number.isFinite(value));
  if (rates.length === 0) return "No requests have been counted yet.";
  const last = points.at(-1);
  const minutes = Math.max(1, Math.round((Date.parse(last.at) - Date.parse(points[0].at)) / 60_000));
  const mean = rates.reduce((sum, value) => sum + value, 0) / rates.length;
  return (
    `Requests per second over the last ${minutes} min: now ${rate(last.rate_per_s)}, limit ${limit}, ` +
    `on average ${rate(mean)}, at most ${rate(Math.max(...rates))}. ` +
    (refused > 0 ? `The provider responded with ${plural(refused, "429", "429s")} in the last hour.` : "The provider responded with no 429.")
  );
}
