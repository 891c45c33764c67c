// The view of all batches: decisions about many payments at once, newest first.

import { get, path, query } from "../api.js";
import { batchHref, batchState, decisionWords } from "../decisions.js";
import { h } from "../dom.js";
import { count, money } from "../format.js";
import { instant } from "../instants.js";
import { chip, empty, loading, table } from "../parts.js";
import { Pages } from "./job_table.js";

const PAGE = 50;
const COLUMNS = [["Started", "nowrap"], ["Decision", ""], ["State", "nowrap"], ["Payments", "num"], ["Applied", "num"], ["Sums", ""], ["By", ""], ["Because", "wide"]];

export function batches(context) {
  const pages = new Pages();
  let data = null;

  return {
    place: "jobs",
    title: "Batches",
    async load(signal) {
      data = await get(path("batches") + query({ limit: PAGE, after: pages.after }), signal);
    },
    render() {
      return [
        h("nav", { "aria-label": "Where this is", class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs"), " / "),
        h("h1", { tabindex: "-1" }, "Batches"),
        h("p", { class: "about" }, "Decisions about many payments at once. Pick payments in the list of jobs to begin one."),
        data === null ? loading(context) : list(),
      ];
    },
  };

  function list() {
    if (data.batches.length === 0 && !data.next) return empty("No batch yet", "A decision about several payments appears here, with its report.");
    const rows = data.batches.map((batch) => ({
      key: batch.id,
      cells: [
        instant(batch.created_at),
        h("a", { href: batchHref(batch.id) }, decisionWords(batch.decision)),
        chip(batchState(batch.state)),
        count(batch.jobs),
        count(batch.applied),
        batch.sums.map(({ currency, amount }) => money(amount, currency)).join(", "),
        `${batch.person} (${batch.database_user})`,
        batch.because,
      ],
    }));
    return [table("Batches, newest first", COLUMNS, rows), pages.bar(data.next, context.refresh)];
  }
}
