// The settings of the chat: system prompt, sampling, tools and schema. They are kept in this browser.

import { byId, element } from "./dom.js";
import { Kept } from "./store.js";
import { parseAsWritten } from "./text.js";

const MAX_INT = 2 ** 31 - 1;
const fraction = (arrow) => ({ step: "any", "data-arrow": arrow });
// The ranges of the API; a seed is as large as a number can be without a loss.
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, ...fraction(0.05) },
  { name: "top_p", label: "Top p", min: 0, max: 1, ...fraction(0.01) },
  { name: "top_k", label: "Top k", min: -1, max: MAX_INT },
  { name: "min_p", label: "Min p", min: 0, max: 1, ...fraction(0.01) },
  { name: "max_tokens", label: "Max tokens", min: 1, max: MAX_INT },
  { name: "seed", label: "Seed", min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, ...fraction(0.1) },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, ...fraction(0.1) },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, ...fraction(0.01) },
];
const TEXTS = [
  { name: "system", label: "System prompt", placeholder: "None" },
  { name: "stop", label: "Stop strings, one a line", placeholder: "None" },
  { name: "schema", label: "JSON schema of the answer", placeholder: '{"type": "object", …}', isJson: true },
  { name: "tools", label: "Tools, as a JSON list", placeholder: '[{"type": "function", "function": …}]', isJson: true },
];

export class Controls {
  constructor() {
    this.form = byId("controls");
    this.toggle = byId("controls-button");
    this.inputs = {};
    this.kept = new Kept("localStorage", "monoloop-settings");
    const numbers = NUMBERS.map(({ label, ...rest }) =>
      // The number pads of some phones have no minus.
      this.field(label, "input", { type: "number", inputmode: rest.min < 0 ? "text" : "decimal", placeholder: "default", ...rest }),
    );
    const texts = TEXTS.map(({ label, isJson, ...rest }) => this.field(label, "textarea", { rows: "2", ...(isJson ? { class: "code", spellcheck: "false" } : {}), ...rest }));
    const reset = element("button", { type: "reset", class: "quiet" }, "Reset all");
    this.form.append(texts[0], element("div", { class: "numbers-grid" }, ...numbers), ...texts.slice(1), reset);
    this.restore();
    this.form.addEventListener("input", () => this.keep());
    this.form.addEventListener("keydown", (event) => this.step(event));
    this.form.addEventListener("reset", () => setTimeout(() => this.keep()));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.toggle.addEventListener("click", () => this.show(this.form.hidden));
  }

  field(label, tag, attributes) {
    const input = element(tag, attributes);
    this.inputs[attributes.name] = input;
    return element("label", { class: tag }, element("span", {}, label), input);
  }

  // The arrow keys change a fraction in steps of `data-arrow`; typed, it may have any digits.
  step(event) {
    const input = event.target;
    if (!input.dataset.arrow || (event.key !== "ArrowUp" && event.key !== "ArrowDown")) return;
    event.preventDefault();
    input.step = input.dataset.arrow;
    if (event.key === "ArrowUp") input.stepUp();
    else input.stepDown();
    input.step = "any";
    this.keep();
  }

  show(isShown) {
    this.form.hidden = !isShown;
    this.toggle.setAttribute("aria-expanded", String(isShown));
  }

  keep() {
    for (const { name } of TEXTS) this.inputs[name].setCustomValidity("");
    const values = Object.entries(this.inputs).map(([name, input]) => [name, input.value]);
    this.kept.set(JSON.stringify(Object.fromEntries(values.filter(([, value]) => value !== ""))));
    this.mark();
  }

  restore() {
    let kept = {};
    try {
      kept = JSON.parse(this.kept.text) ?? {};
    } catch {
      this.kept.set(null);
    }
    for (const [name, input] of Object.entries(this.inputs)) input.value = kept[name] ?? "";
    this.mark();
  }

  // The button says how many settings differ from the model's own.
  mark() {
    const number = Object.values(this.inputs).filter((input) => input.value !== "").length;
    this.toggle.textContent = number ? `Settings (${number})` : "Settings";
  }

  // The fields of a request, or null if one of them is wrong; then it is shown which.
  fields() {
    const found = {};
    for (const { name } of NUMBERS) {
      if (this.inputs[name].value !== "") found[name] = Number(this.inputs[name].value);
    }
    const stop = this.inputs.stop.value.split("\n").filter(Boolean);
    if (stop.length) found.stop = stop;
    const schema = this.json("schema");
    if (schema !== undefined) {
      found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    const tools = this.json("tools");
    if (tools !== undefined) found.tools = tools;
    if (this.form.checkValidity()) return found;
    this.show(true);
    this.form.reportValidity();
    return null;
  }

  json(name) {
    const input = this.inputs[name];
    if (input.value.trim() === "") return undefined;
    try {
      return parseAsWritten(input.value);
    } catch (error) {
      input.setCustomValidity(`This is not JSON: ${error.message}`);
      return undefined;
    }
  }

  get system() {
    return this.inputs.system.value.trim();
  }
}
