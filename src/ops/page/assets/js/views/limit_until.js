// The end of a limit's temporary rate: the field of the limit dialog, and the words of the limit list.

import { h } from "../dom.js";
import { about, inUtc, zoneName } from "../instants.js";

/** The instant that a field of local time means, in the zone that the page shows; null without one. */
export function untilInstant(value) {
  if (!value) return null;
  const at = new Date(inUtc() ? `${value}Z` : value);
  return Number.isNaN(at.getTime()) ? null : at.toISOString();
}

export const untilField = (state, then, oninput) =>
  h("label", { class: "field until" },
    h("span", {}, `Until (optional, ${zoneName()}; then back to ${then})`),
    h("input", { type: "datetime-local", name: "until", autocomplete: "off", oninput, value: state.until }));

/** `until 06:00 CET, then back to 100/1s`. */
export const untilWords = (limit) => (limit.until ? `until ${about(limit.until)}, then back to ${limit.then}` : null);
