// The view that finds payments: a filter, the sums of what matches, and the payments, newest first.

import { get, path, query } from "../api.js";
import { DECIDABLE } from "../decisions.js";
import { h } from "../dom.js";
import { count, when } from "../format.js";
import { empty, loading } from "../parts.js";
import { Selection } from "../selection.js";
import { batchBar, tickColumn } from "./batch_bar.js";
import { filterBar, filterHref, filterOf, isFiltered } from "./filter_bar.js";
import { Pages, isEmpty, jobTable, unreadableRows } from "./job_table.js";
import { totalsLine } from "./job_totals.js";
import { unrecorded } from "./unrecorded.js";

const PAGE = 50;
/** Requests for one page while few payments match. Each searches a part of the ledger. */
const SEARCHES = 8;
/** The sums, and a page that took several requests, are refreshed less often. */
const COSTLY_MS = 30_000;

/** The fields of a filter that have a value. */
const given = (filter) => Object.fromEntries(Object.entries(filter).filter(([, value]) => value !== ""));

export function jobs(context, fields) {
  const wanted = filterOf(fields);
  const pages = new Pages();
  const selection = new Selection();
  let data = null;
  let loaded = { after: undefined, at: 0, costly: false };
  let totals = null;
  let totalsProblem = null;
  let totalsAt = 0;

  return {
    place: "jobs",
    title: "Jobs",
    async load(signal) {
      const { after } = pages;
      const isFresh = loaded.costly && loaded.after === after && Date.now() - loaded.at < COSTLY_MS;
      if (!isFresh) data = await found(after, signal);
      selection.follow(data.jobs, (state) => DECIDABLE.has(state));
      if (Date.now() - totalsAt >= COSTLY_MS) await loadTotals(signal);
    },
    render() {
      return [
        h("h1", { tabindex: "-1" }, "Jobs"),
        filterBar(wanted, (context.overview?.providers ?? []).map(({ name }) => name), go),
        queued(),
        data === null ? loading(context) : [totalsLine(wanted, totals, totalsProblem), list()],
      ];
    },
  };

  /** One page; more requests follow while the search has found too few payments and has not ended. */
  async function found(after, signal) {
    const ask = (from) => get(path("jobs") + query({ ...wanted, after: from, limit: PAGE }), signal);
    const page = await ask(after);
    let searches = 1;
    while (page.searched_back_to && page.jobs.length === 0 && searches < SEARCHES) {
      const more = await ask(page.next);
      page.jobs.push(...more.jobs);
      page.unreadable.push(...more.unreadable);
      page.next = more.next;
      page.searched_back_to = more.searched_back_to;
      searches += 1;
    }
    loaded = { after, at: Date.now(), costly: searches > 1 };
    return page;
  }

  async function loadTotals(signal) {
    totalsAt = Date.now();
    try {
      totals = await get(path("job-totals") + query(wanted), signal);
      totalsProblem = null;
    } catch (error) {
      if (signal.aborted) throw error;
      totalsProblem = error.message;
    }
  }

  function list() {
    const searched = data.searched_back_to
      ? h("p", { class: "notice searched" }, `Searched back to ${when(data.searched_back_to)}. The next page goes on from there.`)
      : null;
    if (isEmpty(data)) {
      return empty("No payments found", isFiltered(wanted) ? "No payment in the ledger matches all of these filters." : "The ledger is empty. A published payment appears here once a worker has recorded it.");
    }
    return [
      unreadableRows(data.unreadable),
      batchBar({ selection, jobs: data.jobs, filter: given(wanted), totals, context }),
      data.jobs.length > 0 || !searched ? jobTable("Payments, newest first", data.jobs, { created: true, lead: tickColumn(selection, data.jobs, context) }) : null,
      searched,
      pages.bar(data.next, context.refresh),
    ];
  }

  /** Payments that wait in a queue and are not in the list: ids and accounts are unknown until a worker records them. */
  function queued() {
    if (wanted.state !== "" && !wanted.state.split(",").includes("waiting")) return null;
    const all = unrecorded(context.overview, wanted.provider);
    const messages = all.reduce((sum, lane) => sum + lane.messages, 0);
    if (messages === 0) return null;
    const fewer = wanted.search || wanted.account ? "; their ids and accounts are unknown" : "";
    const [are, have] = messages === 1 ? ["is", "it"] : ["are", "them"];
    return h("p", { class: "notice queued" }, `${count(messages)} more ${are} in the queue of ${all.map(({ name }) => name).join(", ")}: no worker has recorded ${have} yet${fewer}.`);
  }

  function go(filter) {
    const hash = filterHref(filter);
    if (hash !== location.hash) {
      location.hash = hash;
      return;
    }
    totalsAt = 0;
    loaded.costly = false;
    context.refresh();
  }
}
