// The configuration of a provider as the database has it, field by field.

import { h } from "../dom.js";

/** Fields that the view shows elsewhere. */
const ELSEWHERE = new Set(["limits", "name"]);

export function rowWords(row) {
  const fields = Object.entries(row).filter(([name, value]) => !ELSEWHERE.has(name) && value !== null && !bare(value));
  return h(
    "details",
    {},
    h("summary", {}, "Show the row in the database"),
    h("dl", { class: "facts" }, fields.map(([name, value]) => [h("dt", { key: `n-${name}` }, name), h("dd", { key: `v-${name}`, class: "mono" }, words(value))])),
  );
}

const bare = (value) => typeof value === "object" && Object.keys(value).length === 0;
const words = (value) => (typeof value === "object" ? JSON.stringify(value, null, 1).replaceAll("\n", "") : String(value));
