// What a rehearsed limit does to the payments of the next cut-off, in a sentence. The server estimates them.

import { minute, missedWords } from "./cutoff.js";
import { count, sentence } from "./format.js";

/** `120 payments miss the cut-off at 18:00 CET instead of 3,120.`; empty without a cut-off, or if all are in time. */
export function cutoffChange(cutoff) {
  const { from, to } = cutoff ?? {};
  if (!to) return "";
  const [before, after] = [missed(from), missed(to)];
  if (after === null || (after === 0 && before === 0)) return "";
  if (after === 0) return `In time for the cut-off at ${minute(to.at)}.`;
  const instead = before !== null && before !== after ? ` instead of ${count(before)}` : "";
  return `${sentence(missedWords(to))}${instead}.`;
}

/** Payments that miss a cut-off; null without a forecast. */
function missed(cutoff) {
  if (cutoff?.forecast?.kind === "missed") return cutoff.forecast.payments;
  return cutoff?.forecast?.kind === "on_time" ? 0 : null;
}
