// Charts of the recorded history, drawn by uPlot. A range that is dragged with the pointer is zoomed; buttons beside the
// chart do the same for the keyboard. Marks are thin lines with the numbers of the list below.

import { frame } from "./chart.js";
import { count } from "./format.js";
import { axisTime, isEmpty } from "./recorded.js";
import { colour } from "./theme.js";

const { uPlot } = window;
const NOTHING = { points: [], marks: [], from: 0, to: 1 };
/** A shorter drag, in pixels, is a click. */
const DRAG_MIN = 8;

/** An island for `dom.js`: rates against the limit. `data` has the points, the marks and the range. */
export const recordedRates = (options) => island(rateOptions, rateColumns, options);
/** Waiting payments over the same range. */
export const recordedWaiting = (options) => island(waitingOptions, waitingColumns, options);

function island(describe, columns, { height, onpoint, onzoom }) {
  return (node) => {
    let plot;
    let shown = NOTHING;
    const noted = () => node.classList.toggle("no-data", isEmpty(shown.points));
    const width = () => Math.max(node.clientWidth, 120);
    const make = () => {
      noted();
      plot?.destroy();
      plot = new uPlot({ width: width(), height, ...describe(() => shown, onpoint, onzoom) }, columns(shown.points), node);
    };
    make();
    const resize = new ResizeObserver(() => plot.setSize({ width: width(), height }));
    resize.observe(node);
    document.addEventListener("themechange", make);
    document.addEventListener("zonechange", make);
    return {
      update(now) {
        if (!now || now === shown) return;
        shown = now;
        noted();
        plot.setData(columns(now.points));
      },
      destroy() {
        resize.disconnect();
        document.removeEventListener("themechange", make);
        document.removeEventListener("zonechange", make);
        plot.destroy();
      },
    };
  };
}

const column = (points, field) => points.map((point) => point[field] ?? null);
const seconds = (points) => points.map(({ at }) => Date.parse(at) / 1_000);

const rateColumns = (points) => [
  seconds(points),
  column(points, "started_per_s"),
  column(points, "finished_per_s"),
  column(points, "limit_per_s"),
  points.map((point) => (point.throttled > 0 ? (point.started_per_s ?? 0) : null)),
];
const waitingColumns = (points) => [seconds(points), column(points, "waiting")];

const line = (name, more = {}) => ({ stroke: colour(name), width: 1.75, points: { show: false }, ...more });

function rateOptions(shown, onpoint, onzoom) {
  return {
    ...rangeFrame(shown, onpoint, onzoom, (value) => (value >= 10 ? count(value) : String(value))),
    scales: scales(shown, 0.01),
    series: [
      {},
      line("--chart", { fill: colour("--chart-fill") }),
      line("--good", { width: 1.25 }),
      line("--chart-limit", { width: 1.5, dash: [5, 4], paths: uPlot.paths.stepped({ align: 1 }) }),
      { stroke: colour("--bad"), fill: colour("--bad"), width: 0, paths: () => null, points: { show: true, size: 6 } },
    ],
  };
}

function waitingOptions(shown, onpoint, onzoom) {
  return {
    ...rangeFrame(shown, onpoint, onzoom, count),
    scales: scales(shown, 4),
    series: [{}, line("--chart-2", { fill: colour("--chart-2-fill") })],
  };
}

const scales = (shown, least) => ({
  x: { time: true, range: () => [shown().from / 1_000, shown().to / 1_000] },
  y: { range: (_, __, most) => [0, Math.max(most || 1, least) * 1.12] },
});

function rangeFrame(shown, onpoint, onzoom, words) {
  const base = frame(onpoint, () => shown().points, words);
  const [x, y] = base.axes;
  const values = (_, all) => all.map((at) => (isEmpty(shown().points) ? "" : axisTime(at * 1_000, shown().to - shown().from)));
  return {
    ...base,
    // Above the chart is the place for the numbers of marks.
    padding: [18, ...base.padding.slice(1)],
    axes: [{ ...x, values }, y],
    cursor: { ...base.cursor, drag: { x: true, y: false, setScale: false }, sync: { key: "recorded" } },
    hooks: { ...base.hooks, draw: [(plot) => drawMarks(plot, shown().marks)], setSelect: [(plot) => select(plot, onzoom)] },
  };
}

function select(plot, onzoom) {
  const { left, width } = plot.select;
  if (width < DRAG_MIN) return;
  const [from, to] = [left, left + width].map((at) => plot.posToVal(at, "x") * 1_000);
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  onzoom({ from, to });
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const scale = window.devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = colour("--muted");
  ctx.fillStyle = colour("--muted");
  ctx.lineWidth = scale;
  ctx.font = `${10 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  let labelled = Number.NEGATIVE_INFINITY;
  for (const { at, number } of marks) {
    const x = Math.round(plot.valToPos(Date.parse(at) / 1_000, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    // Numbers that would overlap are left out; the list has all.
    if (x - labelled > 16 * scale) {
      ctx.fillText(String(number), x, bbox.top - 4 * scale);
      labelled = x;
    }
  }
  ctx.restore();
}
