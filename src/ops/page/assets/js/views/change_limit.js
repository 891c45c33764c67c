// The dialog that changes a limit. It shows the old and the new value, and the clear time with each, as the server
// estimates them in a dry run, which changes nothing.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { clearsDependsOn, clearsWords } from "../clears.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { limitWords, rateSpec } from "../format.js";
import { change } from "../parts.js";

const UNITS = [["ms", 1], ["s", 1_000], ["min", 60_000], ["h", 3_600_000], ["d", 86_400_000]];
/** Delay from the last keystroke to the dry run. */
const PAUSE_MS = 250;

export function changeLimit(provider, limit, context) {
  // Requests in flight have no window.
  const inFlight = !limit.window_ms;
  const [unit, size] = UNITS.findLast(([, ms]) => limit.window_ms % ms === 0) ?? UNITS[0];
  const state = { requests: String(limit.max_requests), length: String(limit.window_ms / size), unit, preview: null, problem: "" };
  const url = path("providers", provider.name, "limits", limit.name);
  let timer;

  const windowMs = () => inFlight ? null : Number(state.length) * UNITS.find(([name]) => name === state.unit)[1];
  const valid = () => /^\d{1,9}$/.test(state.requests) && (inFlight || (/^\d{1,9}$/.test(state.length) && windowMs() > 0));
  const spec = () => rateSpec(Number(state.requests), windowMs());
  const same = () => Number(state.requests) === limit.max_requests && (inFlight || windowMs() === limit.window_ms);

  const dialog = ask({
    title: `Change ${limit.name} of ${provider.name}`,
    confirm: () => (valid() && !same() ? `Set to ${limitWords(Number(state.requests), windowMs())}` : "Set"),
    content,
    async act() {
      const done = await post(url, { rate: spec(), dry_run: false, ...reason(state) });
      announce(`${limit.name} of ${provider.name} is now ${done.to}. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
  dialog.ready = false;
  dialog.redraw();
  void loadPreview();

  function typed(field) {
    return (event) => {
      state[field] = event.target.value;
      state.preview = null;
      state.problem = "";
      dialog.ready = false;
      dialog.problem = null;
      dialog.redraw();
      clearTimeout(timer);
      timer = setTimeout(loadPreview, PAUSE_MS);
    };
  }

  async function loadPreview() {
    if (!valid()) return;
    const asked = spec();
    try {
      const preview = await post(url, { rate: asked, dry_run: true });
      if (asked !== (valid() && spec())) return;
      state.preview = preview;
      dialog.ready = !same();
    } catch (error) {
      if (asked === (valid() && spec())) state.problem = error.message;
    }
    dialog.redraw();
  }

  function content() {
    const clears = state.preview?.clears;
    const on = dependsOn();
    const time = (clears) => {
      if (provider.waiting === 0) return "nothing waits";
      return on.includes(limit.name) ? `depends on ${limit.scope}s` : clearsWords(clears);
    };
    return [
      h("fieldset", { class: "rate" },
        h("legend", {}, "New limit"),
        h("input", { type: "text", name: "requests", inputmode: "numeric", "aria-label": "Requests", value: state.requests, autofocus: true, autocomplete: "off", oninput: typed("requests") }),
        ...(inFlight ? [h("span", {}, "at once")] : window())),
      h("dl", { class: "changes", "aria-live": "polite" },
        change("Limit", limitWords(limit.max_requests, limit.window_ms), valid() ? limitWords(Number(state.requests), windowMs()) : "?"),
        change("Clears in", time(clears?.from ?? provider.clears), clears ? time(clears.to) : valid() && !state.problem ? "…" : "?")),
      h("p", { class: "consequence" }, consequence()),
      on.length > 0 && provider.waiting > 0
        ? h("p", { class: "depends" }, `${on.join(", ")} ${on.length === 1 ? "counts" : "count"} each account or reference separately: the time for all waiting payments depends on their accounts and references.`)
        : null,
      state.problem ? h("p", { class: "problem", role: "alert" }, state.problem) : null,
      because(state),
    ];
  }

  function window() {
    return [
      h("span", {}, "per"),
      h("input", { type: "text", name: "length", inputmode: "numeric", "aria-label": "Length of the window", value: state.length, autocomplete: "off", oninput: typed("length") }),
      h("select", { name: "unit", "aria-label": "Unit of the window", value: state.unit, onchange: typed("unit") }, UNITS.map(([name]) => h("option", { value: name }, name))),
    ];
  }

  function dependsOn() {
    const { from, to } = state.preview?.clears ?? { from: provider.clears };
    return [...new Set([...clearsDependsOn(from), ...clearsDependsOn(to)])];
  }

  function consequence() {
    if (!valid() && inFlight) return "Enter a whole number of requests.";
    if (!valid()) return "Enter whole numbers for the requests and for the length of the window.";
    if (same()) return "The limit already has this value.";
    if (Number(state.requests) === 0) return "Zero closes the limit: nothing is sent to this provider until you raise it.";
    const before = limit.max_requests / (limit.window_ms ?? 1);
    const after = Number(state.requests) / (windowMs() ?? 1);
    if (inFlight && after < before) return "Takes effect in every worker within 2 s. Requests in flight stay, so nothing may be sent until enough of them have ended.";
    return after > before
      ? "Takes effect in every worker within 2 s; recorded usage stays. If the provider allows less, it will respond with 429s."
      : "Takes effect in every worker within 2 s; recorded usage stays. So nothing may be sent until enough of it has left the window.";
  }
}
