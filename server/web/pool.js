// The page pool as a map: a square for each cell of pages, filled by what its pages hold.

import { byId, count, element, setText, share } from "./dom.js";

const STATES = ["used", "shared", "cached"];
const LEGEND = { used: "used by one", shared: "shared", cached: "cached", free: "free" };
const GAP = 1; // of the device's pixels, twice that on dense screens

export class PoolMap {
  constructor() {
    this.canvas = byId("pool");
    this.size = byId("pool-size");
    this.numbers = {};
    for (const [state, label] of Object.entries(LEGEND)) {
      this.numbers[state] = element("b", {}, "–");
      byId("legend").append(element("li", { class: state }, `${label} `, this.numbers[state]));
    }
    this.peak = element("b", {}, "–");
    byId("legend").append(element("li", { class: "peak" }, "expected peak ", this.peak));
    this.pages = null;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(pages) {
    const isNew = this.pages?.cells !== pages.cells;
    this.pages = pages;
    const total = pages.used + pages.cached + pages.free;
    const counts = { ...pages, used: pages.used - pages.shared };
    for (const state of Object.keys(LEGEND)) setText(this.numbers[state], count(counts[state]));
    setText(this.peak, share(pages.predicted, total));
    const cell = pages.pages_per_cell > 1 ? `, a square is ${count(pages.pages_per_cell)}` : "";
    setText(this.size, `${count(total)} pages of ${pages.page_size} tokens${cell}`);
    this.canvas.setAttribute(
      "aria-label",
      `Page pool: of ${count(total)} pages ${count(counts.used)} are used by one sequence, ` +
        `${count(pages.shared)} shared, ${count(pages.cached)} cached, ${count(pages.free)} free`,
    );
    if (isNew) this.draw();
  }

  draw() {
    if (this.pages === null || !this.canvas.clientWidth) return;
    const density = devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * density);
    const height = Math.round(this.canvas.clientHeight * density);
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const style = getComputedStyle(this.canvas);
    const colors = Object.fromEntries([...STATES, "free"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const cells = this.pages.cells;
    const columns = columnsFor(cells.length / 3, width, height);
    const side = width / columns;
    const gap = Math.min(GAP * density, side / 4);
    for (let index = 0; index < cells.length / 3; index++) {
      const x = Math.round((index % columns) * side);
      const y = Math.round(Math.floor(index / columns) * side);
      const right = Math.round(((index % columns) + 1) * side - gap);
      const bottom = Math.round((Math.floor(index / columns) + 1) * side - gap);
      pen.fillStyle = colors.free;
      pen.fillRect(x, y, right - x, bottom - y);
      let from = bottom; // the states lie on each other, from the bottom up
      STATES.forEach((state, place) => {
        const part = parseInt(cells[3 * index + place], 16) / 15;
        if (!part) return;
        const to = Math.max(y, from - Math.max(1, Math.round(part * (bottom - y))));
        pen.fillStyle = colors[state];
        pen.fillRect(x, to, right - x, from - to);
        from = to;
      });
    }
  }
}

// The fewest columns of squares with which all rows fit.
function columnsFor(cells, width, height) {
  let columns = Math.max(1, Math.floor(Math.sqrt((cells * width) / height)));
  while (Math.ceil(cells / columns) * (width / columns) > height) columns++;
  return columns;
}
