// The payments that an operator has ticked in a list: some of them, on any page, or all that match the filter.

export class Selection {
  /** State by id, in the order of the ticks. */
  #ticked = new Map();
  #last = null;
  /** All that match the filter, whatever is ticked. */
  all = false;

  get size() {
    return this.#ticked.size;
  }

  get ids() {
    return [...this.#ticked.keys()];
  }

  get states() {
    return new Set(this.#ticked.values());
  }

  has(id) {
    return this.all || this.#ticked.has(id);
  }

  /** Ticks a row or unticks it; with `range`, so are all rows from the last one that was ticked to this one. */
  toggle(jobs, id, range) {
    const at = jobs.findIndex((job) => job.id === id);
    const from = range ? jobs.findIndex((job) => job.id === this.#last) : -1;
    const rows = from < 0 ? [jobs[at]] : jobs.slice(Math.min(from, at), Math.max(from, at) + 1);
    this.set(rows, !this.#ticked.has(id));
    this.#last = id;
  }

  set(jobs, ticked) {
    this.all = false;
    for (const { id, state } of jobs) ticked ? this.#ticked.set(id, state) : this.#ticked.delete(id);
  }

  /** Follows the states of rows that were loaded again; those that can no longer be decided are not ticked any more. */
  follow(jobs, isOpen) {
    for (const { id, state } of jobs) {
      if (!this.#ticked.has(id)) continue;
      isOpen(state) ? this.#ticked.set(id, state) : this.#ticked.delete(id);
    }
  }

  clear() {
    this.#ticked.clear();
    this.all = false;
  }
}
