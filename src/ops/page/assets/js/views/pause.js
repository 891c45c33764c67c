// The dialogs that pause and resume a provider, and release its lane. Each says what will happen. A resume also lifts a
// wait that the provider asked for.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { clearsAt } from "../clears.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { count, plural } from "../format.js";
import { tightestWords } from "../limits.js";
import { button, change } from "../parts.js";
import { needs } from "../person.js";

export function pauseButton(provider, context, kind = "quiet") {
  const { name, paused } = provider;
  const label = paused ? "Resume" : "Pause";
  return button(label, () => (paused ? resume(provider, context) : pause(provider, context)), kind, {
    "aria-label": `${label} ${name}`,
    ...needs("operator"),
  });
}

/** Only while the lane is held, or a wait that the provider asked for is in force; null otherwise. */
export function liftButton(provider, context, kind = "quiet") {
  const { name, paused, state, ends_in_ms: ends } = provider;
  if (state === "held") {
    return button("Release", () => release(provider, context), kind, { "aria-label": `Release ${name}`, ...needs("operator") });
  }
  const waits = state === "paused_by_provider" || (state === "throttled" && ends > 0);
  if (paused || !waits) return null;
  return button("Lift the wait", () => lift(provider, context), kind, { "aria-label": `Lift the wait of ${name}`, ...needs("operator") });
}

function lift(provider, context) {
  const { name } = provider;
  const state = {};
  ask({
    title: `Lift the wait that ${name} asked for?`,
    confirm: "Lift the wait",
    danger: true,
    content: () => [
      h("dl", { class: "changes" }, change("State", "waits, because the provider asked for it", "sends requests")),
      h("ul", {},
        h("li", {}, "Requests start again within 2 s in every worker and for every provider of the quota, within the limits."),
        h("li", {}, "If the provider still refuses requests, the next wait that it asks for takes effect.")),
      because(state),
    ],
    async act() {
      await post(path("providers", name, "resume"), reason(state));
      announce(`The wait of ${name} is lifted. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
}

function release(provider, context) {
  const { name, cause } = provider;
  const state = {};
  ask({
    title: `Release ${name}?`,
    confirm: `Release ${name}`,
    danger: true,
    content: () => [
      h("dl", { class: "changes" }, change("State", "held: no charge starts", "sends requests")),
      h("p", {}, cause ?? ""),
      h("ul", {},
        h("li", {}, "Payments of which the ledger has lost the charge are charged again. Compare them with the provider's records first."),
        h("li", {}, "Charges start again within 2 s in every worker, within the limits.")),
      because(state, { required: true }),
    ],
    async act() {
      await post(path("providers", name, "resume"), { release_hold: true, ...reason(state) });
      announce(`${name} is released. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
}

function pause(provider, context) {
  const { name } = provider;
  const state = {};
  ask({
    title: `Pause ${name}?`,
    confirm: `Pause ${name}`,
    danger: true,
    content: () => [
      h("dl", { class: "changes" },
        change("State", "sends requests", "paused"),
        provider.waiting === 0 ? null : change("Clears", clearsAt(provider.clears, provider.clears_at), "not while paused")),
      h("ul", {},
        h("li", {}, "Within 2 s no new request is started in any worker."),
        provider.in_flight > 0 ? h("li", {}, `${plural(provider.in_flight, "request in flight is", "requests in flight are")} not cancelled; the responses count.`) : null,
        h("li", {}, provider.waiting > 0 ? `${plural(provider.waiting, "waiting payment keeps", "waiting payments keep")} waiting, and new ones wait too. Deadlines still apply.` : "New payments wait in the queue. Their deadlines still apply.")),
      because(state),
    ],
    async act() {
      await post(path("providers", name, "pause"), reason(state));
      announce(`${name} is paused. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
}

function resume(provider, context) {
  const { name } = provider;
  const state = {};
  ask({
    title: `Resume ${name}?`,
    confirm: `Resume ${name}`,
    content: () => [
      h("dl", { class: "changes" },
        change("State", "paused", "sends requests"),
        provider.waiting === 0 ? null : change("Clears", clearsAt(provider.clears), clearsAt(provider.clears_if_resumed))),
      h("ul", {},
        h("li", {}, `${plural(provider.waiting ?? 0, "payment waits and is", "payments wait and are")} sent within its limits; the tightest is ${tightestWords(provider)}.`),
        h("li", {}, `Takes effect in every worker within 2 s. ${count(provider.in_flight ?? 0)} in flight now.`)),
      because(state),
    ],
    async act() {
      await post(path("providers", name, "resume"), reason(state));
      announce(`${name} is resumed. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
}
