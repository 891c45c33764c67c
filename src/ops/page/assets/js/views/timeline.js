// A payment's story in the order in which it happened, with the time that lies between.

import { h } from "../dom.js";
import { clock, count, duration, money, sentence, when } from "../format.js";
import { jobState, spelled } from "../words.js";

/** Shorter gaps are not worth a line. */
const GAP_MS = 250;

export function timeline(told, explained) {
  const entries = [received(told), ...waits(told), ...gates(told, explained), ...requests(told), ...byHand(told), ...events(told)];
  // What is of the same millisecond stands in the order in which one follows from the other: that of the list above.
  entries.sort((a, b) => Date.parse(a.at) - Date.parse(b.at));
  const items = [];
  let last = null;
  for (const [nth, entry] of entries.entries()) {
    const gap = last === null ? 0 : Date.parse(entry.at) - last;
    if (gap >= GAP_MS) items.push(h("li", { key: `gap-${nth}`, class: "gap" }, `${duration(gap)} later`));
    items.push(item(entry, nth));
    last = Date.parse(entry.until ?? entry.at);
  }
  const at = explained?.stands_at;
  if (at) items.push(item({ title: "Now", words: now(told, at), tone: "here" }, "now"));
  return h("ol", { class: "timeline" }, items);
}

/** The sentence above says it in full. */
function now(told, at) {
  if (told.state === "review") return "Waits for a person.";
  const turn = at.turn_at ? `, its turn ${at.exact ? "" : "about "}${when(at.turn_at)}` : "";
  return at.limit ? `Waits for limit ${at.limit}${turn}.` : `Stands at “${spelled(at.gate)}”${turn}.`;
}

const item = ({ at, title, words, tone }, key) =>
  h("li", { key, class: `entry ${tone ?? "neutral"}` },
    at ? h("time", { datetime: at }, when(at)) : h("span", { class: "time" }, ""),
    h("div", {}, h("strong", {}, title), words ? h("p", {}, words) : null));

const received = (told) => ({
  at: told.created_at,
  title: "Received",
  words: `Recorded in the ledger: ${money(told.amount, told.currency)} for ${told.provider}.`,
});

/** For what it was put down last, and until when: until it was sent, if it was. */
function waits(told) {
  const waited = told.waited;
  if (!waited) return [];
  const sent = (told.requests ?? []).find(({ number }) => number === waited.request);
  const until = sent?.began_at ?? waited.until;
  const what = /^waits for (.*)$/.exec(waited.reason)?.[1];
  const took = duration(Date.parse(until) - Date.parse(waited.since));
  const title = what ? `${sent ? "Waited" : "Waits"} for ${what}` : "Put down for a while";
  const span = `${sent ? `For ${took}` : "Parked"}, until ${clock(until)}.`;
  return [{ at: waited.since, until: sent?.began_at, title, words: what ? span : `${sentence(waited.reason)}. ${span}`, tone: "info" }];
}

/** What the explanation adds and no request tells: for which limit it waited. */
function gates(told, explained) {
  const wanted = (gate) => gate.at && gate.passed && /limit|permit|turn|parked|wait/.test(gate.name);
  return (explained?.gates ?? []).filter(wanted).map((gate) => ({ at: gate.at, title: spelled(gate.name), words: gate.words, tone: "info" }));
}

const OUTCOMES = { accepted: "good", declined: "neutral", throttled: "bad", rejected: "warn", unknown: "warn" };

function requests(told) {
  return (told.requests ?? []).flatMap((request) => {
    const title = request.number === 1 ? "Sent" : `Sent again (request ${count(request.number)})`;
    const sent = { at: request.began_at, until: request.ended_at, title, tone: "info", words: request.ended_at ? "" : "No answer yet." };
    if (!request.ended_at) return [sent];
    const took = duration(Date.parse(request.ended_at) - Date.parse(request.began_at));
    // Nothing left, so nothing can have been answered.
    if (request.outcome === "not_sent") {
      const why = request.detail ? ` ${sentence(`${request.detail}.`.replace(/\.\.$/, "."))}` : "";
      const what = request.number === 1 ? "Could not be sent" : `Could not be sent (request ${count(request.number)})`;
      return [{ at: request.began_at, until: request.ended_at, title: what, words: `Given up after ${took}.${why}`, tone: "warn" }];
    }
    const outcome = spelled(request.outcome ?? "no outcome").toLowerCase();
    const words = [
      `After ${took}${request.status ? `, with status ${request.status}` : ""}.`,
      request.detail ? sentence(`${request.detail}.`.replace(/\.\.$/, ".")) : "",
      request.counted === false ? "Counts as no attempt." : "",
    ];
    return [sent, { at: request.ended_at, title: `Answered: ${outcome}`, words: words.filter(Boolean).join(" "), tone: OUTCOMES[request.outcome] ?? "warn" }];
  });
}

const events = (told) =>
  (told.events ?? []).map((event) => {
    const [words, tone] = jobState(event.state);
    return { at: event.at, title: words, tone, words: event.published_at ? `Its event was published ${after(event)}.` : "Its event is not published yet." };
  });

const after = (event) => {
  const ms = Date.parse(event.published_at) - Date.parse(event.at);
  return ms < 1_000 ? "at once" : `${duration(ms)} later`;
};

const byHand = (told) =>
  (told.audit ?? []).map((line) => ({
    at: line.at,
    title: `By hand: ${jobState(line.old_state)[0]} → ${line.new_state ? jobState(line.new_state)[0] : "deleted"}`,
    words: [line.os_user ? `${line.os_user} as ${line.who}` : line.who, line.program, line.because, line.erased ? "erased" : line.cleared_maybe_charged ? "surely not charged" : ""].filter(Boolean).join(" · "),
    tone: "warn",
  }));
