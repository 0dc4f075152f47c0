"""Start-up time and resident memory of a server, over thousands of requests.

    python -m benchmarks.memory [--dtype auto] [--kv-tokens 16384] [--requests 2000]

After a few short requests the whole pool is touched by prompts that fill it together; from then on memory
should stay where it is.
"""

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.common import Served, parser, serve, show
from server.commands.bench.client import Client
from server.commands.bench.load import drive
from server.commands.bench.workload import jobs

GIB = 2**30
FEW_REQUESTS = 3
FILL_PROMPT_TOKENS = 1_900
LOG_MARK = "since start"


def main() -> None:
    """Time some starts, then watch one server."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--dtype", default="auto")
    flags.add_argument("--kv-tokens", type=int, default=16_384)
    flags.add_argument("--requests", type=int, default=2_000)
    flags.add_argument("--starts", type=int, default=3)
    arguments = flags.parse_args()
    settings = ("--dtype", arguments.dtype, "--kv-tokens", str(arguments.kv_tokens))
    ready = []
    for _ in range(arguments.starts - 1):
        with serve(*settings) as served:
            ready.append(served.ready_seconds)
    with serve(*settings) as served:
        ready.append(served.ready_seconds)
        print(
            "".join(f"  {line}\n" for line in served.log.read_text().splitlines() if LOG_MARK in line), end=""
        )
        rows = asyncio.run(watch(served, arguments.kv_tokens, arguments.requests))
    rows.insert(0, {"when": f"seconds to /ready, median of {len(ready)}", "value": statistics.median(ready)})
    show(f"Memory with a pool of {arguments.kv_tokens:,} tokens, {arguments.dtype}", rows, arguments.json)


async def watch(served: Served, kv_tokens: int, requests: int) -> list[dict[str, Any]]:
    """Resident GiB at the start, with the pool touched, and over the requests after that."""
    client = Client(served.url)
    rows = [{"when": "GiB, ready", "value": served.rss_bytes() / GIB}]
    await drive(client, jobs([(128, 32)] * FEW_REQUESTS, served.model, seed=99), 1)
    rows.append({"when": f"GiB, after {FEW_REQUESTS} requests", "value": served.rss_bytes() / GIB})
    output_tokens = 64
    streams = kv_tokens // (FILL_PROMPT_TOKENS + output_tokens)
    fill = await drive(
        client, jobs([(FILL_PROMPT_TOKENS, output_tokens)] * streams, served.model, seed=0), streams
    )
    assert not any(result.error for result in fill.results), [result.error for result in fill.results]
    rows.append({"when": "GiB, pool touched", "value": served.rss_bytes() / GIB})
    seen = []
    for part in range(20):
        run = await drive(client, jobs([(32, 8)] * (requests // 20), served.model, seed=1 + part), 16)
        assert not any(result.error for result in run.results), [result.error for result in run.results]
        seen.append(served.rss_bytes() / GIB)
    middle = statistics.median(seen)
    spread = max(max(seen) - middle, middle - min(seen)) / middle
    rows.append({"when": f"GiB, median over {requests:,} requests after that", "value": middle})
    rows.append({"when": "± %, largest distance from it", "value": 100 * spread})
    return rows


if __name__ == "__main__":
    main()
