// Components that several views share.

import { link } from "./api.js";
import { h } from "./dom.js";
import { count, percent } from "./format.js";
import { written } from "./limits.js";

/** A state in a word, coloured by its tone. */
export const chip = ([words, tone]) =>
  h("span", { class: `chip ${tone}` }, h("span", { class: "dot", "aria-hidden": "true" }), words);

/** A figure with its name. `alarm` marks a value that needs attention. */
export function figure(name, value, { alarm = false, note, href } = {}) {
  return h(
    "div",
    { key: name, class: alarm ? "figure alarm" : "figure" },
    h("dt", {}, name),
    h("dd", {}, href ? h("a", { href }, value) : value, note ? h("small", {}, note) : null),
  );
}

export const figures = (...all) => h("dl", { class: "figures" }, all);

/** Shown until the view's data are loaded. */
export const loading = (context) =>
  h("p", { class: "loading" }, context.problem || link.problem ? "Not loaded yet; retrying every 2 s." : "Loading…");

/** The number of waiting payments. While a source is missing it is a lower bound. */
export const waitingWords = (provider) => (provider.waiting_is_at_least ? `at least ${count(provider.waiting)}` : count(provider.waiting));

/** Why `waiting` is a lower bound. */
export function waitingLacks(provider) {
  if (!provider.waiting_is_at_least) return null;
  const broker = provider.queued === null || provider.queued === undefined;
  const ledger = provider.delayed === null || provider.delayed === undefined;
  if (broker && ledger) return "broker and database are unreachable";
  return broker ? "the broker is unreachable" : "the jobs in the database could not be counted";
}

/** The sum over all providers; null if one of them is unknown. */
export function total(providers, field) {
  const values = providers.map((provider) => provider[field]);
  return values.some((value) => value === null) ? null : values.reduce((sum, value) => sum + (value ?? 0), 0);
}

/** Text of the server; commands between backticks become code. */
export const prose = (text) => String(text ?? "").split("`").map((part, at) => (at % 2 === 1 ? h("code", {}, part) : part));

/** The usage of a limit as a bar and in words; `unasked` is the reason while the usage is unknown. */
export function limitBar(limit, { label, unasked = "the limiter does not respond" } = {}) {
  const known = limit.used !== null && limit.used !== undefined;
  const capacity = known && limit.remaining !== null && limit.remaining !== undefined ? limit.used + limit.remaining : limit.max_requests;
  const share = known && capacity > 0 ? limit.used / capacity : capacity === 0 ? 1 : 0;
  const closed = limit.max_requests === 0;
  // A full limit is the goal: the lane sends as fast as allowed.
  const level = closed ? "closed" : share >= 0.995 ? "full" : "fine";
  const usage = closed
    ? "closed: nothing is sent"
    : known
      ? `${count(limit.used)} of ${count(capacity)} used`
      : limit.scope && limit.scope !== "provider"
        ? `counted per ${limit.scope}`
        : `usage unknown: ${limit.enabled === false ? "the limit is switched off" : unasked}`;
  return h(
    "div",
    { class: `limit ${level}` },
    h(
      "div",
      { class: "limit-head" },
      h("span", { class: "limit-name" }, label ?? limit.name, limit.shadow ? h("em", {}, " (shadow)") : null),
      h("span", { class: "limit-allows" }, written(limit)),
    ),
    known || closed
      ? h(
          "div",
          {
            class: "bar",
            role: "meter",
            "aria-label": `Limit ${limit.name}, used`,
            "aria-valuemin": 0,
            "aria-valuemax": capacity,
            "aria-valuenow": Math.min(limit.used ?? capacity, capacity),
            "aria-valuetext": usage,
          },
          h("div", { class: "bar-fill", style: { width: `${Math.min(100, share * 100).toFixed(1)}%` } }),
        )
      : null,
    h(
      "div",
      { class: "limit-foot" },
      h("span", {}, usage),
      h("span", { class: "limit-level" }, known && !closed ? percent(share) : "", known && level === "full" ? " · in full use" : ""),
    ),
  );
}

/** A table with a caption; `columns`: [title, class]. On narrow screens each cell carries its column's title. */
export function table(caption, columns, rows, { visible = false } = {}) {
  return h(
    "div",
    { class: "table-frame" },
    h(
      "table",
      {},
      h("caption", { class: visible ? "" : "unseen" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)))),
      h(
        "tbody",
        {},
        rows.map(({ key, cells, kind }) =>
          h("tr", { key, class: kind }, cells.map((cell, at) =>
            h("td", { class: columns[at][1], "data-title": columns[at][0] || null }, cell))),
        ),
      ),
    ),
  );
}

export const empty = (title, words, ...more) =>
  h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), h("p", {}, words), more);

export const section = (id, title, ...content) =>
  h(
    "section",
    { key: id, class: "panel", "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title),
    content,
  );

export const button = (label, onclick, kind = "", more = {}) =>
  h("button", { type: "button", class: kind, onclick, ...more }, label);

/** Old and new value beside each other. */
export const change = (name, from, to) =>
  h(
    "div",
    { class: "change", key: name },
    h("dt", {}, name),
    h("dd", {}, h("del", {}, from), h("span", { class: "arrow", "aria-label": "becomes" }, "→"), h("ins", {}, to)),
  );

/** Why the usage of a provider's limits is unknown. */
export function unasked(provider) {
  if (provider.enabled === false) return "the provider is disabled";
  const unusable = provider.state === "misconfigured" && (provider.problems ?? []).length > 0;
  return unusable ? "the configuration is invalid" : undefined;
}

export const jobHref = (id) => `#/jobs/${encodeURIComponent(id)}`;
export const providerHref = (name) => `#/providers/${encodeURIComponent(name)}`;
