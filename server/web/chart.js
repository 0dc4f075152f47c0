// A small curve over the last minute: a line, and for times the largest value as a faint one above it.

import { drawing, element, setText } from "./dom.js";

const SPAN_SECONDS = 60;
const WIDTH = 240;
const HEIGHT = 56;

export class Chart {
  constructor(title, format) {
    this.format = format;
    this.points = []; // [time, value or null, largest or null]
    this.value = element("span", { class: "value" }, "–");
    this.scale = element("span", { class: "scale" }, "");
    this.faint = drawing("path", { class: "faint-line" });
    this.line = drawing("path", { class: "line" });
    this.area = drawing("path", { class: "area" });
    this.picture = drawing(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
      this.area, this.faint, this.line,
    );
    this.title = title;
    this.node = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("span", {}, title), this.value),
      this.picture,
      this.scale,
    );
  }

  add(time, value, largest = null) {
    this.points.push([time, value, largest]);
    while (this.points[0][0] < time - SPAN_SECONDS) this.points.shift();
    const shown = value ?? this.points.findLast((point) => point[1] !== null)?.[1] ?? null;
    const text = shown === null ? "–" : this.format(shown);
    setText(this.value, text);
    this.picture.setAttribute("aria-label", `${this.title}, last minute; now ${text}`);
    this.draw(time);
  }

  draw(now) {
    const most = Math.max(0, ...this.points.map((point) => point[2] ?? point[1] ?? 0));
    const top = ceiling(most);
    setText(this.scale, most > 0 ? this.format(top) : "");
    const x = (time) => WIDTH * (1 - (now - time) / SPAN_SECONDS);
    const y = (value) => HEIGHT - 1 - (HEIGHT - 3) * (value / (top || 1));
    const line = path(this.points, 1, x, y);
    this.line.setAttribute("d", line.d);
    this.area.setAttribute("d", line.areas);
    this.faint.setAttribute("d", path(this.points, 2, x, y).d);
  }
}

// The next of 1, 2, 5, 10, 20 … so that the scale seldom changes.
function ceiling(value) {
  if (!(value > 0)) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((bound) => bound >= value);
}

// Values that are null leave no gap unless they go on for long: one token a second is a line, too.
const GAP_SECONDS = 5;

function path(points, column, x, y) {
  let d = "";
  let areas = "";
  let start = null;
  let last = null;
  const close = () => {
    if (start === null) return;
    areas += `V${HEIGHT}H${x(start).toFixed(1)}Z`;
    start = null;
  };
  for (const point of points) {
    if (point[column] === null) continue;
    const place = `${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`;
    if (last === null || point[0] - last > GAP_SECONDS) {
      close();
      start = point[0];
      d += `M${place}h.01`;
      areas += `M${x(point[0]).toFixed(1)} ${HEIGHT}L${place}`;
    }
    d += `L${place}`;
    areas += `L${place}`;
    last = point[0];
  }
  close();
  return { d, areas };
}
