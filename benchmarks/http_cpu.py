"""What HTTP costs: a live server against the engine in this process, interleaved.

    python -m benchmarks.http_cpu [--streams 16] [--rounds 5]

Throughput: the same requests through both, as many streams as `--streams`. First chunk: one request at a time
on an idle server, against the device's time for the prefill step of an equally long prompt.
"""

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.common import Served, StepRecorder, generate, parser, prompts, serve, show
from engine import Engine
from engine.config import EngineConfig
from server.commands.bench.client import Client
from server.commands.bench.load import drive
from server.commands.bench.workload import jobs

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
PREFILL_TOKENS = 512  # one step of the default token budget
KV_TOKENS = 16_384


def main() -> None:
    """Start both sides, measure, print one table."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--streams", type=int, default=16)
    flags.add_argument("--rounds", type=int, default=5, help="rounds of the throughput comparison")
    flags.add_argument("--singles", type=int, default=20, help="requests of the first-chunk comparison")
    flags.add_argument("--dtype", default="auto")
    arguments = flags.parse_args()
    with serve("--kv-tokens", str(KV_TOKENS), "--dtype", arguments.dtype, "--no-prefix-cache") as served:
        rows = asyncio.run(measure(served, arguments))
    show(f"HTTP against in-process, {arguments.streams} streams", rows, arguments.json)


async def measure(served: Served, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both comparisons."""
    recorder = StepRecorder()
    config = EngineConfig(kv_tokens=KV_TOKENS, dtype=arguments.dtype, prefix_cache=False)
    engine = await Engine.start(config, observer=recorder)
    client = Client(served.url)
    try:
        throughput = await compare_throughput(
            client, served.model, engine, arguments.streams, arguments.rounds
        )
        first_chunk = await compare_first_chunk(client, served.model, engine, recorder, arguments.singles)
    finally:
        await engine.stop()
    return [throughput, first_chunk]


async def compare_throughput(
    client: Client, model: str, engine: Engine, streams: int, rounds: int
) -> dict[str, Any]:
    """Output tokens per second through HTTP and without it."""
    tokens = streams * OUTPUT_TOKENS
    http, direct = [], []
    for round_ in range(rounds + 1):  # the first one warms up
        elapsed = await generate(engine, prompts(streams, PROMPT_TOKENS, round_), OUTPUT_TOKENS)
        direct.append(tokens / elapsed)
        run = await drive(
            client, jobs([(PROMPT_TOKENS, OUTPUT_TOKENS)] * streams, model, seed=round_), streams
        )
        assert not any(result.error for result in run.results), run.results[0].error
        http.append(tokens / run.elapsed_seconds)
    return row("output tokens/s", http[1:], direct[1:])


async def compare_first_chunk(
    client: Client, model: str, engine: Engine, recorder: StepRecorder, singles: int
) -> dict[str, Any]:
    """Milliseconds to the first content over HTTP at idle, and of a prefill step of as many tokens."""
    http, direct = [], []
    for single in range(singles + 1):
        recorder.steps.clear()
        await generate(engine, prompts(1, PREFILL_TOKENS, single), 1)
        direct.append(sum(step.device_seconds for step in recorder.steps) * 1e3)
        result = await client.stream(jobs([(PREFILL_TOKENS, 4)], model, seed=single)[0])
        assert result.error is None, result.error
        http.append(result.ttft_seconds * 1e3)
    return row(f"first chunk against prefill of {PREFILL_TOKENS} tokens, ms", http[1:], direct[1:])


def row(name: str, http: list[float], direct: list[float]) -> dict[str, Any]:
    """Medians, and the median of the pairs' ratios."""
    return {
        "what": name,
        "HTTP": statistics.median(http),
        "in process": statistics.median(direct),
        "ratio": statistics.median(one / other for one, other in zip(http, direct, strict=True)),
    }


if __name__ == "__main__":
    main()
