"""From results to figures: one table, one JSON document."""

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from server.commands.bench.load import Run
from server.commands.bench.scrape import Snapshot, idle_share, lag_quantile


class Percentiles(BaseModel):
    """p50, p90 and p99 in seconds."""

    model_config = ConfigDict(frozen=True)

    p50: float
    p90: float
    p99: float


class Report(BaseModel):
    """The figures of one run. Latencies count requests that ended well; token rates count all.

    `itl` is the time between two chunks with content, `tpot` a request's mean time per token after its first
    chunk; they differ where the server merges tokens into one chunk. `client_lag_p99_seconds` is this
    client's own lateness, contained in every latency.
    """

    model_config = ConfigDict(frozen=True)

    requests: int
    errors: int
    elapsed_seconds: float
    input_tokens: int
    output_tokens: int
    input_tokens_per_second: float
    output_tokens_per_second: float
    chunks: int
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    end_to_end: Percentiles | None
    device_idle_share: float | None
    loop_lag_p99_seconds: float | None
    client_lag_p99_seconds: float
    error_messages: dict[str, int]


def percentiles(values: list[float]) -> Percentiles | None:
    """Linear between the ranks; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)


def make_report(run: Run, before: Snapshot, after: Snapshot) -> Report:
    """Sum up a run."""
    good = [result for result in run.results if result.error is None]
    messages = [result.error for result in run.results if result.error is not None]
    input_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in run.results)
    client_lag = percentiles(run.client_lag_seconds)
    return Report(
        requests=len(run.results),
        errors=len(messages),
        elapsed_seconds=run.elapsed_seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_tokens_per_second=input_tokens / run.elapsed_seconds,
        output_tokens_per_second=output_tokens / run.elapsed_seconds,
        chunks=sum(len(result.chunk_seconds) for result in run.results),
        ttft=percentiles([result.ttft_seconds for result in good]),
        itl=percentiles([gap for result in good for gap in np.diff(result.chunk_seconds).tolist()]),
        tpot=percentiles([tpot for result in good if (tpot := result.tpot_seconds) is not None]),
        end_to_end=percentiles([result.end_to_end_seconds for result in good]),
        device_idle_share=idle_share(before, after, run.elapsed_seconds),
        loop_lag_p99_seconds=lag_quantile(before, after, 0.99),
        client_lag_p99_seconds=client_lag.p99 if client_lag else 0.0,
        error_messages={message: messages.count(message) for message in dict.fromkeys(messages)},
    )


def table(report: Report) -> Table:
    """The figures as a person reads them."""
    result = Table()
    result.add_column("")
    for name in ("total", "p50", "p90", "p99"):
        result.add_column(name, justify="right")

    def total(name: str, value: str) -> None:
        result.add_row(name, value, "", "", "")

    def latency(name: str, values: Percentiles | None) -> None:
        shown = (
            [_milliseconds(value) for value in (values.p50, values.p90, values.p99)] if values else ["–"] * 3
        )
        result.add_row(name, "", *shown)

    total("requests", f"{report.requests:,}")
    total("errors", f"{report.errors:,}")
    total("seconds", f"{report.elapsed_seconds:.2f}")
    total("input tokens/s", f"{report.input_tokens_per_second:,.1f}")
    total("output tokens/s", f"{report.output_tokens_per_second:,.1f}")
    total("tokens per chunk", f"{report.output_tokens / max(1, report.chunks):.2f}")
    latency("TTFT ms", report.ttft)
    latency("ITL ms (between chunks)", report.itl)
    latency("TPOT ms", report.tpot)
    latency("end to end ms", report.end_to_end)
    total("device idle", "–" if report.device_idle_share is None else f"{report.device_idle_share:.1%}")
    for name, lag in (
        ("loop lag ms", report.loop_lag_p99_seconds),
        ("client's own lag ms", report.client_lag_p99_seconds),
    ):
        result.add_row(name, "", "", "", "–" if lag is None else _milliseconds(lag))
    return result


def to_json(report: Report, settings: dict[str, Any]) -> dict[str, Any]:
    """The document `--json` writes: what was asked, what came out."""
    return {"settings": settings, "report": report.model_dump()}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
