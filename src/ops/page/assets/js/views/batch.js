// The view of one batch: its progress, what it decided and why, the payments that were refused, and a stop.

import { get, path, post, query } from "../api.js";
import { announce } from "../announce.js";
import { batchState, decisionWords } from "../decisions.js";
import { ask, because, reason } from "../dialog.js";
import { h } from "../dom.js";
import { count, duration, money, plural } from "../format.js";
import { instant } from "../instants.js";
import { button, chip, figure, figures, jobHref, loading, section, table } from "../parts.js";
import { needs } from "../person.js";
import { leftOut } from "./batch_dialog.js";
import { Pages } from "./job_table.js";

const PAGE = 50;
const COLUMNS = [["Payment", "mono"], ["Why it was refused", "wide"], ["When", "nowrap"]];

export function batch(context, id) {
  const pages = new Pages();
  let data = null;
  let missing = false;
  let refused = { jobs: [], next: null };

  return {
    place: "jobs",
    title: "Batch",
    async load(signal) {
      try {
        data = await get(path("batches", id), signal);
        missing = false;
      } catch (error) {
        if (error.status !== 404) throw error;
        missing = true;
        return;
      }
      context.redraw();
      if (refusals() > 0) refused = await get(path("batches", id, "jobs") + query({ outcome: "refused", limit: PAGE, after: pages.after }), signal);
    },
    render() {
      const crumb = h("nav", { "aria-label": "Where this is", class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("a", { href: "#/batches" }, "Batches"), " / ");
      if (missing) return [crumb, h("h1", { tabindex: "-1" }, "No such batch"), h("p", { class: "empty" }, "There is no batch with this id.")];
      if (!data) return [crumb, h("h1", { tabindex: "-1" }, "Batch"), loading(context)];
      return [crumb, head(), progress(), section("facts", "Decision", facts()), report()];
    },
  };

  function refusals() {
    return data.refused.reduce((sum, { jobs }) => sum + jobs, 0);
  }

  function head() {
    return h("div", { class: "view-head" },
      h("h1", { tabindex: "-1" }, `${decisionWords(data.decision)}: ${plural(data.jobs, "payment", "payments")}`),
      h("span", { "aria-live": "polite" }, chip(batchState(data.state))),
      h("span", { class: "push" }),
      data.state === "running" ? button("Stop", stop, "danger", { "aria-label": "Stop this batch", ...needs("operator") }) : null);
  }

  function progress() {
    const through = data.applied + refusals();
    return h("section", { class: "panel batch-progress", "aria-label": "Progress" },
      h("progress", { "aria-label": "Progress", max: Math.max(data.jobs, 1), value: through }),
      figures(
        figure("Applied", count(data.applied)),
        figure("Refused", count(refusals()), { alarm: refusals() > 0 }),
        figure("Remaining", count(data.remaining), { note: data.state === "running" ? left() : null })));
  }

  /** The time that is left at the chosen rate. */
  function left() {
    const [number, unit] = data.rate.split("/");
    const window = { "1s": 1_000, "1m": 60_000, "1h": 3_600_000 }[unit];
    return window && data.remaining > 0 ? `about ${duration(Math.max(1_000, (data.remaining / Number(number)) * window))} at ${data.rate}` : `at ${data.rate}`;
  }

  function facts() {
    const sums = data.sums.map(({ currency, amount }) => money(amount, currency)).join(", ");
    const all = [
      ["Because", data.because],
      ["Started", [instant(data.created_at), ` by ${data.person} (${data.database_user})`]],
      data.finished_at ? [data.state === "stopped" ? "Stopped" : "Finished", [instant(data.finished_at), data.stopped_by ? ` by ${data.stopped_by} (${data.stopped_database_user})` : ""]] : null,
      ["Sums", sums],
      ["Rate", data.rate],
      ["Batch", h("span", { class: "mono" }, data.id)],
    ];
    return h("dl", { class: "facts" }, all.filter(Boolean).map(([name, value]) => [h("dt", { key: `${name} name` }, name), h("dd", { key: name }, value)]));
  }

  function report() {
    if (refusals() === 0) return data.state === "finished" ? h("p", { class: "accounted" }, h("span", { class: "tick", "aria-hidden": "true" }, "✓"), " No payment was refused.") : null;
    const rows = refused.jobs.map((job) => ({
      key: job.id,
      cells: [h("a", { href: jobHref(job.id) }, job.id), job.text ?? job.refusal ?? "", instant(job.at)],
    }));
    return [leftOut(data.refused, "Refused, and left as they are"), table("Refused payments", COLUMNS, rows), pages.bar(refused.next, context.refresh)];
  }

  function stop() {
    const state = {};
    ask({
      title: "Stop this batch?",
      confirm: "Stop this batch",
      danger: true,
      content: () => [
        h("p", {}, `${plural(data.applied, "payment is", "payments are")} changed already and stay so. About ${plural(data.remaining, "payment is", "payments are")} left as they are.`),
        h("p", {}, "A stopped batch does not go on. The same decision about the others is a new batch."),
        because(state),
      ],
      async act() {
        data = await post(path("batches", id, "stop"), reason(state));
        announce("The batch is stopped.", "good");
        context.refresh();
      },
    });
  }
}
