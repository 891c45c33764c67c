// Buttons that copy a text as the page shows it: an id, a key, a block of lines. Hidden characters stay escaped, so that
// no pasted text holds any.

import { announce } from "./announce.js";
import { h } from "./dom.js";
import { printable } from "./printable.js";

/** `text` is one line, or a list of lines. */
export function copyButton(text, what, label = "Copy") {
  const shown = [text].flat().map((line) => printable(String(line))).join("\n");
  return h("button", { type: "button", class: "copy", "aria-label": `Copy the ${what}`, onclick: () => void copy(shown, what) }, label);
}

async function copy(text, what) {
  const copied = (await written(text)) || selected(text);
  announce(copied ? `The ${what} is copied.` : `This browser does not allow to copy the ${what}: select it and copy it by hand.`, copied ? "good" : "bad");
}

/** Browsers have the clipboard only on HTTPS and on the machine itself. */
async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** The older way, which works everywhere. */
function selected(text) {
  const before = document.activeElement;
  const field = document.createElement("textarea");
  field.className = "unseen";
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}
