// Elements and figures. Everything shown is set as text: nothing a model writes can become markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function button(label, action, attributes = {}) {
  const made = element("button", { type: "button", class: "quiet", ...attributes }, label);
  made.addEventListener("click", action);
  return made;
}

// Writes text only where it changes: a few hundred cells are looked at four times a second.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

// Three digits and a unit, such as 84.2 ms, 1.31 s, 12 min.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 100) return `${digits(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function digits(number) {
  if (number >= 100 || number === 0) return count(number);
  return number.toFixed(number >= 10 ? 1 : 2);
}

export function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
}
