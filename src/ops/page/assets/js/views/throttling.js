// What a provider seems to allow, after repeated 429s: the server's sentence, and a button that opens the limit dialog
// with the rate. Nothing changes before an operator confirms it.

import { get, path } from "../api.js";
import { h } from "../dom.js";
import { written } from "../limits.js";
import { button } from "../parts.js";
import { needs } from "../person.js";
import { changeLimit } from "./change_limit.js";

/** The server reads up to two hours of requests for it. */
const EVERY_MS = 15_000;

export function throttling(name) {
  let hint = null;
  let loadedAt = -Infinity;

  return {
    /** Without it, the rest of the view is shown. */
    async load(signal) {
      if (Date.now() - loadedAt < EVERY_MS) return;
      try {
        hint = (await get(path("providers", name, "throttling"), signal)).hint ?? null;
        loadedAt = Date.now();
      } catch (error) {
        if (signal.aborted || error.status === 0) throw error;
        hint = null;
      }
    },
    render(known, context) {
      if (!hint) return null;
      const limit = (known.limits ?? []).find(({ name }) => name === hint.limit);
      return h("div", { class: "notice warn throttled", role: "status" },
        h("p", {}, h("strong", {}, "The provider refuses requests."), ` ${hint.text}.`),
        limit && hint.window_ms
          ? button(`Try ${written(hint)}`, () => changeLimit(known, limit, context, hint), "", { "aria-label": `Try ${written(hint)} as limit ${limit.name}`, ...needs("admin") })
          : null);
    },
  };
}
