// Text of an answer as it streams in: paragraphs, and blocks of code between fences of backquotes or tildes.

import { element } from "./dom.js";

// Indent, marks and language of a line that is a fence, and the begin of a line that may become one.
const FENCE = /^([ \t]*)(`{3,}|~{3,})([^`]*)$/;
const FENCE_BEGIN = /^[ \t]*(`{0,2}|~{0,2}|(`{3,}|~{3,})[^`]*)$/;

const PIECE_CHARACTERS = 4000; // each change of a piece lays all of it out again

export class StreamedText {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.held = ""; // the begin of a line that may become a fence
    this.atLineStart = true;
    this.open(null);
  }

  // Begins a block of code after `fence`, or a paragraph if it is null.
  open(fence) {
    this.close();
    this.fence = fence;
    this.block = element(fence ? "code" : "p");
    this.node.append(fence ? element("pre", { tabindex: "0" }, this.block) : this.block);
    this.addPiece();
  }

  close() {
    if (!this.block) return;
    this.piece.data = this.piece.data.trimEnd();
    if (!this.fence && this.isEmpty) this.block.remove();
  }

  addPiece() {
    this.piece = document.createTextNode("");
    this.block.append(element("span", { class: "piece" }, this.piece));
  }

  get isEmpty() {
    return this.piece.length === 0 && this.block.children.length === 1;
  }

  // Adds what `text` has more than what was shown before.
  update(text) {
    if (text.length > this.text.length) this.append(text.slice(this.text.length));
  }

  append(text) {
    this.text += text;
    for (const line of (this.held + text).split(/(?<=\n)/)) {
      const isWhole = line.endsWith("\n");
      this.held = this.atLineStart && !isWhole && FENCE_BEGIN.test(line) ? line : "";
      if (this.held) continue;
      const fence = this.atLineStart && isWhole ? this.fenceIn(line) : null;
      if (fence) this.open(this.fence ? null : fence);
      else this.write(line);
    }
  }

  // The fence that a line is: outside of code one that opens, inside one that closes (CommonMark 0.31, 4.5).
  fenceIn(line) {
    const [, indent, marks, language] = FENCE.exec(line.trimEnd()) ?? [];
    if (marks === undefined) return null;
    const closes = () => language === "" && marks.startsWith(this.fence.marks) && indent.length < this.fence.indent + 4;
    return this.fence === null || closes() ? { indent: indent.length, marks } : null;
  }

  write(text) {
    if (this.fence === null && this.atLineStart && text.endsWith("\n") && !text.trim()) {
      if (!this.isEmpty) this.open(null);
      return;
    }
    if (this.atLineStart && this.piece.length > PIECE_CHARACTERS) this.addPiece();
    let shown = text;
    if (this.fence === null) shown = this.isEmpty && this.block === this.node.firstChild ? text.trimStart() : text;
    else if (this.atLineStart) shown = text.slice(Math.min(this.fence.indent, text.search(/[^ \t]|$/)));
    this.piece.appendData(shown);
    if (text) this.atLineStart = text.endsWith("\n");
  }

  // Writes what was held back, unless it closes the code; an answer that is JSON is shown indented.
  end() {
    if (this.fence && this.fenceIn(this.held)) this.open(null);
    else this.write(this.held);
    this.held = "";
    this.close();
    const json = indented(this.text);
    if (json !== undefined) this.node.replaceChildren(element("pre", { class: "json", tabindex: "0" }, element("code", {}, json)));
  }
}

const JSON_TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|[[\]{},:]|[^\s[\]{},:"]+/g;

// A JSON object or list with line breaks and indents, its numbers and keys as written; undefined if it is neither.
export function indented(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  try {
    JSON.parse(text);
  } catch {
    return undefined;
  }
  let made = "";
  let before = "";
  let depth = 0;
  for (const [token] of text.matchAll(JSON_TOKEN)) {
    const opened = before === "{" || before === "[";
    const closes = token === "}" || token === "]";
    if (closes) depth--;
    if (closes ? !opened : opened || before === ",") made += `\n${"  ".repeat(depth)}`;
    made += token === ":" ? ": " : token;
    if (token === "{" || token === "[") depth++;
    before = token;
  }
  return made;
}

// Parses JSON whose numbers JSON.stringify() writes as they were: 12345678901234567890 does not end in zeros.
export function parseAsWritten(text) {
  return JSON.parse(text, (_, value, context) => (typeof value === "number" && JSON.rawJSON ? JSON.rawJSON(context.source) : value));
}
