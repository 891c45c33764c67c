// When a backlog is cleared, in words. The server estimates it, for every view in the same way.

import { DASH, duration } from "./format.js";

const HELD = {
  never: "never",
  not_while_paused: "not while paused",
  not_while_disabled: "not while disabled",
  not_while_breaker_open: "not while the circuit breaker is open",
};
const MISSING = {
  worker: "no worker reports",
  backend: "a backend is unavailable",
  configuration: "its configuration is refused",
  queue: "the broker does not say what waits",
  ledger: "the database does not say what waits",
  row: "it has no valid row",
};

const known = (value) => value !== null && value !== undefined;
const atLeastASecond = (ms) => duration(Math.max(1_000, ms));

/** `8 min 52 s`, the least that it takes, or why there is no such time. */
export function clearsWords(clears) {
  switch (clears?.kind) {
    case "clears_in":
      return clears.ms === 0 ? DASH : atLeastASecond(clears.ms);
    case "depends_on_accounts":
      return `at least ${atLeastASecond(clears.at_least_ms)}`;
    case "unknown":
      return `unknown: ${MISSING[clears.missing] ?? clears.missing}`;
    default:
      return HELD[clears?.kind] ?? "unknown";
  }
}

/** The same with a guess in place of the least, where there is one. */
export const clearsAbout = (clears) => (clears?.kind === "depends_on_accounts" && known(clears.about_ms) ? `about ${atLeastASecond(clears.about_ms)}` : clearsWords(clears));

/** Limits that count each account or reference on its own. */
export const clearsDependsOn = (clears) => (clears?.kind === "depends_on_accounts" ? clears.limits : []);
