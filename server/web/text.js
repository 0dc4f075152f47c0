// Text of an answer as it streams in: paragraphs, and blocks of code between fences of backquotes.

import { element } from "./dom.js";

const FENCE = /^```[^`]*$/;

export class StreamedText {
  constructor(node) {
    this.node = node;
    this.restart();
  }

  restart() {
    this.node.replaceChildren();
    this.target = null;
    this.text = "";
    this.held = ""; // the begin of a line that may become a fence
    this.atLineStart = true;
    this.isCode = false;
    this.open(false);
  }

  open(isCode) {
    if (this.target) this.target.data = this.target.data.trimEnd();
    this.isCode = isCode;
    this.target = document.createTextNode("");
    const block = isCode ? element("code", {}, this.target) : element("p", {}, this.target);
    this.node.append(isCode ? element("pre", { tabindex: "0" }, block) : block);
  }

  append(text) {
    this.text += text;
    const lines = (this.held + text).split(/(?<=\n)/);
    this.held = "";
    lines.forEach((line, index) => {
      const isWhole = line.endsWith("\n");
      if (this.atLineStart && FENCE.test(line.trimEnd()) && isWhole) {
        this.open(!this.isCode);
      } else if (this.atLineStart && !isWhole && index === lines.length - 1 && mayBeFence(line)) {
        this.held = line;
      } else if (line) {
        const isFirst = !this.isCode && this.target.length === 0;
        this.target.appendData(isFirst ? line.trimStart() : line);
        this.atLineStart = isWhole;
      }
    });
  }

  // Writes what was held back; an answer that is JSON is shown indented.
  end() {
    if (this.held && !FENCE.test(this.held)) this.target.appendData(this.held);
    this.held = "";
    const parsed = parseJson(this.text);
    if (parsed !== undefined) this.node.replaceChildren(jsonBlock(parsed));
    for (const paragraph of this.node.querySelectorAll("p:empty")) paragraph.remove();
  }
}

function mayBeFence(line) {
  return "```".startsWith(line.slice(0, 3)) && !line.slice(3).includes("`");
}

// The object or list that a text is, or undefined.
export function parseJson(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

export function jsonBlock(value) {
  return element("pre", { class: "json", tabindex: "0" }, element("code", {}, JSON.stringify(value, null, 2)));
}
