// The filter bar of the list of payments. Its fields are in the address, so a link keeps the filter.

import { query } from "../api.js";
import { h } from "../dom.js";
import { JOB_STATES, jobState } from "../words.js";

const FIRST = ["search", "state", "provider", "account"];
const MORE = ["reason", "currency", "min_amount", "max_amount", "created_from", "created_to", "finished_from", "finished_to"];
const INSTANTS = new Set(["created_from", "created_to", "finished_from", "finished_to"]);
const NAMES = [...FIRST, ...MORE];

/** The filter in the fields of an address: what the API takes, and what a link keeps. */
export const filterOf = (fields) => Object.fromEntries(NAMES.map((name) => [name, fields.get(name) ?? ""]));

export const isFiltered = (wanted) => NAMES.some((name) => wanted[name] !== "");

/** `go(filter)` is called with what was entered. */
export function filterBar(wanted, providers, go) {
  const text = (name, label, hint, more = {}) =>
    h("label", { class: "field" }, h("span", {}, label), h("input", { type: "text", name, value: wanted[name], placeholder: hint, autocomplete: "off", spellcheck: "false", ...more }));
  const choice = (name, label, options) =>
    h("label", { class: "field" }, h("span", {}, label),
      h("select", { name, value: wanted[name] }, h("option", { value: "" }, "any"), options.map(([value, words]) => h("option", { key: value, value }, words))));
  const instant = (name, label) =>
    h("label", { class: "field instant" }, h("span", {}, label), h("input", { type: "datetime-local", name, value: shown(wanted[name]) }));
  const states = JOB_STATES.map((state) => [state, jobState(state)[0]]);
  // A link may name several states.
  if (wanted.state.includes(",")) states.push([wanted.state, wanted.state.split(",").map((state) => jobState(state)[0]).join(" or ")]);
  const names = providers.includes(wanted.provider) || wanted.provider === "" ? providers : [...providers, wanted.provider];
  return h("form", { class: "filter-bar", role: "search", "aria-label": "Find payments", onsubmit: (event) => submit(event, wanted, go) },
    h("div", { class: "filters" },
      text("search", "Id or reference", "or its beginning"),
      choice("state", "State", states),
      choice("provider", "Provider", names.map((name) => [name, name])),
      text("account", "Account", ""),
      h("button", { type: "submit", class: "primary" }, "Find")),
    h("details", { class: "more-filters", open: MORE.some((name) => wanted[name] !== "") ? true : undefined },
      h("summary", {}, "More filters"),
      h("div", { class: "fields" },
        text("reason", "Reason", "its beginning"),
        text("currency", "Currency", "EUR", { maxlength: "3", size: "3" }),
        text("min_amount", "Amount from", "10.00", { inputmode: "decimal" }),
        text("max_amount", "Amount to", "50.00", { inputmode: "decimal" }),
        instant("created_from", "Created from (UTC)"),
        instant("created_to", "Created before (UTC)"),
        instant("finished_from", "Finished from (UTC)"),
        instant("finished_to", "Finished before (UTC)"))),
    isFiltered(wanted) ? h("p", {}, h("a", { href: "#/jobs" }, "Clear all filters")) : null);
}

/** A date, or an instant to the minute, as the input has it. */
function shown(text) {
  const at = text === "" ? NaN : Date.parse(text);
  return Number.isNaN(at) ? "" : new Date(at).toISOString().slice(0, 16);
}

function submit(event, wanted, go) {
  event.preventDefault();
  const given = Object.fromEntries(NAMES.map((name) => [name, value(event.target.elements[name], wanted[name])]));
  given.currency = given.currency.toUpperCase();
  go(given);
}

/** An instant that was not changed keeps its seconds. */
function value({ name, value }, before) {
  if (!INSTANTS.has(name)) return value.trim();
  if (value === shown(before)) return before;
  return value === "" ? "" : `${value}:00Z`;
}

/** The address of the view with this filter. */
export const filterHref = (filter) => `#/jobs${query(filter)}`;
