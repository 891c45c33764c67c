// The recorded history of a provider as pure functions: ranges and their zoom, the data of charts, and a table.

import { plural, rate } from "./format.js";
import { dayMonth, hourMinute } from "./instants.js";

const SECOND_MS = 1_000;
const HOUR_MS = 3_600 * SECOND_MS;
const DAY_MS = 24 * HOUR_MS;
const LONGEST_MS = 30 * DAY_MS;
/** A shorter range has too few points for a line. */
const SHORTEST_MS = 120 * SECOND_MS;
/** Rows of the table: so many points are summed up that no more are needed. */
const ROWS_MAX = 24;

/** The ranges that end now. */
export const RANGES = [["5 min", HOUR_MS / 12], ["15 min", HOUR_MS / 4], ["1 h", HOUR_MS], ["6 h", 6 * HOUR_MS], ["24 h", DAY_MS], ["7 d", 7 * DAY_MS], ["30 d", LONGEST_MS]];

/** The default range: the shortest that holds the data of the last hour, which begin at `since`. */
export const fitting = (ranges, since, now) => ranges.find(({ length }) => length >= Math.min(now - since, HOUR_MS));

/** What is chosen, as a range: a length that ends now, or the two ends of a zoom. */
export const rangeOf = (chosen, now) => (chosen.length ? { from: now - chosen.length, to: now } : chosen);

/** Whether the history is read again: another range is chosen, or a range that ends now has moved by a step. */
export function isDue(chosen, read, now) {
  if (!read || read.chosen !== chosen) return true;
  return Boolean(chosen.length) && now - read.at >= Math.max(10 * SECOND_MS, chosen.length / 720);
}

/** A range with its ends in order, neither too short nor too long, and not in the future. */
export function bounded({ from, to }, now) {
  const [start, end] = from <= to ? [from, to] : [to, from];
  const length = Math.min(Math.max(end - start, SHORTEST_MS), LONGEST_MS);
  const middle = (start + end) / 2;
  const last = Math.min(middle + length / 2, now);
  return { from: Math.round(last - length), to: Math.round(last) };
}

/** The range with this many times its length around the same middle. */
export function scaled({ from, to }, factor, now) {
  const [middle, half] = [(from + to) / 2, ((to - from) / 2) * factor];
  return bounded({ from: middle - half, to: middle + half }, now);
}

/** The range moved by this share of its length. */
export const moved = ({ from, to }, share, now) => bounded({ from: from + (to - from) * share, to: to + (to - from) * share }, now);

const known = (value) => value !== null && value !== undefined;

const isKnown = ({ started, waiting }) => known(started) || known(waiting);

/** Without any count there is no scale. */
export const isEmpty = (points) => !points.some(isKnown);

/** When the figures begin, in ms; null without any. */
export const beginning = (points) => (isEmpty(points) ? null : Date.parse(points.find(isKnown).at));

/** As `beginning`; null also for figures that begin with the range. */
export function lateBeginning({ points, from, to }) {
  const first = beginning(points);
  return first !== null && first - from > (to - from) / 12 ? first : null;
}

/** A time for an axis: with the day where the range is longer than one. */
export function axisTime(ms, lengthMs) {
  const [day, time] = [dayMonth(ms), hourMinute(ms)];
  if (lengthMs <= DAY_MS) return time;
  return lengthMs <= 3 * DAY_MS ? `${day} ${time}` : day;
}

/** The marks with their numbers, as the chart and the list show them. */
export const numbered = (marks) => marks.map((mark, at) => ({ ...mark, number: at + 1 }));

/** The marks near an instant: within a hundredth of the range. */
export const marksNear = (marks, at, lengthMs) => marks.filter((mark) => Math.abs(Date.parse(mark.at) - Date.parse(at)) <= lengthMs / 100);

const sum = (values) => (values.some(known) ? values.reduce((total, value) => total + (value ?? 0), 0) : null);
const mean = (values) => {
  const all = values.filter(known);
  return all.length === 0 ? null : all.reduce((total, value) => total + value, 0) / all.length;
};

/** Rows for a table, newest first: counts are summed, rates averaged, and the other figures are the last ones. */
export function tableRows(points) {
  const size = Math.max(1, Math.ceil(points.length / ROWS_MAX));
  const rows = [];
  for (let end = points.length; end > 0; end -= size) {
    const part = points.slice(Math.max(0, end - size), end);
    const last = part.findLast((point) => known(point.started)) ?? part.at(-1);
    rows.push({
      at: part.at(-1).at,
      started_per_s: mean(part.map((point) => point.started_per_s)),
      finished_per_s: mean(part.map((point) => point.finished_per_s)),
      throttled: sum(part.map((point) => point.throttled)),
      limit_per_s: last.limit_per_s,
      waiting: last.waiting,
      review: last.review,
    });
  }
  return rows;
}

/** The chart in a sentence. */
export function rangeWords(points) {
  if (isEmpty(points)) return "Nothing is recorded for this range.";
  const total = (field) => points.reduce((all, point) => all + (point[field] ?? 0), 0);
  const rates = points.map((point) => point.started_per_s).filter(known);
  const most = rate(Math.max(0, ...rates));
  const refused = total("throttled") > 0 ? `${plural(total("throttled"), "429", "429s")}` : "no 429";
  return `In this range ${plural(total("started"), "request", "requests")} started, at most ${most}; ${plural(total("finished"), "payment", "payments")} finished; the provider responded with ${refused}.`;
}
