"""What the benchmarks share: the machine they ran on, a live server, an engine, and how figures are shown."""

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine import Engine
from engine.request import Request, SamplingParams
from engine.stats import NullObserver
from server.commands.bench.scrape import ServerInfo
from server.commands.client import ClientSettings

START_TIMEOUT_SECONDS = 600
# Instruction sets that decide how fast products are, by their names in /proc/cpuinfo.
INSTRUCTIONS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "sve",
)


@dataclass(frozen=True)
class Step:
    """One step as the loop saw it: its end on the loop's clock, its time on the device, its size."""

    seen_seconds: float
    device_seconds: float
    num_tokens: int
    num_rows: int


@dataclass
class StepRecorder(NullObserver):
    """Keeps every step."""

    steps: list[Step] = field(default_factory=list)

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None:
        """Note a step."""
        self.steps.append(Step(time.perf_counter(), seconds, num_tokens, num_rows))

    def decode_step_seconds(self, batch: int) -> float:
        """Median time from one full decode step's end to the next one's: the device and all around it."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        gaps = [
            after.seen_seconds - before.seen_seconds
            for before, after in pairs
            if (before.num_tokens, before.num_rows, after.num_tokens, after.num_rows) == (batch,) * 4
        ]
        return statistics.median(gaps)


def prompts(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Random token ids: `count` prompts that share nothing."""
    rng = random.Random(seed)
    return [tuple(rng.choices(range(1_000, 20_000), k=length)) for _ in range(count)]


async def generate(engine: Engine, batch: list[tuple[int, ...]], output_tokens: int) -> float:
    """Run a batch greedily to exactly `output_tokens` each; returns the seconds it took."""
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    streams = [engine.submit(Request(f"bench-{index}", ids, sampling)) for index, ids in enumerate(batch)]
    deltas = await asyncio.gather(*(stream.collect() for stream in streams))
    elapsed = time.perf_counter() - start
    assert sum(delta.num_tokens for delta in deltas) == len(batch) * output_tokens
    return elapsed


@dataclass
class Served:
    """A server in a process of its own."""

    url: str
    model: str
    pid: int
    ready_seconds: float
    log: Path
    probe_path: Path

    def probe(self) -> dict[str, Any]:
        """Return the figures of benchmarks.probed_server about this server."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.probe_path))
            with client.makefile() as answer:
                found: dict[str, Any] = json.load(answer)
        return found

    def rss_bytes(self) -> int:
        """Memory of the process that is resident now (Linux)."""
        try:
            return rss_bytes(self.pid)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.log.read_text()}") from error


def rss_bytes(pid: int) -> int:
    """Memory of a process that is resident now (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no resident memory: it has ended")


@contextmanager
def serve(*flags: str, probed: str = "") -> Iterator[Served]:
    """Run `monoloop serve` with these flags on a free port until the block ends.

    With `probed`, the name of a module with the command line of `server`, it runs that and answers probes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log, probe = Path(folder, "log"), Path(folder, "probe")
        program = ["benchmarks.probed_server", str(probe), probed] if probed else ["server"]
        command = [sys.executable, "-m", *program, "serve", "--port", str(port), *flags]
        started = time.perf_counter()
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                while not _is_ready(url):
                    if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_SECONDS:
                        raise RuntimeError(f"the server did not start\n{log.read_text()}")
                    time.sleep(0.02)
                yield Served(
                    url,
                    ServerInfo(ClientSettings(url=url)).first_model(),
                    process.pid,
                    time.perf_counter() - started,
                    log,
                    probe,
                )
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu_facts() -> dict[str, str]:
    """What Linux knows of the first core; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def machine() -> dict[str, Any]:
    """The machine and the versions the figures belong to."""
    facts = cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": facts.get("model name", platform.processor() or platform.machine()),
        "instructions": " ".join(name for name in INSTRUCTIONS if name in flags),
        "cores": cores,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flag every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return result


def show(title: str, rows: list[dict[str, Any]], json_file: Path | None) -> None:
    """Print rows as a table under the machine's line, and write them as JSON if asked."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    about = machine()
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(
            *(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "machine": about, "rows": rows}, indent=2) + "\n")
