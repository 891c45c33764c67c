// One line about the finish time of a backlog, and about the next cut-off of its provider.

import { throttledWords } from "./clears.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { about } from "./instants.js";

const MINUTE_MS = 60_000;

/** The minute in which the backlog is cleared: seconds would promise more than an estimate knows. */
export const minute = (at) => about(new Date(Math.ceil(Date.parse(at) / MINUTE_MS) * MINUTE_MS).toISOString());

/** `240/s`, rounded up so that it is enough. */
const enough = (rate) => (rate >= 10 ? `${count(Math.ceil(rate))}/s` : `${(Math.ceil(rate * 10) / 10).toFixed(1)}/s`);

/** `3,120 payments miss the cut-off at 18:00 CET`. */
export function missedWords({ at, forecast: { payments, is_at_least: isAtLeast } }) {
  const who = `${isAtLeast ? "at least " : ""}${count(payments)} ${payments === 1 ? "payment misses" : "payments miss"}`;
  return `${who} the cut-off at ${about(at)}`;
}

/** `3,120 payments miss the cut-off at 18:00 CET; 240/s would do`. */
function cutoffWords({ at, forecast }) {
  const then = `the cut-off at ${about(at)}`;
  switch (forecast?.kind) {
    case "missed": {
      const needed = forecast.needed_per_s;
      return `${missedWords({ at, forecast })}; ${needed === null || needed === undefined ? "no rate would do" : `${enough(needed)} would do`}`;
    }
    case "on_time":
      return `in time for ${then}`;
    default:
      return `it is unknown whether payments miss ${then}`;
  }
}

const preposition = (clears) => {
  if (clears?.kind !== "depends_on_accounts") return "at";
  return clears.about_ms === null || clears.about_ms === undefined ? "not before" : "at about";
};

/** Nothing if no payment waits, or if the backlog clears within a minute and there is no cut-off. */
export function finishLine(provider) {
  const { clears_at: at, cutoff } = provider;
  if (!(provider.waiting > 0)) return null;
  const isSoon = at && provider.clears?.kind === "clears_in" && provider.clears.ms < MINUTE_MS;
  const parts = [throttledWords(provider.clears), at && !isSoon ? `clears ${preposition(provider.clears)} ${minute(at)}` : null, cutoff ? cutoffWords(cutoff) : null].filter(Boolean);
  if (parts.length === 0) return null;
  const words = parts.join(" · ");
  const isMissed = cutoff?.forecast?.kind === "missed" && cutoff.forecast.payments > 0;
  return h("p", { class: isMissed ? "depends cause" : "depends" }, `${words.charAt(0).toUpperCase()}${words.slice(1)}.`);
}
