"""Memory of a server over many mixed requests: what grows with each of them, and what comes back when idle.

    python -m benchmarks.memory [--requests 5000] [--every 1000] [--concurrency 16] [-- FLAGS OF serve]

Requests are chats, streams, schemas, tools and regular expressions, each with texts, names and a grammar of
its own; some clients vanish, read slowly or send garbage. Each row, one for every `--every` requests, has
resident MiB; MiB that glibc's arenas took from the system, and those of them that are free; MiB of large
blocks outside arenas; objects that Python's collector knows. The last row is the idle server, some seconds
later.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients import Client, Prepared, Shares, mixed_requests
from benchmarks.common import Served, parser, serve, show

MIB = 2**20


def main() -> None:
    """Serve, send requests, and print the curve."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--requests", type=int, default=5_000)
    flags.add_argument("--every", type=int, default=1_000, help="requests between two rows")
    flags.add_argument("--seconds", type=float, default=3_600, help="end after them, whatever is left")
    flags.add_argument("--max-tokens", type=int, default=6)
    flags.add_argument("--concurrency", type=int, default=16)
    flags.add_argument("--idle-seconds", type=float, default=15)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--server", default="server", help="module with the command line of `server`")
    flags.add_argument("--kinds", action="store_true", help="print which Python objects have become more")
    flags.add_argument("serve", nargs="*", metavar="FLAG", help="flags of `monoloop serve`")
    args = flags.parse_args()
    with serve(*args.serve, probed=args.server) as served:
        first = served.probe()
        rows = [row(0, first, first["rss_bytes"])]
        rows += asyncio.run(curve(served, args))
        if args.kinds:
            after = served.probe()["kinds"]
            for kind, number in sorted(
                after.items(), key=lambda item: first["kinds"].get(item[0], 0) - item[1]
            ):
                print(f"{kind}: {first['kinds'].get(kind, 0)} -> {number}")
    show(f"Memory over mixed requests, ready after {served.ready_seconds:.1f} s", rows, args.json)


async def curve(served: Served, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Send the requests; return a row for every `args.every` of them, and one for the idle server."""
    url = urlsplit(served.url)
    assert url.hostname is not None and url.port is not None
    client = Client(url.hostname, url.port, timeout_seconds=60)
    requests = mixed_requests(args.max_tokens, args.seed)
    rng = random.Random(args.seed)
    rows: list[dict[str, Any]] = []
    number, deadline = 0, time.monotonic() + args.seconds
    while number < args.requests and time.monotonic() < deadline:
        batch = itertools.islice(requests, args.every)
        number += await send_all(client, batch, args.concurrency, rng, deadline)
        rows.append(row(number, await asyncio.to_thread(served.probe), served.rss_bytes()))
        print(rows[-1], flush=True)
    await asyncio.sleep(args.idle_seconds)
    figures = await asyncio.to_thread(served.probe)
    rows.append(row(number, figures, figures["rss_bytes"]) | {"requests": f"{number:,}, idle"})
    return rows


async def send_all(
    client: Client, requests: Iterator[Prepared], concurrency: int, rng: random.Random, deadline: float
) -> int:
    """Send requests until the deadline; return their number. Raises RuntimeError if one has a fault."""
    shares = Shares()

    async def work() -> int:
        number = 0
        while time.monotonic() < deadline and (request := next(requests, None)) is not None:
            outcome = await client.perform(request, shares.choose(rng), rng)
            if outcome.fault:
                raise RuntimeError(outcome.fault)
            number += 1
        return number

    return sum(await asyncio.gather(*(work() for _ in range(concurrency))))


def row(number: int, figures: dict[str, Any], rss_bytes: int) -> dict[str, Any]:
    """Return a row of the table."""
    heap = {f"{name} MiB": figures.get(f"{name}_bytes", 0) / MIB for name in ("arena", "free", "mapped")}
    return {
        "requests": f"{number:,}",
        "RSS MiB": rss_bytes / MIB,
        **heap,
        "arenas": figures.get("num_arenas", 0),
        "objects": figures["num_objects"],
        "grammars": figures["kinds"]["CompiledGrammar"],
        "files": figures["num_files"],
        "threads": figures["num_threads"],
    }


if __name__ == "__main__":
    main()
