// The connection to /live_stats: connects again after a fault, and rests while the tab is hidden.

import { events, request } from "./api.js";
import { afterNextKey, askForKey } from "./key.js";

const FIRST_RETRY_SECONDS = 0.5;
const LONGEST_RETRY_SECONDS = 8;

export class Feed {
  // `show(event)` gets each event, `note(state, text)` how the connection is.
  constructor(show, note) {
    this.show = show;
    this.note = note;
    this.retrySeconds = FIRST_RETRY_SECONDS;
    this.abort = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.connect()));
    addEventListener("online", () => this.connect());
  }

  rest() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async connect() {
    this.rest();
    if (document.hidden) return;
    const abort = (this.abort = new AbortController());
    try {
      const response = await request("live_stats", { signal: abort.signal });
      for await (const data of events(response)) {
        this.retrySeconds = FIRST_RETRY_SECONDS;
        const event = JSON.parse(data);
        this.note(event.draining ? "draining" : "live", event.draining ? "draining" : "live");
        this.show(event);
      }
      this.retry("lost", "reconnecting");
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    }
  }

  fail(error) {
    if (error.status === 401) {
      this.note("locked", "needs a key");
      afterNextKey(() => this.connect());
      askForKey();
    } else if (error.status === 429) {
      this.retrySeconds = LONGEST_RETRY_SECONDS;
      this.retry("lost", "too many watch");
    } else if (error.status === 503) {
      this.retry("lost", "not ready");
    } else {
      this.retry("lost", "reconnecting");
    }
  }

  retry(state, text) {
    this.note(state, text);
    this.timer = setTimeout(() => this.connect(), 1000 * this.retrySeconds);
    this.retrySeconds = Math.min(LONGEST_RETRY_SECONDS, 2 * this.retrySeconds);
  }
}
