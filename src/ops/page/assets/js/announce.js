// Short messages, shown in a corner for some seconds and read out by screen readers.

import { h, patch } from "./dom.js";

const SHOWN_MS = 8_000;
const region = document.getElementById("messages");
let shown = [];
let last = 0;

/** `tone`: good, bad or neutral. */
export function announce(words, tone = "neutral") {
  const message = { id: ++last, words, tone };
  shown = [...shown.slice(-2), message];
  draw();
  setTimeout(() => dismiss(message.id), SHOWN_MS);
}

function dismiss(id) {
  shown = shown.filter((message) => message.id !== id);
  draw();
}

function draw() {
  patch(
    region,
    shown.map(({ id, words, tone }) =>
      h(
        "div",
        { key: id, class: `message ${tone}` },
        h("span", {}, words),
        h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", onclick: () => dismiss(id) }, "×"),
      ),
    ),
  );
}
