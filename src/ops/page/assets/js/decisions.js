// What an operator can decide about many payments at once, by their state, and the words for it.

import { jobState } from "./words.js";

export const DECISIONS = {
  succeeded: {
    state: "review",
    to: "succeeded",
    label: "Resolve as succeeded",
    title: "Resolve these payments as succeeded?",
    words: "Each payment becomes succeeded. Its event is published; it is never sent again.",
  },
  declined: {
    state: "review",
    to: "declined",
    label: "Resolve as declined",
    title: "Resolve these payments as declined?",
    words: "Each payment becomes declined: not charged, and not retried. Its event is published; it is never sent again.",
  },
  resend: {
    state: "review",
    to: "waiting",
    label: "Charge again",
    title: "Charge these payments again?",
    words: "Each payment is sent with the same key and the same request, within the limits. If it was charged after all and the provider has forgotten the key, it is charged twice.",
    danger: true,
    retyped: true,
  },
  cancel: {
    state: "waiting",
    to: "cancelled",
    label: "Cancel",
    title: "Cancel these payments?",
    words: "Each payment is never sent, and an event is published. A request that is already in flight is not cancelled.",
    danger: true,
  },
  replay: {
    state: "dead",
    to: "waiting",
    label: "Replay",
    title: "Replay these payments?",
    words: "Each payment returns to its lane with the same key, and its attempts start from zero. The limits apply.",
  },
  discard: {
    state: "dead",
    to: "cancelled",
    label: "Discard",
    title: "Discard these payments?",
    words: "Each payment becomes cancelled, an event is published, and it is never sent. This cannot be undone.",
    danger: true,
  },
};

/** States about which an operator can decide. */
export const DECIDABLE = new Set(Object.values(DECISIONS).map(({ state }) => state));

/** The decisions for payments of these states, as [code, decision]. */
export const decisionsFor = (states) => Object.entries(DECISIONS).filter(([, { state }]) => states.has(state));

/** Names a decision; a newer server may know others. */
export const decisionWords = (code) => DECISIONS[code]?.label ?? jobState(code)[0];

const STATES = { running: ["Running", "info"], stopped: ["Stopped", "warn"], finished: ["Finished", "good"] };
export const batchState = (state) => STATES[state] ?? [String(state), "neutral"];
export const batchHref = (id) => `#/batches/${encodeURIComponent(id)}`;
