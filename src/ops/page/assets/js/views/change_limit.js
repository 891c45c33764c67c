// The dialog that changes a limit, for good or until an instant. It shows the old and the new value, and the clear time
// with each, as the server estimates them in a dry run, which changes nothing. A slider tries rates.

import { path, post } from "../api.js";
import { announce } from "../announce.js";
import { clearsAt, clearsDependsOn } from "../clears.js";
import { cutoffChange } from "../cutoff_change.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { rateSpec } from "../format.js";
import { about } from "../instants.js";
import { written } from "../limits.js";
import { change } from "../parts.js";
import { untilField, untilInstant, untilWords } from "./limit_until.js";

const UNITS = [["ms", 1], ["s", 1_000], ["min", 60_000], ["h", 3_600_000], ["d", 86_400_000]];
/** Delay from the last keystroke to the dry run. */
const PAUSE_MS = 250;
/** The slider goes to so many times the rate. */
const SLIDER_TIMES = 4;
const SLIDER_LEAST = 20;
const SLIDER_STEPS = 400;

/** `tried`: a rate to begin with, in place of the limit's own. */
export function changeLimit(provider, limit, context, tried = limit) {
  // Requests in flight have no window.
  const inFlight = !limit.window_ms;
  const [unit, size] = UNITS.findLast(([, ms]) => tried.window_ms % ms === 0) ?? UNITS[0];
  const state = { requests: String(tried.max_requests), length: String(tried.window_ms / size), unit, until: "", preview: null, problem: "" };
  const most = Math.max(SLIDER_LEAST, SLIDER_TIMES * Math.max(tried.max_requests, limit.max_requests));
  const url = path("providers", provider.name, "limits", limit.name);
  let timer;

  const windowMs = () => inFlight ? null : Number(state.length) * UNITS.find(([name]) => name === state.unit)[1];
  const valid = () => /^\d{1,9}$/.test(state.requests) && (inFlight || (/^\d{1,9}$/.test(state.length) && windowMs() > 0));
  const spec = () => rateSpec(Number(state.requests), windowMs());
  const sameRate = () => Number(state.requests) === limit.max_requests && (inFlight || windowMs() === limit.window_ms);
  const same = () => sameRate() && !state.until && !limit.until;
  const lasting = () => limit.then ?? written(limit);
  const body = () => ({ rate: spec(), ...(state.until ? { until: untilInstant(state.until) } : {}) });

  const dialog = ask({
    title: `Change ${limit.name} of ${provider.name}`,
    confirm: () => (valid() && !same() ? `Set to ${spec()}` : "Set"),
    content,
    async act() {
      const done = await post(url, { ...body(), dry_run: false, ...reason(state) });
      const until = done.returns ? `, ${untilWords(done.returns)}` : "";
      announce(`${limit.name} of ${provider.name} is now ${done.to}${until}. Workers follow within 2 s.`, "good");
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
    const asked = JSON.stringify(body());
    const isCurrent = () => valid() && asked === JSON.stringify(body());
    try {
      const preview = await post(url, { ...body(), dry_run: true });
      if (!isCurrent()) return;
      state.preview = preview;
      dialog.ready = !same();
    } catch (error) {
      if (isCurrent()) state.problem = error.message;
    }
    dialog.redraw();
  }

  function content() {
    const { clears, clears_at: at } = state.preview ?? {};
    const on = dependsOn();
    const time = (clears, at) => {
      if (provider.waiting === 0) return "nothing waits";
      return on.includes(limit.name) ? `depends on ${limit.scope}s` : clearsAt(clears, at);
    };
    return [
      h("fieldset", { class: "rate" },
        h("legend", {}, "New limit"),
        h("input", { type: "text", name: "requests", inputmode: "numeric", "aria-label": "Requests", value: state.requests, autofocus: true, autocomplete: "off", oninput: typed("requests") }),
        ...(inFlight ? [h("span", {}, "at once")] : window())),
      slider(),
      h("dl", { class: "changes", "aria-live": "polite" },
        change("Limit", written(limit), valid() ? spec() : "?"),
        change("Clears", clears ? time(clears.from, at?.from) : time(provider.clears, provider.clears_at), clears ? time(clears.to, at?.to) : valid() && !state.problem ? "…" : "?")),
      h("p", { class: "finish", "aria-live": "polite" }, provider.waiting > 0 && state.preview ? cutoffChange(state.preview.cutoff) : ""),
      h("p", { class: "consequence" }, consequence()),
      on.length > 0 && provider.waiting > 0
        ? h("p", { class: "depends" }, `${on.join(", ")} ${on.length === 1 ? "counts" : "count"} each account or reference separately: the time for all waiting payments depends on their accounts and references.`)
        : null,
      state.problem ? h("p", { class: "problem", role: "alert" }, state.problem) : null,
      untilField(state, lasting(), typed("until")),
      because(state),
    ];
  }

  function slider() {
    const step = Math.max(1, Math.round(most / SLIDER_STEPS));
    const now = valid() ? spec() : "?";
    return h("label", { class: "field slider" }, h("span", {}, "Try a rate"), h("input", { type: "range", name: "slider", "aria-valuetext": now, min: 1, max: most, step, oninput: typed("requests"), value: /^\d{1,9}$/.test(state.requests) ? state.requests : "1" }));
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
    if (limit.until && !state.until) return `The limit stays at this rate, and no longer goes back to ${limit.then} at ${about(limit.until)}.`;
    if (sameRate()) return "Only the end of this rate changes.";
    if (Number(state.requests) === 0) return "Zero closes the limit: nothing is sent to this provider until you raise it.";
    const before = limit.max_requests / (limit.window_ms ?? 1);
    const after = Number(state.requests) / (windowMs() ?? 1);
    if (inFlight && after < before) return "Takes effect in every worker within 2 s. Requests in flight stay, so nothing may be sent until enough of them have ended.";
    return after > before
      ? "Takes effect in every worker within 2 s; recorded usage stays. If the provider allows less, it will respond with 429s."
      : "Takes effect in every worker within 2 s; recorded usage stays. So nothing may be sent until enough of it has left the window.";
  }
}
