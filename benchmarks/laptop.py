"""A laptop's CPU: `monoloop serve` beside llama.cpp and transformers with the same file, interleaved.

    python -m benchmarks.laptop [--llama-python VENV/bin/python] [--rounds 3] [--flags="--quantization int8"]

monoloop and llama.cpp are servers driven over HTTP by one client; llama.cpp needs an interpreter whose
environment has `xllamacpp`. transformers generates in a process of its own, in bfloat16, without HTTP. All
get the same random token ids, greedy, without prefix reuse, and the same number of threads. In each round one
contender runs after the other, in another order each time; figures are medians over the rounds, and ratios
medians of the rounds' ratios. "Beside a busy program": one more process keeps a core busy.
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.common import parser, rss_bytes, serve, show
from engine.config import EngineConfig
from engine.machine import num_cores
from models.catalog import locate
from server.commands.bench.client import Client, Result
from server.commands.bench.load import drive
from server.commands.bench.workload import jobs

STREAMS = 16
KV_TOKENS = 16_384
PREFILL_TOKENS = 256
IDLE_SECONDS = 3.0
HERE = Path(__file__).parent


class Measure(NamedTuple):
    """A measurement of speed: streams at once, prompt tokens of each, tokens per second of which part."""

    name: str
    streams: int
    prompt_tokens: int
    part: str  # "prefill", "decode", or "output": all of it


MEASURES = {
    "one": Measure("one stream, decode tokens/s", 1, 64, "decode"),
    "sixteen": Measure(f"{STREAMS} streams, output tokens/s", STREAMS, 64, "output"),
    "prefill": Measure(f"prefill of {PREFILL_TOKENS}, tokens/s", 1, PREFILL_TOKENS, "prefill"),
}
BUSY = "while True: pass"


class Timing(NamedTuple):
    """Seconds of one run of a contender: to the first token (None: not known), and in all."""

    first: float | None
    total: float


class Contender(Protocol):
    """A process that generates."""

    name: str
    pid: int
    ready_seconds: float

    def run(self, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> Timing:
        """Generate from random prompts and return how long it took."""


@dataclass
class HttpContender:
    """A server with POST /v1/completions; `extra` are fields of its requests."""

    name: str
    pid: int
    ready_seconds: float
    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    def run(self, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> Timing:
        """See Contender. Raises RuntimeError for an answer that is an error or of another length."""
        work = jobs([(prompt_tokens, output_tokens)] * streams, self.model, seed)
        for job in work:
            job.body.update(self.extra)
        run = asyncio.run(drive(Client(self.url), work, streams))
        for result in run.results:
            if result.error is not None or result.output_tokens != output_tokens:
                raise RuntimeError(f"{self.name}: {result.error or result.output_tokens}")
        return Timing(_first(run.results), run.elapsed_seconds)


def _first(results: list[Result]) -> float | None:
    """Return the seconds to the first token of a single stream."""
    return results[0].ttft_seconds if len(results) == 1 else None


@dataclass
class LineContender:
    """A process that answers lines: see benchmarks/transformers_peer.py."""

    name: str
    pid: int
    ready_seconds: float
    process: subprocess.Popen[str]

    def run(self, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> Timing:
        """See Contender."""
        work = jobs([(prompt_tokens, output_tokens)] * streams, self.name, seed)
        question = {"prompts": [job.body["prompt"] for job in work], "output_tokens": output_tokens}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return Timing(*json.loads(self.process.stdout.readline()))


def main() -> None:
    """Start all contenders, measure them in turn, print one table."""
    arguments = parse()
    gguf = locate(EngineConfig(model=arguments.model).model).weights
    rows: list[dict[str, Any]] = []
    starts = start_seconds(arguments)
    with ExitStack() as stack:
        contenders: list[Contender] = [stack.enter_context(monoloop(arguments))]
        if arguments.llama_python is not None:
            contenders.append(stack.enter_context(llama(gguf, arguments)))
        if not arguments.no_transformers:
            contenders.append(stack.enter_context(transformers(arguments)))
        memory = {"ready": {one.name: rss_bytes(one.pid) / 1e9 for one in contenders}}
        seeds = count()  # no two runs have prompts that begin with the same tokens
        for contender in contenders:
            for measure in arguments.measures:
                run(contender, measure, arguments.output_tokens, next(seeds))
        rows += speed(contenders, arguments, arguments.rounds, seeds)
        with child(sys.executable, "-c", BUSY):
            beside = speed(contenders, arguments, arguments.busy_rounds, seeds)
        rows += [one | {"measure": f"{one['measure']}, beside a busy program"} for one in beside]
        idle = {one.name: cpu_share(one.pid) for one in contenders}
        contenders[0].run(STREAMS, KV_TOKENS // STREAMS - 16, 8, next(seeds))
        memory["used"] = {one.name: rss_bytes(one.pid) / 1e9 for one in contenders}
    rows.append(row("resident GB, ready", memory["ready"]))
    rows.append(row(f"resident GB, {KV_TOKENS:,} tokens of KV used", memory["used"]))
    rows.append(row("CPU use when idle, % of a core", idle))
    if starts:
        rows.append(
            row(f"seconds to ready, median of {len(starts)}", {"monoloop": statistics.median(starts)})
        )
    settings = f"{arguments.threads} threads, {arguments.output_tokens} new tokens, {arguments.rounds} rounds"
    show(f"{gguf.name}, {settings}", rows, arguments.json)


def parse() -> argparse.Namespace:
    """Return the command's flags."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--llama-python", type=Path, help="interpreter whose environment has xllamacpp")
    flags.add_argument("--no-transformers", action="store_true")
    flags.add_argument("--busy-rounds", type=int, default=1, help="rounds beside a busy program")
    flags.add_argument("--measures", type=measures, default=list(MEASURES.values()), help=",".join(MEASURES))
    flags.add_argument("--model", default=EngineConfig().model, help="catalog name or .gguf file")
    flags.add_argument("--flags", type=shlex.split, default=[], help="more flags of `monoloop serve`")
    flags.add_argument("--output-tokens", type=int, default=128)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--starts", type=int, default=3, help="starts of monoloop that are timed")
    flags.add_argument("--threads", type=int, default=num_cores())
    return flags.parse_args()


def measures(text: str) -> list[Measure]:
    """Return the measures of `one,sixteen`."""
    return [MEASURES[name] for name in text.split(",")]


def speed(
    contenders: list[Contender], arguments: argparse.Namespace, num_rounds: int, seeds: Iterator[int]
) -> list[dict[str, Any]]:
    """Return a row for each measure, or none for no rounds."""
    rows = []
    for measure in arguments.measures if num_rounds else ():
        rounds: list[dict[str, float]] = []
        for round_ in range(num_rounds):
            first, seed = round_ % len(contenders), next(seeds)
            rounds.append(
                {
                    one.name: run(one, measure, arguments.output_tokens, seed)
                    for one in contenders[first:] + contenders[:first]
                }
            )
        rows.append(row(measure.name, *rounds))
    return rows


def run(contender: Contender, measure: Measure, output_tokens: int, seed: int) -> float:
    """Return tokens per second of the part that the measure names."""
    if measure.part == "prefill":
        output_tokens = 2
    timing = contender.run(measure.streams, measure.prompt_tokens, output_tokens, seed)
    if measure.part == "output":
        return measure.streams * output_tokens / timing.total
    assert timing.first is not None
    if measure.part == "prefill":
        return measure.prompt_tokens / timing.first
    return (output_tokens - 1) / (timing.total - timing.first)


def row(name: str, *rounds: dict[str, float]) -> dict[str, Any]:
    """Return a row of the table: medians of each contender, and of our ratio to each other one."""

    def median(values: list[float]) -> float | str:
        return statistics.median(values) if values else ""

    def ratio(peer: str) -> float | str:
        return median([one["monoloop"] / one[peer] for one in rounds if one.get(peer)])

    names = ("monoloop", "llama.cpp", "transformers")
    return {
        "measure": name,
        **{name: median([one[name] for one in rounds if name in one]) for name in names},
        **{f"× {peer}": ratio(peer) for peer in names[1:]},
    }


def start_seconds(arguments: argparse.Namespace) -> list[float]:
    """Return the seconds from the start of a process to /ready, once for each start."""
    seconds = []
    for _ in range(arguments.starts):
        with monoloop(arguments) as contender:
            seconds.append(contender.ready_seconds)
    return seconds


@contextmanager
def monoloop(arguments: argparse.Namespace) -> Iterator[HttpContender]:
    """Run our server as a user starts it."""
    flags = ["--model", arguments.model, "--threads", str(arguments.threads), "--kv-tokens", str(KV_TOKENS)]
    with serve(*flags, *arguments.flags) as served:
        yield HttpContender("monoloop", served.pid, served.ready_seconds, served.url, served.model)


@contextmanager
def llama(gguf: Path, arguments: argparse.Namespace) -> Iterator[HttpContender]:
    """Run llama.cpp's server."""
    numbers = (str(number) for number in (arguments.threads, STREAMS, KV_TOKENS))
    start = time.perf_counter()
    with child(str(arguments.llama_python), str(HERE / "llama_peer.py"), str(gguf), *numbers) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("llama.cpp did not start; run benchmarks/llama_peer.py to see why")
        ready_seconds = time.perf_counter() - start
        print(f"llama.cpp: {process.stdout.readline().strip()}")
        extra = {"cache_prompt": False}
        yield HttpContender("llama.cpp", process.pid, ready_seconds, url, gguf.stem, extra)


@contextmanager
def transformers(arguments: argparse.Namespace) -> Iterator[LineContender]:
    """Run transformers with a model of the same shape."""
    start = time.perf_counter()
    command = ("-m", "benchmarks.transformers_peer", arguments.model, str(arguments.threads))
    with child(sys.executable, *command) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"transformers did not start; run `python {' '.join(command)}` to see why")
        yield LineContender("transformers", process.pid, time.perf_counter() - start, process)


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the block ends, without the settings of threads that this one has made."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def cpu_share(pid: int) -> float:
    """Return the CPU time of a process over some seconds in which nothing is asked of it, in % of a core."""
    before = cpu_seconds(pid)
    time.sleep(IDLE_SECONDS)
    return 100 * (cpu_seconds(pid) - before) / IDLE_SECONDS


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used (Linux)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
