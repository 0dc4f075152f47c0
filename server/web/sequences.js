// The table of sequences: one row each, running ones first, those of this page marked.

import { byId, count, duration, element, setText } from "./dom.js";

const HINTS = {
  waiting: "waits for a place",
  prefill: "its prompt is computed",
  decode: "tokens are generated",
  preempted: "gave up its pages and waits",
  recompute: "its tokens are computed again",
};

export class Sequences {
  constructor() {
    this.body = byId("sequences");
    this.counts = byId("sequences-count");
    this.rows = [];
    this.mine = new Set();
  }

  show(event) {
    const { sequences } = event;
    const hidden = event.running + event.waiting - sequences.length;
    const more = hidden > 0 ? `, ${count(hidden)} more` : "";
    setText(this.counts, `${count(event.running)} running, ${count(event.waiting)} waiting${more}`);
    while (this.rows.length < sequences.length) this.rows.push(new Row(this.body));
    for (const row of this.rows.splice(sequences.length)) row.node.remove();
    sequences.forEach((sequence, place) => this.rows[place].show(sequence, this.isMine(sequence.id)));
  }

  // Sequences of an answer have its id and a number behind it.
  isMine(id) {
    return this.mine.has(id.slice(0, id.lastIndexOf("-"))) || this.mine.has(id);
  }
}

class Row {
  constructor(body) {
    this.name = element("th", { scope: "row" });
    this.phase = element("span", { class: "phase" });
    this.progress = element("progress");
    this.numbers = Array.from({ length: 5 }, () => element("td", { class: "number" }));
    this.node = element("tr", {}, this.name, element("td", {}, this.phase), element("td", {}, this.progress), ...this.numbers);
    body.append(this.node);
  }

  show(sequence, isMine) {
    const { phase, prompt_tokens: prompt, computed_tokens: computed, output_tokens: output } = sequence;
    setText(this.name, isMine ? "this chat" : shortId(sequence.id));
    this.name.title = sequence.id;
    this.node.classList.toggle("mine", isMine);
    setText(this.phase, phase);
    this.phase.title = HINTS[phase];
    this.node.dataset.phase = phase;
    const isDecoding = phase === "decode";
    this.progress.max = isDecoding ? sequence.max_tokens : prompt + output;
    this.progress.value = isDecoding ? output : computed;
    this.progress.setAttribute("aria-label", isDecoding ? "of the tokens it may generate" : "of its tokens computed");
    const { cached_tokens: cached, pages, age_seconds: age } = sequence;
    const texts = [count(prompt), count(cached), count(output), count(pages), duration(age)];
    texts.forEach((text, place) => setText(this.numbers[place], text));
  }
}

function shortId(id) {
  const [, kind, rest] = /^([a-z]+)[-_](.*)$/.exec(id) ?? [null, "", id];
  const number = /-(\d+)$/.exec(rest);
  return `${kind} ${rest.slice(0, 6)}${number && number[1] !== "0" ? `-${number[1]}` : ""}`.trim();
}
