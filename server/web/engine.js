// The engine as it works: figures, curves, pages and sequences of each event.

import { Chart } from "./chart.js";
import { byId, count, digits, duration, element, setText, share } from "./dom.js";
import { PoolMap } from "./pool.js";
import { Sequences } from "./sequences.js";

const percent = (value) => share(value, 1);
const milli = (times, which) => times?.[`${which}_seconds`] ?? null;

// TTFT: time to first token; ITL: inter-token latency. Title, format, and the value and the largest value of an event.
const CURVES = [
  ["Output tokens/s", digits, (event) => [event.output_tokens_per_second]],
  ["Prompt tokens/s", digits, (event) => [event.prompt_tokens_per_second]],
  ["TTFT", duration, ({ ttft }) => [milli(ttft, "mean"), milli(ttft, "largest")]],
  ["ITL", duration, ({ itl }) => [milli(itl, "mean"), milli(itl, "largest")]],
  ["Loop lag", duration, (event) => [milli(event.loop_lag, "mean"), milli(event.loop_lag, "largest")]],
  ["Device idle", percent, (event) => [event.device_idle_share]],
];

const FIGURES = [
  ["Running", (event) => count(event.running)],
  ["Waiting", (event) => count(event.waiting)],
  ["Step", (event) => duration(event.step?.mean_seconds)],
  ["Tokens a step", (event) => (event.tokens_per_step === null ? "–" : digits(event.tokens_per_step))],
  ["Prefix hits", ({ totals }) => share(totals.cached_prompt_tokens, totals.prompt_tokens)],
  ["Preemptions", ({ totals }) => count(totals.preemptions)],
  ["Acceptance", ({ totals }) => share(totals.accepted_drafts, totals.drafts)],
];

const TOTALS = [
  ["Prompt tokens", ({ totals }) => count(totals.prompt_tokens)],
  ["of them cached", ({ totals }) => count(totals.cached_prompt_tokens)],
  ["Output tokens", ({ totals }) => count(totals.output_tokens)],
  ["Steps", ({ totals }) => count(totals.steps)],
  ["Evicted pages", ({ totals }) => count(totals.evicted_pages)],
];

export class EngineView {
  constructor() {
    this.charts = CURVES.map(([title, format, read]) => ({ read, chart: new Chart(title, format) }));
    byId("charts").append(...this.charts.map(({ chart }) => chart.node));
    this.numbers = [...list("figures", FIGURES), ...list("totals", TOTALS)];
    this.pool = new PoolMap();
    this.sequences = new Sequences();
  }

  show(event) {
    const now = performance.now() / 1000;
    for (const { read, chart } of this.charts) chart.add(now, ...read(event));
    for (const { read, node } of this.numbers) setText(node, read(event));
    this.pool.show(event.pages);
    this.sequences.show(event);
    setText(byId("model"), event.model);
    const used = share(event.pages.used, event.pages.used + event.pages.cached + event.pages.free);
    setText(byId("glance"), `${digits(event.output_tokens_per_second)} tokens/s · pages ${used}`);
  }
}

function list(id, figures) {
  return figures.map(([label, read]) => {
    const node = element("dd", {}, "–");
    byId(id).append(element("div", {}, element("dt", {}, label), node));
    return { read, node };
  });
}
