// What a rehearsed limit does to the finish time and to the cut-off, in a sentence. The server estimates both.

import { minute, missedWords } from "./cutoff.js";
import { count } from "./format.js";

/** `Clears at 14:32 CET instead of 16:10 CET. 120 payments miss the cut-off at 18:00 CET instead of 3,120.` */
export function finishChange({ clears_at: at, cutoff } = {}) {
  return [clearsChange(at), cutoffChange(cutoff)].filter(Boolean).map((words) => `${words}.`).join(" ");
}

function clearsChange(at) {
  if (!at?.to) return null;
  const [from, to] = [at.from ? minute(at.from) : null, minute(at.to)];
  if (from === to) return `Clears at ${to}, as before`;
  return from ? `Clears at ${to} instead of ${from}` : `Clears at ${to}`;
}

function cutoffChange(cutoff) {
  const { from, to } = cutoff ?? {};
  if (!to) return null;
  const [before, after] = [missed(from), missed(to)];
  if (after === null || (after === 0 && before === 0)) return null;
  if (after === 0) return `In time for the cut-off at ${minute(to.at)}`;
  const instead = before !== null && before !== after ? ` instead of ${count(before)}` : "";
  return `${missedWords(to)}${instead}`;
}

/** Payments that miss a cut-off; null without a forecast. */
function missed(cutoff) {
  if (cutoff?.forecast?.kind === "missed") return cutoff.forecast.payments;
  return cutoff?.forecast?.kind === "on_time" ? 0 : null;
}
