// The view of actions that two people decide: those that await the second one, and those that are decided.

import { allRules, approvalHref, approvalState, ruleWords, subjectWords, sumsWords } from "../approvals.js";
import { get, path, query } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { about, instant } from "../instants.js";
import { chip, empty, loading, section, table } from "../parts.js";
import { Pages } from "./job_table.js";

const PAGE = 50;
const PENDING = [["Requested", "nowrap"], ["What", "wide"], ["Payments", "num"], ["Sums", ""], ["By", ""], ["Because", "wide"], ["Rule", ""], ["Void at", ""]];
const DECIDED = [["Requested", "nowrap"], ["What", "wide"], ["State", "nowrap"], ["Payments", "num"], ["Sums", ""], ["By", ""], ["Decided by", ""], ["Reason", "wide"]];

export function approvals(context) {
  const pages = new Pages();
  let pending = null;
  let all = null;

  return {
    place: "approvals",
    title: "Approvals",
    async load(signal) {
      pending = await get(path("approvals") + query({ state: "pending", limit: PAGE }), signal);
      all = await get(path("approvals") + query({ after: pages.after, limit: PAGE }), signal);
    },
    render() {
      const rules = allRules();
      const words = rules.length === 0 ? "No action needs a second person here." : `These need a second person: ${rules.join("; ")}.`;
      return [
        h("h1", { tabindex: "-1" }, "Approvals"),
        h("p", { class: "about" }, `${words} Nothing is changed before another person approves it.`),
        all === null ? loading(context) : [section("pending", "Awaiting a second person", waiting()), section("decided", "Decided", decided())],
      ];
    },
  };

  function waiting() {
    if (pending.approvals.length === 0) return empty("Nothing awaits a second person", "An action that needs one appears here.");
    const rows = pending.approvals.map((approval) => ({ key: approval.id, cells: [...what(approval), ...size(approval), approval.requested_by.name, approval.because ?? "", ruleWords(approval.action), instant(approval.expires_at, about(approval.expires_at))] }));
    return [
      table("Actions that await a second person, newest first", PENDING, rows),
      pending.next ? h("p", { class: "about" }, `These are the newest ${count(pending.approvals.length)}; older ones follow when they are decided.`) : null,
    ];
  }

  function decided() {
    const done = all.approvals.filter(({ state }) => state !== "pending");
    if (done.length === 0 && pages.seen.length === 1 && !all.next) return empty("Nothing is decided yet", "Approved, refused, withdrawn and expired actions are kept here.");
    const rows = done.map((approval) => {
      const [requested, text] = what(approval);
      return { key: approval.id, cells: [requested, text, chip(approvalState(approval.state)), ...size(approval), approval.requested_by.name, approval.decided_by?.name ?? "", approval.decided_because ?? ""] };
    });
    return [table("Decided actions, newest first", DECIDED, rows), pages.bar(all.next, context.refresh)];
  }
}

const what = (approval) => [instant(approval.requested_at), h("a", { href: approvalHref(approval.id) }, subjectWords(approval))];
/** A setting has no payments. */
const size = ({ payments, sums }) => [payments > 0 ? count(payments) : "", sumsWords(sums)];
