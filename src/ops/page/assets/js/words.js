// The names of states and decisions on the page. `tone` is the colour of a chip; the text is always shown too.

const LANES = {
  running: ["Running", "good"],
  idle: ["Idle", "neutral"],
  waiting_for_limit: ["At its limit", "good"],
  cold: ["Cold start", "info"],
  probing: ["Probing", "warn"],
  paused: ["Paused", "warn"],
  closed: ["Closed", "warn"],
  disabled: ["Disabled", "neutral"],
  paused_by_provider: ["Paused by provider", "warn"],
  throttled: ["Refused with 429s", "bad"],
  blocked: ["Accounts blocked", "warn"],
  held: ["Held", "bad"],
  breaker_open: ["Breaker open", "bad"],
  misconfigured: ["Misconfigured", "bad"],
  backend_unavailable: ["Backend unavailable", "bad"],
  no_worker: ["No worker", "bad"],
  draining: ["Draining", "warn"],
};

const JOBS = {
  waiting: ["Waiting", "info"],
  sending: ["Sending", "info"],
  unknown: ["Outcome unknown", "warn"],
  review: ["Review", "warn"],
  dead: ["Dead", "bad"],
  succeeded: ["Succeeded", "good"],
  declined: ["Declined", "neutral"],
  expired: ["Expired", "neutral"],
  cancelled: ["Cancelled", "neutral"],
};

const WORKERS = {
  ready: ["Ready", "good"],
  starting: ["Starting", "info"],
  draining: ["Draining", "warn"],
  lost: ["Lost", "bad"],
};

const DECISIONS = {
  granted: ["Granted", "good"],
  refused: ["Refused", "info"],
  delayed: ["Delayed", "info"],
  throttled: ["429 from provider", "bad"],
  paused: ["Paused", "warn"],
  resumed: ["Resumed", "good"],
  breaker_opened: ["Breaker opened", "bad"],
  breaker_closed: ["Breaker closed", "good"],
};

const ALGORITHMS = {
  sliding_log: "sliding log: every window of this length",
  sliding_window: "sliding window of buckets",
  fixed_window: "fixed window: by the calendar",
  token_bucket: "token bucket",
  gcra: "evenly spaced (GCRA)",
  concurrency: "requests in flight",
};

const spelled = (word) => String(word).replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase());
const look = (table) => (word) => table[word] ?? [spelled(word), "neutral"];

export const laneState = look(LANES);
export const jobState = look(JOBS);
export const workerState = look(WORKERS);
export const decision = look(DECISIONS);
export const algorithm = (name) => ALGORITHMS[name] ?? String(name).replaceAll("_", " ");
export const JOB_STATES = Object.keys(JOBS);
export { spelled };
