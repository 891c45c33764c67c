// What a person decides about one payment, each with a question that says what will happen.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { money } from "../format.js";
import { change } from "../parts.js";
import { jobState } from "../words.js";

const VERDICTS = [
  ["succeeded", "It was charged", "Settled as succeeded. Its event is published; it is never sent again."],
  ["declined", "It was not charged, and shall not be", "Settled as declined. Its event is published; it is never sent again."],
  ["resend", "It was surely not charged, and shall be", "Waits again and is sent with the same key and the same request. If it was charged after all and the provider has forgotten the key, it is charged twice."],
];

const named = (job) => h("p", {}, h("code", {}, job.id), `, ${money(job.amount, job.currency)} at ${job.provider}`);
const states = (from, to) => h("dl", { class: "changes" }, change("State", jobState(from)[0], jobState(to)[0]));

export function resolve(job, context) {
  const state = { as: null, reference: job.provider_reference ?? "" };
  const dialog = ask({
    title: "What became of this payment?",
    confirm: () => (state.as === "resend" ? "Send it again" : state.as ? `Settle as ${state.as}` : "Settle"),
    content: (dialog) => [
      named(job),
      job.reason ? h("p", { class: "reason" }, job.reason) : null,
      h("fieldset", { class: "verdicts" },
        h("legend", {}, "Look it up at the provider first, then say:"),
        VERDICTS.map(([as, title, words]) =>
          h("label", { key: as },
            h("input", { type: "radio", name: "as", value: as, required: true, onchange: () => { state.as = as; dialog.ready = true; dialog.redraw(); } }),
            h("span", {}, h("strong", {}, title), h("small", {}, words))))),
      state.as === "succeeded"
        ? h("label", { class: "field" }, h("span", {}, "The provider's reference (optional)"),
            h("input", { type: "text", name: "reference", value: job.provider_reference ?? "", autocomplete: "off", oninput: (event) => (state.reference = event.target.value) }))
        : null,
      because(state),
    ],
    async act() {
      const reference = state.as === "succeeded" && state.reference.trim() ? { reference: state.reference.trim() } : {};
      done(job, await post(path("jobs", job.id, "resolve"), { as: state.as, ...reference, ...reason(state) }), context);
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
    words: "It is never sent, and its event says so. A worker that has it in hand loses it; a request that is already on its way is not called back, and then this is refused.",
    url: path("jobs", job.id, "cancel"),
  });

export const replay = (job, context) =>
  simple(job, context, {
    title: "Replay this payment?",
    confirm: "Replay it",
    to: "waiting",
    words: "It was surely not charged. It goes to its lane again with the same key, and its attempts begin anew, within the limits like any other.",
    url: path("dlq", job.id, "replay"),
  });

export const discard = (job, context) =>
  simple(job, context, {
    title: "Discard this payment?",
    confirm: "Discard it",
    danger: true,
    to: "cancelled",
    words: "It becomes cancelled, its event says so, and it is never tried again. This cannot be taken back.",
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
