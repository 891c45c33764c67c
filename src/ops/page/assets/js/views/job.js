// One payment: where it stands and why, its story as a timeline, and what a person can do about it.

import { get, path } from "../api.js";
import { h } from "../dom.js";
import { clock, count, duration, money, plural, sentence, when } from "../format.js";
import { serverNow } from "../clock.js";
import { button, chip, loading, prose, providerHref, section } from "../parts.js";
import { jobState, spelled } from "../words.js";
import { cancel, discard, replay, resolve } from "./decide.js";
import { timeline } from "./timeline.js";
import { unrecorded } from "./unrecorded.js";

export function job(context, id) {
  let told = null;
  let explained = null;
  let missing = false;

  return {
    place: "jobs",
    title: id,
    async load(signal) {
      try {
        told = await get(path("jobs", id), signal);
        missing = false;
      } catch (error) {
        if (error.status !== 404) throw error;
        missing = true;
      }
      context.redraw();
      try {
        explained = await get(path("jobs", id, "explain"), signal);
      } catch (error) {
        if (signal.aborted || error.status === 0) throw error;
        // The story stands without it.
        explained = { summary: `Why it stands where it does cannot be said now: ${error.message}`, gates: [] };
      }
    },
    render() {
      const crumb = h("nav", { "aria-label": "Where this is", class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs"), " / ");
      if (missing) return [crumb, h("h1", { tabindex: "-1", class: "id" }, id), unknown()];
      if (!told) return [crumb, h("h1", { tabindex: "-1", class: "id" }, id), loading(context)];
      return [crumb, head(), stands(), section("story", "Its story", timeline(told, explained)), section("facts", "What is known of it", facts())];
    },
  };

  /** A payment may be on its way here: the queue cannot be searched, and a worker writes one down with its first request. */
  function unknown() {
    const queued = unrecorded(context.overview).map(({ name, messages }) => `${count(messages)} at ${name}`);
    return h("div", { class: "empty" },
      h("p", { class: "empty-title" }, "Not in the ledger"),
      h("p", {}, prose(sentence(explained?.summary ?? "It may be in its lane's queue, or in a worker's hands and not written down yet."))),
      queued.length > 0 ? h("p", {}, `In queues, not taken yet: ${queued.join(", ")}. This page looks again every 2 s.`) : null);
  }

  function head() {
    const act = (label, decide, kind) => button(label, () => decide(told, context), kind);
    return h("div", { class: "view-head" },
      h("h1", { tabindex: "-1", class: "id" }, id),
      h("span", { "aria-live": "polite" }, chip(jobState(told.state))),
      h("strong", { class: "amount" }, money(told.amount, told.currency)),
      h("span", { class: "muted" }, "at ", h("a", { href: providerHref(told.provider) }, told.provider), told.account ? ` for ${told.account}` : ""),
      h("span", { class: "push" }),
      told.state === "review" ? act("Resolve", resolve, "primary") : null,
      told.state === "dead" ? [act("Replay", replay, "primary"), act("Discard", discard, "danger")] : null,
      told.state === "waiting" ? act("Cancel payment", cancel, "") : null);
  }

  function stands() {
    if (!explained) return null;
    const at = explained.stands_at;
    return h("section", { class: "panel stands", "aria-label": "Where it stands" },
      h("p", { class: "summary", "aria-live": "off" }, prose(sentence(explained.summary))),
      at && (at.limit || at.turn_at || at.before_it > 0) ? turn(at) : null,
      h("ol", { class: "gates" }, (explained.gates ?? []).map((gate) => {
        const here = !gate.passed && gate.name === at?.gate;
        return h("li", { key: gate.name, class: gate.passed ? "passed" : here ? "here" : "ahead" },
          h("span", { class: "gate-mark", "aria-hidden": "true" }, gate.passed ? "✓" : here ? "●" : ""),
          h("span", { class: "gate-name" }, spelled(gate.name), h("span", { class: "unseen" }, gate.passed ? ": passed. " : here ? ": it stands here. " : ": still ahead. ")),
          gate.at && gate.passed ? h("time", { datetime: gate.at }, clock(gate.at)) : null,
          // The sentence above is that of the gate that it stands at.
          h("span", { class: "gate-words" }, gate.words === explained.summary ? "" : (gate.words ?? "")));
      })));
  }

  function turn(at) {
    const left = at.turn_at ? Math.max(0, Date.parse(at.turn_at) - serverNow()) : at.turn_in_ms;
    const fact = (name, value) => (value === "–" ? null : h("div", { key: name, class: "figure" }, h("dt", {}, name), h("dd", {}, value)));
    return h("dl", { class: "figures turn" },
      fact("Limit", at.limit ?? "–"),
      fact("Allows", at.allows ?? "–"),
      fact("Used", count(at.used)),
      fact("Before it", count(at.before_it)),
      fact(at.exact ? "Its turn" : "Its turn, about", at.turn_at ? when(at.turn_at) : "–"),
      // In steps of a second: whoever is read to would otherwise hear nothing else.
      left === null || left === undefined ? null : h("div", { key: "in", class: "figure", "aria-live": "off" }, h("dt", {}, "That is in"), h("dd", {}, duration(Math.ceil(left / 1_000) * 1_000))));
  }

  function digest({ bytes, sha256 }) {
    return `${plural(bytes, "byte", "bytes")}, sha256 ${sha256}`;
  }

  function facts() {
    const rows = [
      ["Idempotency key", told.idempotency_key], ["Provider's reference", told.provider_reference], ["Reference", told.reference],
      ["Reason", told.reason], ["Attempts", count(told.attempts)],
      ["May have been charged", told.maybe_charged ? "yes: some attempt's outcome is unknown" : told.state === "succeeded" ? null : "no"],
      ["In hand of", told.lease_owner ? `${told.lease_owner}, until ${when(told.lease_until)}` : null],
      ["Not before", told.not_before && when(told.not_before)], ["Expires", told.expires_at && when(told.expires_at)],
      ["Received", when(told.created_at)], ["First sent", told.first_sent_at && when(told.first_sent_at)], ["Changed", when(told.updated_at)],
      ["Request", told.request && `${told.request.method} ${told.request.url}`],
      ["Its body", told.request?.body && digest(told.request.body)],
      ["Payload", told.payload && digest(told.payload)],
    ];
    return h("dl", { class: "facts" }, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", { key: `n-${name}` }, name), h("dd", { key: `v-${name}`, class: "mono" }, value)]));
  }
}
