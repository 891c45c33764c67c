// Line charts over time, drawn by uPlot on a canvas. A screen reader cannot read a canvas, so each chart has a text
// beside it.

import { count, hourMinute, plural, rate } from "./format.js";
import { SECONDS } from "./history.js";
import { colour } from "./theme.js";

const { uPlot } = window;
/** Always the same time span, so that the scale does not change while the first minutes arrive. */
const SPAN = { time: true, range: (_, __, most) => [most - SECONDS, most] };
const FONT = "11px system-ui, sans-serif";

/** An island for `dom.js`: rate against limit, small on a card or large with axes. `data` holds the points. */
export const rateChart = (options) => island(rateOptions, rateColumns, options);

function island(describe, columns, { height, compact = false, onpoint }) {
  return (node) => {
    let plot;
    let points = [];
    const noted = () => node.classList.toggle("no-data", !points.some(({ rate_per_s, waiting }) => (rate_per_s ?? waiting ?? null) !== null));
    const make = () => {
      noted();
      plot?.destroy();
      const width = Math.max(node.clientWidth, 120);
      plot = new uPlot({ width, height, ...describe(compact, onpoint, () => points) }, columns(points), node);
    };
    make();
    const resize = new ResizeObserver(() => plot.setSize({ width: Math.max(node.clientWidth, 120), height }));
    resize.observe(node);
    document.addEventListener("themechange", make);
    return {
      update(now = []) {
        if (now === points) return;
        points = now;
        noted();
        plot.setData(columns(points));
      },
      destroy() {
        resize.disconnect();
        document.removeEventListener("themechange", make);
        plot.destroy();
      },
    };
  };
}

const seconds = (points) => points.map(({ at }) => Date.parse(at) / 1_000);

const rateColumns = (points) => [
  seconds(points),
  points.map((point) => point.rate_per_s ?? null),
  points.map((point) => point.limit_per_s ?? null),
  points.map((point) => (point.throttled > 0 ? (point.rate_per_s ?? 0) : null)),
];

function rateOptions(compact, onpoint, points) {
  return {
    ...frame(compact, onpoint, points, (value) => (value >= 10 ? count(value) : String(value))),
    scales: { x: SPAN, y: { range: (_, __, most) => [0, Math.max(most || 1, 0.01) * 1.12] } },
    series: [
      {},
      { stroke: colour("--chart"), fill: colour("--chart-fill"), width: 1.75, points: { show: false } },
      { stroke: colour("--chart-limit"), width: 1.5, dash: [5, 4], points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) },
      { stroke: colour("--bad"), fill: colour("--bad"), width: 0, paths: () => null, points: { show: true, size: 6 } },
    ],
  };
}

export function frame(compact, onpoint, points, words) {
  const stroke = colour("--muted");
  const grid = { stroke: colour("--grid"), width: 1 };
  const x = {
    stroke,
    grid: { show: false },
    ticks: { show: false },
    font: FONT,
    size: 22,
    space: compact ? 70 : 90,
    values: (_, all) => all.map((at) => hourMinute(at * 1_000)),
  };
  const y = {
    stroke,
    grid,
    ticks: { show: false },
    font: FONT,
    space: compact ? 34 : 40,
    // The same size for charts above each other, so that their times line up.
    size: (_, all) => (compact ? 12 + 6.5 * Math.max(2, ...(all ?? []).map((text) => text.length)) : 64),
    // Without any count there is no scale.
    values: (plot, all) => {
      const counted = plot.data.slice(1).some((line) => line.some((value) => value > 0));
      return all.map((value) => (counted || (value === 0 && plot.data[0].length > 0) ? words(value) : ""));
    },
  };
  return {
    legend: { show: false },
    cursor: compact ? { show: false } : { y: false, drag: { setScale: false, x: false, y: false }, points: { size: 7 }, sync: { key: "times" } },
    padding: [8, compact ? 6 : 18, 0, 0],
    axes: [x, y],
    hooks: onpoint ? { setCursor: [({ cursor }) => onpoint(points()[cursor.idx] ?? null)] } : {},
  };
}

/** The rate chart in a sentence. */
export function rateWords(points) {
  const rates = points.map((point) => point.rate_per_s).filter((value) => Number.isFinite(value));
  if (rates.length === 0) return "No requests have been counted yet.";
  const last = points.at(-1);
  const minutes = Math.max(1, Math.round((Date.parse(last.at) - Date.parse(points[0].at)) / 60_000));
  const refused = points.reduce((sum, point) => sum + (point.throttled ?? 0), 0);
  const mean = rates.reduce((sum, value) => sum + value, 0) / rates.length;
  return (
    `Requests per second over the last ${minutes} min: now ${rate(last.rate_per_s)} of ${rate(last.limit_per_s)} allowed on average, ` +
    `on average ${rate(mean)}, at most ${rate(Math.max(...rates))}. ` +
    (refused > 0 ? `The provider responded with ${plural(refused, "429", "429s")}.` : "The provider responded with no 429.")
  );
}
