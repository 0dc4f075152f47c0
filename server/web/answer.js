// One answer on the page: reasoning folded, text, tool calls, and the figures of how it was made.

import { button, count, digits, duration, element, setText } from "./dom.js";
import { StreamedText, indented } from "./text.js";

export class Answer {
  // `actions`: buttons that a complete answer has; `returnResults(results)` goes on after tool calls.
  constructor(actions, returnResults) {
    this.message = { role: "assistant", content: "" };
    this.calls = []; // CallCards
    this.returnResults = returnResults;
    this.thoughts = element("div", { class: "thoughts" });
    this.summary = element("summary", {}, "Reasoning …");
    this.reasoning = element("details", { class: "reasoning", hidden: "" }, this.summary, this.thoughts);
    this.content = element("div", { class: "content" });
    this.tools = element("div", { class: "tools" });
    this.note = element("p", { class: "note", role: "alert", hidden: "" });
    this.figures = element("ul", { class: "numbers", "aria-label": "Figures of this answer" });
    this.buttons = element("div", { class: "turn-actions", hidden: "" }, ...actions);
    this.node = element(
      "article",
      { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.reasoning, this.content, this.tools, this.note,
      element("footer", {}, this.figures, this.buttons),
    );
    this.text = new StreamedText(this.content);
    this.thought = new StreamedText(this.thoughts);
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.id = null;
    this.usage = null;
    this.finish = null;
  }

  // Takes a chunk of the stream; show() shows it.
  take(chunk) {
    this.id = chunk.id ?? this.id;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    if (reasoning) this.message.reasoning_content = (this.message.reasoning_content ?? "") + reasoning;
    if (content) this.message.content += content;
    for (const call of calls ?? []) (this.calls[call.index] ??= new CallCard(this.tools)).take(call);
    this.finish = choice.finish_reason ?? this.finish;
  }

  show() {
    const { content, reasoning_content: reasoning = "" } = this.message;
    this.reasoning.hidden = reasoning === "";
    this.thought.update(reasoning);
    this.text.update(content);
    for (const card of this.calls) card.show();
    this.figures.replaceChildren(...(this.first === null ? [] : [item("TTFT ", duration(this.ttft))]));
  }

  get ttft() {
    return (this.first - this.started) / 1000;
  }

  // Ends the answer; `problem` says why it is not complete, and `isAsked` if the reader stopped it.
  end(problem, isAsked) {
    this.show();
    this.node.setAttribute("aria-busy", "false");
    this.text.end();
    this.thought.end();
    for (const card of this.calls) card.end();
    this.buttons.hidden = false;
    const thoughts = this.usage?.completion_tokens_details?.reasoning_tokens;
    setText(this.summary, thoughts ? `Reasoning, ${count(thoughts)} tokens` : "Reasoning");
    if (this.calls.length) this.message.tool_calls = this.calls.map(({ call }) => call);
    const isWhole = problem === null && this.finish !== "length";
    if (this.calls.length && isWhole) this.tools.append(this.resultForm());
    if (problem !== null) {
      this.note.hidden = false;
      this.note.classList.toggle("calm", isAsked);
      setText(this.note, problem);
    }
    this.figures.replaceChildren(...this.items());
  }

  items() {
    const items = this.first === null ? [] : [item("TTFT ", duration(this.ttft))];
    const { usage } = this;
    if (usage) {
      const seconds = (this.last - this.first) / 1000;
      if (usage.completion_tokens > 1 && seconds > 0) {
        items.push(item("", digits((usage.completion_tokens - 1) / seconds), " tokens/s"));
      }
      items.push(item("", count(usage.completion_tokens), " tokens"), item("prompt ", count(usage.prompt_tokens)));
      items.push(item("cached ", count(usage.prompt_tokens_details?.cached_tokens ?? 0)));
    }
    if (this.finish) items.push(item("finish ", this.finish));
    return items;
  }

  // Fields for what the tools returned, and a button that goes on with it.
  resultForm() {
    const fields = this.calls.map(({ call }) =>
      element("textarea", { rows: "1", placeholder: `Result of ${call.function.name}`, "aria-label": `Result of ${call.function.name}` }),
    );
    const results = () => this.calls.map(({ call }, place) => ({ role: "tool", tool_call_id: call.id, content: fields[place].value }));
    const go = button("Return results", () => this.returnResults(results()), { class: "quiet starts" });
    return element("div", { class: "results" }, ...fields, go);
  }
}

function item(before, value, after = "") {
  return element("li", {}, before, element("b", {}, value), after);
}

// A tool call: its name, and its arguments, indented once they are complete.
class CallCard {
  constructor(list) {
    this.call = { id: "", type: "function", function: { name: "", arguments: "" } };
    this.name = element("b");
    this.shown = document.createTextNode("");
    const title = element("div", { class: "call-name" }, "Tool call ", this.name);
    list.append(element("div", { class: "call" }, title, element("pre", { tabindex: "0" }, element("code", {}, this.shown))));
  }

  take(delta) {
    this.call.id = delta.id ?? this.call.id;
    this.call.function.name += delta.function?.name ?? "";
    this.call.function.arguments += delta.function?.arguments ?? "";
  }

  show() {
    const { name, arguments: text } = this.call.function;
    setText(this.name, name);
    this.shown.appendData(text.slice(this.shown.length));
  }

  end() {
    const text = this.call.function.arguments;
    this.shown.data = indented(text) ?? text;
  }
}
