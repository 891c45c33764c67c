// The view that finds payments by id, state, provider and account.

import { get, path, query } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { empty, loading } from "../parts.js";
import { JOB_STATES, jobState } from "../words.js";
import { Pages, isEmpty, jobTable, unreadableRows } from "./job_table.js";
import { unrecorded } from "./unrecorded.js";

const PAGE = 50;
const FIELDS = ["id", "state", "provider", "account"];

export function jobs(context, fields) {
  const wanted = Object.fromEntries(FIELDS.map((name) => [name, fields.get(name) ?? ""]));
  // A provider's payments without another filter come in the order of their idempotency keys.
  const byKey = wanted.provider !== "" && FIELDS.every((name) => name === "provider" || wanted[name] === "");
  const pages = new Pages();
  let data = null;

  return {
    place: "jobs",
    title: "Jobs",
    async load(signal) {
      data = await get(path("jobs") + query({ ...wanted, after: pages.after, limit: PAGE }), signal);
    },
    render() {
      return [
        h("h1", { tabindex: "-1" }, "Jobs"),
        form(),
        queued(),
        data === null
          ? loading(context)
          : isEmpty(data)
            ? empty("No payments found", FIELDS.some((name) => wanted[name]) ? "No payment in the ledger matches all of these filters." : "The ledger is empty. A published payment appears here once a worker has recorded it.")
            : [unreadableRows(data.unreadable), jobTable(`Payments, in the order of their ${byKey ? "idempotency keys" : "ids"}`, data.jobs), pages.bar(data.next, context.refresh)],
      ];
    },
  };

  /** Payments that wait in a queue and are not in the list: ids and accounts are unknown until a worker records them. */
  function queued() {
    if (wanted.state !== "" && wanted.state !== "waiting") return null;
    const all = unrecorded(context.overview, wanted.provider);
    const messages = all.reduce((sum, lane) => sum + lane.messages, 0);
    if (messages === 0) return null;
    const fewer = wanted.id || wanted.account ? "; their ids and accounts are unknown" : "";
    const [are, have] = messages === 1 ? ["is", "it"] : ["are", "them"];
    return h("p", { class: "notice queued" }, `${count(messages)} more ${are} in the queue of ${all.map(({ name }) => name).join(", ")}: no worker has recorded ${have} yet${fewer}.`);
  }

  function form() {
    const providers = (context.overview?.providers ?? []).map(({ name }) => name);
    if (wanted.provider && !providers.includes(wanted.provider)) providers.push(wanted.provider);
    const text = (name, label, hint) =>
      h("label", { class: "field" }, h("span", {}, label), h("input", { type: "text", name, value: wanted[name], placeholder: hint, autocomplete: "off", spellcheck: "false" }));
    const choice = (name, label, options) =>
      h("label", { class: "field" }, h("span", {}, label),
        h("select", { name, value: wanted[name] }, h("option", { value: "" }, "any"), options.map(([value, words]) => h("option", { key: value, value }, words))));
    return h("form", { class: "filters", role: "search", "aria-label": "Find payments", onsubmit: search },
      text("id", "Payment id", "whole id"),
      choice("state", "State", JOB_STATES.map((state) => [state, jobState(state)[0]])),
      choice("provider", "Provider", providers.map((name) => [name, name])),
      text("account", "Account", ""),
      h("button", { type: "submit", class: "primary" }, "Find"));
  }

  function search(event) {
    event.preventDefault();
    const given = Object.fromEntries(FIELDS.map((name) => [name, event.target.elements[name].value.trim()]));
    const hash = `#/jobs${query(given)}`;
    if (hash === location.hash) context.refresh();
    else location.hash = hash;
  }
}
