// The view of workers with their versions, and of the backends as each worker sees them.

import { get, path } from "../api.js";
import { h } from "../dom.js";
import { ago, agoWords, count, duration, plural, sentence } from "../format.js";
import { instant } from "../instants.js";
import { chip, empty, loading, section, table } from "../parts.js";
import { spelled, workerState } from "../words.js";

const BACKENDS = ["database", "queue", "limiter"];
/** Reports round to this. A backend in the same process takes less. */
const SHORTEST_MS = 0.01;

export function workers(context) {
  let data = null;

  return {
    place: "workers",
    title: "Workers and backends",
    async load(signal) {
      data = await get(path("workers"), signal);
    },
    render() {
      const heading = h("h1", { tabindex: "-1" }, "Workers and backends");
      if (data === null) return [heading, loading(context)];
      if (data.workers.length === 0) return [heading, empty("No worker has reported", "Nothing is sent while no worker runs. Start one:", h("pre", {}, h("code", {}, "sluicegate run")))];
      return [heading, warnings(data.workers), backends(data.workers), section("workers", "Workers", list(data.workers, context))];
    },
  };
}

function warnings(all) {
  const versions = [...new Set(all.filter(alive).map(({ version }) => version))];
  const words = all.flatMap((worker) => (worker.warnings ?? []).map((warning) => `${worker.id}: ${warning}`));
  if (versions.length > 1) words.unshift(`Several versions run at once: ${versions.join(", ")}.`);
  for (const worker of all.filter(({ state }) => state === "lost")) words.push(`${worker.id} has not reported for ${ago(worker.seen_at)}. Other workers take over its jobs.`);
  return words.length === 0 ? null : h("section", { class: "notice warn", "aria-label": "Warnings" }, h("ul", {}, words.map((line) => h("li", { key: line.replace(/ for [^.]*/, "") }, line))));
}

const alive = ({ state }) => state !== "lost";
const tripTime = (ms) => (ms === null || ms === undefined ? "–" : ms < SHORTEST_MS ? `under ${SHORTEST_MS} ms` : ms < 10 ? `${Number(ms.toPrecision(2))} ms` : duration(ms));

/** Each backend as all live workers see it. */
function backends(all) {
  const seen = all.filter(alive);
  // A deployment without a broker has no queue.
  const known = BACKENDS.filter((name) => name !== "queue" || seen.length === 0 || seen.some((worker) => worker.backends?.queue));
  const cards = known.map((name) => {
    const views = seen.map((worker) => worker.backends?.[name]).filter(Boolean);
    const away = views.filter(({ ok }) => !ok).length;
    const times = views.map((view) => view.rtt_ms).filter((ms) => Number.isFinite(ms));
    const state = views.length === 0 ? ["Not seen", "neutral"] : away === 0 ? ["Available", "good"] : away === views.length ? ["Unavailable", "bad"] : [`Unavailable for ${count(away)} of ${plural(views.length, "worker", "workers")}`, "warn"];
    const [least, most] = times.length === 0 ? ["–", "–"] : [tripTime(Math.min(...times)), tripTime(Math.max(...times))];
    const trip = least === most ? least : `${least} to ${most}`;
    return h("article", { key: name, class: `card backend ${state[1]}`, "aria-label": spelled(name) },
      h("header", {}, h("h3", {}, spelled(name)), chip(state)),
      h("p", {}, [...new Set(views.map(named).filter(Boolean))].join(", ") || "–"),
      away > 0 ? h("ul", { class: "away" }, causes(seen, name).map((words) => h("li", { key: words }, words))) : null,
      h("p", { class: "muted" }, "Round trip ", h("b", {}, trip)));
  });
  return h("section", { "aria-labelledby": "backends-title" }, h("h2", { id: "backends-title" }, "Backends"), h("div", { class: "cards backends" }, cards));
}

const named = ({ kind, version }) => [kind, version].filter(Boolean).join(" ");

/** Why a backend is unavailable; each cause once. */
function causes(seen, name) {
  const away = seen.filter((worker) => worker.backends?.[name]?.ok === false);
  return [...new Set(away.map((worker) => sentence(worker.backends[name].problem ?? "no response")))];
}

function list(all, context) {
  const marks = (worker) => BACKENDS.map((name) => worker.backends?.[name]).map((view, at) => (view ? h("span", { key: BACKENDS[at], class: view.ok ? "trip" : "trip bad" }, `${BACKENDS[at]} ${view.ok ? tripTime(view.rtt_ms) : "unavailable"}`) : null));
  return table(`${plural(all.length, "worker", "workers")}`,
    [["Worker", "mono"], ["State", "nowrap"], ["Host", ""], ["Version", "mono"], ["Up for", "nowrap"], ["Last report", "nowrap"], ["Lanes", "num"], ["Active", "num"], ["In flight", "num"], ["Backends", "wide"]],
    all.map((worker) => ({
      key: worker.id,
      cells: [
        worker.id === context.overview?.worker ? [worker.id, h("small", { class: "muted" }, " this worker")] : worker.id,
        chip(workerState(worker.state)),
        `${worker.host ?? ""}${worker.pid ? `, pid ${worker.pid}` : ""}`,
        worker.version ?? "",
        instant(worker.started_at, ago(worker.started_at)),
        instant(worker.seen_at, agoWords(worker.seen_at)),
        count(worker.lanes),
        count(worker.active),
        count(worker.in_flight),
        h("span", { class: "trips" }, marks(worker)),
      ],
    })));
}
