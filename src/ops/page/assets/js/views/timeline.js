// The timeline of a payment: what happened, in order, with the time in between.

import { h } from "../dom.js";
import { clock, count, duration, money, sentence, when } from "../format.js";
import { jobState, spelled } from "../words.js";

/** Shorter gaps get no line. */
const GAP_MS = 250;

export function timeline(details, explained) {
  const entries = [received(details), ...waits(details), ...checks(details, explained), ...requests(details), ...byOperator(details), ...events(details)];
  // Entries of the same millisecond keep the order of the list above, in which one follows from the other.
  entries.sort((a, b) => Date.parse(a.at) - Date.parse(b.at));
  const items = [];
  let last = null;
  for (const [nth, entry] of entries.entries()) {
    const gap = last === null ? 0 : Date.parse(entry.at) - last;
    if (gap >= GAP_MS) items.push(h("li", { key: `gap-${nth}`, class: "gap" }, `${duration(gap)} later`));
    items.push(item(entry, nth));
    last = Date.parse(entry.until ?? entry.at);
  }
  const at = explained?.blocked_at;
  if (at) items.push(item({ title: "Now", words: now(details, at), tone: "here" }, "now"));
  return h("ol", { class: "timeline" }, items);
}

/** The current state in short; the summary above has the full sentence. */
function now(details, at) {
  if (details.state === "review") return "Waits for manual review.";
  const start = at.starts_at ? `, ${at.exact ? "start" : "estimated start"} ${when(at.starts_at)}` : "";
  return at.limit ? `Waits for limit ${at.limit}${start}.` : `At “${spelled(at.check)}”${start}.`;
}

const item = ({ at, title, words, tone }, key) =>
  h("li", { key, class: `entry ${tone ?? "neutral"}` },
    at ? h("time", { datetime: at }, when(at)) : h("span", { class: "time" }, ""),
    h("div", {}, h("strong", {}, title), words ? h("p", {}, words) : null));

const received = (details) => ({
  at: details.created_at,
  title: "Received",
  words: `Recorded in the ledger: ${money(details.amount, details.currency)} for ${details.provider}.`,
});

/** Why the payment was delayed last, and until when; if it was sent since, until then. */
function waits(details) {
  const waited = details.waited;
  if (!waited) return [];
  const sent = (details.requests ?? []).find(({ number }) => number === waited.request);
  const until = sent?.began_at ?? waited.until;
  const took = duration(Date.parse(until) - Date.parse(waited.since));
  const words = `${sent ? `For ${took}` : "Delayed"}, until ${clock(until)}.`;
  return [{ at: waited.since, until: sent?.began_at, title: sentence(sent ? waited.past_reason : waited.reason), words, tone: "info" }];
}

/** What the explanation adds to the requests: the limit that the payment waited for. */
function checks(details, explained) {
  const wanted = (check) => check.at && check.passed && /limit|queue/.test(check.name);
  return (explained?.checks ?? []).filter(wanted).map((check) => ({ at: check.at, title: spelled(check.name), words: check.text, tone: "info" }));
}

const OUTCOMES = { accepted: "good", declined: "neutral", throttled: "bad", rejected: "warn", unknown: "warn" };

function requests(details) {
  return (details.requests ?? []).flatMap((request) => {
    const title = request.number === 1 ? "Sent" : `Sent again (request ${count(request.number)})`;
    const sent = { at: request.began_at, until: request.ended_at, title, tone: "info", words: request.ended_at ? "" : "No response yet." };
    if (!request.ended_at) return [sent];
    const took = duration(Date.parse(request.ended_at) - Date.parse(request.began_at));
    // Nothing was sent, so there is no response.
    if (request.outcome === "not_sent") {
      const why = request.detail ? ` ${sentence(`${request.detail}.`.replace(/\.\.$/, "."))}` : "";
      const what = request.number === 1 ? "Could not be sent" : `Could not be sent (request ${count(request.number)})`;
      return [{ at: request.began_at, until: request.ended_at, title: what, words: `Failed after ${took}.${why}`, tone: "warn" }];
    }
    const outcome = spelled(request.outcome ?? "no outcome").toLowerCase();
    const words = [
      `After ${took}${request.status ? `, with status ${request.status}` : ""}.`,
      request.detail ? sentence(`${request.detail}.`.replace(/\.\.$/, ".")) : "",
      request.counted === false ? "Does not count as an attempt." : "",
    ];
    return [sent, { at: request.ended_at, title: `Response: ${outcome}`, words: words.filter(Boolean).join(" "), tone: OUTCOMES[request.outcome] ?? "warn" }];
  });
}

/** Without a broker no event is published, and none waits for that. */
const publication = (published) =>
  published === undefined ? "Event recorded." : published ? "Event published." : "Event not published yet.";

const events = (details) =>
  (details.events ?? []).map((event) => {
    const [words, tone] = jobState(event.state);
    return { at: event.at, title: words, tone, words: publication(event.published) };
  });

const byOperator = (details) =>
  (details.audit ?? []).map((line) => ({
    at: line.at,
    title: `By an operator: ${jobState(line.old_state)[0]} → ${line.new_state ? jobState(line.new_state)[0] : "deleted"}`,
    words: [line.os_user ? `${line.os_user} as ${line.who}` : line.who, line.program, line.because, line.erased ? "erased" : line.cleared_maybe_charged ? "confirmed not charged" : ""].filter(Boolean).join(" · "),
    tone: "warn",
  }));
