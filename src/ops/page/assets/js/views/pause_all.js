// The dialogs that pause all providers and resume those that this pause holds. Each says which providers, and what stays
// as it is.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { plural } from "../format.js";
import { about, instant } from "../instants.js";
import { button, change, total } from "../parts.js";
import { needs } from "../person.js";

const NAMES_MAX = 12;

function names(all) {
  const more = all.length - NAMES_MAX;
  return `${all.slice(0, NAMES_MAX).join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}

/** Null while nothing could be paused. */
export function pauseAllButton(context) {
  const running = (context.overview?.providers ?? []).filter(({ paused }) => !paused);
  return running.length === 0 ? null : button("Pause all", () => pauseAll(context), "quiet", { "aria-label": "Pause all providers", ...needs("operator") });
}

export const resumeAllButton = (pause, context) =>
  button("Resume all", () => resumeAll(pause, context), "", needs("operator"));

function pauseAll(context) {
  const { providers, pause_of_all: before } = context.overview;
  const running = providers.filter(({ paused }) => !paused);
  const paused = providers.filter((provider) => provider.paused && !before?.providers.includes(provider.name));
  const inFlight = total(running, "in_flight");
  const state = {};
  ask({
    title: "Pause all providers?",
    confirm: `Pause ${plural(running.length, "provider", "providers")}`,
    danger: true,
    content: () => [
      h("dl", { class: "changes" }, change("State", plural(running.length, "provider sends", "providers send"), "paused")),
      h("p", {}, names(running.map(({ name }) => name))),
      h("ul", {},
        h("li", {}, "Within 2 s no new request is started in any worker. Payments keep waiting, and new ones wait too. Deadlines still apply."),
        inFlight > 0 ? h("li", {}, `${plural(inFlight, "request in flight is", "requests in flight are")} not cancelled; the responses count.`) : null,
        before ? h("li", {}, `It extends the pause of ${before.by}.`) : null,
        paused.length > 0 ? h("li", {}, `Paused already, and not resumed with the others: ${names(paused.map(({ name }) => name))}.`) : null),
      because(state),
    ],
    async act() {
      const done = await post(path("pause-all"), reason(state));
      announce(`${plural(done.paused.length, "provider is", "providers are")} paused. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
}

function resumeAll(pause, context) {
  const others = context.overview.providers.filter(({ name, paused }) => paused && !pause.providers.includes(name));
  const held = context.overview.providers.filter(({ name }) => pause.providers.includes(name));
  const waiting = total(held, "waiting");
  const state = {};
  ask({
    title: "Resume all that this pause has paused?",
    confirm: `Resume ${plural(pause.providers.length, "provider", "providers")}`,
    content: () => [
      h("p", {}, `Paused by ${pause.by} `, instant(pause.since, about(pause.since)), pause.because ? `: ${pause.because}` : "", "."),
      h("dl", { class: "changes" }, change("State", `${plural(pause.providers.length, "provider", "providers")} paused`, "sends requests")),
      h("p", {}, names(pause.providers)),
      h("ul", {},
        h("li", {}, `${plural(waiting ?? 0, "payment waits and is", "payments wait and are")} sent, within the limits of each provider.`),
        h("li", {}, "A wait that a provider asked for stays in force."),
        others.length > 0 ? h("li", {}, `Paused otherwise, and still paused then: ${names(others.map(({ name }) => name))}.`) : null),
      because(state),
    ],
    async act() {
      const done = await post(path("resume-all"), reason(state));
      announce(`${plural(done.resumed.length, "provider is", "providers are")} resumed. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
}
