"""Every Prometheus metric, declared once. Gauges and totals are read from live state at each scrape.

The `vllm:` names, labels and buckets are those that dashboards and autoscalers know; ours are `monoloop_*`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.outputs import FinishReason
from engine.stats import EngineStats, RequestTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS"))

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STAGE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, *(2**power for power in range(4, 15)))
STEP_SECONDS = tuple(0.0005 * 2**power for power in range(15))
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20)
LAG = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
)
HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def token_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to `largest`."""
    series = [step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5)]
    return tuple(bound for bound in series if bound <= largest)


class Histogram:
    """Counts per bucket, on the loop only.

    prometheus_client's own takes a lock and about 3 µs per observation; this one 0.5 µs, and a loop that
    delivers 20,000 tokens a second observes each of them.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.largest = 0.0  # until a reader of the largest values resets it

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` (`times` times)."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.largest:
            self.largest = value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        running, result = 0, []
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            running += count
            result.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return result


class HistogramMeta(NamedTuple):
    """Name, help and buckets of a histogram."""

    name: str
    help: str
    bounds: tuple[float, ...]


class LiveValue(NamedTuple):
    """A gauge or total and how it is read from a snapshot of the engine."""

    name: str
    help: str
    read: Callable[[EngineStats], float]


HISTOGRAMS = {
    "ttft": HistogramMeta("vllm:time_to_first_token_seconds", "Arrival to first token", TTFT),
    "inter_token": HistogramMeta("vllm:inter_token_latency_seconds", "Time between two tokens", PER_TOKEN),
    "per_token": HistogramMeta(
        "vllm:request_time_per_output_token_seconds", "Decode time of a request per token", PER_TOKEN
    ),
    "end_to_end": HistogramMeta("vllm:e2e_request_latency_seconds", "Arrival to end of a request", STAGE),
    "queue": HistogramMeta("vllm:request_queue_time_seconds", "Arrival to first step", STAGE),
    "inference": HistogramMeta("vllm:request_inference_time_seconds", "First step to end", STAGE),
    "prefill": HistogramMeta("vllm:request_prefill_time_seconds", "First step to first token", STAGE),
    "decode": HistogramMeta("vllm:request_decode_time_seconds", "First token to end", STAGE),
    "preemptions": HistogramMeta("vllm:request_num_preemptions", "Preemptions of a request", PREEMPTIONS),
    "n": HistogramMeta("vllm:request_params_n", "Parameter n of requests", CHOICES),
    "iteration": HistogramMeta("vllm:iteration_tokens_total", "Tokens of a step", STEP_TOKENS),
    "step_tokens": HistogramMeta("monoloop_step_tokens", "Tokens of a step", STEP_TOKENS),
    "step_seconds": HistogramMeta("monoloop_step_seconds", "Time of a step on the device", STEP_SECONDS),
    "loop_lag": HistogramMeta(
        "monoloop_loop_lag_seconds", "Lateness of a 10 ms timer on the event loop", LAG
    ),
}
TOKEN_HISTOGRAMS = {
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request"),
    "generation_tokens": ("vllm:request_generation_tokens", "Output tokens of a request"),
    "max_tokens": ("vllm:request_params_max_tokens", "Parameter max_tokens of requests"),
}
GAUGES = (
    LiveValue("vllm:num_requests_running", "Requests in the running batch", lambda stats: stats.running),
    LiveValue("vllm:num_requests_waiting", "Requests waiting for a place", lambda stats: stats.waiting),
    LiveValue(
        "vllm:kv_cache_usage_perc", "Share of KV pages that requests hold, 0 to 1", lambda s: s.kv_cache_usage
    ),
    LiveValue("monoloop_pages_used", "KV pages held by requests", lambda stats: stats.pages_used),
    LiveValue(
        "monoloop_pages_predicted",
        "KV pages that the running requests are expected to hold at most",
        lambda stats: stats.pages_predicted,
    ),
    LiveValue("monoloop_pages_cached", "KV pages kept only for reuse", lambda stats: stats.pages_cached),
    LiveValue("monoloop_pages_free", "KV pages that hold nothing", lambda stats: stats.pages_free),
    LiveValue(
        "monoloop_device_idle_share",
        "Share of the last 30 s that the device stood still while work waited",
        lambda stats: stats.device_idle_share,
    ),
)
COUNTERS = (
    LiveValue("vllm:prompt_tokens", "Prompt tokens received", lambda stats: stats.prompt_tokens_total),
    LiveValue("vllm:generation_tokens", "Tokens generated", lambda stats: stats.generation_tokens_total),
    LiveValue(
        "vllm:prompt_tokens_cached",
        "Prompt tokens not computed again",
        lambda s: s.cached_prompt_tokens_total,
    ),
    LiveValue(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up for reuse",
        lambda s: s.queried_prompt_tokens_total,
    ),
    LiveValue(
        "vllm:prefix_cache_hits", "Prompt tokens found for reuse", lambda s: s.cached_prompt_tokens_total
    ),
    LiveValue(
        "monoloop_evicted_pages", "KV pages given up for others", lambda stats: stats.evicted_pages_total
    ),
    LiveValue(
        "vllm:num_preemptions", "Times a request gave up its pages", lambda stats: stats.preemptions_total
    ),
    LiveValue(
        "vllm:corrupted_requests",
        "Requests that ended because their logits were not finite",
        lambda stats: stats.corrupted_requests_total,
    ),
    LiveValue("monoloop_steps", "Steps the device has computed", lambda stats: stats.steps_total),
    LiveValue(
        "monoloop_mixed_steps",
        "Steps that computed prompt tokens and decoded in the same batch",
        lambda stats: stats.mixed_steps_total,
    ),
    LiveValue(
        "monoloop_constrained_steps",
        "Steps whose sampling waited for masks of grammars",
        lambda stats: stats.constrained_steps_total,
    ),
    LiveValue(
        "monoloop_device_idle_seconds",
        "Seconds the device was idle while a sequence could run",
        lambda stats: stats.device_idle_seconds_total,
    ),
)


class Metrics(Collector):
    """The registry, and the engine's observer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(self)
        self._metas = dict(HISTOGRAMS)
        self._histograms = {key: Histogram(meta.bounds) for key, meta in HISTOGRAMS.items()}
        self._finished = dict.fromkeys(FinishReason, 0)
        self._http: dict[tuple[str, str, str], int] = {}
        self._http_seconds: dict[str, Histogram] = {}
        self._stats: Callable[[], EngineStats] | None = None
        self._labels = ("", "0")

    def attach(self, stats: Callable[[], EngineStats], model_name: str, max_model_len: int) -> None:
        """The engine is there: its name for the label, its length for the buckets, its live state."""
        self._stats = stats
        self._labels = (model_name, "0")
        for key, (name, text) in TOKEN_HISTOGRAMS.items():
            self._metas[key] = HistogramMeta(name, text, token_buckets(max_model_len))
            self._histograms[key] = Histogram(self._metas[key].bounds)

    def histogram(self, key: str) -> Histogram:
        """The histogram of a key of HISTOGRAMS."""
        return self._histograms[key]

    # What the engine reports (engine.stats.EngineObserver)

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None:
        """A step took `seconds` on the device."""
        self._histograms["step_seconds"].observe(seconds)
        self._histograms["step_tokens"].observe(num_tokens)
        self._histograms["iteration"].observe(num_tokens)

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self._histograms["ttft"].observe(seconds)

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """A request got more tokens: each counts with its share of the time."""
        self._histograms["inter_token"].observe(seconds / num_tokens, num_tokens)

    def loop_lag(self, seconds: float) -> None:
        """A timer of the loop came late."""
        self._histograms["loop_lag"].observe(seconds)

    def request_finished(self, times: RequestTimes) -> None:
        """A request ended, for whatever reason."""
        self._finished[times.finish_reason] += 1
        observed: dict[str, float | None] = {
            "end_to_end": times.end_to_end_seconds,
            "queue": times.queue_seconds,
            "prefill": times.prefill_seconds,
            "decode": times.decode_seconds,
            "preemptions": times.preemptions,
            "prompt_tokens": times.prompt_tokens,
            "generation_tokens": times.generation_tokens,
            "max_tokens": times.max_tokens,
        }
        if times.queue_seconds is not None:
            observed["inference"] = times.end_to_end_seconds - times.queue_seconds
        if times.decode_seconds is not None and times.generation_tokens > 1:
            observed["per_token"] = times.decode_seconds / (times.generation_tokens - 1)
        for key, value in observed.items():
            if value is not None:
                self._histograms[key].observe(value)

    # What the HTTP side reports

    def request_params(self, n: int) -> None:
        """A request for text was accepted."""
        self._histograms["n"].observe(n)

    def http_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered; `route` is a template."""
        key = (method if method in METHODS else "other", route, str(status))
        self._http[key] = self._http.get(key, 0) + 1
        self._http_seconds.setdefault(route, Histogram(HTTP)).observe(seconds)

    # What Prometheus reads

    def exposition(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        yield from self._collect_http()
        if self._stats is None:
            return
        stats = self._stats()
        for gauge in GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=LABELS)
            family.add_metric(self._labels, gauge.read(stats))
            yield family
        for counter in COUNTERS:
            total = CounterMetricFamily(counter.name, counter.help, labels=LABELS)
            total.add_metric(self._labels, counter.read(stats))
            yield total
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended", labels=(*LABELS, "finished_reason")
        )
        for reason, count in self._finished.items():
            finished.add_metric((*self._labels, reason.value), count)
        yield finished
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV pool", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        num_pages = stats.pages_used + stats.pages_cached + stats.pages_free
        config.add_metric((*self._labels, str(stats.page_size), str(num_pages)), 1)
        yield config
        for key, meta in self._metas.items():
            yield family_of(meta, LABELS, [(self._labels, self._histograms[key])])

    def _collect_http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "monoloop_http_requests", "Answers by route and status", labels=("method", "route", "status")
        )
        for labels, count in self._http.items():
            requests.add_metric(labels, count)
        yield requests
        seconds = HistogramMeta(
            "monoloop_http_request_duration_seconds", "Time to the end of the answer", HTTP
        )
        yield family_of(seconds, ("route",), [((route,), h) for route, h in self._http_seconds.items()])


def family_of(
    meta: HistogramMeta, names: tuple[str, ...], series: list[tuple[tuple[str, ...], Histogram]]
) -> HistogramMetricFamily:
    """A histogram with its labelled series."""
    family = HistogramMetricFamily(meta.name, meta.help, labels=names)
    for labels, histogram in series:
        family.add_metric(labels, histogram.buckets(), sum_value=histogram.total)
    return family
