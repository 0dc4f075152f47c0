"""A giant prompt arrives among running streams, and a step is to take no longer than a target.

    python -m benchmarks.giant [--prompt 6000] [--streams 32] [--times 2]          # the default model
    python -m benchmarks.giant --shape llama-1b --prompt 16000 --times 2           # random weights, on a GPU

First, without a target: the giant's time to its first token alone, and the time of a step that only decodes.
The target is `--times` that. Shown are the streams' times between tokens while the giant is computed, and its
time to the first token beside the one alone divided by the share of a step that decoding leaves to prompts.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.common import parser, show
from benchmarks.in_process import Recorder, engine_around, run
from engine import Engine
from engine.bench.steps import SHAPE_NAMES, random_runner
from engine.config import EngineConfig
from engine.device.devices import choose_device, set_up_thread
from engine.request import Request, SamplingParams
from engine.startup import default_token_budget
from engine.stream import RequestStream

STREAM_PROMPT_TOKENS = 16
STREAM_OUTPUT_TOKENS = 1_500
NUM_WARM_UP_TOKENS = 20
NUM_DECODE_TOKENS = 60


@asynccontextmanager
async def engine_of(args: argparse.Namespace, target_step_seconds: float | None) -> AsyncIterator[Engine]:
    """The default model, or random weights of a shape."""
    config = EngineConfig(
        prefix_cache=False,
        target_step_seconds=target_step_seconds,
        kv_tokens=args.streams * (STREAM_PROMPT_TOKENS + STREAM_OUTPUT_TOKENS + 64) + args.prompt + 64,
        device=args.device,
        dtype=args.dtype,
    )
    if args.shape is None:
        engine = await Engine.start(config)
        try:
            yield engine
        finally:
            await engine.stop()
        return
    config = config.model_copy(
        update={"token_budget": default_token_budget(config), "max_model_len": max(args.prompt, 2048) + 64}
    )

    def make_runner() -> Any:
        set_up_thread(config, choose_device(config))
        return random_runner(args.shape, config)

    async with engine_around(args.shape, config, make_runner, Recorder()) as engine:
        yield engine


class Streams:
    """Readers of running streams, which note when each of them got something."""

    def __init__(self, submit: Callable[[int, int], RequestStream], count: int) -> None:
        self.seen: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self._news = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._read(submit(STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS), times))
            for times in self.seen
        ]

    async def _read(self, stream: RequestStream, times: list[tuple[float, int]]) -> None:
        try:
            async for delta in stream:
                self._note(times, delta.num_tokens)
        finally:
            stream.abort()

    def _note(self, times: list[tuple[float, int]], num_tokens: int) -> None:
        times.append((time.perf_counter(), num_tokens))
        self._news.set()

    async def have(self, num_deltas: int) -> None:
        """Return when each has got this number of further deltas."""
        wanted = [len(times) + num_deltas for times in self.seen]
        while any(len(times) < number for times, number in zip(self.seen, wanted, strict=True)):
            self._news.clear()
            await self._news.wait()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds for each token that came between two moments."""
        return [
            (later - earlier) / max(1, num_tokens)
            for times in self.seen
            for (earlier, _), (later, num_tokens) in itertools.pairwise(times)
            if start <= earlier and later <= end
        ]

    async def stop(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row: what was to be held, and what was."""
    rng = random.Random(0)

    def prompt_of(engine: Engine, num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(100, engine.model.vocab_size) for _ in range(num_tokens))

    def submitter(engine: Engine) -> Callable[[int, int], RequestStream]:
        giant = prompt_of(engine, args.prompt)  # beforehand: the streams share its loop

        def submit(num_prompt_tokens: int, max_tokens: int) -> RequestStream:
            is_giant = num_prompt_tokens == args.prompt
            prompt = giant if is_giant else prompt_of(engine, num_prompt_tokens)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            return engine.submit(Request("r", prompt, sampling))

        return submit

    async def first_token_seconds(submit: Callable[[int, int], RequestStream]) -> float:
        start = time.perf_counter()
        await submit(args.prompt, 1).collect()
        return time.perf_counter() - start

    async with engine_of(args, None) as engine:
        submit = submitter(engine)
        await submit(512, 4).collect()  # warm-up
        alone = await first_token_seconds(submit)
        print(f"alone: {alone:.2f} s to the first token", flush=True)
        streams = Streams(submit, args.streams)
        await streams.have(NUM_WARM_UP_TOKENS)
        start = time.perf_counter()
        await streams.have(NUM_DECODE_TOKENS)
        decode = statistics.median(streams.gaps(start, time.perf_counter()))
        await streams.stop()
    print(f"decoding: {1e3 * decode:.1f} ms a step", flush=True)
    target = args.times * decode
    async with engine_of(args, target) as engine:
        submit = submitter(engine)
        await submit(512, 4).collect()
        streams = Streams(submit, args.streams)
        await streams.have(NUM_WARM_UP_TOKENS)
        start = time.perf_counter()
        among = await first_token_seconds(submit)
        gaps = streams.gaps(start, time.perf_counter())
        await streams.stop()
    share = 1.0 - decode / target
    return [
        {
            "streams": args.streams,
            "prompt": args.prompt,
            "decode step ms": 1e3 * decode,
            "target ms": 1e3 * target,
            "ITL p50 ms": 1e3 * float(np.percentile(gaps, 50)),
            "ITL p99 ms": 1e3 * float(np.percentile(gaps, 99)),
            "p99 / target": float(np.percentile(gaps, 99)) / target,
            "TTFT alone s": alone,
            "TTFT among s": among,
            "TTFT / (alone / share)": among / (alone / share),
        }
    ]


def main() -> None:
    """Measure and print."""
    flags = parser(__doc__)
    flags.add_argument("--prompt", type=int, default=6_000)
    flags.add_argument("--streams", type=int, default=32)
    flags.add_argument("--times", type=float, default=2.0, help="target in steps that only decode")
    flags.add_argument("--shape", choices=SHAPE_NAMES, help="random weights of this shape")
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flags.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    args = flags.parse_args()
    show("a giant among running streams", run(measure(args)), args.json)


if __name__ == "__main__":
    main()
