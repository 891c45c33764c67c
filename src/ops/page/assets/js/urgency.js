// The order of the overview: what needs a person, what is limited, what runs, and what is idle.

/** Sections in their order, with their headings. */
export const SECTIONS = [
  ["attention", "Needs attention", "A person must decide, or nothing is sent."],
  ["stopped", "Stopped by the incident", "They go on when it ends."],
  ["limited", "Limited", "As fast as limits and providers allow."],
  ["running", "Running", ""],
  ["idle", "Idle", ""],
];
const NAMES = SECTIONS.map(([name]) => name);
const STOPPED = new Set(["misconfigured", "paused", "closed", "breaker_open", "backend_unavailable", "no_worker"]);
/** Payments move slower than the limits allow, or not at all, until a person changes something. */
const HELD_BACK = new Set(["held", "throttled", "blocked"]);
const LIMITED = new Set(["waiting_for_limit", "cold", "probing", "paused_by_provider", "draining"]);
const IDLE = new Set(["idle", "disabled"]);
/** A lane at its limit has free permits now and then. It moves to a calmer section once it has been calm this long. */
const CALM_MS = 10_000;

/** A limit on the whole provider that delays, and is used up while payments wait. */
const atLimit = ({ waiting, limits }) =>
  waiting > 0 &&
  (limits ?? []).some(({ enabled, shadow, applies_to: calls, scope, used, remaining }) =>
    enabled !== false && !shadow && calls !== "lookup" && (scope ?? "provider") === "provider" && used > 0 && remaining === 0);

/** The section of a provider by what it is now. `explained`: an incident explains its state. */
export function urgency(provider, explained) {
  const { state, review, dead, problems, clears, waiting } = provider;
  const unsent = clears?.kind === "never" || (state === "disabled" && waiting > 0);
  if (HELD_BACK.has(state) || review > 0 || dead > 0 || (problems ?? []).length > 0 || unsent) return "attention";
  if (STOPPED.has(state)) return explained ? "stopped" : "attention";
  if (LIMITED.has(state) || (state === "running" && atLimit(provider))) return "limited";
  return IDLE.has(state) ? "idle" : "running";
}

/** Sorts providers into sections. What becomes urgent moves at once, what calms down moves after a while. */
export class Sorter {
  #last = new Map();

  /** `explained`: names of the providers whose state an incident explains. */
  sections(providers, explained, now) {
    const found = new Map(NAMES.map((name) => [name, []]));
    for (const provider of providers) found.get(this.#sectionOf(provider, explained.has(provider.name), now)).push(provider);
    found.get("attention").sort((a, b) => severity(a) - severity(b));
    return SECTIONS.map(([name, title, about]) => ({ name, title, about, providers: found.get(name) }));
  }

  #sectionOf(provider, explained, now) {
    const wanted = urgency(provider, explained);
    const last = this.#last.get(provider.name);
    const calmer = last && NAMES.indexOf(wanted) > NAMES.indexOf(last.section);
    // The end of a fault and an operator's own decision show at once.
    const waits = calmer && (last.section === "limited" || last.section === "running") && now - last.at < CALM_MS;
    const section = waits ? last.section : wanted;
    this.#last.set(provider.name, { section, at: waits ? last.at : now });
    return section;
  }
}

/** Held lanes come first. Faults come before lanes that an operator stopped, and those before lanes that send while payments need a decision. */
function severity({ state }) {
  if (state === "held") return -1;
  if (state === "throttled") return 0;
  if (state === "blocked") return 1;
  if (!STOPPED.has(state)) return 2;
  return state === "paused" || state === "closed" ? 1 : 0;
}
