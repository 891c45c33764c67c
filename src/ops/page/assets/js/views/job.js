// The view of one payment: what happened to it in a line, why it is there, its timeline, its details, what to ask the
// provider, and what an operator can do.

import { get, path } from "../api.js";
import { copyButton } from "../copy.js";
import { h } from "../dom.js";
import { count, duration, money, plural, sentence } from "../format.js";
import { serverNow } from "../clock.js";
import { inZone, instant } from "../instants.js";
import { button, chip, loading, prose, providerHref, section } from "../parts.js";
import { needs } from "../person.js";
import { jobState, spelled } from "../words.js";
import { askProvider } from "./ask_provider.js";
import { cancel, discard, replay, resolve } from "./decide.js";
import { headline } from "./headline.js";
import { timeline } from "./timeline.js";
import { unrecorded } from "./unrecorded.js";

export function job(context, id) {
  let details = null;
  let explained = null;
  let missing = false;

  return {
    place: "jobs",
    title: id,
    async load(signal) {
      try {
        details = await get(path("jobs", id), signal);
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
        // The timeline is shown without the explanation.
        explained = { summary: `The explanation is unavailable: ${error.message}`, checks: [] };
      }
    },
    render() {
      const crumb = h("nav", { "aria-label": "Where this is", class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs"), " / ");
      if (missing) return [crumb, h("h1", { tabindex: "-1", class: "id" }, id), unknown()];
      if (!details) return [crumb, h("h1", { tabindex: "-1", class: "id" }, id), loading(context)];
      return [crumb, head(), stands(), askProvider(details), section("story", "Timeline", timeline(details, explained)), section("facts", "Details", facts())];
    },
  };

  /** A payment may be in a queue, which cannot be searched. A worker records it before its first request. */
  function unknown() {
    const queued = unrecorded(context.overview).map(({ name, messages }) => `${count(messages)} at ${name}`);
    return h("div", { class: "empty" },
      h("p", { class: "empty-title" }, "Not in the ledger"),
      h("p", {}, prose(sentence(inZone(explained?.summary) ?? "The payment may be in its lane's queue, or a worker has it and has not recorded it yet."))),
      queued.length > 0 ? h("p", {}, `In queues, not recorded yet: ${queued.join(", ")}. This page checks again every 2 s.`) : null);
  }

  function head() {
    const act = (label, decide, kind) => button(label, () => decide(details, context), kind, needs("operator"));
    return h("div", { class: "view-head" },
      h("h1", { tabindex: "-1", class: "id" }, id),
      copyButton(id, "payment id"),
      h("span", { "aria-live": "polite" }, chip(jobState(details.state))),
      h("strong", { class: "amount" }, money(details.amount, details.currency)),
      h("span", { class: "muted" }, "at ", h("a", { href: providerHref(details.provider) }, details.provider), details.account ? ` for ${details.account}` : ""),
      h("span", { class: "push" }),
      details.state === "review" ? act("Resolve", resolve, "primary") : null,
      details.state === "dead" ? [act("Replay", replay, "primary"), act("Discard", discard, "danger")] : null,
      details.state === "waiting" ? act("Cancel payment", cancel, "") : null);
  }

  function stands() {
    const line = h("p", { class: "headline", "aria-live": "off" }, headline(details, explained));
    if (!explained) return h("section", { class: "panel stands", "aria-label": "Current state" }, line);
    const at = explained.blocked_at;
    const here = (check) => !check.passed && check.name === at?.check;
    const reached = (explained.checks ?? []).filter((check) => check.passed || here(check));
    const passed = plural(reached.filter((check) => check.passed).length, "check passed", "checks passed");
    const waits = at && (at.limit || at.starts_at || at.jobs_ahead > 0 || explained.backlog);
    return h("section", { class: "panel stands", "aria-label": "Current state" },
      line,
      h("p", { class: "summary", "aria-live": "off" }, prose(sentence(inZone(explained.summary)))),
      waits ? forecast(at, explained.backlog) : null,
      reached.length === 0 ? null : h("details", { class: "passed-checks" },
        h("summary", {}, reached.some(here) ? `${passed}, it is at “${spelled(at.check)}”` : passed),
        h("ol", { class: "checks" }, reached.map(checkItem))));
  }

  function checkItem(check) {
    return h("li", { key: check.name, class: check.passed ? "passed" : "here" },
      h("span", { class: "check-mark", "aria-hidden": "true" }, check.passed ? "✓" : "●"),
      h("span", { class: "check-name" }, spelled(check.name), h("span", { class: "unseen" }, check.passed ? ": passed. " : ": the payment is here. ")),
      check.at && check.passed ? instant(check.at) : null,
      // The summary above already has the text of the current check.
      h("span", { class: "check-words" }, check.text === explained.summary ? "" : inZone(check.text ?? "")));
  }

  /** `place`: among the payments of its account and priority in the backlog. */
  function forecast(at, place) {
    const left = at.starts_at ? Math.max(0, Date.parse(at.starts_at) - serverNow()) : at.starts_in_ms;
    const fact = (name, value) => (value === "–" ? null : h("div", { key: name, class: "figure" }, h("dt", {}, name), h("dd", {}, value)));
    return h("dl", { class: "figures forecast" },
      fact("Limit", at.limit ?? "–"),
      fact("Allows", at.allows ?? "–"),
      fact("Used", count(at.used)),
      fact("Place in its account", place ? `${count(place.position)} of ${count(place.waiting)}` : "–"),
      fact("Priority", place?.priority ?? "–"),
      fact("Blocked until", place?.blocked ? (place.blocked.reason === "account_blocked" ? "the rule ends" : instant(place.blocked.until)) : "–"),
      fact("Ahead of it", count(at.jobs_ahead)),
      fact(at.exact ? "Start" : "Estimated start", at.starts_at ? instant(at.starts_at) : at.start_unknown ? "unknown" : "–"),
      // In steps of a second, so that a screen reader can say something else too.
      left === null || left === undefined ? null : h("div", { key: "in", class: "figure", "aria-live": "off" }, h("dt", {}, "Starts in"), h("dd", {}, duration(Math.ceil(left / 1_000) * 1_000))));
  }

  function digest({ bytes, sha256 }) {
    return `${plural(bytes, "byte", "bytes")}, sha256 ${sha256}`;
  }

  function facts() {
    const copied = (value, what) => (value ? [value, " ", copyButton(value, what)] : null);
    const at = (value) => (value ? instant(value) : null);
    const rows = [
      ["Idempotency key", copied(details.idempotency_key, "idempotency key")],
      ["Provider's reference", copied(details.provider_reference, "provider's reference")],
      ["Charged", details.charged_amount ? money(details.charged_amount, details.currency) : null],
      ["Reference", copied(details.reference, "reference")],
      ["Reason", inZone(details.reason)], ["Attempts", details.attempts > 0 ? count(details.attempts) : null],
      ["May have been charged", details.maybe_charged ? "yes: the outcome of an attempt is unknown" : details.state === "succeeded" ? null : "no"],
      ["Active in", details.holder && (details.response_by ? [`${details.holder}, response by `, at(details.response_by)] : details.holder)],
      ["Not before", at(details.not_before)], ["Expires", at(details.expires_at)],
      ["Received", at(details.created_at)], ["First sent", at(details.first_sent_at)], ["Changed", at(details.updated_at)],
      ["Request", details.request && `${details.request.method} ${details.request.url}`],
      ["Request body", details.request?.body && digest(details.request.body)],
      ["Payload", details.payload && digest(details.payload)],
    ];
    return h("dl", { class: "facts" }, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", { key: `n-${name}` }, name), h("dd", { key: `v-${name}`, class: "mono" }, value)]));
  }
}
