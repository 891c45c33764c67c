// The dialog of a decision about many payments: the server counts first, then the operator gives rate and reason, and
// confirms what was counted. A set that has changed since is counted again.

import { path, post } from "../api.js";
import { DECISIONS, batchHref } from "../decisions.js";
import { ask, because } from "../dialog.js";
import { h } from "../dom.js";
import { count, duration, money, plural } from "../format.js";
import { change, jobHref } from "../parts.js";
import { jobState } from "../words.js";

const RATE = "50";
const RATE_MAX = 1_000;

/** `selection`: {ids} or {filter}, as the API takes it. */
export function askBatch(decision, selection) {
  const { state: from, to, label, title, words, danger = false, retyped = false } = DECISIONS[decision];
  const state = { rate: RATE, typed: "", preview: null, problem: null };
  const rateIsValid = () => /^\d{1,4}$/.test(state.rate) && Number(state.rate) >= 1 && Number(state.rate) <= RATE_MAX;
  const isTyped = () => !retyped || state.typed === String(state.preview?.jobs);
  const dialog = ask({
    title,
    danger,
    wide: true,
    confirm: () => (state.preview ? `${label}: ${plural(state.preview.jobs, "payment", "payments")}` : label),
    content: () => [
      h("div", { role: "status", class: "counted-set" }, counted()),
      h("p", {}, words),
      field("rate", `Payments per second, 1 to ${count(RATE_MAX)}`, { value: state.rate }),
      because(state, { required: true }),
      retyped ? field("typed", state.preview ? `Type the number of payments, ${state.preview.jobs}, to charge them again` : "Type the number of payments to charge them again") : null,
    ],
    act,
  });
  update();
  void countThem();

  async function countThem() {
    state.preview = null;
    state.problem = null;
    update();
    try {
      state.preview = await post(path("batches", "preview"), { decision, selection });
    } catch (error) {
      state.problem = error.message;
    }
    update();
  }

  function update() {
    dialog.ready = state.preview?.jobs > 0 && rateIsValid() && isTyped();
    dialog.redraw();
  }

  function field(name, title, more = {}) {
    const entered = (event) => {
      state[name] = event.target.value.trim();
      update();
    };
    return h("label", { key: name, class: "field" }, h("span", {}, title),
      h("input", { type: "text", name, inputmode: "numeric", autocomplete: "off", oninput: entered, ...more }));
  }

  function counted() {
    const { preview, problem } = state;
    if (problem) return h("p", { class: "problem" }, problem);
    if (!preview) return h("p", { class: "loading" }, "Counting what would change…");
    const takes = rateIsValid() ? duration(Math.max(1_000, (preview.jobs / Number(state.rate)) * 1_000)) : "?";
    return [
      h("dl", { class: "changes" },
        line("Payments", count(preview.jobs)),
        preview.sums.map(({ currency, amount }) => line(`Sum in ${currency}`, money(amount, currency))),
        preview.jobs > 0 ? change("State", jobState(from)[0], jobState(to)[0]) : null,
        preview.jobs > 0 ? line("Takes about", takes) : null),
      preview.jobs === 0 ? h("p", { class: "notice warn" }, "No payment would change.") : null,
      leftOut(preview.not_applicable),
      preview.at_most === true && preview.jobs > 0 ? h("p", { class: "muted" }, "Some may still be refused at their turn. The report names them.") : null,
    ];
  }

  async function act() {
    const { preview, rate, because: why } = state;
    const typed = retyped ? { confirm_jobs: preview.jobs } : {};
    try {
      const { id } = await post(path("batches"), { decision, selection, digest: preview.digest, rate: `${rate}/1s`, because: why.trim(), ...typed });
      location.hash = batchHref(id);
    } catch (error) {
      if (error.status !== 409) throw error;
      await countThem();
      throw new Error(`${error.message}. The payments were counted again: check the numbers.`);
    }
  }
}

const line = (name, value) => h("div", { class: "change", key: name }, h("dt", {}, name), h("dd", {}, value));

/** Why payments of the selection are left as they are, each cause with an example. */
export function leftOut(causes, title = "Left as they are") {
  if (!causes?.length) return null;
  const all = causes.reduce((sum, { jobs }) => sum + jobs, 0);
  return h("div", { class: "notice warn" },
    h("p", {}, `${title}: ${plural(all, "payment", "payments")}`),
    h("ul", {}, causes.map(({ refusal, text, jobs, example }) =>
      h("li", { key: refusal }, `${count(jobs)}: ${text ?? refusal}`, example ? [", like ", h("a", { href: jobHref(example), class: "mono" }, example)] : null))));
}
