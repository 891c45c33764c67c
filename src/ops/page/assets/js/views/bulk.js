// Replay or discard of many dead payments, one after another at a chosen rate, with progress and a stop. It continues
// while other views are open, and ends when the page is closed.

import { get, path, post, query } from "../api.js";
import { announce } from "../announce.js";
import { ask, because, reason } from "../dialog.js";
import { h, patch } from "../dom.js";
import { count, duration } from "../format.js";
import { button, change } from "../parts.js";

const PAGE = 500;
const REFUSALS_SHOWN = 5;
const RATE_MAX = 100;
const DEFAULT_RATE = { replay: 10, discard: 20 };

const region = document.getElementById("work");
let running = null;

/** `what`: {ids} or {provider} for all, with `total` and `words`. */
export function askBulk(verb, what, finished) {
  if (running && !running.ended) return announce("Another run is in progress: stop it or wait for its end.", "bad");
  const state = { rate: String(DEFAULT_RATE[verb]) };
  const valid = () => /^\d{1,3}$/.test(state.rate) && Number(state.rate) >= 1 && Number(state.rate) <= RATE_MAX;
  const replays = verb === "replay";
  ask({
    title: `${replays ? "Replay" : "Discard"} ${what.words}?`,
    confirm: () => `${replays ? "Replay" : "Discard"} ${count(what.total)}${valid() ? ` at ${state.rate}/s` : ""}`,
    danger: !replays,
    content: (dialog) => [
      h("dl", { class: "changes" }, change("State", "Dead", replays ? "Waiting" : "Cancelled"),
        h("div", { class: "change", key: "time" }, h("dt", {}, "Takes about"), h("dd", {}, valid() ? duration(Math.max(1_000, (what.total / Number(state.rate)) * 1_000)) : "?"))),
      h("p", {}, replays
        ? "Each payment returns to its lane with the same key, and its attempts start from zero. Lanes keep to their limits; the rate decides how fast the queues are filled."
        : "Each payment becomes cancelled, an event is published, and it is never sent. This cannot be undone."),
      h("label", { class: "field" }, h("span", {}, `Payments per second, 1 to ${RATE_MAX}`),
        h("input", { type: "text", name: "rate", inputmode: "numeric", value: state.rate, autocomplete: "off", oninput: (event) => { state.rate = event.target.value.trim(); dialog.ready = valid(); dialog.redraw(); } })),
      because(state),
      h("p", { class: "muted" }, "Keep this page open until the run ends. You can stop it; completed changes stay."),
    ],
    async act() {
      void run(verb, what, Number(state.rate), reason(state), finished);
    },
  });
}

/** Yields the ids one by one. For all payments it reads a page at a time, each after the last id. */
async function* ids(what) {
  if (what.ids) {
    yield* what.ids;
    return;
  }
  for (let after = null; ; ) {
    const { jobs, next } = await get(path("jobs") + query({ state: "dead", provider: what.provider, after, limit: PAGE }));
    for (const { id } of jobs) yield id;
    if (!next) return;
    after = next;
  }
}

async function run(verb, what, rate, why, finished) {
  running = { verb, what, rate, done: 0, refused: [], refusals: 0, stop: false, problem: null, ended: false };
  addEventListener("beforeunload", warn);
  draw();
  const began = performance.now();
  try {
    for await (const id of ids(what)) {
      const due = began + ((running.done + running.refusals) / rate) * 1_000;
      const wait = due - performance.now();
      if (wait > 0) await new Promise((resume) => setTimeout(resume, wait));
      if (running.stop) break;
      await one(verb, id, why);
      draw();
    }
  } catch (error) {
    running.problem = error.message;
  }
  removeEventListener("beforeunload", warn);
  running.ended = true;
  draw();
  announce(words(), running.problem || running.refusals > 0 ? "bad" : "good");
  finished();
}

/** A refusal is recorded and the next payment is tried. No response ends the run: the next request would fail too. */
async function one(verb, id, why) {
  try {
    await post(path("dlq", id, verb), why);
    running.done += 1;
  } catch (error) {
    if (error.status !== 409 && error.status !== 404) throw error;
    running.refusals += 1;
    running.refused = [...running.refused, `${id}: ${error.message}`].slice(-REFUSALS_SHOWN);
  }
}

const warn = (event) => event.preventDefault();

function words() {
  const { verb, done, refusals, what, problem, stop } = running;
  const past = verb === "replay" ? "replayed" : "discarded";
  const end = problem ? ` The run ended early: ${problem}` : stop ? " The run was stopped." : "";
  return `${count(done)} of ${count(what.total)} ${past}${refusals > 0 ? `, ${count(refusals)} refused` : ""}.${end}`;
}

function draw() {
  if (!running) return patch(region);
  const { verb, done, refusals, what, rate, refused, ended } = running;
  const through = done + refusals;
  const close = () => {
    running = null;
    draw();
  };
  const stop = () => {
    running.stop = true;
  };
  patch(region,
    h("section", { class: "run", "aria-label": verb === "replay" ? "Replay" : "Discard" },
      h("div", { class: "run-head" }, h("strong", {}, ended ? words() : `${verb === "replay" ? "Replaying" : "Discarding"} at ${rate}/s`), ended ? button("Close", close, "quiet") : button("Stop", stop, "danger")),
      h("progress", { "aria-label": "Progress", max: Math.max(what.total, through, 1), value: through }),
      h("p", { class: "muted" }, `${count(through)} of ${count(what.total)}, ${count(refusals)} refused`),
      refused.length > 0 ? h("ul", { class: "refused", tabindex: "0", "aria-label": "Refused" }, refused.map((line) => h("li", { key: line }, line))) : null));
}
