// The overview, by attention: incidents, sums, then the providers that need a person, that are at a limit, that run.
// Idle ones are folded. Cards show up to eight providers, a dense table more of them.

import { serverNow } from "../clock.js";
import { h } from "../dom.js";
import { count, plural, sentence } from "../format.js";
import { Histories } from "../history.js";
import { incidents, otherWarnings } from "../incidents.js";
import { about, instant } from "../instants.js";
import { empty, loading, total, waitingWords } from "../parts.js";
import { Sorter } from "../urgency.js";
import { laneState } from "../words.js";
import { card, whatCounts } from "./card.js";
import { laneTable } from "./lane_table.js";
import { pauseAllButton, resumeAllButton } from "./pause_all.js";
import { rejectedLine } from "./rejected.js";
import { sums } from "./sums.js";

const CARDS_MAX = 8;
/** Warnings that are shown; the others are folded. */
const WARNINGS_MAX = 3;

export function overview(context) {
  const histories = new Histories();
  const sorter = new Sorter();
  const state = { lanes: new Map(), changed: "" };

  return {
    place: "overview",
    title: "Overview",
    async load(signal) {
      if (context.overview === null) return;
      const { providers } = context.overview;
      notice(providers);
      // The figures first; the charts follow, and a table has none.
      context.redraw();
      const names = providers.length > CARDS_MAX ? [] : providers.map(({ name }) => name);
      await histories.follow(context.overview, names, signal);
    },
    render() {
      const known = context.overview;
      const heading = h("h1", { tabindex: "-1", class: "unseen" }, "Overview");
      if (!known) return [heading, loading(context)];
      if (known.providers.length === 0) return [heading, warnings(known), nothing()];
      const found = incidents(known);
      const explained = new Set(found.flatMap(({ lanes }) => lanes));
      return [
        heading,
        h("p", { class: "unseen", "aria-live": "polite" }, state.changed),
        found.map((incident) => bar(incident, known, context)),
        sums(known),
        warnings(known),
        rejectedLine(known),
        h("div", { class: "tools end" }, pauseAllButton(context)),
        h("div", { class: "sections" }, sorter.sections(known.providers, explained, serverNow()).map((section) => lanes(section, explained, known.providers.length))),
      ];
    },
  };

  /** What a screen reader announces: a provider's new state, not the figures. */
  function notice(providers) {
    const turned = providers.filter((p) => (state.lanes.get(p.name) ?? p.state) !== p.state);
    for (const { name, state: lane } of providers) state.lanes.set(name, lane);
    if (turned.length > 0) state.changed = turned.map((p) => `${p.name}: ${laneState(p.state)[0]}`).join(", ");
  }

  function lanes({ name, title, about: words, providers }, explained, all) {
    if (providers.length === 0) return null;
    const dense = all > CARDS_MAX || name === "idle" || name === "stopped";
    const content = dense
      ? laneTable(title, providers, context, explained)
      : h("div", { class: "cards" }, providers.map((provider) => card(provider, histories.of(provider.name), context, explained.has(provider.name))));
    const id = `lanes-${name}`;
    if (name === "idle") {
      const names = providers.slice(0, CARDS_MAX).map((provider) => provider.name).join(", ");
      const more = providers.length > CARDS_MAX ? ` and ${count(providers.length - CARDS_MAX)} more` : "";
      // Where nothing else is shown, the idle ones are.
      return h("details", { key: name, class: "lanes idle", open: providers.length === all },
        h("summary", {}, h("h2", { id }, `${count(providers.length)} idle`), h("span", { class: "muted" }, `${names}${more}`)), content);
    }
    return h("section", { key: name, class: `lanes ${name} ${dense ? "dense" : ""}`.trim(), style: { "--cards": providers.length }, "aria-labelledby": id },
      h("div", { class: "lanes-head" }, h("h2", { id }, title, " ", h("span", { class: "badge" }, count(providers.length))), words ? h("p", { class: "muted" }, words) : null),
      content);
  }
}

/** An incident in a bar: what, since when, and what it means for payments. */
function bar({ key, tone, title, since, words, problem, pause }, known, context) {
  const lower = known.providers.some((provider) => provider.waiting_is_at_least);
  const waiting = total(known.providers, "waiting");
  const are = lower || waiting !== 1 ? "payments wait" : "payment waits";
  return h("section", { key, class: `incident ${tone}`, "aria-label": title },
    h("p", { class: "incident-head" },
      // Without the figures, which a screen reader would announce with each change.
      h("strong", { role: "alert" }, title, since ? [" since ", instant(since, about(since))] : null, "."),
      tone === "bad" ? ` Nothing is lost. ${sentence(waitingWords({ waiting, waiting_is_at_least: lower }))} ${are}.` : ""),
    h("p", { class: "incident-words" }, words, words ? " " : "", problem ? h("small", {}, problem) : null),
    pause ? h("p", { class: "incident-actions" }, resumeAllButton(pause, context)) : null);
}

const nothing = () =>
  empty(
    "No provider yet",
    "Limits are in the database. Write a provider file and apply it; its card appears here within 2 s.",
    h("pre", {}, h("code", {}, "sluicegate provider apply providers.toml")),
  );

function warnings(known) {
  const shown = otherWarnings(known);
  const notShown = (problem) => !shown.some((words) => words.includes(problem));
  const rows = known.providers.flatMap((p) => (p.problems ?? []).filter(notShown).map((problem) => `${p.name}: ${problem}; ${whatCounts(p)}`));
  const all = [...shown, ...rows];
  if (all.length === 0) return null;
  const line = (words) => h("li", { key: words }, words);
  const folded = all.slice(WARNINGS_MAX);
  return h("section", { class: "notice warn", "aria-label": "Warnings" },
    h("ul", {}, all.slice(0, WARNINGS_MAX).map(line)),
    folded.length === 0 ? null : h("details", {}, h("summary", {}, plural(folded.length, "more warning", "more warnings")), h("ul", {}, folded.map(line))));
}
