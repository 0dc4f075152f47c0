"""Soak test: many clients of a live server at once, of which some vanish, read slowly or send garbage.

    python -m benchmarks.soak [--clients 1000] [--seconds 600] [--server MODULE] [-- FLAGS OF serve]

Checks that nothing hangs; that every finished stream is whole, with the answer that the request got alone
before; that /health always answered in time, also while clients came and left; that afterwards no page, task,
connection or file is left; that memory stayed; and that nothing was written to a lost connection. Prints a
table, and exits with 1 if a check failed. --server runs another module with the command line of `server`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients import Behaviour, Client, Outcome, Prepared, Shares, token_requests
from benchmarks.common import Served, parser, serve, show

MIB = 2**20
SETTLE_SECONDS = 20.0
MAX_FAULTS_SHOWN = 20
LOST_CONNECTION = "socket.send() raised exception"
# What may not be more of after the run than before it.
LIVE_OBJECTS = ("Task", "Watch", "Connection", "ActiveRequest", "Sequence", "Mailbox")
# Arguments: host, port, seconds between requests. Prints the milliseconds of each /health, and its status.
HEALTH = """
import http.client, sys, time
while True:
    started = time.perf_counter()
    try:
        connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=30)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
    except OSError:
        status = 0
    print(1e3 * (time.perf_counter() - started), status, flush=True)
    time.sleep(float(sys.argv[3]))
"""


@dataclass
class Report:
    """What clients saw."""

    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    health_milliseconds: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    def add(self, request: Prepared, behaviour: Behaviour, outcome: Outcome, alone: dict[str, str]) -> None:
        """Count an outcome, and note what is wrong with it."""
        fault = outcome.fault
        if outcome.answer is not None and outcome.answer != alone[request.name]:
            fault = f"{request.name}: {outcome.answer!r} alone was {alone[request.name]!r}"
        kind = "refused" if outcome.status in (429, 503) else "ended"
        self.ended[f"{behaviour}: {'faulty' if fault else kind}"] += 1
        if fault:
            self.faults.append(fault)


def main() -> int:
    """Serve, soak, print; return the exit status."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--clients", type=int, default=1_000, help="clients at a time")
    flags.add_argument("--seconds", type=float, default=600)
    flags.add_argument("--requests", type=int, default=10**9, help="end after this number of requests")
    flags.add_argument("--prompts", type=int, default=64, help="different requests")
    flags.add_argument("--max-tokens", type=int, default=48)
    flags.add_argument("--timeout-seconds", type=float, default=300, help="a longer request hangs")
    flags.add_argument("--health-milliseconds", type=float, default=1_000, help="most for /health")
    flags.add_argument("--memory-percent", type=float, default=10, help="most by which memory may grow")
    flags.add_argument("--memory-floor-mib", type=float, default=64, help="growth that always may be")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--server", default="server", help="module with the command line of `server`")
    flags.add_argument("serve", nargs="*", metavar="FLAG", help="flags of `monoloop serve`")
    args = flags.parse_args()
    with serve(*args.serve, probed=args.server) as served:
        report, rows = asyncio.run(soak(served, args))
        log = served.log.read_text(errors="replace")
    if number := log.count(LOST_CONNECTION):
        report.faults.append(f"{number} log lines say that something was written to a lost connection")
    if number := log.count("Traceback"):
        place = log.index("Traceback")
        report.faults.append(f"{number} tracebacks in the log; the first:\n{log[place : place + 2000]}")
    show(f"{args.clients} clients at a time for {args.seconds:g} s", rows, args.json)
    for fault in report.faults[:MAX_FAULTS_SHOWN]:
        print(f"FAULT: {fault}")
    print(f"{len(report.faults)} faults")
    return 1 if report.faults else 0


async def soak(served: Served, args: argparse.Namespace) -> tuple[Report, list[dict[str, Any]]]:
    """Run requests alone, then the clients, then check what is left; return what was seen, and a table."""
    url = urlsplit(served.url)
    assert url.hostname is not None and url.port is not None
    client = Client(url.hostname, url.port, args.timeout_seconds)
    requests = token_requests(args.prompts, args.max_tokens, args.seed)
    alone: dict[str, str] = {}
    for request in requests:
        outcome = await client.perform(request, Behaviour.READS, random.Random(0))
        if outcome.answer is None:
            raise RuntimeError(f"alone, {request.name} got {outcome.status} {outcome.fault}")
        alone[request.name] = outcome.answer
    report = Report()
    before = await asyncio.to_thread(served.probe)
    health = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HEALTH, url.hostname, str(url.port), "0.1", stdout=asyncio.subprocess.PIPE
    )
    try:
        started = time.monotonic()
        await run_clients(served, client, requests, alone, report, args)
        seconds = time.monotonic() - started
    finally:
        health.terminate()
        output, _ = await health.communicate()
    read_health(output.decode(), report, args.health_milliseconds)
    after = await settle(served, before)
    check_left(served, before, after, report)
    check_memory(report, args)
    return report, table(report, before, after, seconds)


async def run_clients(
    served: Served,
    client: Client,
    requests: list[Prepared],
    alone: dict[str, str],
    report: Report,
    args: argparse.Namespace,
) -> None:
    """Keep `args.clients` clients busy until time or requests are over, then wait for the last ones."""
    rng = random.Random(args.seed)
    shares = Shares()
    deadline = time.monotonic() + args.seconds
    left = args.requests

    async def work() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < deadline:
            left -= 1
            request, behaviour = rng.choice(requests), shares.choose(rng)
            report.add(request, behaviour, await client.perform(request, behaviour, rng), alone)

    async def watch_memory() -> None:
        while True:
            report.memory_bytes.append(served.rss_bytes())
            await asyncio.sleep(args.seconds / 100)

    memory = asyncio.create_task(watch_memory())
    try:
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(args.clients)]
            await asyncio.wait(workers, timeout=args.seconds)
            client.is_stopping = True
    finally:
        memory.cancel()


def read_health(output: str, report: Report, most_milliseconds: float) -> None:
    """Note the latencies that the prober printed, and those that are too long or have another status."""
    lines = [line.split() for line in output.splitlines()]
    report.health_milliseconds = [float(words[0]) for words in lines]
    if bad := [
        " ".join(words) for words in lines if words[1] != "200" or float(words[0]) > most_milliseconds
    ]:
        report.faults.append(
            f"{len(bad)} of {len(lines)} /health were slow or failed (ms, status): {bad[:5]}"
        )
    if not lines:
        report.faults.append("/health was never answered")


def get_json(served: Served, path: str) -> dict[str, Any]:
    """Return the JSON of an endpoint."""
    with urllib.request.urlopen(served.url + path, timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found


async def settle(served: Served, before: dict[str, Any]) -> dict[str, Any]:
    """Return the probe's figures once no more is open than before, or after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = await asyncio.to_thread(served.probe)
        if not left_over(before, after) or time.monotonic() > deadline:
            return after
        await asyncio.sleep(0.5)


def left_over(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what there is more of than before."""
    pairs = [(name, before["kinds"].get(name, 0), after["kinds"].get(name, 0)) for name in LIVE_OBJECTS]
    pairs.append(("open file", before["num_files"], after["num_files"]))
    return [f"{name}: {earlier} before, {later} after" for name, earlier, later in pairs if later > earlier]


def check_left(served: Served, before: dict[str, Any], after: dict[str, Any], report: Report) -> None:
    """Note pages, requests, tasks and files that are left."""
    report.faults += left_over(before, after)
    load = get_json(served, "/load")
    report.faults += [
        f"{name} is {load[name]}" for name in ("running", "waiting", "pages_used") if load[name]
    ]


def check_memory(report: Report, args: argparse.Namespace) -> None:
    """Note growth of memory from the second quarter of the run to the last: the first one fills pools."""
    quarter = len(report.memory_bytes) // 4
    if not quarter:
        return
    early = max(report.memory_bytes[quarter : 2 * quarter])
    late = max(report.memory_bytes[-quarter:])
    if late - early > max(args.memory_percent / 100 * early, args.memory_floor_mib * MIB):
        report.faults.append(f"memory grew from {early / MIB:.0f} to {late / MIB:.0f} MiB")


def table(
    report: Report, before: dict[str, Any], after: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Return the rows of the report."""
    health = sorted(report.health_milliseconds) or [0.0]
    memory = report.memory_bytes or [0]
    rows: list[tuple[str, Any]] = [(what, number) for what, number in sorted(report.ended.items())]
    rows += [
        ("requests", report.ended.total()),
        ("requests/s", report.ended.total() / seconds),
        ("/health p50, ms", health[len(health) // 2]),
        ("/health p99, ms", health[int(0.99 * (len(health) - 1))]),
        ("/health max, ms", health[-1]),
        ("memory before, MiB", before["rss_bytes"] / MIB),
        ("memory at half time, MiB", memory[len(memory) // 2] / MIB),
        ("memory at the end, MiB", memory[-1] / MIB),
        ("memory idle, MiB", after["rss_bytes"] / MIB),
        ("open files before, after", f"{before['num_files']}, {after['num_files']}"),
        ("tasks before, after", f"{before['kinds']['Task']}, {after['kinds']['Task']}"),
    ]
    return [{"what": what, "value": value} for what, value in rows]


if __name__ == "__main__":
    sys.exit(main())
