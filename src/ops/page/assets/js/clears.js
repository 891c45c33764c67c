// The clear time of a backlog in words. The server estimates it in the same way for every view.

import { DASH, duration } from "./format.js";

const HELD = {
  never: "never",
  not_while_paused: "not while paused",
  not_while_disabled: "not while disabled",
  not_while_breaker_open: "not while the breaker is open",
};
const MISSING = {
  worker: "no worker has reported",
  backend: "a backend is unavailable",
  configuration: "the provider refuses the configuration",
  queue: "the broker does not report its queue",
  ledger: "the database does not report its jobs",
  row: "there is no valid configuration",
};

const known = (value) => value !== null && value !== undefined;
const atLeastASecond = (ms) => duration(Math.max(1_000, ms));

/** `8 min 52 s`, the least time, or the reason why there is no estimate. */
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

/** As `clearsWords`, in a few words: an estimate in place of the least time, and no reason, which the card shows above. */
export function clearsAbout(clears) {
  if (clears?.kind === "unknown") return "unknown";
  return clears?.kind === "depends_on_accounts" && known(clears.about_ms) ? `about ${atLeastASecond(clears.about_ms)}` : clearsWords(clears);
}

/** Limits that count each account or reference separately. */
export const clearsDependsOn = (clears) => (clears?.kind === "depends_on_accounts" ? clears.limits : []);
