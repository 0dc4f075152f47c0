"""What a request costs the loop: many short ones over real sockets, with a model that computes nothing.

    python -m benchmarks.requests [--streams 256] [--requests 1000] [--files] [--base COMMIT --rounds 3]

The engine and the server are the real ones, the client runs in a process of its own, and each request has a
connection of its own. No GPU is needed: logits are narrow, so that the device thread has little to compute.
The layers are where the loop's thread spends its processor time, by the innermost package (or file) of a
sample. A sample is taken after each `SAMPLE_SECONDS` of the process's processor time, and counts the time of
the loop's thread since the one before; it costs 3 µs, so less than 1 %. With `--base`, another commit takes
turns with this checkout, and the ratios are shown.
"""

import argparse
import functools
import json
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.common import parser, show
from benchmarks.in_process import Recorder, drive, engine_around, run, serving
from benchmarks.loop import NullModel
from engine.config import EngineConfig
from engine.device.devices import choose_device, set_up_thread
from engine.device.runner import ModelRunner

ROOT = Path(__file__).parents[1]
LOGITS_WIDTH = 64
SAMPLE_SECONDS = 0.001
SHOWN_LAYERS = 12
# Of the processor, which is what to trust on a shared machine, and as a client sees it.
LOOP_CPU = "loop CPU µs/request"
METRICS = (
    LOOP_CPU,
    "all CPU µs/request",
    "requests/s",
    "TTFT p50 ms",
    "ITL p50 ms",
    "ITL p99 ms",
    "lag p99 ms",
)


class NarrowNullModel(NullModel):
    """A NullModel with LOGITS_WIDTH logits: to sample 256 rows of a whole vocabulary takes a CPU 10 ms."""

    def __init__(self, step_seconds: float, max_rows: int, max_len: int, device: torch.device) -> None:
        super().__init__(step_seconds, max_rows, max_len, device)
        self._logits = self._logits[:, :LOGITS_WIDTH].contiguous()


class LayerSampler:
    """Adds up the processor time of the main thread by layer, until the block ends."""

    def __init__(self, by_file: bool) -> None:
        self.seconds: Counter[str] = Counter()
        self._by_file = by_file
        self._seen_seconds = 0.0

    def __enter__(self) -> "LayerSampler":
        self._seen_seconds = time.thread_time()
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        now = time.thread_time()  # Python runs handlers in the main thread, which is the loop's
        self.seconds[self._layer(frame)] += now - self._seen_seconds
        self._seen_seconds = now

    def _layer(self, frame: FrameType | None) -> str:
        while frame is not None and frame.f_code.co_filename.startswith("<"):  # made by dataclasses and such
            frame = frame.f_back
        return "other" if frame is None else layer_of(frame.f_code.co_filename, self._by_file)


@functools.cache
def layer_of(filename: str, by_file: bool) -> str:
    """Return the package of a file, or the file in its package."""
    parts = Path(filename).parts
    roots = [index for index, part in enumerate(parts) if part == "site-packages" or part[:8] == "python3."]
    first = roots[-1] + 1 if roots else min(len(Path.cwd().parts), len(parts) - 1)
    return "/".join(parts[first:]) if by_file else parts[first].removesuffix(".py")


@asynccontextmanager
async def null_server(
    args: argparse.Namespace, max_len: int, kv_tokens: int
) -> AsyncIterator[tuple[str, Recorder]]:
    """Serve a NarrowNullModel until the block ends; yields the server's URL and its metrics.

    `args` has `streams`, the largest batch, and `step_milliseconds`.
    """
    config = EngineConfig(
        device="cpu",
        max_num_seqs=args.streams,
        token_budget=8192,
        kv_tokens=kv_tokens,
        prefix_cache=False,
    )

    def make_runner() -> ModelRunner:
        device = choose_device(config)
        set_up_thread(config, device)
        model: Any = NarrowNullModel(args.step_milliseconds / 1e3, args.streams, max_len, device)
        return ModelRunner.around(model, config, 8192, ())

    recorder = Recorder()
    async with (
        engine_around("null", config, make_runner, recorder) as engine,
        serving(engine, recorder) as url,
    ):
        yield url, recorder


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One warm-up and one run; returns the METRICS, and "layers": µs per request of each."""
    max_len = args.prompt_tokens + args.output_tokens
    lengths = [(args.prompt_tokens, args.output_tokens)]
    async with null_server(args, max_len, kv_tokens=args.streams * (max_len + 16)) as (url, recorder):
        await drive(url, lengths * args.streams, args.streams)
        recorder.clear()
        loop_start, process_start = time.thread_time(), time.process_time()
        with LayerSampler(args.files) as sampler:
            report = await drive(url, lengths * args.requests, args.streams)
        loop_seconds, process_seconds = time.thread_time() - loop_start, time.process_time() - process_start
    if report["errors"]:
        raise RuntimeError(f"requests failed: {report['error_messages']}")
    micro = 1e6 / args.requests
    scale = micro * loop_seconds / sampler.seconds.total()
    return {
        LOOP_CPU: micro * loop_seconds,
        "all CPU µs/request": micro * process_seconds,
        "requests/s": args.requests / report["elapsed_seconds"],
        "tokens/chunk": report["output_tokens"] / report["chunks"],
        "TTFT p50 ms": 1e3 * report["ttft"]["p50"],
        "ITL p50 ms": 1e3 * report["itl"]["p50"],
        "ITL p99 ms": 1e3 * report["itl"]["p99"],
        "lag p99 ms": recorder.lag_milliseconds(99),
        "step ms": 1e3 * statistics.median(recorder.step_seconds),
        "layers": {layer: scale * seconds for layer, seconds in sampler.seconds.most_common()},
    }


def compare_with(args: argparse.Namespace, flags: list[str]) -> list[dict[str, Any]]:
    """Measure the base and this checkout in turn; returns a row for each metric, and for each large layer."""
    # Not imported at the top: in the base's checkout, these are the base's.
    from benchmarks.hot_path import check_out, compare, run

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        check_out(args.base, base)
        rounds = [
            [run(side, Path(folder), flags, Path(__file__)) for side in (base, ROOT)]
            for _ in range(args.rounds)
        ]
    rows = [compare(name, [(old[name], new[name]) for old, new in rounds]) for name in METRICS]
    layers = [[Counter(side["layers"]) for side in sides] for sides in rounds]
    largest = sum((old + new for old, new in layers), Counter()).most_common(SHOWN_LAYERS)
    rows += [compare(name, [(old[name] or 1, new[name] or 1) for old, new in layers]) for name, _ in largest]
    return rows


def main() -> None:
    """Measure, and print the figures and the layers."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--streams", type=int, default=256, help="requests at a time")
    flags.add_argument("--requests", type=int, default=1000)
    flags.add_argument("--prompt-tokens", type=int, default=128)
    flags.add_argument("--output-tokens", type=int, default=64)
    flags.add_argument("--step-milliseconds", type=float, default=2.0, help="time of the null model's step")
    flags.add_argument("--files", action="store_true", help="the layers are files")
    flags.add_argument("--base", help="a commit to compare with")
    flags.add_argument("--rounds", type=int, default=3, help="runs of each side")
    flags.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what this starts in a checkout
    args = flags.parse_args()
    if args.measure is not None:
        args.measure.write_text(json.dumps(run(measure(args))))
        return
    if args.base is not None:
        names = ("streams", "requests", "prompt_tokens", "output_tokens", "step_milliseconds")
        passed = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
        passed += ["--files"] * args.files
        show(f"now against {args.base}, {args.rounds} rounds", compare_with(args, passed), args.json)
        return
    found = run(measure(args))
    layers = found.pop("layers")
    show("requests", [found], args.json)
    rows = [{"layer": layer, "µs/request": seconds} for layer, seconds in layers.items()]
    show("where the loop's thread spends them", rows[:SHOWN_LAYERS], None)


if __name__ == "__main__":
    main()
