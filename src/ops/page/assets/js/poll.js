// A poll that calls a function while the page is visible, one call at a time.

export const EVERY_MS = 2_000;

export class Poll {
  #tick;
  #timer;
  #running = false;
  #again = false;
  #stopped = false;

  constructor(tick) {
    this.#tick = tick;
    document.addEventListener("visibilitychange", this.#seen);
  }

  #seen = () => {
    clearTimeout(this.#timer);
    if (!document.hidden) this.now();
  };

  /** Calls immediately, or right after the current call. */
  async now() {
    if (this.#stopped) return;
    if (this.#running) {
      this.#again = true;
      return;
    }
    clearTimeout(this.#timer);
    this.#running = true;
    try {
      await this.#tick();
    } finally {
      this.#running = false;
    }
    if (this.#stopped || document.hidden) return;
    if (this.#again) {
      this.#again = false;
      void this.now();
    } else {
      this.#timer = setTimeout(() => this.now(), EVERY_MS);
    }
  }

  stop() {
    this.#stopped = true;
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#seen);
  }
}
