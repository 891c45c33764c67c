// The notes of operators on a payment: to whom its review is assigned, and comments. A note changes no payment.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { ask } from "../dialog.js";
import { h } from "../dom.js";
import { agoWords } from "../format.js";
import { instant } from "../instants.js";
import { button, section } from "../parts.js";
import { needs, ownName } from "../person.js";

const WORDS_MAX = "500";
const NAME_MAX = "100";

export function notes(details, context) {
  const all = details.notes ?? [];
  const reviewed = details.state === "review";
  const whom = details.assigned_to ? `Assigned to ${details.assigned_to}.` : "Assigned to no one.";
  return section("notes", "Notes",
    reviewed || details.assigned_to ? h("p", {}, whom) : null,
    all.length === 0 ? h("p", { class: "muted" }, "No comment yet.") : h("ol", { class: "notes" }, all.map((note, at) => item(note, at))),
    h("div", { class: "tools" },
      reviewed ? button("Assign", () => assign(details, context), "", needs("operator")) : null,
      button("Comment", () => comment(details, context), "", needs("operator"))));
}

function item({ at, who, os_user: user, kind, text }, key) {
  const words = kind === "assigned" ? `Assigned to ${text ?? "no one"}` : text;
  return h("li", { key }, h("p", {}, words), h("small", { class: "muted" }, `${user ?? who}, `, instant(at, agoWords(at))));
}

function assign(details, context) {
  const before = details.assigned_to ?? ownName() ?? "";
  const state = { to: before };
  ask({
    title: "Assign this review?",
    confirm: () => (state.to.trim() ? `Assign to ${state.to.trim()}` : "Assign to no one"),
    content: (dialog) => [
      h("p", {}, h("code", {}, details.id)),
      field("to", "To a person or a team; empty: to no one", { value: before, maxlength: NAME_MAX }, (value) => {
        state.to = value;
        dialog.redraw();
      }),
    ],
    async act() {
      await post(path("jobs", details.id, "assignment"), { to: state.to.trim() || null });
      announce(`${details.id} is assigned to ${state.to.trim() || "no one"}.`, "good");
      context.refresh();
    },
  });
}

function comment(details, context) {
  const state = { text: "" };
  ask({
    title: "Comment on this payment?",
    confirm: "Add comment",
    content: () => [
      h("p", {}, h("code", {}, details.id)),
      field("text", "Comment", { maxlength: WORDS_MAX, required: true }, (value) => (state.text = value)),
      h("p", { class: "muted" }, "A comment is kept for ever: name a ticket and no person."),
    ],
    async act() {
      await post(path("jobs", details.id, "comments"), { text: state.text.trim() });
      announce(`The comment on ${details.id} is added.`, "good");
      context.refresh();
    },
  });
}

const field = (name, title, more, entered) =>
  h("label", { class: "field" }, h("span", {}, title),
    h("input", { type: "text", name, autocomplete: "off", oninput: (event) => entered(event.target.value), ...more }));
