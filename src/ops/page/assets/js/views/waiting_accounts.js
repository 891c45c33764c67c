// The section of a provider's view with the accounts whose payments wait in the ledger's backlog, and what blocks them.

import { query } from "../api.js";
import { serverNow } from "../clock.js";
import { h } from "../dom.js";
import { count, duration, percent, plural, sentence } from "../format.js";
import { inZone, instant } from "../instants.js";
import { section, table } from "../parts.js";

const COLUMNS = [["Account", "mono"], ["Priority", "num"], ["Waiting", "num"], ["Weight", "num"], ["Share", "num"], ["Blocked", "wide"]];

/** `lane` is the response of the API, `problem` why there is none. */
export function waitingAccounts(provider, { lane, problem }) {
  if (problem) return section("flows", "Waiting by account", h("p", { class: "about" }, `Unknown: ${problem}`));
  if (!lane) return null;
  if (lane.flows.length === 0) {
    return section("flows", "Waiting by account", h("p", { class: "about" }, `No payment of ${provider} waits in the ledger's backlog.`));
  }
  return section("flows", "Waiting by account",
    h("p", { class: "about" }, "Payments in the ledger's backlog. Higher priorities go first; accounts that are not blocked share their priority by weight."),
    table("Accounts whose payments wait, most payments first", COLUMNS, lane.flows.map((flow) => ({
      key: `${flow.priority ?? "-"} ${flow.account ?? ""}`,
      cells: [account(provider, flow), flow.priority ?? "outcome unknown", count(flow.waiting), count(flow.weight), share(flow), blocked(flow)],
    }))),
    leftOut(provider, lane));
}

const account = (provider, flow) =>
  flow.account === null ? "no account" : h("a", { href: `#/jobs${query({ state: "waiting", provider, account: flow.account })}` }, flow.account);

const share = (flow) => (flow.share === undefined ? "" : percent(flow.share));

function blocked({ blocked }) {
  if (!blocked) return "";
  return h("span", {}, sentence(inZone(blocked.text)), " ", h("small", {}, untilWords(blocked)));
}

/** A rule has no end. A refused account is tried again. */
function untilWords({ reason, until }) {
  if (reason === "account_blocked") return "while the rule exists";
  const left = Math.max(0, Date.parse(until) - serverNow());
  // In steps of a second, so that a screen reader can say something else too.
  const wait = left > 0 ? ` (in ${duration(Math.ceil(left / 1_000) * 1_000)})` : "";
  return [reason === "limit" ? "until " : "next try ", instant(until), wait];
}

/** What the table leaves out. */
function leftOut(provider, lane) {
  const others = lane.total_flows - lane.flows.length;
  if (others <= 0) return null;
  const waiting = lane.total_waiting - lane.flows.reduce((sum, flow) => sum + flow.waiting, 0);
  return h("p", { class: "about" }, `${plural(others, "more flow", "more flows")} with ${plural(waiting, "waiting payment", "waiting payments")} not listed: `,
    h("code", {}, `sluicegate provider flows ${provider} --limit N`), " lists more.");
}
