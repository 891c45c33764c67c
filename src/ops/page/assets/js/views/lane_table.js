// The providers of a section as a dense table: for more of them than cards can show at a glance.

import { clearsAbout } from "../clears.js";
import { h } from "../dom.js";
import { count, percent, rate } from "../format.js";
import { instant } from "../instants.js";
import { written } from "../limits.js";
import { chip, providerHref, table, waitingWords } from "../parts.js";
import { laneState } from "../words.js";
import { cause, decisions, oldest, refused, tightest } from "./card.js";
import { pauseButton } from "./pause.js";

const COLUMNS = [
  ["Provider", "lane"],
  ["State", "lane-state"],
  ["Waiting", "num"],
  ["Oldest", "num"],
  ["Clears in", "num"],
  ["Sent", "num"],
  ["Tightest limit", "tightest"],
  ["Action", "actions"],
];

/** `explained`: names of the providers whose cause an incident above has already. */
export function laneTable(title, providers, context, explained) {
  return table(title, COLUMNS, providers.map((provider) => ({
    key: provider.name,
    kind: `lane-row ${laneState(provider.state)[1]}`,
    cells: [
      h("a", { href: providerHref(provider.name), title: provider.name }, provider.name),
      [chip(laneState(provider.state)), decisions(provider), refused(provider), explained.has(provider.name) ? null : cause(provider)],
      provider.waiting === 0 && !provider.waiting_is_at_least ? "" : waitingWords(provider),
      provider.oldest_waiting_at ? instant(provider.oldest_waiting_at, oldest(provider)) : "",
      provider.waiting === 0 ? "" : clearsAbout(provider.clears),
      provider.rate_per_s === 0 ? "" : rate(provider.rate_per_s),
      mini(tightest((provider.limits ?? []).filter(({ enabled }) => enabled !== false))[0]),
      pauseButton(provider, context),
    ],
  })));
}

/** The tightest limit as a small bar. */
function mini(limit) {
  if (!limit) return "";
  const allows = written(limit);
  const { used, remaining } = limit;
  if (used === null || used === undefined || !(used + remaining > 0)) return h("small", {}, allows);
  const share = used / (used + remaining);
  const words = `${limit.name}: ${count(used)} of ${count(used + remaining)} used`;
  return h("span", { class: share >= 0.995 ? "mini full" : "mini", title: words },
    h("span", { class: "bar", role: "meter", "aria-label": `Usage of limit ${limit.name}`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100), "aria-valuetext": `${count(used)} of ${count(used + remaining)} used` },
      h("span", { class: "bar-fill", style: { width: `${(share * 100).toFixed(1)}%` } })),
    h("small", {}, `${percent(share)} of ${allows}`));
}
