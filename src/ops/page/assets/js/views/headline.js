// A payment in one line, in plain words: what happened to the money, when, and what comes next.

import { count, money, plural } from "../format.js";
import { inZone, instant } from "../instants.js";
import { spelled } from "../words.js";

/** Reads as a sentence: a list of texts and elements. */
export function headline(details, explained) {
  const say = SAY[details.state];
  return say ? [say(details, explained), "."].flat(Infinity) : [spelled(details.state), "."];
}

const requestsOf = (details) => details.requests ?? [];
const lastRequest = (details) => requestsOf(details).at(-1);
/** When the payment reached its current state. */
const reachedAt = (details) => (details.events ?? []).findLast(({ state }) => state === details.state)?.at ?? details.updated_at;
const because = (reason) => (reason ? `: ${inZone(reason)}` : "");

const SAY = {
  waiting: (details, explained) => [unsent(details), whatHolds(details, explained), start(explained)],
  sending: (details) => ["Being sent since ", instant(lastRequest(details)?.began_at ?? details.updated_at), "; no response yet"],
  unknown: (details, explained) => ["Unknown", sentWithoutAnswer(details), next(explained)],
  review: (details) => details.maybe_charged ? ["Unknown, a person must decide", sentWithoutAnswer(details)] : ["A person must decide", because(details.reason)],
  dead: (details) => ["Not charged: ", tried(details), ", the last at ", instant(lastRequest(details)?.began_at ?? details.updated_at), because(details.reason)],
  succeeded: (details) => [
    "Charged at ",
    instant(chargedAt(details)),
    `, ${money(details.amount, details.currency)}`,
    details.provider_reference ? `; the provider's reference is ${details.provider_reference}` : "; the provider gave no reference",
  ],
  declined: (details) => (requestsOf(details).length === 0
    ? ["Declined at ", instant(reachedAt(details)), " by a rule of ours; never sent, not charged"]
    : ["Declined by the provider at ", instant(reachedAt(details)), because(details.reason ?? lastRequest(details)?.detail), "; not charged"]),
  expired: (details) => ["Expired at ", instant(reachedAt(details)), "; ", neverCharged(details)],
  cancelled: (details) => ["Cancelled at ", instant(reachedAt(details)), by(details), "; ", neverCharged(details)],
};

/** The instant of the response that said so. */
function chargedAt(details) {
  return requestsOf(details).findLast(({ outcome }) => outcome === "accepted")?.ended_at ?? reachedAt(details);
}

const tried = (details) => (requestsOf(details).length === 0 ? "it was never sent" : `${plural(requestsOf(details).length, "request", "requests")} failed`);
const neverCharged = (details) => (requestsOf(details).length === 0 ? "never sent, not charged" : "not charged");

function by(details) {
  const line = (details.audit ?? []).findLast(({ new_state }) => new_state === details.state);
  return line?.who ? ` by ${line.os_user ?? line.who}` : "";
}

function unsent(details) {
  const sent = requestsOf(details).filter(({ outcome }) => outcome !== "not_sent").length;
  if (requestsOf(details).length === 0) return "Not sent yet: ";
  return sent === 0 ? "Not sent yet, though tried: " : `Not charged yet, sent ${sent === 1 ? "once" : `${count(sent)} times`}: `;
}

const CHECKS = {
  recorded: "no worker has recorded it",
  provider: "its provider cannot be used",
  time: "it waits for its time",
  lane: "its lane sends nothing",
  limiter: "the limiter gives no permits",
  account: "its account is held",
  limit: "a limit of its provider is in full use",
  queue: "others are ahead of it",
};

/** What holds it, in few words. The sentence below the headline has all of them. */
function whatHolds(details, explained) {
  const at = explained?.blocked_at;
  if (!at) return details.reason ? inZone(details.reason) : "it waits for its turn";
  if (at.limit) return at.check === "account" ? `its account is at its limit ${at.limit}` : `limit ${at.limit} is in full use`;
  return CHECKS[at.check] ?? spelled(at.check).toLowerCase();
}

function start(explained) {
  const at = explained?.blocked_at;
  if (!at?.starts_at) return at?.start_unknown ? "; the start is unknown" : "";
  return [at.exact ? "; starts at " : "; starts at about ", instant(at.starts_at)];
}

function sentWithoutAnswer(details) {
  const request = requestsOf(details).findLast(({ outcome }) => outcome === "unknown" || outcome === "in_progress" || !outcome) ?? lastRequest(details);
  if (!request) return "";
  return [": sent at ", instant(request.began_at), request.status ? `, the response ${request.status} does not say` : ", no response"];
}

/** A look-up, or the same request again under the same key. */
function next(explained) {
  const at = explained?.blocked_at?.starts_at;
  return at ? ["; asked again at about ", instant(at)] : "; it will be asked again";
}
