"""All that is claimed about a GPU in one run: the tests on it, then the speed table. No network, no download.

    python -m benchmarks.gpu_check [--json FILE] [--only tests|speed]

Each part is a command of its own, which gives the device's memory back: pytest -m gpu, monoloop bench static,
benchmarks.workload and benchmarks.loop. "reach" is the aim for one H100 80GB in bf16; on another card the
last column says how far it is away. The exit status is 1 if a test or a command failed; a missed aim is only
shown.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from engine.machine import num_cores

# Milliseconds of a step, on an H100; decode from context 512 to 640.
STEP_AIMS = {
    "llama-8b": {
        ("decode", 1): 6.1,
        ("decode", 16): 6.6,
        ("decode", 64): 8.2,
        ("decode", 256): 14.8,
        ("prefill", 512): 14.0,
        ("prefill", 2048): 51.0,
        ("prefill", 8192): 222.0,
    },
    "llama-1b": {("decode", 1): 1.35, ("decode", 16): 1.5, ("decode", 64): 2.0, ("decode", 256): 3.4},
}
TOKENS_PER_SECOND_AIMS = {"llama-8b": 5950.0, "llama-1b": 27_000.0}
IDLE_AIMS = {"llama-8b": 2.0, "llama-1b": 5.0}
HTTP_SHARE_AIM = 92.0
LAG_AIM_MILLISECONDS = 10.0
PREFILLS = ["--prefill", "512,2048,8192"]
# How much longer a decode step may take with these draws than greedily, in percent.
DRAWS = ["--temperature", "0.8", "--top-p", "0.95", "--top-k", "50", "--prefill", "512"]
DRAWS_AIM, MANY_DRAWS_AIM, MANY_DRAWS_FROM = 5.0, 8.0, 64

# The server's tests use no GPU, and the client libraries they import may not be installed.
TEST_FOLDERS = ["tests/engine", "tests/gpu", "tests/kernels", "tests/models"]
# The tests mostly wait for the compiler. Each process holds a CUDA context, of about half a GB.
MAX_TEST_PROCESSES = 8


class Figure(NamedTuple):
    """One line of the table. `aim` is the least or, unless `more_is_better`, the most it should be."""

    what: str
    value: float
    unit: str
    floor: float | None = None
    aim: float | None = None
    more_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Whether the aim is reached, and else how far it is away."""
        if self.aim is None:
            return ""
        if self.value >= self.aim if self.more_is_better else self.value <= self.aim:
            return "reached"
        return f"{self.value / self.aim:.2f} x"


def step_figures(shape: str, document: dict[str, Any], known: list[Figure]) -> Iterator[Figure]:
    """From `monoloop bench static --json`."""
    for row in document["rows"]:
        kind = (row["step"], row["num_tokens"])
        what = f"{shape} {row['step']}, {row['num_tokens']} {'rows' if row['step'] == 'decode' else 'tokens'}"
        aim = STEP_AIMS[shape].get(kind)
        yield Figure(what, row["milliseconds"], "ms", row["floor_milliseconds"], aim)


def drawn_figures(shape: str, document: dict[str, Any], known: list[Figure]) -> Iterator[Figure]:
    """The same with draws in place of argmax, against what is known of argmax."""
    for row in document["rows"]:
        what = f"{shape} decode, {row['num_tokens']} rows"
        for greedy in known:
            if row["step"] == "decode" and greedy.what == what:
                ratio = 100 * (row["milliseconds"] / greedy.value - 1)
                aim = MANY_DRAWS_AIM if row["num_tokens"] > MANY_DRAWS_FROM else DRAWS_AIM
                yield Figure(f"{what}: drawn, not greedy", ratio, "% more", aim=aim)


def workload_figures(shape: str, document: dict[str, Any], known: list[Figure]) -> Iterator[Figure]:
    """From `benchmarks.workload --http --json`: its last round."""
    offline, http = document["rows"][-2:]
    name = f"{shape} workload W"
    yield Figure(
        f"{name}, offline",
        offline["output_tokens_per_second"],
        "tokens/s",
        aim=TOKENS_PER_SECOND_AIMS[shape],
        more_is_better=True,
    )
    yield Figure(f"{name}, offline: device idle", 100 * offline["device_idle_share"], "%")
    yield Figure(f"{name}, SSE streams", http["output_tokens_per_second"], "tokens/s")
    yield Figure(
        f"{name}, SSE streams: of offline",
        100 * http["of_offline"],
        "%",
        aim=HTTP_SHARE_AIM,
        more_is_better=True,
    )
    yield Figure(
        f"{name}, SSE streams: device idle", 100 * http["device_idle_share"], "%", aim=IDLE_AIMS[shape]
    )
    lag = http["loop_lag_p99_milliseconds"]
    yield Figure(f"{name}, SSE streams: loop lag p99", lag, "ms", aim=LAG_AIM_MILLISECONDS)


def loop_figures(shape: str, document: dict[str, Any], known: list[Figure]) -> Iterator[Figure]:
    """From `benchmarks.loop --json`."""
    for row in document["rows"]:
        name = f"loop, {row['streams']} streams, steps of {row['step']}"
        yield Figure(f"{name}: device idle", row["device idle %"], "%")
        yield Figure(f"{name}: loop lag p99", row["lag p99 ms"], "ms", aim=LAG_AIM_MILLISECONDS)
        yield Figure(f"{name}: chunks", row["chunks/s"], "/s")
        yield Figure(f"{name}: tokens", row["tokens/s"], "/s")


class Part(NamedTuple):
    """A command that can write JSON, and how that and the figures so far become its own figures."""

    shape: str
    command: list[str]
    figures: Callable[[str, dict[str, Any], list[Figure]], Iterator[Figure]]


def parts() -> Iterator[Part]:
    """All of the table, in its order."""
    for shape in STEP_AIMS:
        static = ["server", "bench", "static", "--shape", shape]
        yield Part(shape, [*static, *PREFILLS], step_figures)
        yield Part(shape, [*static, *DRAWS], drawn_figures)
        workload = ["benchmarks.workload", "--http", "--rounds", "2", "--shape", shape]
        yield Part(shape, workload, workload_figures)
    yield Part("", ["benchmarks.loop"], loop_figures)


def run_tests(console: Console) -> bool:
    """Run the tests in several processes; whether all passed. Those of one xdist_group run one by one."""
    processes = min(MAX_TEST_PROCESSES, num_cores())
    # pytest-benchmark, where it is installed, warns beside xdist, and warnings are errors here.
    pytest = ["pytest", "-m", "gpu", "-q", "--durations=5", "-p", "no:benchmark"]
    pytest += ["-n", str(processes), "--dist", "loadgroup"]
    return run_module(console, [*pytest, *TEST_FOLDERS], OMP_NUM_THREADS=str(num_cores() // processes))


def run_module(console: Console, arguments: list[str], **environment: str) -> bool:
    """Run `python -m ...` in this Python, its output on ours; whether it ended well."""
    console.rule(" ".join(arguments), align="left")
    console.file.flush()
    started = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", *arguments], env=os.environ | environment).returncode
    console.print(f"exit status {code} after {time.perf_counter() - started:.0f} s")
    return code == 0


def show(console: Console, figures: list[Figure]) -> None:
    """The table."""
    table = Table(title="speed; reach: for one H100 80GB, bf16", title_justify="left")
    for name in ("what", "measured", "unit", "floor", "reach", ""):
        table.add_column(name, justify="left" if name in ("what", "unit", "") else "right", no_wrap=True)
    for figure in figures:
        numbers = [
            "" if number is None else f"{number:,.2f}" for number in (figure.value, figure.floor, figure.aim)
        ]
        table.add_row(figure.what, numbers[0], figure.unit, *numbers[1:], figure.verdict)
    console.print(table)


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--only", choices=["tests", "speed"], help="the tests, or the speed table, alone")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no usable CUDA device", file=sys.stderr)
        return 1
    if arguments.only != "speed" and find_spec("xdist") is None:
        print(
            "gpu_check: the tests run in parallel by pytest-xdist, which this Python lacks. Install it "
            f"({sys.executable} -m pip install pytest-xdist), or leave the tests out with --only speed",
            file=sys.stderr,
        )
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    started = time.perf_counter()
    passed = arguments.only == "speed" or run_tests(console)
    figures, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts() if arguments.only != "tests" else ()):
            file = Path(folder, f"{number}.json")
            if run_module(console, [*part.command, "--json", str(file)]):
                figures += part.figures(part.shape, json.loads(file.read_text()), figures)
            else:
                failed.append(" ".join(part.command))
    about = {**machine(), "gpu": torch.cuda.get_device_name(), "seconds": time.perf_counter() - started}
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    if figures:
        show(console, figures)
    tests = "not run" if arguments.only == "speed" else "passed" if passed else "FAILED"
    console.print(f"tests: {tests}; commands that failed: {', '.join(failed) or 'none'}")
    if arguments.json:
        rows = [{**figure._asdict(), "verdict": figure.verdict} for figure in figures]
        document = {"machine": about, "tests": tests, "failed": failed, "figures": rows}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
