// A confirmation dialog that says what will happen. The browser's own modal dialog keeps the focus inside, closes with
// Esc, and returns the focus.

import { h, patch } from "./dom.js";

let last = 0;

/**
 * `content(dialog)` describes the inside; `confirm` is the button's label (a function of nothing, or a string);
 * `act()` carries it out, and the dialog closes unless it throws. `dialog.redraw()` draws again, `dialog.ready` says
 * whether it can be confirmed.
 */
export function ask({ title, content, confirm, act, danger = false, wide = false }) {
  const node = document.createElement("dialog");
  const titleId = `dialog-${++last}`;
  node.setAttribute("aria-labelledby", titleId);
  if (wide) node.classList.add("wide");
  const dialog = { ready: true, busy: false, problem: null, redraw, close: () => node.close() };

  async function submit(event) {
    event.preventDefault();
    if (!dialog.ready || dialog.busy) return;
    dialog.busy = true;
    dialog.problem = null;
    redraw();
    try {
      await act();
      node.close();
    } catch (error) {
      dialog.problem = error.message;
    }
    dialog.busy = false;
    if (node.isConnected) redraw();
  }

  function redraw() {
    const label = typeof confirm === "function" ? confirm() : confirm;
    patch(
      node,
      h(
        "form",
        { onsubmit: submit },
        h("h2", { id: titleId }, title),
        h("div", { class: "dialog-body" }, content(dialog)),
        h("p", { class: "problem", role: "alert" }, dialog.problem ?? ""),
        h(
          "div",
          { class: "dialog-actions" },
          h("button", { type: "button", onclick: () => node.close() }, "Cancel"),
          h(
            "button",
            { type: "submit", class: danger ? "danger" : "primary", disabled: !dialog.ready || dialog.busy },
            dialog.busy ? "One moment…" : label,
          ),
        ),
      ),
    );
  }

  node.addEventListener("close", () => {
    patch(node);
    node.remove();
  });
  document.body.append(node);
  redraw();
  node.showModal();
  return dialog;
}

/** A text field for the reason of a change, which the audit keeps. */
export function because(state, { required = false } = {}) {
  return h(
    "label",
    { class: "field" },
    h("span", {}, required ? "Because" : "Because (optional, kept in the audit)"),
    h("input", {
      type: "text",
      name: "because",
      autocomplete: "off",
      required,
      oninput: (event) => (state.because = event.target.value),
    }),
  );
}

/** The reason as a field of the API's body. */
export const reason = (state) => (state.because?.trim() ? { because: state.because.trim() } : {});
