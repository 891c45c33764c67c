// The view of one action that two people decide: exactly what would be done, who requested it, and the dialogs that
// approve, refuse and withdraw it.

import { actionWords, approvalState, effect, ruleWords, subjectWords } from "../approvals.js";
import { get, path, post } from "../api.js";
import { announce } from "../announce.js";
import { batchHref } from "../decisions.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { count, money, sentence } from "../format.js";
import { inZone, instant } from "../instants.js";
import { button, change, chip, jobHref, loading, providerHref, section } from "../parts.js";
import { needs, wayWords } from "../person.js";
import { jobState } from "../words.js";

export function approval(context, id) {
  let data = null;
  let missing = false;

  return {
    place: "approvals",
    title: "Approval",
    async load(signal) {
      try {
        data = await get(path("approvals", id), signal);
        missing = false;
      } catch (error) {
        if (error.status !== 404) throw error;
        missing = true;
      }
    },
    render() {
      const crumb = h("nav", { "aria-label": "Where this is", class: "crumb" }, h("a", { href: "#/approvals" }, "Approvals"), " / ");
      if (missing) return [crumb, h("h1", { tabindex: "-1" }, "No such approval"), h("p", { class: "empty" }, "There is no approval with this id.")];
      if (!data) return [crumb, h("h1", { tabindex: "-1" }, "Approval"), loading(context)];
      return [crumb, head(), whyNot(), section("what", data.state === "pending" ? "What an approval does" : "What was requested", what(data)), section("request", "Request", request()), decision()];
    },
  };

  function head() {
    const pending = data.state === "pending";
    const { may_decide: mayDecide, may_withdraw: mayWithdraw } = data.you;
    const decides = mayDecide ? needs(data.needed_role) : { disabled: true, title: sentence(data.you.why_not ?? "another person decides"), "aria-describedby": "why-not" };
    return h("div", { class: "view-head" },
      h("h1", { tabindex: "-1" }, subjectWords(data)),
      h("span", { "aria-live": "polite" }, chip(approvalState(data.state))),
      h("span", { class: "push" }),
      pending && mayWithdraw ? button("Withdraw", withdraw, "", { key: "withdraw" }) : null,
      pending ? [button("Refuse", refuse, "danger", { key: "refuse", ...decides }), button("Approve", approve, "primary", { key: "approve", ...decides })] : null);
  }

  /** Why the person at this page cannot decide, in words. */
  function whyNot() {
    if (data.state !== "pending" || data.you.may_decide) return null;
    return h("p", { id: "why-not", class: "notice warn" }, `You cannot decide this. ${sentence(data.you.why_not ?? "another person decides")}.`);
  }

  function request() {
    const { name, role, path: way } = data.requested_by;
    return facts([
      ["Requested", [instant(data.requested_at), ` by ${name}, role ${role}, identified ${wayWords(way)}`]],
      ["Because", data.because],
      ["Rule", ruleWords(data.action) && `${actionWords(data.action)}: ${ruleWords(data.action)}`],
      ["Needed role", data.needed_role],
      [data.state === "expired" ? "Expired" : "Void at", data.state === "pending" || data.state === "expired" ? instant(data.expires_at) : null],
      ["Approval", h("span", { class: "mono" }, data.id)],
    ]);
  }

  function decision() {
    if (!data.decided_by) return null;
    const batch = data.result_batch ? h("a", { href: batchHref(data.result_batch) }, "Progress and report of the batch") : null;
    return section("decision", "Decision", facts([
      [approvalState(data.state)[0], [instant(data.decided_at), ` by ${data.decided_by.name}, role ${data.decided_by.role}`]],
      ["Because", inZone(data.decided_because)],
      ["Result", data.result],
      ["Batch", batch],
    ]));
  }

  function approve() {
    decide("approve", {
      title: "Approve this?",
      confirm: `Approve: ${subjectWords(data)}`,
      danger: effect(data.action)?.danger === true,
      words: `It is done as soon as you approve it. The audit names ${data.requested_by.name} and you.`,
      done: (now) => `Approved${now.result ? `: ${now.result}` : ""}.`,
    });
  }

  function refuse() {
    decide("refuse", {
      title: "Refuse this?",
      confirm: "Refuse",
      danger: true,
      required: true,
      words: `Nothing is changed. ${data.requested_by.name} sees the reason, and can request it again.`,
      done: () => "Refused. Nothing was changed.",
    });
  }

  function withdraw() {
    decide("withdraw", {
      title: "Withdraw your request?",
      confirm: "Withdraw",
      words: "Nothing is changed, and no one has to decide any more. You can request it again.",
      done: () => "Withdrawn. Nothing was changed.",
    });
  }

  function decide(verb, { title, confirm, danger = false, required = false, words, done }) {
    const state = {};
    ask({
      title,
      confirm,
      danger,
      wide: true,
      content: () => [what(data), h("p", {}, words), because(state, { required })],
      async act() {
        try {
          data = await post(path("approvals", id, verb), reason(state));
          announce(done(data), "good");
        } finally {
          context.refresh();
        }
      },
    });
  }
}

const facts = (rows) =>
  h("dl", { class: "facts" }, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", { key: `n-${name}` }, name), h("dd", { key: `v-${name}` }, value)]));

const line = (name, value) => h("div", { class: "change", key: name }, h("dt", {}, name), h("dd", {}, value));

/** What exactly is done. */
function what({ action, state, text, batch, job, provider, limit, payments, sums }) {
  const done = effect(action);
  return [
    // The figures of a limit say it better: in local time.
    limit ? null : h("p", {}, sentence(text), "."),
    h("dl", { class: "changes" },
      job ? line("Payment", h("a", { href: jobHref(job), class: "mono" }, job)) : null,
      provider || !done ? line("Provider", provider ? h("a", { href: providerHref(provider) }, provider) : "several") : null,
      payments > 0 && !job ? line("Payments", count(payments)) : null,
      sums.map(({ currency, amount }) => line(`Sum in ${currency}`, money(amount, currency))),
      done ? change("State", jobState(done.state)[0], jobState(done.to)[0]) : null,
      limit ? [change(`Limit ${limit.name}`, limit.from, limit.to), line("Until", limit.until ? instant(limit.until) : "it is changed again")] : null,
      batch ? line("Rate", batch.rate) : null),
    done ? h("p", {}, job ? done.words.replace(/^Each payment/, "The payment") : done.words) : null,
    batch && state === "pending" ? h("p", { class: "muted" }, "The set of payments is fixed. If it has changed when another person approves it, nothing is done.") : null,
  ];
}
