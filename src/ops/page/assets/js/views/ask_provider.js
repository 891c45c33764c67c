// What to ask the provider about a payment: key, reference, instants and amount, as lines to copy into a mail or a
// ticket. Instants are in UTC, because two companies read them.

import { copyButton } from "../copy.js";
import { h } from "../dom.js";
import { money } from "../format.js";
import { section } from "../parts.js";

/** Outcomes of which only the provider knows. */
const OPEN = new Set(["unknown", "review", "sending"]);

/** Null for a payment that was never sent: the provider knows nothing of it. */
export function askProvider(details) {
  const requests = (details.requests ?? []).filter(({ outcome }) => outcome !== "not_sent");
  if (requests.length === 0) return null;
  const lines = question(details, requests);
  const block = [h("pre", { tabindex: "0", "aria-label": "Question to the provider" }, h("code", {}, lines.map((line, at) => h("span", { key: at, class: "line" }, line)))), copyButton(lines, "question")];
  const title = "What to ask the provider";
  if (OPEN.has(details.state)) return section("ask", title, h("div", { class: "ask" }, block));
  return h("details", { key: "ask", class: "panel fold" }, h("summary", {}, title), h("div", { class: "ask" }, block));
}

function question(details, requests) {
  const { provider_reference: charge, reference, account, idempotency_key: key, request } = details;
  const line = (name, value) => (value ? `${`${name}:`.padEnd(17)}${value}` : null);
  return [
    charge ? "Please confirm this charge:" : "Was this payment charged? If so, what is your reference?",
    line("Idempotency key", key),
    line("Your reference", charge),
    line("Our payment", details.id),
    line("Our reference", reference),
    line("Account", account),
    line("Amount", money(details.amount, details.currency).replace("\u00a0", " ")),
    line("Request", request && `${request.method} ${request.url}`),
    ...requests.map((sent, at) => line(requests.length === 1 ? "Sent" : `Sent (${at + 1})`, `${sent.began_at}, ${answer(sent)}`)),
  ].filter(Boolean);
}

function answer({ ended_at: at, status }) {
  if (!at) return "no response yet";
  return status ? `response ${status} at ${at}` : `no response until ${at}`;
}
