// Actions that a second person must approve: the names of actions and states, the configured rules in words, and whether
// an action reaches one.

import { DECISIONS, decisionWords } from "./decisions.js";
import { h } from "./dom.js";
import { count, money, plural } from "./format.js";
import { approvalRules } from "./person.js";

const SETTINGS = { limit: "Change a limit", pause: "Pause", resume: "Resume" };
const STATES = {
  pending: ["Awaits a second person", "warn"],
  approved: ["Approved", "good"],
  refused: ["Refused", "bad"],
  withdrawn: ["Withdrawn", "neutral"],
  expired: ["Expired", "neutral"],
};

export const approvalState = (state) => STATES[state] ?? [String(state), "neutral"];
export const approvalHref = (id) => `#/approvals/${encodeURIComponent(id)}`;
export const actionWords = (action) => SETTINGS[action] ?? decisionWords(action);
export const sumsWords = (sums) => sums.map(({ currency, amount }) => money(amount, currency)).join(", ");

/** What an approval is about, in few words. */
export function subjectWords({ action, job, limit, provider, payments }) {
  if (job) return `${actionWords(action)}: ${job}`;
  if (limit) return `Change limit ${limit.name} of ${provider}: ${limit.to}`;
  if (action in SETTINGS) return `${actionWords(action)} ${provider ?? (action === "resume" ? "what was paused together" : "all providers")}`;
  return `${actionWords(action)}: ${plural(payments, "payment", "payments")}`;
}

function thresholdWords(rule) {
  if (rule.payments) return `from ${plural(rule.payments, "payment", "payments")} on`;
  return rule.amount ? `from ${money(rule.amount, rule.currency)} on` : "always";
}

/** The rules of an action in words: `from 100 payments on`; empty without one. */
export const ruleWords = (action) => approvalRules().filter((rule) => rule.action === action).map(thresholdWords).join(", or ");

/** All rules, each action once. */
export const allRules = () => [...new Set(approvalRules().map(({ action }) => action))].map((action) => `${actionWords(action)} ${ruleWords(action)}`);

/** Whether the rules ask for a second person. The server decides by the same rules. */
function isReached(action, payments, sums) {
  const rules = approvalRules().filter((rule) => rule.action === action);
  const named = new Set(rules.map(({ currency }) => currency).filter(Boolean));
  return rules.some((rule) => {
    if (rule.payments) return payments >= rule.payments;
    if (!rule.amount) return true;
    return sums.some(({ currency, amount }) => (currency === rule.currency ? amount >= rule.amount : !named.has(currency)));
  });
}

/** Said before the confirmation; null where one person suffices. */
export function secondPersonNote(action, payments = 0, sums = []) {
  if (!isReached(action, payments, sums)) return null;
  return h("p", { key: "second person", class: "notice second-person" }, "A second person must approve this. Nothing is changed before.");
}

/** The line of the overview; null where nothing is pending. */
export function approvalsLine({ pending_approvals: pending }) {
  if (!pending) return null;
  const words = pending === 1 ? "1 decision awaits a second person" : `${count(pending)} decisions await a second person`;
  return h("p", { class: "notice warn approvals-line" }, h("a", { href: "#/approvals" }, words), ".");
}

/** What a decision about payments does to each of them; null for a setting. */
export const effect = (action) => DECISIONS[action] ?? null;
