// The sums over all providers. What is zero and should be zero is one line.

import { h } from "../dom.js";
import { ago, count, rate, sentence } from "../format.js";
import { instant } from "../instants.js";
import { figure, figures, total, waitingLacks, waitingWords } from "../parts.js";
import { counted, zeros } from "./card.js";

export function sums(known) {
  const sum = (field) => total(known.providers, field);
  const lacking = known.providers.find((provider) => provider.waiting_is_at_least);
  const waiting = waitingWords({ waiting: sum("waiting"), waiting_is_at_least: lacking !== undefined });
  const oldest = known.providers.map((p) => p.oldest_waiting_at).filter(Boolean).sort()[0];
  const [review, dead, refused] = ["review", "dead", "refused_by_provider"].map(sum);
  const alarms = [
    review === 0 ? null : figure("Review", count(review), { alarm: review > 0, href: "#/attention?state=review" }),
    dead === 0 ? null : figure("Dead", count(dead), { alarm: dead > 0, href: "#/attention?state=dead" }),
    refused === 0 ? null : figure("429s", count(refused), { alarm: refused > 0, note: refused === null ? null : "last hour" }),
  ];
  return h(
    "section",
    { class: "sums", "aria-label": "All providers together" },
    figures(
      figure("Waiting", waiting, { note: lacking ? waitingLacks(lacking) : oldest ? ["oldest ", instant(oldest, ago(oldest))] : null, href: "#/jobs?state=waiting" }),
      figure("Sent", rate(sum("rate_per_s")), { note: "last 10 s" }),
      figure("In flight", count(sum("in_flight")), { note: `${count(sum("active"))} active` }),
      alarms,
    ),
    fine(zeros({ review, dead, refused_by_provider: refused }), recordedIfSound(known)),
    unsound(known),
    counted(known),
  );
}

const faultsOf = (known) => (known.reconciliation ?? []).flatMap((account) => (account.faults ?? []).map((fault) => `${account.provider}: ${fault}`));

/** The number of recorded payments, if all of them are accounted for. */
function recordedIfSound(known) {
  const accounts = known.reconciliation ?? [];
  if (accounts.length === 0 || faultsOf(known).length > 0) return null;
  return accounts.reduce((sum, account) => sum + (account.recorded ?? 0), 0);
}

/** One line for all that is as it should be. */
function fine(zero, recorded) {
  const sound = recorded === null ? "" : recorded === 1 ? "the one recorded payment is accounted for" : `all ${count(recorded)} recorded payments are accounted for`;
  return fineLine([zero, sound].filter(Boolean).join("; "));
}

/** Null without words. */
export const fineLine = (words) =>
  words === "" ? null : h("p", { class: "accounted" }, h("span", { class: "tick", "aria-hidden": "true" }, "✓"), ` ${sentence(words)}.`);

function unsound(known) {
  const faults = faultsOf(known);
  return faults.length === 0 ? null : h("div", { class: "notice bad", role: "alert" }, h("strong", {}, "Not all payments are accounted for."), h("ul", {}, faults.map((fault) => h("li", {}, fault))));
}
