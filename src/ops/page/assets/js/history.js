// The last minutes of each provider: read once, then continued from each overview.

import { get, path, query } from "./api.js";

const SECONDS = 600;
/** After a longer gap (the page was hidden) the history is read again. */
const GAP_MS = 10_000;
const AT_ONCE = 2;

export class Histories {
  #points = new Map();
  #asked = new Set();
  /** The last 429 of each provider at its last overview. */
  #refused = new Map();

  of(name) {
    return this.#points.get(name) ?? [];
  }

  /** Adds a point from an overview, and reads the histories that are missing. */
  async follow(overview, names, signal) {
    for (const provider of overview.providers) this.#add(provider, overview.at);
    const unknown = names.filter((name) => !this.#asked.has(name));
    for (let at = 0; at < unknown.length; at += AT_ONCE) {
      await Promise.all(unknown.slice(at, at + AT_ONCE).map((name) => this.#read(name, signal)));
    }
  }

  #add(provider, at) {
    const refused = provider.last_refused_at ?? "";
    const throttled = refused > (this.#refused.get(provider.name) ?? refused);
    const known = this.#points.get(provider.name);
    if (!known) {
      this.#refused.set(provider.name, refused);
      return;
    }
    const last = known.at(-1);
    const gap = last ? Date.parse(at) - Date.parse(last.at) : 0;
    if (gap > GAP_MS) this.#asked.delete(provider.name);
    if (last && gap < 1_000) return;
    this.#refused.set(provider.name, refused);
    const { rate_per_s, limit_per_s } = provider;
    const waiting = provider.waiting_is_at_least ? null : provider.waiting;
    const oldest = Date.parse(at) - SECONDS * 1_000;
    const kept = known.filter((point) => Date.parse(point.at) >= oldest);
    this.#points.set(provider.name, [...kept, { at, rate_per_s, limit_per_s, waiting, throttled }]);
  }

  async #read(name, signal) {
    this.#asked.add(name);
    try {
      const { points } = await get(path("providers", name, "history") + query({ seconds: SECONDS }), signal);
      this.#points.set(name, points ?? []);
    } catch (error) {
      this.#asked.delete(name);
      // Without a history the chart has no lines.
      if (signal.aborted || error.status === 0 || error.status === undefined) throw error;
    }
  }
}
