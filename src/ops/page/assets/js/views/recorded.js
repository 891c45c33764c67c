// The recorded history on a provider's page: charts over a chosen range, the marks in it, and the figures as a table.

import { get, path, query } from "../api.js";
import { serverNow } from "../clock.js";
import { h } from "../dom.js";
import { count, rate, when } from "../format.js";
import { about, instant } from "../instants.js";
import { limitWas, tightestWords } from "../limits.js";
import { button, section, table, waitingWords } from "../parts.js";
import { RANGES, beginning, bounded, fitting, isDue, isEmpty, lateBeginning, marksNear, moved, numbered, rangeOf, rangeWords, scaled, tableRows } from "../recorded.js";
import { recordedRates, recordedWaiting } from "../recorded_chart.js";

/** Marks in the list; the newest ones. */
const MARKS_MAX = 40;
const LENGTHS = RANGES.map(([label, length]) => ({ label, length }));
const HOUR = LENGTHS.findIndex(({ label }) => label === "1 h");

export function recorded(context, name) {
  // `since`: when the data of the last hour begin; null without any.
  const state = { chosen: LENGTHS[HOUR], isChosen: false, isFitted: false, since: null, read: null, problem: null, point: null };
  const noted = (point) => {
    if (state.point === point) return;
    state.point = point;
    context.redraw();
  };
  const choose = (chosen) => {
    state.chosen = chosen;
    state.isChosen = true;
    context.redraw();
    void context.refresh();
  };
  const change = (make) => choose(make(rangeOf(state.chosen, serverNow())));
  const onzoom = (range) => choose(bounded(range, serverNow()));
  const rates = recordedRates({ height: 240, onpoint: noted, onzoom });
  const waiting = recordedWaiting({ height: 140, onpoint: noted, onzoom });

  return {
    async load(signal) {
      if (!state.isChosen && !state.isFitted) await fit(signal);
      if (!state.isChosen && state.since !== null) state.chosen = fitting(LENGTHS, state.since, serverNow());
      if (isDue(state.chosen, state.read, serverNow())) await read(signal);
    },
    render(known) {
      const { read, point } = state;
      const points = read?.points ?? [];
      return section("rate", "Rate against limit",
        tools(),
        readout(known, point),
        begins(),
        state.problem ? h("p", { class: "cause" }, `The history cannot be read: ${state.problem}`) : null,
        h("div", { key: "rates", class: "canvas", role: "img", "aria-label": rangeWords(points), mount: rates, data: read }),
        h("h3", {}, "Waiting"),
        h("div", { key: "waiting", class: "canvas", role: "img", "aria-label": `Payments that wait: now ${waitingWords(known)}.`, mount: waiting, data: read }),
        point ? marksList(marksNear(read.marks, point.at, read.to - read.from), { near: true }) : null,
        marksList(read?.marks ?? []),
        h("details", {}, h("summary", {}, "View as table"), figuresTable(points, known)));
    },
  };

  async function read(signal) {
    const { chosen } = state;
    const now = serverNow();
    const range = rangeOf(chosen, now);
    try {
      const [from, to] = [range.from, range.to].map((at) => new Date(at).toISOString());
      const history = await get(path("history") + query({ provider: name, from, to: chosen.length ? null : to }), signal);
      const { points = [], marks = [] } = history;
      state.read = { chosen, at: now, from: Date.parse(history.from), to: Date.parse(history.to), points, marks: numbered(marks) };
      state.problem = null;
    } catch (error) {
      // Without the history, the rest of the view is shown.
      if (signal.aborted || error.status === 0 || error.status === undefined) throw error;
      state.problem = error.message;
    }
  }

  /** Finds the data: in the last hour, or in the shortest longer range that has some. */
  async function fit(signal) {
    for (const range of LENGTHS.slice(HOUR)) {
      state.chosen = range;
      await read(signal);
      if (state.isChosen || state.problem) return;
      if (!isEmpty(state.read.points)) break;
    }
    state.isFitted = true;
    if (isEmpty(state.read.points)) state.chosen = LENGTHS[HOUR];
    else if (state.chosen === LENGTHS[HOUR]) state.since = beginning(state.read.points);
  }

  /** Since when there are figures, where the range is longer. */
  function begins() {
    const first = state.read ? lateBeginning(state.read) : null;
    return first === null ? null : h("p", { class: "about begins" }, "Figures begin at ", instant(first, about(first)), ".");
  }

  function tools() {
    const { chosen, read } = state;
    const pressed = (range) => ({ "aria-pressed": String(range === chosen) });
    return h("div", { class: "chart-tools" },
      h("div", { class: "choices", role: "group", "aria-label": "Range of the charts" }, LENGTHS.map((range) => button(range.label, () => choose(range), "", { key: range.label, ...pressed(range) }))),
      h("div", { class: "choices", role: "group", "aria-label": "Zoom" },
        button("Zoom in", () => change((range) => scaled(range, 1 / 2, serverNow()))),
        button("Zoom out", () => change((range) => scaled(range, 2, serverNow()))),
        button("Earlier", () => change((range) => moved(range, -1 / 2, serverNow()))),
        button("Later", () => change((range) => moved(range, 1 / 2, serverNow())), "", { disabled: Boolean(chosen.length) })),
      chosen.length || !read ? null : h("span", { class: "muted", "aria-live": "polite" }, `${when(new Date(chosen.from))} to ${when(new Date(chosen.to))}`));
  }
}

function readout(known, point) {
  const shown = point ?? { started_per_s: known.rate_per_s, review: known.review };
  return h("p", { class: "readout" },
    h("span", { class: "readout-at" }, point ? when(point.at) : "Now"),
    h("span", { class: "key" }, h("b", {}, rate(shown.started_per_s)), " sent"),
    point ? h("span", { class: "key finished-key" }, h("b", {}, rate(shown.finished_per_s)), " finished") : null,
    h("span", { class: "key limit-key" }, "limit ", h("b", {}, point ? limitWas(point.limit_per_s, known) : tightestWords(known))),
    h("span", { class: "key waiting-key" }, h("b", {}, point ? count(point.waiting) : waitingWords(known)), " waiting"),
    shown.review > 0 ? h("span", {}, h("b", {}, count(shown.review)), " in review") : null,
    shown.throttled > 0 ? h("span", { class: "key bad-key" }, h("b", {}, count(shown.throttled)), " 429s") : null);
}

const markLines = (marks) =>
  h("ol", {}, marks.map((mark) => h("li", { key: mark.number }, h("b", {}, String(mark.number)), h("time", { datetime: mark.at }, when(mark.at)), h("span", {}, mark.text))));

/** What the numbered lines of the charts are: those near the pointer, or all in a list that opens. */
function marksList(marks, { near = false } = {}) {
  if (marks.length === 0) return null;
  const shown = marks.slice(-MARKS_MAX);
  if (near) return h("div", { key: "near", class: "marks" }, markLines(shown));
  const hidden = marks.length - shown.length;
  return h("details", { key: "marks", class: "marks" },
    h("summary", {}, `Marks: changes, pauses, workers and circuit breakers (${count(marks.length)})`),
    hidden > 0 ? h("p", { class: "muted" }, `The newest ${count(shown.length)} of ${count(marks.length)}.`) : null,
    markLines(shown));
}

const figuresTable = (points, known) =>
  table("Rates, limit, waiting payments, reviews and 429s of the range, newest first",
    [["Until", "nowrap"], ["Sent", "num"], ["Finished", "num"], ["Limit", "num"], ["Waiting", "num"], ["In review", "num"], ["429s", "num"]],
    tableRows(points).map((row) => ({ key: row.at, cells: [when(row.at), rate(row.started_per_s), rate(row.finished_per_s), limitWas(row.limit_per_s, known), count(row.waiting), count(row.review), count(row.throttled)] })));
