// The connection to /live_stats: connects again after a fault, and rests while the tab is hidden.

import { events, request } from "./api.js";
import { afterNextKey, askForKey } from "./key.js";

const FIRST_RETRY_SECONDS = 0.5;
const LONGEST_RETRY_SECONDS = 8;
const LONGEST_SILENCE_SECONDS = 5; // four events come a second; a network that is gone says nothing

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
    this.expectEvent();
    try {
      const response = await request("live_stats", { signal: abort.signal });
      for await (const data of events(response)) {
        this.expectEvent();
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

  expectEvent() {
    this.after(LONGEST_SILENCE_SECONDS, () => {
      this.rest();
      this.retry("lost", "reconnecting");
    });
  }

  fail(error) {
    if (error.status === 401) {
      this.rest();
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
    this.after(this.retrySeconds, () => this.connect());
    this.retrySeconds = Math.min(LONGEST_RETRY_SECONDS, 2 * this.retrySeconds);
  }

  // There is one timer: for the next event, or for the next try.
  after(seconds, action) {
    clearTimeout(this.timer);
    this.timer = setTimeout(action, 1000 * seconds);
  }
}
