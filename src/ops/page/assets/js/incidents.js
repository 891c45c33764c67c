// Incidents: one per cause, however many providers it stops. A backend that is unavailable is one, and so is a cause
// that several providers name.

import { plural, sentence } from "./format.js";

const KINDS = {
  redis: "Redis",
  redis_cluster: "Redis Cluster",
  rabbitmq: "RabbitMQ",
  postgres: "PostgreSQL",
  sqlite: "SQLite",
};
const BACKENDS = { database: "The database", queue: "The broker", limiter: "The limiter" };
const CONSEQUENCES = {
  database: "No request starts without the database; each starts when it responds again.",
  queue: "Workers take no new payment from it until it responds again.",
  limiter: "No request starts without a permit; sending goes on when it responds again.",
};
/** States with one cause for many lanes. */
const SHARED = new Set(["no_worker", "backend_unavailable", "draining"]);
const TITLES = { no_worker: "No worker", backend_unavailable: "Backend unavailable", draining: "All workers are draining" };

const backendName = ({ kind, backend }) => KINDS[kind] ?? BACKENDS[backend] ?? sentence(backend);

/** `{key, tone, title, short, since, words, problem, lanes, pause}`: `lanes` are the names of the providers that it explains,
 * `pause` the pause of all that it tells of. */
export function incidents(overview) {
  const backends = (overview?.outages ?? []).map((outage) => ofBackend(outage, overview.providers));
  const paused = ofPause(overview);
  const explained = new Set([...paused, ...backends].flatMap(({ lanes }) => lanes));
  return [...paused, ...backends, ...ofStates(overview?.providers ?? [], explained)];
}

/** The pause of all providers, while it is in force. */
function ofPause(overview) {
  const pause = overview?.pause_of_all;
  if (!pause) return [];
  const sending = overview.providers.some(({ paused, enabled }) => enabled && !paused);
  const held = pause.providers.length;
  return [{
    key: "pause of all",
    tone: "warn",
    title: `${sending ? `${plural(held, "provider", "providers")} paused together` : "All providers paused"} by ${pause.by}`,
    short: sending ? "Providers paused" : "All paused",
    since: pause.since,
    words: `${pause.because ? `${sentence(pause.because)}. ` : ""}They start no new request. Payments wait; nothing is lost.`,
    problem: null,
    lanes: pause.providers,
    pause,
  }];
}

function ofBackend(outage, providers) {
  const name = backendName(outage);
  const { everywhere, workers, of_workers: all, since, backend, problem } = outage;
  const whom = everywhere ? "" : workers === 0 ? " for this worker" : ` for ${workers} of ${all} workers`;
  return {
    key: `backend ${backend}`,
    tone: everywhere ? "bad" : "warn",
    title: `${name} unreachable${whom}`,
    short: `${name} unreachable`,
    since,
    words: everywhere ? CONSEQUENCES[backend] : "The other workers send.",
    problem,
    lanes: providers.filter(({ state }) => state === "backend_unavailable").map(({ name }) => name),
  };
}

/** Providers in the same state for the same cause, two at least: the card of a single one says it. */
function ofStates(providers, explained) {
  const groups = new Map();
  for (const { name, state, cause } of providers) {
    if (!SHARED.has(state) || explained.has(name)) continue;
    const key = `${state} ${cause}`;
    if (!groups.has(key)) groups.set(key, { state, cause, lanes: [] });
    groups.get(key).lanes.push(name);
  }
  return [...groups].filter(([, { lanes }]) => lanes.length > 1).map(([key, { state, cause, lanes }]) => ({
    key,
    tone: state === "draining" ? "warn" : "bad",
    title: lanes.length === providers.length ? TITLES[state] : `${TITLES[state]} for ${lanes.length} providers`,
    short: TITLES[state],
    since: null,
    words: "",
    problem: cause,
    lanes,
  }));
}

/** Warnings of the server that no incident has already said. */
export function otherWarnings(overview) {
  const said = (overview?.outages ?? []).map(({ problem }) => problem).filter(Boolean);
  return (overview?.warnings ?? []).filter((words) => !said.some((problem) => words.includes(problem)));
}
