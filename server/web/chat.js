// The conversation: send, stop, regenerate, edit. A turn is a message and the node that shows it.

import { ApiError, events, request } from "./api.js";
import { Answer } from "./answer.js";
import { button, byId, element } from "./dom.js";
import { askForKey } from "./key.js";

const NEAR_END_PIXELS = 60;
const STOPPED = "Stopped.";

export class Chat {
  // `controls` has the settings; `onAnswer(id)` is called when the engine has given an answer its id.
  constructor(controls, onAnswer) {
    this.controls = controls;
    this.onAnswer = onAnswer;
    this.turns = [];
    this.abort = null;
    this.frame = null;
    this.list = byId("turns");
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.target.closest("dialog")) this.stop();
    });
  }

  send() {
    const text = this.prompt.value.trim();
    if (!text) return;
    this.go(() => {
      this.prompt.value = "";
      this.addUser(text);
    });
  }

  // Changes the turns, and asks for an answer to them. Does nothing while an answer runs or a setting is wrong.
  go(change) {
    if (this.abort) return;
    const fields = this.controls.fields();
    if (fields === null) return;
    change();
    if (document.activeElement !== this.prompt) this.list.focus(); // the button that was pressed goes
    this.answer(fields);
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.cut(0);
    this.prompt.focus();
  }

  // Removes the turns from `place` on.
  cut(place) {
    for (const turn of this.turns.splice(place)) turn.node?.remove();
    byId("empty").hidden = this.turns.length > 0;
  }

  add(turn) {
    this.turns.push(turn);
    byId("empty").hidden = true;
    if (turn.node) this.list.append(turn.node);
    this.list.scrollTop = this.list.scrollHeight;
    return turn;
  }

  addUser(text) {
    const shown = element("div", { class: "content" }, text);
    const turn = { message: { role: "user", content: text } };
    const edit = button("Edit", () => this.edit(turn, shown));
    const actions = element("div", { class: "turn-actions" }, edit);
    turn.node = element("article", { class: "turn user", "aria-label": "You" }, shown, actions);
    this.add(turn);
  }

  addResult(message) {
    const shown = element("div", { class: "content" }, message.content);
    this.add({ message, node: element("article", { class: "turn result", "aria-label": "Result of a tool" }, shown) });
  }

  // Turns a message into a field; what comes after it is answered anew.
  edit(turn, shown) {
    const field = element("textarea", { "aria-label": "Edited message", rows: "2" });
    field.value = turn.message.content;
    const cancel = () => {
      turn.node.replaceChildren(...before);
      turn.node.querySelector("button").focus();
    };
    const save = () => {
      const text = field.value.trim();
      if (!text) return;
      this.go(() => {
        this.cut(this.turns.indexOf(turn));
        this.addUser(text);
        this.prompt.focus();
      });
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      save();
    });
    const before = [...turn.node.children];
    const actions = element("div", { class: "actions" }, button("Cancel", cancel), button("Send again", save, { class: "main starts" }));
    turn.node.replaceChildren(field, actions);
    field.focus();
  }

  // Asks for the answer to all turns, and shows it as it comes.
  async answer(fields) {
    const body = { ...fields, messages: this.messages(), stream: true, stream_options: { include_usage: true } };
    const turn = {};
    const copy = button("Copy", () => navigator.clipboard.writeText(answer.message.content));
    const again = button("Regenerate", () => this.go(() => this.cut(this.turns.indexOf(turn))), { class: "quiet starts" });
    const answer = new Answer(navigator.clipboard ? [again, copy] : [again], (results) => {
      this.go(() => results.forEach((message) => this.addResult(message)));
    });
    turn.message = answer.message;
    turn.node = answer.node;
    this.add(turn);
    this.abort = new AbortController();
    this.showRunning(true);
    let problem = null;
    try {
      await this.stream(body, answer);
    } catch (error) {
      problem = this.problem(error);
    }
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.abort = null;
    this.showRunning(false);
    this.keepEndInView(() => answer.end(problem, problem === STOPPED));
  }

  messages() {
    const system = this.controls.system;
    const turns = this.turns.map((turn) => turn.message).filter((message) => message.content || message.tool_calls || message.role !== "assistant");
    return [...(system ? [{ role: "system", content: system }] : []), ...turns];
  }

  async stream(body, answer) {
    const response = await request("v1/chat/completions", { body, signal: this.abort.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      if (answer.id === null) this.onAnswer(chunk.id);
      answer.take(chunk);
      this.showSoon(answer);
    }
    throw new ApiError("The connection was lost before the answer was complete.", 0);
  }

  // Shows an answer once a frame: its chunks may come faster than the page can be laid out.
  showSoon(answer) {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.keepEndInView(() => answer.show());
    });
  }

  problem(error) {
    if (error.name === "AbortError") return STOPPED;
    if (error.status === 401) askForKey();
    if (!(error instanceof ApiError)) console.error(error);
    return error.message;
  }

  showRunning(isRunning) {
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    this.list.classList.toggle("running", isRunning);
  }

  // Scrolls with the text, unless the reader has scrolled up.
  keepEndInView(change) {
    const { list } = this;
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PIXELS;
    change();
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }
}
