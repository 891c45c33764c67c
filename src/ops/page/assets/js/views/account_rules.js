// The section of a provider's view with the rules of single accounts: who is blocked, refused, exempt or limited, by whom,
// why and until when. Its dialogs set and unset a rule.

import { get, path, post } from "../api.js";
import { announce } from "../announce.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { about, instant } from "../instants.js";
import { button, change, section, table } from "../parts.js";
import { needs } from "../person.js";
import { untilField, untilInstant } from "./limit_until.js";

const COLUMNS = [["Account", "mono"], ["Rule", ""], ["Until", ""], ["By", ""], ["Why", "wide"], ["Change", "nowrap"]];
/** Further rules are listed by the command. */
const ROWS_MAX = 100;
const RULES = [["blocked", "Block: its payments wait"], ["refuse", "Refuse: its payments end as declined"], ["exempt", "Exempt from account limits"], ["rate", "Limit to a rate"]];

/** Loads the rules of a provider; without them, the rest of the view is shown. */
export async function loadRules(name, signal) {
  try {
    return await get(path("providers", name, "accounts"), signal);
  } catch (error) {
    if (signal.aborted || error.status === 0) throw error;
    return { problem: error.message };
  }
}

export function accountRules(provider, { rules, problem }, context) {
  if (problem) return section("accounts", "Account rules", h("p", { class: "about" }, `Unknown: ${problem}`));
  if (!rules) return null;
  return section("accounts", "Account rules",
    rules.length === 0 ? h("p", { class: "about" }, `No account of ${provider} has a rule.`) : table("Accounts with a rule", COLUMNS, rules.slice(0, ROWS_MAX).map((rule) => ({
      key: `${rule.account} ${rule.limit ?? ""}`,
      cells: [rule.account, words(rule), until(rule), author(rule), rule.because ?? "", actions(provider, rule, context)],
    }))),
    rules.length > ROWS_MAX ? h("p", { class: "about" }, `${count(rules.length - ROWS_MAX)} more: `, h("code", {}, `sluicegate accounts list ${provider}`), " lists all.") : null,
    h("div", {}, button("Set a rule", () => setRule(provider, null, context), "", { "aria-label": `Set a rule for an account of ${provider}`, ...needs("operator") })));
}

const words = ({ rule, limit, burst, weight }) =>
  [rule, burst ? `with burst ${burst}` : "", weight === 1 ? "" : `weight ${weight}`, limit ? `at limit ${limit}` : ""].filter(Boolean).join(", ");

const until = (rule) => (rule.until ? h("span", {}, instant(rule.until), ` then ${rule.then}`) : "");

const author = (rule) => (rule.who ? h("span", {}, rule.who, " ", h("small", {}, instant(rule.at))) : "");

const actions = (provider, rule, context) => h("span", {},
  button("Change", () => setRule(provider, rule, context), "quiet", { "aria-label": `Change the rule of ${subject(rule)}`, ...needs("operator") }),
  button("Unset", () => unsetRule(provider, rule, context), "quiet", { "aria-label": `Unset the rule of ${subject(rule)}`, ...needs("operator") }));

const subject = ({ account, limit }) => (limit ? `${account} at limit ${limit}` : account);

/** `rule`: the present one; null for another account. */
function setRule(provider, rule, context) {
  const known = RULES.some(([name]) => name === rule?.rule);
  const state = { account: rule?.account ?? "", limit: rule?.limit ?? "", kind: known || !rule?.rule ? rule?.rule ?? "blocked" : "rate", rate: known ? "" : rule?.rule ?? "", until: "" };
  const written = () => (state.kind === "rate" ? state.rate.trim() : state.kind);
  const complete = () => [state.account.trim(), written(), state.because?.trim()].every(Boolean);
  const typed = (field) => (event) => {
    state[field] = event.target.value;
    dialog.ready = complete();
    dialog.redraw();
  };
  const field = (name, label, rest = {}) => h("label", { class: "field" }, h("span", {}, label),
    h("input", { type: "text", name, autocomplete: "off", value: state[name], oninput: typed(name), ...rest }));
  const dialog = ask({
    title: rule ? `Change the rule of ${subject(rule)} at ${provider}` : `Set a rule for an account of ${provider}`,
    confirm: () => (complete() ? `Set to ${written()}` : "Set"),
    content: () => [
      rule ? null : field("account", "Account", { autofocus: true, required: true }),
      rule ? null : field("limit", "Limit (optional; default: all account limits)"),
      h("label", { class: "field" }, h("span", {}, "Rule"),
        h("select", { name: "kind", value: state.kind, onchange: typed("kind") }, RULES.map(([name, label]) => h("option", { value: name }, label)))),
      state.kind === "rate" ? field("rate", "Rate, such as 5/1s", { required: true }) : null,
      rule ? h("dl", { class: "changes", "aria-live": "polite" }, change("Rule", words(rule), written() || "?")) : null,
      h("p", { class: "consequence" }, rule?.until && !state.until ? `The rule stays, and no longer becomes ${rule.then} at ${about(rule.until)}.` : "Takes effect in every worker within 2 s. A provider file that is applied keeps the rule."),
      untilField(state, rule ? rule.then ?? words(rule) : "no rule", typed("until")),
      h("div", { oninput: () => { dialog.ready = complete(); dialog.redraw(); } }, because(state, { required: true })),
    ],
    async act() {
      const limit = state.limit.trim();
      const done = await post(path("providers", provider, "accounts", state.account.trim()), { rule: written(), ...(limit ? { limit } : {}), ...(state.until ? { until: untilInstant(state.until) } : {}), ...reason(state) });
      announce(`${done.account} of ${provider} is now ${done.to}. Workers follow within 2 s.${done.warning ? ` Warning: ${done.warning}.` : ""}`, done.warning ? "warn" : "good");
      context.refresh();
    },
  });
  dialog.ready = complete();
  dialog.redraw();
}

function unsetRule(provider, rule, context) {
  const state = {};
  const dialog = ask({
    title: `Unset the rule of ${subject(rule)} at ${provider}?`,
    confirm: "Unset the rule",
    danger: true,
    content: () => [
      h("dl", { class: "changes" }, change("Rule", words(rule), "no rule")),
      h("p", { class: "consequence" }, rule.rule === "blocked" ? "Its waiting payments are sent, within the limits." : "Takes effect in every worker within 2 s. A provider file that is applied does not bring the rule back."),
      h("div", { oninput: () => { dialog.ready = Boolean(state.because?.trim()); dialog.redraw(); } }, because(state, { required: true })),
    ],
    async act() {
      await post(path("providers", provider, "accounts", rule.account, "unset"), { ...(rule.limit ? { limit: rule.limit } : {}), ...reason(state) });
      announce(`${subject(rule)} of ${provider} has no rule any more. Workers follow within 2 s.`, "good");
      context.refresh();
    },
  });
  dialog.ready = false;
  dialog.redraw();
}
