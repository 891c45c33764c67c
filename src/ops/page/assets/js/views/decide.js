// The dialogs in which an operator decides about one payment. Each says what will happen.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { money } from "../format.js";
import { change } from "../parts.js";
import { jobState } from "../words.js";

const VERDICTS = [
  ["succeeded", "Charged", "The payment becomes succeeded. Its event is published; it is never sent again."],
  ["declined", "Not charged, do not retry", "The payment becomes declined. Its event is published; it is never sent again."],
  ["resend", "Confirmed not charged: charge again", "The payment waits again and is sent with the same key and the same request. If it was charged after all and the provider has forgotten the key, it is charged twice."],
];

const named = (job) => h("p", {}, h("code", {}, job.id), `, ${money(job.amount, job.currency)} at ${job.provider}`);
const states = (from, to) => h("dl", { class: "changes" }, change("State", jobState(from)[0], jobState(to)[0]));

export function resolve(job, context) {
  const state = { as: null, reference: job.provider_reference ?? "", amount: "", typed: "" };
  const isReady = () => state.as !== null && (state.as !== "resend" || state.typed === job.id);
  const dialog = ask({
    title: "Resolve this payment?",
    confirm: () => (state.as === "resend" ? "Charge again" : state.as ? `Resolve as ${state.as}` : "Resolve"),
    content: (dialog) => [
      named(job),
      job.reason ? h("p", { class: "reason" }, job.reason) : null,
      h("fieldset", { class: "verdicts" },
        h("legend", {}, "Look the payment up at the provider first, then choose:"),
        VERDICTS.map(([as, title, words]) =>
          h("label", { key: as },
            h("input", { type: "radio", name: "as", value: as, required: true, onchange: () => { state.as = as; dialog.ready = isReady(); dialog.redraw(); } }),
            h("span", {}, h("strong", {}, title), h("small", {}, words))))),
      state.as === "succeeded"
        ? h("label", { class: "field" }, h("span", {}, "The provider's reference (optional)"),
            h("input", { type: "text", name: "reference", value: job.provider_reference ?? "", autocomplete: "off", oninput: (event) => (state.reference = event.target.value) }))
        : null,
      state.as === "succeeded"
        ? h("label", { class: "field" }, h("span", {}, `Charged amount in minor units, if not ${job.amount}`),
            h("input", { type: "text", name: "amount", inputmode: "numeric", autocomplete: "off", oninput: (event) => (state.amount = event.target.value) }))
        : null,
      state.as === "resend"
        ? h("label", { key: "typed", class: "field" }, h("span", {}, `Type the id, ${job.id}, to charge it again`),
            h("input", { type: "text", name: "typed", autocomplete: "off", spellcheck: "false", oninput: (event) => { state.typed = event.target.value.trim(); dialog.ready = isReady(); dialog.redraw(); } }))
        : null,
      because(state),
    ],
    async act() {
      const confirmed = state.as === "resend" ? { confirm_id: state.typed } : {};
      const reference = state.as === "succeeded" && state.reference.trim() ? { reference: state.reference.trim() } : {};
      const typed = state.amount.trim();
      const amount = state.as === "succeeded" && typed ? { amount: /^\d+$/.test(typed) ? Number(typed) : typed } : {};
      done(job, await post(path("jobs", job.id, "resolve"), { as: state.as, ...reference, ...amount, ...confirmed, ...reason(state) }), context);
    },
  });
  dialog.ready = false;
  dialog.redraw();
}

export const cancel = (job, context) =>
  simple(job, context, {
    title: "Cancel this payment?",
    confirm: "Cancel this payment",
    danger: true,
    to: "cancelled",
    words: "The payment is never sent, and an event is published. If a worker holds it, that worker loses its lease. If a request is already in flight, the cancellation is refused.",
    url: path("jobs", job.id, "cancel"),
  });

export const replay = (job, context) =>
  simple(job, context, {
    title: "Replay this payment?",
    confirm: "Replay payment",
    to: "waiting",
    words: "The payment is confirmed not charged. It returns to its lane with the same key, and its attempts start from zero. The limits apply.",
    url: path("dlq", job.id, "replay"),
  });

export const discard = (job, context) =>
  simple(job, context, {
    title: "Discard this payment?",
    confirm: "Discard payment",
    danger: true,
    to: "cancelled",
    words: "The payment becomes cancelled, an event is published, and it is never sent. This cannot be undone.",
    url: path("dlq", job.id, "discard"),
  });

function simple(job, context, { title, confirm, danger, to, words, url }) {
  const state = {};
  ask({
    title,
    confirm,
    danger,
    content: () => [named(job), job.reason ? h("p", { class: "reason" }, job.reason) : null, states(job.state, to), h("p", {}, words), because(state)],
    async act() {
      done(job, await post(url, reason(state)), context);
    },
  });
}

function done(job, answer, context) {
  const now = answer.state ? jobState(answer.state)[0].toLowerCase() : "changed";
  announce(`${job.id} is now ${now}${answer.done ? `: ${answer.done}` : ""}.`, "good");
  context.refresh();
}
