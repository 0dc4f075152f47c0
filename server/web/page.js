// Starts the page: the chat, the view of the engine, and the feed between server and view.

import { Chat } from "./chat.js";
import { Controls } from "./controls.js";
import { byId, setText } from "./dom.js";
import { EngineView } from "./engine.js";
import { Feed } from "./feed.js";
import { setUpKey } from "./key.js";

setUpKey();

const engine = new EngineView();
new Chat(new Controls(), (id) => engine.sequences.mine.add(id));

const status = byId("status");
const feed = new Feed(
  (event) => engine.show(event),
  (state, text) => {
    setText(status, text);
    status.dataset.state = state;
    byId("engine").classList.toggle("stale", state !== "live" && state !== "draining");
  },
);
feed.connect();

// On narrow screens one of the two is shown.
const views = document.querySelectorAll("[data-shows]");
for (const view of views) {
  view.addEventListener("click", () => {
    document.body.dataset.view = view.dataset.shows;
    for (const other of views) other.setAttribute("aria-pressed", String(other === view));
  });
}
