// The view of rejected messages: what is wrong with each and how it begins, and the decision about it.

import { get, path, post, query } from "../api.js";
import { announce } from "../announce.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { agoWords, count, plural } from "../format.js";
import { button, change, empty, loading, providerHref, table } from "../parts.js";
import { needs } from "../person.js";
import { Pages } from "./job_table.js";

const PAGE = 50;
const REASONS = ["malformed", "too_large", "unknown_field", "bad_id", "bad_amount", "bad_currency", "bad_field", "wrong_provider", "card_number", "secret", "missing_account", "missing_reference", "unsupported_currency", "unsupported_amount", "conflict", "undeliverable", "newer_version"];
const FIELDS = ["provider", "reason", "decided"];

export function rejected(context, fields) {
  const wanted = Object.fromEntries(FIELDS.map((name) => [name, fields.get(name) ?? ""]));
  const decided = wanted.decided === "true";
  const pages = new Pages();
  let data = null;

  return {
    place: "rejected",
    title: "Rejected messages",
    async load(signal) {
      data = await get(path("rejected") + query({ ...wanted, before: pages.after, limit: PAGE }), signal);
    },
    render() {
      return [
        h("h1", { tabindex: "-1" }, "Rejected messages"),
        h("p", { class: "muted" }, "These messages can never be a payment as they are. Nothing was sent for them. The ledger keeps each until it is republished or discarded."),
        form(),
        data === null ? loading(context) : list(),
      ];
    },
  };

  function list() {
    const unreadable = data.unreadable.map(({ id, problem }) => h("p", { key: `unreadable ${id}`, class: "notice unreadable" }, `Message ${id} cannot be read: ${problem}. Repair its row by SQL.`));
    if (data.messages.length === 0 && unreadable.length === 0 && !data.next) {
      const filtered = wanted.provider || wanted.reason;
      return empty(decided ? "No decision yet" : "No rejected messages", filtered ? "No message matches all of these filters." : decided ? "A message that is republished or discarded appears here." : "Every message was a payment, or an operator has decided about it.");
    }
    const columns = [["When", "nowrap"], ["Provider", ""], ["Reason", "mono"], ["What is wrong", "wide"], ["Begins", "wide mono"], ["Size", "num nowrap"], [decided ? "Decision" : "Decide", decided ? "wide" : "actions"]];
    return [unreadable, table("Rejected messages, newest first", columns, data.messages.map((message) => ({ key: message.id, cells: cells(message) }))), pages.bar(data.next, context.refresh)];
  }

  function cells(message) {
    return [
      h("span", { title: message.at }, agoWords(message.at)),
      h("a", { href: providerHref(message.provider) }, message.provider),
      message.reason,
      message.detail,
      message.head ?? (message.decision === "discarded" ? "" : "not recorded by the older version"),
      plural(message.body_bytes, "byte", "bytes"),
      message.decision ? decisionWords(message) : actions(message),
    ];
  }

  function actions(message) {
    const named = { "aria-label": `Republish message ${message.id}`, ...needs("operator") };
    return [
      message.masked ? h("span", { class: "muted" }, "masked: it can only be discarded ") : button("Republish", () => decide(message, "republish"), "", named),
      button("Discard", () => decide(message, "discard"), "quiet", { "aria-label": `Discard message ${message.id}`, ...needs("operator") }),
    ];
  }

  function form() {
    const providers = (context.overview?.providers ?? []).map(({ name }) => name);
    if (wanted.provider && !providers.includes(wanted.provider)) providers.push(wanted.provider);
    const choice = (name, label, none, options) =>
      h("label", { class: "field" }, h("span", {}, label),
        h("select", { name, value: wanted[name] }, h("option", { value: "" }, none), options.map(([value, words]) => h("option", { key: value, value }, words))));
    return h("form", { class: "filters", role: "search", "aria-label": "Find rejected messages", onsubmit: search },
      choice("provider", "Provider", "any", providers.map((name) => [name, name])),
      choice("reason", "Reason", "any", REASONS.map((code) => [code, code])),
      choice("decided", "Show", "open", [["true", "decided"]]),
      h("button", { type: "submit", class: "primary" }, "Find"));
  }

  function search(event) {
    event.preventDefault();
    const given = Object.fromEntries(FIELDS.map((name) => [name, event.target.elements[name].value]));
    const hash = `#/rejected${query(given)}`;
    if (hash === location.hash) context.refresh();
    else location.hash = hash;
  }

  function decide(message, action) {
    const discards = action === "discard";
    const state = {};
    ask({
      title: discards ? "Discard this message?" : "Republish this message?",
      confirm: discards ? "Discard message" : "Republish message",
      danger: discards,
      content: () => [
        h("p", {}, `Message ${message.id} of ${message.provider}: `, h("code", {}, message.reason)),
        h("p", { class: "reason" }, message.detail),
        h("dl", { class: "changes" }, change("Decision", "open", discards ? "discarded" : "republished")),
        h("p", {}, discards
          ? "Its body is removed from the ledger, the only place that has it. This cannot be undone."
          : "The same bytes go to its lane again. If the cause remains, the message is rejected again. A payment that the ledger has already is not sent twice."),
        because(state),
      ],
      async act() {
        const done = await post(path("rejected", String(message.id), action), reason(state));
        announce(`Message ${done.id} is ${done.decision}.`, "good");
        context.refresh();
      },
    });
  }
}

function decisionWords({ decision, decided_at, os_user, decided_by, because: why }) {
  const who = os_user ?? decided_by;
  return [`${decision} ${agoWords(decided_at)}`, who ? ` by ${who}` : "", why ? `: ${why}` : ""];
}

/** The line of the overview; null where nothing was rejected. */
export function rejectedLine(known) {
  const { messages, is_at_least: atLeast, providers } = known.rejected ?? {};
  if (!messages) return null;
  const each = Object.entries(providers).map(([name, of]) => `${name} ${count(of)}`).join(", ");
  const words = `${atLeast ? "At least " : ""}${plural(messages, "rejected message awaits", "rejected messages await")} a decision`;
  return h("p", { class: "notice warn" }, h("a", { href: "#/rejected" }, words), ` (${each}).`);
}
