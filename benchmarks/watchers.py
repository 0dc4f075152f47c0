"""What watchers of /live_stats cost: beside streams over real sockets, interleaved, and beside nothing.

    python -m benchmarks.watchers [--streams 64] [--rounds 5]

The model computes nothing, so that the loop is all there is to slow down. Clients and watchers run in
processes of their own. The processor time of the loop's thread per token is the figure to trust on a shared
machine: tokens per second also say what else ran. Beside nothing, it is a share of the wall time.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.common import parser, show
from benchmarks.in_process import drive, run
from benchmarks.requests import null_server
from server.live import MAX_WATCHERS

PROMPT_TOKENS = 128
IDLE_SECONDS = 3.0
WATCHERS = (0, 1, MAX_WATCHERS)
# Arguments: host, port, number of watchers. Reads and throws away, until it is ended.
READER = """
import selectors, socket, sys
selector = selectors.DefaultSelector()
for _ in range(int(sys.argv[3])):
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    connection.sendall(b"GET /live_stats HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    selector.register(connection, selectors.EVENT_READ)
while True:
    for key, _ in selector.select():
        key.fileobj.recv(1 << 16)
"""


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of watchers: medians over the rounds, ratios to none in the same round."""
    max_len = PROMPT_TOKENS + args.output_tokens
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in WATCHERS}
    async with null_server(args, max_len, kv_tokens=args.streams * (max_len + 16) * 4) as (url, _):
        idle = {number: await measure_idle(url, number) for number in WATCHERS}
        lengths = [(PROMPT_TOKENS, args.output_tokens)] * args.streams
        await drive(url, lengths, args.streams)
        for index in range(args.rounds):
            for number in WATCHERS if index % 2 else reversed(WATCHERS):
                found[number].append(await measure_with(url, number, lengths, args.streams))
    return [
        row_of(number, rounds, found[0]) | {"loop CPU % while idle": 100 * (idle[number] - idle[0])}
        for number, rounds in found.items()
    ]


@asynccontextmanager
async def watchers(url: str, number: int) -> AsyncIterator[None]:
    """A process with a number of watchers, until the block ends."""
    host, port = url.removeprefix("http://").split(":")
    reader = await asyncio.create_subprocess_exec(sys.executable, "-c", READER, host, port, str(number))
    try:
        yield
    finally:
        reader.kill()
        await reader.wait()


async def measure_idle(url: str, num_watchers: int) -> float:
    """Return the share of a core that the loop takes beside watchers alone."""
    async with watchers(url, num_watchers):
        await asyncio.sleep(0.5)  # until they have connected
        started = time.thread_time()
        await asyncio.sleep(IDLE_SECONDS)
        return (time.thread_time() - started) / IDLE_SECONDS


async def measure_with(
    url: str, num_watchers: int, lengths: list[tuple[int, int]], streams: int
) -> tuple[float, float]:
    """Run the streams beside watchers; return tokens/s and the loop's µs of processor time per token."""
    async with watchers(url, num_watchers):
        started = time.thread_time()
        report = await drive(url, lengths, streams)
        seconds = time.thread_time() - started
    if report["errors"]:
        raise RuntimeError(f"requests failed: {report['error_messages']}")
    tokens = report["output_tokens"]
    return tokens / report["elapsed_seconds"], 1e6 * seconds / tokens


def row_of(number: int, rounds: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the row of a number of watchers."""
    rates, costs = zip(*rounds, strict=True)
    return {
        "watchers": number,
        "tokens/s": statistics.median(rates),
        "ratio of tokens/s": statistics.median(a[0] / b[0] for a, b in zip(rounds, base, strict=True)),
        "loop CPU µs/token": statistics.median(costs),
        "ratio of CPU": statistics.median(a[1] / b[1] for a, b in zip(rounds, base, strict=True)),
    }


def main() -> None:
    """Measure, and print a row for each number of watchers."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--streams", type=int, default=64)
    flags.add_argument("--output-tokens", type=int, default=512)
    flags.add_argument("--step-milliseconds", type=float, default=10.0, help="time of the null model's step")
    flags.add_argument("--rounds", type=int, default=5)
    args = flags.parse_args()
    show(f"watchers beside {args.streams} streams", run(measure(args)), args.json)


if __name__ == "__main__":
    main()
