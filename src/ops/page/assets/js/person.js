// The person at this page: name and role, as the server identifies them, and what the role cannot do.

import { get, path } from "./api.js";
import { h } from "./dom.js";

/** A role can change while the page is open. */
const AGAIN_MS = 30_000;
const ROLES = ["viewer", "operator", "admin"];
const WAYS = { open: "no sign-in: the server asks for none", token: "by a token", proxy: "by the proxy that signs people in" };

let person = null;
let asked = 0;

/** Asks the server at most every 30 s. Without an answer nothing is disabled: the server refuses what it must. */
export async function askPerson(signal) {
  if (Date.now() - asked < AGAIN_MS) return;
  asked = Date.now();
  try {
    person = await get(path("whoami"), signal);
  } catch {
    asked = 0;
  }
}

/** Attributes of a button that needs a role: none, or those of a disabled button with the reason. */
export function needs(role) {
  const given = person?.role;
  if (given === undefined || ROLES.indexOf(given) >= ROLES.indexOf(role)) return {};
  return { disabled: true, title: `Needs role ${role}. Your role is ${given}.` };
}

/** Name and role in the header; null where the server asks for no identity. */
export function personChip() {
  if (person === null || person.path === "open") return null;
  const words = `${person.name}, role ${person.role}, identified ${WAYS[person.path] ?? person.path}`;
  return h("span", { class: "person", title: words },
    h("span", { class: "unseen" }, `You are ${words}`),
    h("span", { class: "person-name", "aria-hidden": "true" }, person.name),
    h("span", { class: "person-role", "aria-hidden": "true" }, person.role));
}
