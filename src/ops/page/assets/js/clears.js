// The clear time of a backlog in words. The server estimates it in the same way for every view.

import { serverNow } from "./clock.js";
import { DASH, duration } from "./format.js";
import { about, when } from "./instants.js";

const MINUTE_MS = 60_000;

const HELD = {
  never: "never",
  not_while_blocked: "not while the accounts are blocked",
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

const passedWords = ({ passed_per_s: perSecond }) => (known(perSecond) ? `; ${perSecond}/s get through` : "");

/** Why there is no finish time while the provider refuses requests; null otherwise. */
export const throttledWords = (clears) =>
  clears?.kind === "not_while_throttled" ? `no finish time is known while the provider refuses requests with 429${passedWords(clears)}` : null;

const atLeastASecond = (ms) => duration(Math.max(1_000, ms));

/** `8 min 52 s`, the least time, or the reason why there is no estimate. */
export function clearsWords(clears) {
  switch (clears?.kind) {
    case "clears_in":
      return clears.ms === 0 ? DASH : atLeastASecond(clears.ms);
    case "depends_on_accounts":
      return `at least ${atLeastASecond(clears.at_least_ms)}`;
    case "not_before":
      return `not before ${when(new Date(clears.at))}`;
    case "not_while_throttled":
      return `unknown: the provider refuses requests with 429${passedWords(clears)}`;
    case "unknown":
      return `unknown: ${MISSING[clears.missing] ?? clears.missing}`;
    default:
      return HELD[clears?.kind] ?? "unknown";
  }
}

/** As `clearsWords`, in a few words: an estimate in place of the least time, and no reason, which the card shows above. */
export function clearsAbout(clears) {
  if (clears?.kind === "unknown" || clears?.kind === "not_while_throttled") return "unknown";
  return clears?.kind === "depends_on_accounts" && known(clears.about_ms) ? `about ${atLeastASecond(clears.about_ms)}` : clearsWords(clears);
}

/** `at 14:32 CET (in 4 min)`, the least time, or the reason why there is no estimate. `at`: the instant, if the server has
 * said it. */
export function clearsAt(clears, at) {
  const estimated = clears?.kind === "depends_on_accounts" && known(clears.about_ms);
  const ms = estimated ? clears.about_ms : (clears?.ms ?? clears?.at_least_ms);
  if (!known(ms) || ms === 0) return clearsWords(clears);
  const [preposition, left] = estimated ? ["at about", "in about"] : clears.kind === "clears_in" ? ["at", "in"] : ["not before", "in at least"];
  const end = new Date(at ?? serverNow() + ms);
  // More than a minute ahead, seconds would promise more than an estimate knows.
  const words = ms < MINUTE_MS ? when(end) : about(new Date(Math.ceil(end / MINUTE_MS) * MINUTE_MS));
  return `${preposition} ${words} (${left} ${atLeastASecond(ms)})`;
}

/** Limits that count each account or reference separately. */
export const clearsDependsOn = (clears) => (clears?.kind === "depends_on_accounts" ? clears.limits : []);
